# SPDX-License-Identifier: Apache-2.0
"""Reverts moves whose destination was declared dead before it could prepare anything; the instances go on where they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import errors
from moorage.clock import Clock
from moorage.context import acting_for, from_text
from moorage.instances.in_place import InPlace
from moorage.instances.moves import PREPARE
from moorage.services.interface import AGENT
from moorage.services.tables import services
from moorage.work.tables import workers

__all__ = ["MoveReverts"]

LOG = logging.getLogger(__name__)
#: Moves in one look; the next look has the others.
_PAGE = 500
#: Seconds after which a move that could not be reverted is looked at again.
_PAUSE = 10.0
_REASON = "The agent of its destination was declared dead before it had prepared the move."
#: From the few services that are declared dead to what is addressed to them, which has an index.
_STUCK = (
    sa.select(workers.c.resource_id, workers.c.request)
    .join(services, services.c.host == workers.c.target_host)
    .where(services.c.binary == AGENT, services.c.forced_down == sa.true(), workers.c.operation == PREPARE)
    .order_by(workers.c.resource_id)
    .limit(_PAGE)
)


@dataclass(slots=True)
class MoveReverts:
    """Finds moves that wait for a destination that an operator has declared dead; used by one thread of each scheduler.

    The other steps need no such look: the commit of a move is refused when its destination is declared dead.
    """

    in_place: InPlace
    clock: Clock
    _not_before: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def found(transaction: Any) -> bool:
        """Returns whether a move waits for a dead destination. One statement."""
        return transaction.execute(_STUCK).first() is not None

    def tick(self) -> None:
        """Looks once; one statement when there is nothing to do."""
        now = self.clock.monotonic()
        self._not_before = {uuid: at for uuid, at in self._not_before.items() if at > now}
        with self.in_place.database.read() as tx:
            found = tx.execute(_STUCK).all()
        for uuid, request in found:
            if uuid not in self._not_before:
                try:
                    with acting_for(from_text(request)):
                        self.in_place.revert_move(uuid, _REASON)
                except errors.MoorageError as error:
                    LOG.warning("The move of instance %s is not reverted now: %s", uuid, error.message)
                    self._not_before[uuid] = now + _PAUSE
