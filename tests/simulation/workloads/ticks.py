# SPDX-License-Identifier: Apache-2.0
"""Three engines share periodic work; each tick of an object has at most one effect, and each object is handled when all is well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage.control_plane.engine_role import Engine
from moorage.control_plane.periodic import ALWAYS
from moorage.coordination.interface import PERIODIC_TASKS, PeriodicTask, TaskLease
from moorage.db import Database
from moorage.extensions import Loaded
from tests.simulation.workloads.base import Workload

__all__ = ["EFFECTS", "Ticks", "effects_in_order"]

OBJECTS = tuple(f"object-{number}" for number in range(6))
#: Seconds between two ticks.
SPACING = 6.0
EFFECTS = sa.Table(
    "simulated_effects",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("object_id", sa.String(50)),
    sa.Column("tick", sa.BigInteger),
    sa.Column("token", sa.BigInteger),
)


class _Task(PeriodicTask):
    """Writes down each handling in the handling's transaction."""

    api_version = (1, 0)
    spacing = SPACING
    timeout = 20.0
    concurrency = 2

    @override
    def list_objects(self) -> Sequence[str]:
        return OBJECTS

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        self.tools.clock.sleep(0.05)
        values = {"object_id": object_id, "tick": lease.tick, "token": lease.token}
        lease.finish_with(lambda tx: tx.execute(sa.insert(EFFECTS), values) and None)
        return True


class Ticks(Workload):
    """Three engines, coordination by the database."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        ("services", "report_interval"): 3.0,
        ("services", "service_down_time"): 10.0,
        ("coordination", "periodic_coordination_backend"): "database",
        ("coordination", "heartbeat_timeout"): 2.0,
        ("coordination", "session_timeout"): 10.0,
        ("coordination", "poll_interval"): 2.0,
        ("periodic", "enabled_tasks"): ["simulated"],
        ("periodic", "poll"): 2.0,
    }
    points: ClassVar[int] = 430
    steps: ClassVar[int] = 750
    seconds: ClassVar[float] = 20.0
    healing: ClassVar[float] = 200.0
    clients: ClassVar[bool] = False

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        with database.write() as tx:
            EFFECTS.create(tx)

    @override
    def begin(self) -> None:
        task = Loaded("simulated", _Task, "simulation", "1", PERIODIC_TASKS.group)
        # Without the tasks that always run: no law looks at them, and they were a quarter of a schedule.
        self.world.base.cache[PERIODIC_TASKS.group, ("simulated", *ALWAYS)] = [task]
        self._healed_at = -1
        for number in (1, 2, 3):
            self.start_role(f"engine-{number}", Engine)

    @override
    def quiet(self) -> str:
        now = self.rows("SELECT max(tick) FROM simulated_effects")[0][0] or 0
        if self._healed_at < 0:
            self._healed_at, self._since = now, self.kernel.now
        if self.kernel.now - self._since < 3 * SPACING:
            return "it was not quiet for three periods yet"
        late = self.rows(
            "SELECT object_id, max(tick) FROM simulated_effects GROUP BY 1 HAVING max(tick) < ?",
            now - 2.5 * SPACING * 1_000_000,
        )
        found = {
            row[0]
            for row in self.rows("SELECT DISTINCT object_id FROM simulated_effects WHERE tick > ?", self._healed_at)
        }
        missing = set(OBJECTS) - found
        return f"objects are not handled: {sorted(missing)}, late: {late}" if missing or late else ""

    @override
    def check_step(self) -> None:
        self.check()

    @override
    def check(self) -> None:
        effects_in_order(self)


def effects_in_order(of: Workload) -> None:
    """Each tick of an object has at most one effect, and none comes after one of a later ring or tick."""
    twice = of.rows("SELECT object_id, tick, count(*) FROM simulated_effects GROUP BY 1, 2 HAVING count(*) > 1")
    of.require(not twice, f"a tick had two effects: object, tick, effects = {twice}")
    back = of.rows(
        "SELECT a.object_id, a.tick, a.token, b.tick, b.token FROM simulated_effects a JOIN simulated_effects b"
        " ON a.object_id = b.object_id AND a.id < b.id WHERE a.token > b.token OR a.tick > b.tick"
    )
    of.require(not back, f"an effect came after one of a later ring or tick: {back}")
