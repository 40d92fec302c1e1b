# SPDX-License-Identifier: Apache-2.0
"""Limits of projects: writers claim, resize, move and release, while an administrator changes, removes and sets limits."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
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

__all__ = ["Quotas"]

PROVIDERS = tuple(f"{number}0000000-0000-4000-8000-000000000000" for number in (1, 2))
#: Larger than any limit, so that only limits refuse.
SIZE = 1000
CLASSES = ("VCPU", "MEMORY_MB")
#: The limits of one project change their values; those of the other come and go.
STEADY, CHANGING = "p", "q"
LIMITS = {(STEADY, "VCPU"): 6, (STEADY, "MEMORY_MB"): 8, (CHANGING, "VCPU"): 5}
Limit = tuple[str, str]

_HELD = (
    "SELECT c.uuid, c.project_id, COALESCE(c.counts_with, c.uuid), c.counted, a.resource_class_id, SUM(a.used)"
    " FROM consumers c JOIN allocations a ON a.consumer_id = c.uuid GROUP BY 1, 2, 3, 4, 5"
)
_NAMES = {number: name for name, number in STANDARD_CLASSES.items()}


@dataclass
class _Doing:
    """The operation of a writer that is in progress.

    :param began: the step of the schedule. :param enforced: whether limits refuse it.
    :param least: the least of what was free of each limit while it ran.
    """

    began: int
    enforced: bool
    least: dict[Limit, int] = field(default_factory=dict)


class Quotas(Workload):
    """Three writers, two administrators, two projects."""

    points: ClassVar[int] = 100
    steps: ClassVar[int] = 600
    seconds: ClassVar[float] = 5.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        store: Any = load_store(conf, database, SystemClock())
        inventories = tuple(InventoryItem(name, SIZE) for name in CLASSES)
        store.ensure_providers([ResourceProvider(uuid, f"p{uuid[0]}", inventories=inventories) for uuid in PROVIDERS])
        for (project, name), limit in LIMITS.items():
            store.set_quota(project, name, limit)

    @override
    def begin(self) -> None:
        self.doing: dict[str, _Doing] = {}
        #: The step since which a limit is known to be set.
        self.since: dict[Limit, int] = dict.fromkeys(LIMITS, 0)
        self.held: dict[Limit, int] = {}

    @override
    def begin_clients(self) -> None:
        for number in range(1, 4):
            self.client(f"writer-{number}", self._writer, victim=True)
        for project in (STEADY, CHANGING):
            self.client(f"admin-{project}", lambda process, project=project: self._admin(process, project))  # type: ignore[misc]

    # -- clients --------------------------------------------------------------------------------------------------

    def _store(self, process: Process) -> Any:
        platform = self.world.platform(process, "client", beats=False)
        return load_store(self.world.conf, platform.database, platform.clock)

    def _writer(self, process: Process) -> None:
        store = self._store(process)
        # uuid -> project and the consumer that holds resources on the destination of its move
        mine: dict[str, tuple[str, str]] = {}
        for _ in range(self.random.randint(4, 9)):
            what = self.random.choice(("claim", "claim", "resize", "move", "move", "release", "write"))
            if what == "claim" or not mine:
                uuid, project = self._uuid(), self.random.choice((STEADY, CHANGING))
                mine[uuid] = (project, "")
                self._claim(process, store, uuid, project)
                continue
            uuid = self.random.choice(sorted(mine))
            project, moving = mine[uuid]
            if what == "release":
                del mine[uuid]
                for each in (moving, uuid):
                    self._do(process, lambda each=each: each and store.release(each))  # type: ignore[misc]
            elif what == "move" and not moving:
                mine[uuid] = (project, self._begin_move(process, store, uuid, project))
            elif what == "move":
                self._end_move(process, store, uuid, project, moving)
                mine[uuid] = (project, "")
            else:
                # What clients of Placement write is counted and never refused.
                self._change(process, store, uuid, project, enforced=what == "resize")

    def _uuid(self) -> str:
        return f"{self.random.getrandbits(32):08x}-0000-4000-8000-000000000000"

    def _resources(self) -> dict[str, dict[str, int]]:
        names = self.random.choice((CLASSES, CLASSES[:1]))
        return {self.random.choice(PROVIDERS): {name: self.random.randint(1, 3) for name in names}}

    def _claim(self, process: Process, store: Any, uuid: str, project: str) -> None:
        wanted = self._resources()
        request = ClaimRequest(uuid, wanted, request_id=f"req-{uuid}", project=project)
        for _ in range(self.random.choice((1, 1, 2))):
            self._do(process, lambda: store.claim(request), wanted, project)

    def _change(self, process: Process, store: Any, uuid: str, project: str, *, enforced: bool) -> None:
        wanted = self._resources()
        change = AllocationChange(uuid, wanted, project=project, enforce_quota=enforced)
        self._do(process, lambda: store.replace([change]), wanted, project, enforced=enforced)

    def _begin_move(self, process: Process, store: Any, uuid: str, project: str) -> str:
        made, wanted = self._uuid(), self._resources()
        change = AllocationChange(
            made, wanted, Expect.NOTHING, project, request_id=f"req-{made}", counts_with=uuid, enforce_quota=True
        )
        self._do(process, lambda: store.replace([change]), wanted, project)
        return made

    def _end_move(self, process: Process, store: Any, uuid: str, project: str, moving: str) -> None:
        """The instance holds what it moved to. Its source goes to the other consumer, which is then released, or at once."""
        with contextlib.suppress(errors.MoorageError):
            holds = [self._holds(store, each) for each in (uuid, moving)]
            if not all(holds):
                return
            kept = holds[0] if self.random.random() < 0.5 else {}
            changes = [
                AllocationChange(uuid, holds[1], project=project),
                AllocationChange(moving, kept, project=project),
            ]
            self._do(process, lambda: store.replace(changes), enforced=False)
            if kept:
                self._do(process, lambda: store.release(moving))

    def _holds(self, store: Any, uuid: str) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for item in store.allocations(consumers=[uuid]):
            found.setdefault(item.provider, {})[item.resource_class] = item.used
        return found

    def _do(
        self,
        process: Process,
        call: Callable[[], object],
        wanted: dict[str, dict[str, int]] | None = None,
        project: str = "",
        *,
        enforced: bool = True,
    ) -> None:
        """Do it. A refusal by a limit is only right if the whole of what it wants was free at no moment.

        :param wanted: what the consumer shall hold of the project's limits.
        """
        doing = _Doing(self.kernel.steps, enforced)
        self.doing[process.name] = doing
        self._look([doing])
        try:
            call()
        except errors.QuotaExceeded as error:
            name = str(error.details["resource_class"])
            asked = sum(amounts.get(name, 0) for amounts in (wanted or {}).values())
            # A limit that was removed meanwhile was there when it refused.
            least = doing.least.get((project, name), 0)
            fits = wanted is None or not enforced or asked <= least
            self.require(not fits, f"refused while {least} or more were free, and {asked} wanted: {error.message}")
        except errors.MoorageError:
            return
        finally:
            self.doing.pop(process.name, None)

    def _admin(self, process: Process, project: str) -> None:
        store, platform = self._store(process), self.world.platforms[process.name]
        for _ in range(self.random.randint(3, 7)):
            name = self.random.choice(CLASSES)
            what = self.random.choice(("set", "set", "unset", "recount", "show"))
            with contextlib.suppress(errors.MoorageError):
                if what == "set":
                    store.set_quota(project, name, self.random.randint(2, 9))
                    self.since.setdefault((project, name), self.kernel.steps)
                elif what == "unset" and project == CHANGING:
                    self.since.pop((project, name), None)
                    store.unset_quota(project, name)
                elif what == "recount":
                    store.recount_quotas(project)
                else:
                    store.quotas(project)
            if self.random.random() < 0.5:
                platform.clock.sleep(self.random.uniform(0, 1))

    # -- checks ---------------------------------------------------------------------------------------------------

    def _limits(self) -> dict[Limit, tuple[int, int]]:
        return {
            (project, _NAMES[of_class]): (int(maximum), int(used))
            for project, of_class, maximum, used in self.rows(
                "SELECT project_id, resource_class_id, maximum, used FROM quotas"
            )
        }

    def _sums(self, *, counted: bool) -> dict[Limit, int]:
        """What consumers hold; those that count together once, with the larger amount."""
        units: dict[tuple[str, str, str], int] = defaultdict(int)
        for _, project, unit, is_counted, of_class, used in self.rows(_HELD):
            if is_counted or not counted:
                key = project, unit, _NAMES[of_class]
                units[key] = max(units[key], int(used))
        found: dict[Limit, int] = defaultdict(int)
        for (project, _, name), used in units.items():
            found[project, name] += used
        return found

    def _look(self, several: list[_Doing]) -> None:
        held = self._sums(counted=False)
        for limit, (maximum, _) in self._limits().items():
            for each in several:
                each.least[limit] = min(each.least.get(limit, SIZE), maximum - held[limit])

    @override
    def check_step(self) -> None:
        limits, counted, held = self._limits(), self._sums(counted=True), self._sums(counted=False)
        wrong = {limit: (used, counted[limit]) for limit, (_, used) in limits.items() if used != counted[limit]}
        self.require(not wrong, f"limits count something else than counted consumers hold (counted, held): {wrong}")
        doing = self.doing.get(self.kernel.in_process().name)
        if doing is not None and doing.enforced:
            over = {
                limit: (held[limit], limits[limit][0])
                for limit, since in self.since.items()
                if limit in limits
                and since < doing.began
                and held[limit] > max(limits[limit][0], self.held.get(limit, 0))
            }
            self.require(not over, f"over a limit that was set before (held, limit): {over}")
        self.held = held
        self._look(list(self.doing.values()))

    @override
    def quiet(self) -> str:
        return ""

    @override
    def check(self) -> None:
        store = self._store(self.kernel.in_process())
        store.quotas()
        self.check_step()
        limits, held = self._limits(), self._sums(counted=False)
        uncounted = {limit: (used, held[limit]) for limit, (_, used) in limits.items() if used != held[limit]}
        self.require(not uncounted, f"limits do not count all that is held (counted, held): {uncounted}")
        self.require(store.quota_drift() == [], "the audit finds a limit that counts something else than is held")
        for (project, name), (maximum, used) in sorted(limits.items()):
            self._probe(store, project, name, maximum - used)

    def _probe(self, store: Any, project: str, name: str, free: int) -> None:
        """What is free is granted, and one unit more is refused."""
        for amount, fits in ((free, True), (1, False)):
            if amount > 0:
                uuid = f"f0000000-0000-4000-8000-{self.random.getrandbits(48):012x}"
                request = ClaimRequest(uuid, {PROVIDERS[0]: {name: amount}}, "probe", project)
                try:
                    store.claim(request)
                    granted = True
                except errors.QuotaExceeded:
                    granted = False
                self.require(
                    granted == fits, f"at rest {amount} {name} of {project} with {free} free: granted {granted}"
                )
