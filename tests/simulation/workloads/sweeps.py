# SPDX-License-Identifier: Apache-2.0
"""Members that claim ticks of a few objects under rings that change, and finish them late."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors, randomness
from moorage.coordination.tick_leases import SqlTickLeases, TickLease
from moorage.db import Database
from tests.simulation.kernel import Process
from tests.simulation.store import EPOCH
from tests.simulation.workloads.base import Workload
from tests.simulation.workloads.ticks import EFFECTS, effects_in_order

__all__ = ["Sweeps"]

OBJECTS = ("o1", "o2", "o3", "o4")


class Sweeps(Workload):
    """Three members. Each believes in the ring that it read last, which may be an old one."""

    points: ClassVar[int] = 150
    steps: ClassVar[int] = 500
    seconds: ClassVar[float] = 10.0
    jumps: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        with database.write() as tx:
            EFFECTS.create(tx)

    @override
    def begin(self) -> None:
        self.ring = self.tick = 1

    @override
    def begin_clients(self) -> None:
        for number in (1, 2, 3):
            self.client(f"member-{number}", self._member, victim=True)

    def _member(self, process: Process) -> None:
        platform = self.world.platform(process, "member", beats=False)
        store = SqlTickLeases(platform.database)
        ring = self.ring
        for _ in range(self.random.randint(4, 8)):
            if self.random.random() < 0.3:
                self.ring += 1
            if self.random.random() < 0.4:
                self.tick += 1
            if self.random.random() < 0.6:
                ring = self.ring
            tick = (EPOCH + self.tick) * 1_000_000
            platform.clock.sleep(self.random.choice((0.0, 0.0, 0.0, 0.5, 3.0)))
            claim = TickLease("simulated", tick, ring, process.name, randomness.new_hex())
            try:
                for each in store.claim(claim, self.random.sample(OBJECTS, self.random.randint(1, 4))):
                    platform.clock.sleep(self.random.choice((0.0, 0.0, 0.0, 0.2, 4.0)))
                    for _ in range(self.random.choice((1, 1, 2))):  # a handling that believes that it failed
                        store.run(functools.partial(self._finish, store, claim, each))
            except (errors.Unavailable, errors.Fenced) as error:
                self.kernel.note("refused", type(error).__name__)
            platform.clock.sleep(self.random.choice((0.0, 0.0, 1.0)))

    @staticmethod
    def _finish(store: SqlTickLeases, claim: TickLease, object_id: str, tx: sa.Connection) -> None:
        store.end(tx, claim, object_id)
        tx.execute(sa.insert(EFFECTS), {"object_id": object_id, "tick": claim.tick, "token": claim.token})

    @override
    def check_step(self) -> None:
        effects_in_order(self)

    @override
    def quiet(self) -> str:
        return ""

    @override
    def check(self) -> None:
        effects_in_order(self)
