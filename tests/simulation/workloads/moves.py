# SPDX-License-Identifier: Apache-2.0
"""Moves and resizes between hosts whose agents are killed and stand still at every step.

Clients revert moves, and confirm and revert resizes. What they leave confirms itself. An operator declares agents dead. Copies of
instances whose resize is not confirmed end, or are lost with their files.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from moorage.control_plane.factories import load_store, open_instances, open_workers
from moorage.db import Database
from moorage.drivers.interface import WorkloadState
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.in_place import InPlace
from moorage.instances.interface import departed_consumer
from moorage.instances.resizes import Resizes
from moorage.services.registry import ServiceRegistry
from moorage_plugins.stores.classes import STANDARD_CLASSES
from tests import hypervisors
from tests.simulation.kernel import Process
from tests.simulation.workloads.base import open_deleter
from tests.simulation.workloads.placement import HOSTS, Placement, enrol

__all__ = ["Moves"]


class Moves(Placement):
    """As :class:`Placement`, with larger nodes and clients that mostly move and resize their instances."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Placement.settings,
        # Longer than most clients take to confirm or to revert.
        ("compute", "resize_confirm_after"): 12.0,
    }
    operations: ClassVar[tuple[str, ...]] = ("live_migrate", "migrate", "resize", "resize")
    seconds: ClassVar[float] = 40.0
    points: ClassVar[int] = 900
    steps: ClassVar[int] = 2400

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        enrol(database, conf, HOSTS, 12)

    @override
    def begin(self) -> None:
        #: (Uuid, host) -> when its copy there ended or was lost.
        self._ended: dict[tuple[str, str], float] = {}
        #: Uuid, host and token of the copies that were lost.
        self._lost: set[tuple[str, str, int]] = set()
        #: When a thread of an agent last saw what runs on its host.
        self._seen: dict[Any, float] = {}
        #: Uuid -> status and phase after the last commit.
        self._before: dict[str, tuple[str, str]] = {}
        self.world.after_plugin = self._after_plugin
        super().begin()

    @override
    def begin_clients(self) -> None:
        for number in range(1, 4):
            self.client(f"client-{number}", self._client)
        self.client("operator", self._operator)
        self.client("owner", self._owner)
        draw = random.Random(f"{self.world.seed}/copies")
        for _ in range(draw.choice((0, 1, 1, 2))):
            after, what = draw.uniform(0, self.seconds), draw.choice(("lost", "ended"))
            self.faults.add(
                f"copy {what} after {after:.3f} s",
                functools.partial(self.faults.later, after, functools.partial(self._copy_ends, what)),
            )

    def _copy_ends(self, what: str, own: random.Random) -> bool:
        """One copy of an instance whose resize is not confirmed is lost, or the one that runs ends; whether there was one."""
        copies = []
        for uuid, host, pending in self.rows(
            "SELECT uuid, host, pending FROM instances WHERE status = 'resized' ORDER BY uuid"
        ):
            kept = json.loads(pending)["kept"]["host"]
            for where, tokens in self._effects().get(uuid, {}).items():
                if what == "lost" and where in (host, kept) or where == host:
                    copies.append((uuid, where, tokens[-1]))
        if not copies:
            return False
        uuid, host, token = own.choice(copies)
        if what == "lost":
            hypervisors.remove(self.world.folder, host, uuid)
            self._lost.add((uuid, host, token))
        else:
            hypervisors.put(self.world.folder, host, uuid, state=WorkloadState.STOPPED)
        self._ended[uuid, host] = self.kernel.now
        self.faults.counts[f"copy {what}"] += 1
        self.kernel.note(f"copy {what}", f"{uuid} on {host}")
        return True

    def _after_plugin(self, name: str) -> None:
        if name == "SimulatedDriver.inspect":
            self._seen[self.kernel.current] = self.kernel.now
        self.check_copies()

    @override
    def may_be_gone(self, uuid: str) -> bool:
        return any(uuid == lost for lost, _, _ in self._lost)

    @override
    def _client(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        conf = self.world.conf
        instances, workers = open_instances(platform, conf), open_workers(platform, conf)
        cast = cast_to_agent(platform.sender)
        in_place = InPlace(platform.database, instances, workers, cast)
        resizes = Resizes(
            platform.database, instances, workers, load_store(conf, platform.database, platform.clock), cast
        )
        mine = self._create(platform)
        for _ in range(self.random.randint(2, 5)):
            self._move(platform, mine)
            # Often while the move has just begun, and at times between its commit and its end.
            platform.clock.sleep(self.random.choice((0.05, 0.2, self.random.uniform(0, 4))))
            if self.random.random() < 0.5:
                self._attempt(mine, "revert", lambda uuid: in_place.revert_move(uuid, "It was reverted."))
            platform.clock.sleep(self.random.uniform(0, 4))
            for _ in range(self.random.choice((0, 1, 2))):
                self._decide(resizes, mine)
                platform.clock.sleep(self.random.choice((0.05, 0.5, self.random.uniform(0, 4))))
        if self.random.random() < 0.3:
            self._delete(open_deleter(platform, conf), mine)

    def _decide(self, resizes: Resizes, of: Any) -> None:
        """Confirms the resize of an instance, or reverts it."""
        if self.random.random() < 0.4:
            self._attempt(of, "confirm_resize", resizes.confirm)
        else:
            request = f"revert-{self.random.getrandbits(32):08x}"
            self._attempt(of, "revert_resize", lambda uuid: resizes.revert(uuid, request))

    def _operator(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)
        registry = ServiceRegistry(platform.database, platform.clock)
        for _ in range(self.random.randint(0, 3)):
            platform.clock.sleep(self.random.uniform(1, 8))
            agent = registry.list(binary="agent", host=self.random.choice(HOSTS))[0].uuid
            for down in (True, False):
                self._until(platform, functools.partial(registry.set, agent, forced_down=down))
                platform.clock.sleep(self.random.uniform(1, 8))

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        super().check_step()
        self.check_copies()
        self.check_kept()
        self.check_ends()

    def check_ends(self) -> None:
        """A resize confirms itself only when the new copy was seen running, and a move is committed to what is there."""
        me = self.kernel.current
        now: dict[str, tuple[str, str]] = {}
        for uuid, status, host, text in self.rows("SELECT uuid, status, host, pending FROM instances"):
            pending = json.loads(text) if text else {}
            now[uuid] = status, pending.get("phase", "")
            before, phase = self._before.get(uuid, ("", ""))
            by_agent = me is not None and me.process.name.partition("#")[0] in HOSTS
            if before == "resized" and status in ("active", "stopped") and by_agent:
                ended = self._ended.get((uuid, host), -1.0)
                runs = self.executing().get(uuid) == [host]
                self.require(
                    runs or ended >= self._seen.get(me, 0.0),
                    f"the resize of instance {uuid} confirmed itself, and it does not run",
                )
            if pending.get("phase") == "activate" != phase:
                there = self._effects().get(uuid, {}).get(host, [])
                self.require(
                    pending["prepared"] in there,
                    f"instance {uuid} was committed to host {host}, where nothing of it is",
                )
        self._before = now

    def check_copies(self) -> None:
        """At most one copy of an instance executes."""
        twice = {uuid: hosts for uuid, hosts in self.executing().items() if len(hosts) > 1}
        self.require(not twice, f"more than one copy executes: {twice}")

    def check_kept(self) -> None:
        """A resize that is not confirmed can be reverted: the old place has the room, and another host the copy."""
        found = self.rows(
            "SELECT uuid, host, pending FROM instances WHERE destination_uuid > '' AND status = 'resized'"
        )
        for uuid, host, pending in found:
            kept = json.loads(pending)["kept"]
            consumer = uuid if kept["host"] == host else departed_consumer(uuid)
            held = dict(self._held(consumer, kept["node_uuid"]))
            wanted: Mapping[str, int] = kept["holds"][kept["node_uuid"]]
            there = all(held.get(STANDARD_CLASSES[name], 0) >= amount for name, amount in wanted.items())
            self.require(there, f"instance {uuid} cannot go back: {consumer} holds {held} instead of {dict(wanted)}")
            if kept["host"] != host and (uuid, kept["host"], kept["token"]) not in self._lost:
                copies = self._effects().get(uuid, {}).get(kept["host"], [])
                self.require(
                    kept["token"] in copies, f"instance {uuid} cannot go back: {kept['host']} has lost its copy"
                )

    def _held(self, consumer: str, node_uuid: str) -> list[tuple[int, int]]:
        return [
            (number, used)
            for number, used in self.rows(
                "SELECT a.resource_class_id, a.used FROM allocations a JOIN resource_providers p"
                f" ON p.id = a.resource_provider_id WHERE a.consumer_id = '{consumer}' AND p.uuid = '{node_uuid}'"
            )
        ]
