# SPDX-License-Identifier: Apache-2.0
"""Moves and resizes between hosts whose agents are killed and stand still at every step.

Clients revert moves, and confirm and revert resizes. What they leave confirms itself. An operator declares agents dead.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from moorage.control_plane.factories import load_store, open_instances, open_workers
from moorage.db import Database
from moorage.instances.create import Deleter, cast_to_agent
from moorage.instances.in_place import InPlace
from moorage.instances.interface import departed_consumer
from moorage.instances.resizes import Resizes
from moorage.services.registry import ServiceRegistry
from moorage_plugins.stores.classes import STANDARD_CLASSES
from tests.simulation.kernel import Process
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
    points: ClassVar[int] = 1200
    steps: ClassVar[int] = 3000

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        enrol(database, conf, HOSTS, 12)

    @override
    def begin(self) -> None:
        self.world.after_plugin = self.check_copies
        super().begin()

    @override
    def begin_clients(self) -> None:
        for number in range(1, 4):
            self.client(f"client-{number}", self._client)
        self.client("operator", self._operator)
        self.client("owner", self._owner)

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
            self._delete(Deleter(platform.database, instances, workers, cast), mine)

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
            if kept["host"] != host:
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
