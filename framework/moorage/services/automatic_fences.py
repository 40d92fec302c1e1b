# SPDX-License-Identifier: Apache-2.0
"""Fences hosts that fence themselves, with a brake: few hosts in a period, and none while half of the agents are silent.

A fault of the network or of the store makes many hosts look dead at once. To evacuate them all would do more harm than the fault.

The brake has ``[evacuation] max_hosts`` slots, a row each. A fence takes a slot whose last use is ``[evacuation] period`` seconds
ago, in its own transaction and by one conditional statement. So in no period of that length there are more fences than slots,
however many engines fence hosts.

The time of the database alone does not fence a host. Its clock may jump forward, and a failover to a lagging copy may lose
heartbeats that were confirmed: then living agents look silent. So an engine fences a host only when it has itself seen the agent's
row unchanged for the lease and a margin, by its own monotonic clock, and the statement requires the row to be as it was seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from moorage import errors
from moorage.clock import Clock
from moorage.db import MICROSECONDS, Database, Duplicate, now
from moorage.services.interface import AGENT, SELF_FENCE_MARGIN, Service
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import SELF_FENCED, ServiceRegistry
from moorage.services.tables import automatic_fences, services

__all__ = ["AutomaticFences"]

#: Seconds after which a silent agent says nothing about a fault of now.
_FORGOTTEN = 86_400.0
_SINCE_BEAT = now() - services.c.beat_at
_HEARD = sa.and_(sa.bindparam("down_micros", type_=sa.BigInteger) > _SINCE_BEAT, sa.not_(SELF_FENCED))
_LIFE = sa.select(
    sa.func.count().label("known"), sa.func.coalesce(sa.func.sum(sa.case((_HEARD, 1), else_=0)), 0).label("heard")
).where(services.c.binary == AGENT, services.c.beat > 0, int(_FORGOTTEN * MICROSECONDS) > _SINCE_BEAT)
#: Seconds by which the clocks of the database's servers differ at most.
_SKEW = 60.0
#: A use further in the future is from before the clock of the database was set back; it must not block the slot for long.
_IS_FREE = sa.or_(
    now() - automatic_fences.c.fenced_at >= sa.bindparam("period_micros", type_=sa.BigInteger),
    automatic_fences.c.fenced_at - now() > int(_SKEW * MICROSECONDS),
)
_SLOTS = sa.select(automatic_fences.c.slot, sa.case((_IS_FREE, 1), else_=0).label("free"))
_TAKE = (
    sa.update(automatic_fences)
    .where(automatic_fences.c.slot == sa.bindparam("of_slot"), _IS_FREE)
    .values(fenced_at=now(), host=sa.bindparam("of_host", type_=sa.String))
)


class _HeldBackError(errors.Conflict):
    """The brake holds a fence back: its transaction is undone."""


@dataclass(frozen=True, slots=True)
class AutomaticFences:
    """Fences hosts that fenced themselves, where the brake allows it. Safe for use by several processes.

    :param observer: times how long this engine has seen agents unchanged.
    :param down_time: seconds without a heartbeat after which an agent counts as silent.
    :param most: hosts that are fenced in ``period`` seconds at most.
    """

    database: Database
    registry: ServiceRegistry
    observer: LivenessObserver
    down_time: float
    most: int
    period: float

    @classmethod
    def from_config(
        cls, conf: cfg.ConfigOpts, clock: Clock, database: Database, registry: ServiceRegistry
    ) -> AutomaticFences:
        """Returns the brake as the configuration has it."""
        section, down_time = conf.evacuation, conf.services.service_down_time
        return cls(database, registry, LivenessObserver(clock, down_time), down_time, section.max_hosts, section.period)

    def fence(self, agent: Service) -> str:
        """Fences the host of an agent as :meth:`ServiceRegistry.fence_itself` does; returns why not yet, empty when it is fenced.

        :param agent: its row as it was read just now. Rows are given to ``observer`` whenever they are read.
        :raises Conflict: the host does not fence itself, or its agent has come back.
        """
        self.observer.observe([agent])
        seen, needed = (
            self.observer.silent_for(agent.uuid),
            (agent.self_fence or 0) / MICROSECONDS * (1 + SELF_FENCE_MARGIN),
        )
        if seen <= needed:
            return (
                f"this engine has seen its agent silent for {seen:.1f} seconds of the {needed:g} that the lease of the host and a "
                "margin last"
            )
        try:
            self.database.run(lambda tx: self._fence(tx, agent))
        except _HeldBackError as error:
            return error.message
        except Duplicate:
            return "another engine fences a host in this moment"
        return ""

    def _fence(self, tx: Any, agent: Service) -> None:
        if not self.registry.fence_itself_in(tx, agent.uuid, agent):
            return
        self._refuse_silence(tx)
        self._take_slot(tx, agent.host)

    def _refuse_silence(self, tx: Any) -> None:
        found = tx.execute(_LIFE, {"down_micros": int(self.down_time * MICROSECONDS)}).one()
        if 2 * int(found.heard) <= found.known:
            raise _HeldBackError(
                f"{found.known - int(found.heard)} of {found.known} agents are silent, so the fault may be in the network or the "
                "store; while at least half are, no host is fenced automatically"
            )

    def _take_slot(self, tx: Any, host: str) -> None:
        values = {"period_micros": int(self.period * MICROSECONDS)}
        slots = {row.slot: bool(row.free) for row in tx.execute(_SLOTS, values)}
        used = sum(not free for free in slots.values())
        if used >= self.most:
            raise _HeldBackError(
                f"as many hosts as [evacuation] max_hosts allows ({self.most}) were fenced automatically in the last "
                f"{self.period:g} seconds"
            )
        slot = next(each for each in range(1, self.most + 1) if slots.get(each, True))
        if slot not in slots:
            tx.execute(sa.insert(automatic_fences).values(slot=slot, fenced_at=now(), host=host))
        elif tx.execute(_TAKE, {**values, "of_slot": slot, "of_host": host}).rowcount != 1:
            raise _HeldBackError("another engine fences a host in this moment")
