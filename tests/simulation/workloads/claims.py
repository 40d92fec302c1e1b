# SPDX-License-Identifier: Apache-2.0
"""Claims on a few small providers: taken, replaced, released and repeated by writers that die."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import AllocationChange, ClaimRequest, Expect, InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.control_plane.factories import load_store
from moorage.db import Database
from moorage_plugins.stores.classes import STANDARD_CLASSES
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import Workload

__all__ = ["Claims"]

PROVIDERS = tuple(f"{number}0000000-0000-4000-8000-000000000000" for number in (1, 2, 3))
SIZE = 6
CLASSES = ("VCPU", "MEMORY_MB")
#: A consumer of which all writers raise the amount by one, at the generation that they read; one that all want to create.
COUNTER, WANTED = "c0000000-0000-4000-8000-000000000000", "d0000000-0000-4000-8000-000000000000"
#: A consumer that all writers change and release.
SHARED = "e0000000-0000-4000-8000-000000000000"
Holding = frozenset[tuple[str, str, int]]


@dataclass
class _Consumer:
    """What its only writer knows of a consumer: the holdings that it may have."""

    uuid: str
    may_hold: set[Holding] = field(default_factory=lambda: {frozenset()})
    log: list[str] = field(default_factory=list)


class Claims(Workload):
    """Four writers, three providers."""

    points: ClassVar[int] = 250
    steps: ClassVar[int] = 600
    seconds: ClassVar[float] = 5.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        inventories = tuple(InventoryItem(name, SIZE) for name in CLASSES)
        store = load_store(conf, database, SystemClock())
        store.ensure_providers([ResourceProvider(uuid, f"p{uuid[0]}", inventories=inventories) for uuid in PROVIDERS])
        # One larger provider, so that the counter never meets a limit.
        store.ensure_providers([ResourceProvider(COUNTER, "counter", inventories=(InventoryItem("VCPU", 1000),))])

    @override
    def begin(self) -> None:
        self.consumers: list[_Consumer] = []
        self.counted = self.perhaps_counted = 0
        self.winners: list[str] = []

    @override
    def begin_clients(self) -> None:
        for number in range(1, 5):
            self.client(f"writer-{number}", self._writer, victim=True)

    # -- writers --------------------------------------------------------------------------------------------------

    def _writer(self, process: Process) -> None:
        platform = self.world.platform(process, "writer", beats=False)
        store: Any = load_store(self.world.conf, platform.database, platform.clock)
        mine: list[_Consumer] = []
        for number in range(self.random.randint(3, 8)):
            what = self.random.choice(
                ("claim", "claim", "replace", "release", "move", "count", "count", "want", "share")
            )
            if what == "count":
                self._count(store)
            elif what == "want":
                self._want(store, f"{process.name}/{number}")
            elif what == "share":
                self._share(store)
            elif what == "claim" or not mine:
                mine.append(self._claim(store, process))
            elif what == "release":
                self._do(self.random.choice(mine), frozenset(), lambda uuid: store.release(uuid))
            elif what == "move":
                self._move(store, mine)
            else:
                self._replace(store, self.random.choice(mine))

    def _resources(self) -> dict[str, dict[str, int]]:
        chosen = self.random.sample(PROVIDERS, self.random.choice((1, 1, 2)))
        names = self.random.choice((CLASSES, CLASSES[:1]))
        return {uuid: {name: self.random.randint(1, 3) for name in names} for uuid in chosen}

    def _claim(self, store: Any, process: Process) -> _Consumer:
        made = _Consumer(f"{self.random.getrandbits(32):08x}-0000-4000-8000-000000000000")
        self.consumers.append(made)
        wanted = self._resources()
        request = ClaimRequest(made.uuid, wanted, request_id=f"req-{made.uuid}")
        holding = holding_of(wanted)
        # Repeated even after an answer: a repetition changes nothing.
        for _ in range(self.random.randint(1, 3)):
            known = made.may_hold == {holding}
            done = self._do(made, holding, lambda _: store.claim(request))
            # Where nothing goes wrong, no writer holds up the others for long either.
            found = done or (done is None and not self.calm)
            said = "; ".join(made.log)
            self.require(not known or found, f"a repetition of the claim of {made.uuid} did not find it ({said})")
            if done is False:
                break
        return made

    def _replace(self, store: Any, of: _Consumer) -> None:
        wanted = self._resources()
        change = AllocationChange(of.uuid, wanted, request_id=f"req-{self.random.getrandbits(64):x}")
        for _ in range(self.random.randint(1, 3)):
            if self._do(of, holding_of(wanted), lambda _: store.replace([change])) is False:
                break

    def _move(self, store: Any, mine: list[_Consumer]) -> None:
        """All that one consumer holds goes to another, in one transaction."""
        source = self.random.choice(mine)
        if len(source.may_hold) != 1 or not (holding := next(iter(source.may_hold))):
            return
        target = _Consumer(f"{self.random.getrandbits(32):08x}-0000-4000-8000-000000000000")
        self.consumers.append(target)
        mine.append(target)
        resources: dict[str, dict[str, int]] = {}
        for provider, name, amount in sorted(holding):
            resources.setdefault(provider, {})[name] = amount
        changes = [AllocationChange(source.uuid, {}), AllocationChange(target.uuid, resources, Expect.NOTHING)]
        source.may_hold.add(frozenset())
        if self._do(target, holding, lambda _: store.replace(changes)):
            source.may_hold = {frozenset()}
        elif len(target.may_hold) == 1:
            source.may_hold = {holding}

    def _do(self, of: _Consumer, holding: Holding, call: Any) -> bool | None:
        """Whether it was done; False: it was refused, None: nobody knows."""
        before = set(of.may_hold)
        of.may_hold.add(holding)  # a writer that dies now leaves it unknown
        try:
            call(of.uuid)
        except errors.StoreUnavailable as error:
            if error.details.get("outcome") != "unknown":
                of.may_hold = before
            of.log.append(f"unknown: {error.message}")
            return None
        except errors.MoorageError as error:
            of.may_hold = before
            of.log.append(f"{type(error).__name__}: {error.message}")
            return None if isinstance(error, errors.Unavailable) else False
        of.may_hold = {holding}
        of.log.append(f"holds {sorted(holding)}")
        return True

    def _count(self, store: Any) -> None:
        """Read the counter, and write one more where its generation is the one that was read."""
        try:
            found = store.consumer(COUNTER)
        except errors.MoorageError:
            return
        amount = sum(each.used for each in found.allocations) if found else 0
        expected = found.consumer.generation if found else Expect.NOTHING
        self.perhaps_counted += 1
        try:
            store.replace([AllocationChange(COUNTER, {COUNTER: {"VCPU": amount + 1}}, expected)])
            self.counted += 1
        except errors.StoreUnavailable as error:
            if error.details.get("outcome") != "unknown":
                self.perhaps_counted -= 1
        except errors.MoorageError:
            self.perhaps_counted -= 1

    def _want(self, store: Any, request: str) -> None:
        try:
            store.claim(ClaimRequest(WANTED, {PROVIDERS[0]: {"VCPU": 1}}, request_id=request))
            self.winners.append(request)
        except errors.MoorageError:
            return

    def _share(self, store: Any) -> None:
        with contextlib.suppress(errors.MoorageError):
            if self.random.random() < 0.5:
                store.release(SHARED)
            else:
                store.replace([AllocationChange(SHARED, self._resources())])

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        over = self.rows("SELECT resource_provider_id, used, total FROM inventories WHERE used > total - reserved")
        self.require(not over, f"over the limit: provider, used, total = {over}")
        sums = self.rows(
            "SELECT i.resource_provider_id, i.resource_class_id, i.used, COALESCE(SUM(a.used), 0) FROM inventories i"
            " LEFT JOIN allocations a ON a.resource_provider_id = i.resource_provider_id"
            " AND a.resource_class_id = i.resource_class_id GROUP BY 1, 2, 3 HAVING i.used <> COALESCE(SUM(a.used), 0)"
        )
        self.require(not sums, f"used differs from the sum of allocations: {sums}")

    @override
    def quiet(self) -> str:
        return ""

    @override
    def check(self) -> None:
        self.check_step()
        held: dict[str, set[tuple[str, str, int]]] = {}
        names = {number: name for name, number in STANDARD_CLASSES.items()}
        for consumer, provider, of_class, used in self.rows(
            "SELECT a.consumer_id, p.uuid, a.resource_class_id, a.used FROM allocations a JOIN resource_providers p"
            " ON p.id = a.resource_provider_id"
        ):
            held.setdefault(consumer, set()).add((provider, names[of_class], used))
        for each in self.consumers:
            found = frozenset(held.pop(each.uuid, set()))
            self.require(
                found in each.may_hold,
                f"consumer {each.uuid} holds {sorted(found)}, not one of {[sorted(may) for may in each.may_hold]} "
                f"({'; '.join(each.log)})",
            )
        count = sum(used for _, _, used in held.pop(COUNTER, set()))
        self.require(
            self.counted <= count <= self.perhaps_counted,
            f"{self.counted} increments were acknowledged (at most {self.perhaps_counted} happened), {count} are there",
        )
        held.pop(WANTED, None)
        held.pop(SHARED, None)
        self.require(len(set(self.winners)) <= 1, f"several requests created one consumer: {self.winners}")
        self.require(not held, f"claims of nobody: {held}")
        rows = {row[0] for row in self.rows("SELECT uuid FROM consumers")}
        nothing = {each.uuid for each in self.consumers if each.may_hold == {frozenset()}}
        self.require(not rows & nothing, f"consumers that hold nothing have rows: {sorted(rows & nothing)}")


def holding_of(resources: dict[str, dict[str, int]]) -> Holding:
    """What is claimed, as what is held."""
    return frozenset((uuid, name, amount) for uuid, amounts in resources.items() for name, amount in amounts.items())
