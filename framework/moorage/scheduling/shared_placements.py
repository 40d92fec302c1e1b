# SPDX-License-Identifier: Apache-2.0
"""Places the instances of several requests together: one thread decides for all requests that wait, and claims in few transactions.

The threads share the work as :mod:`moorage.gathering` says. A request whose node refuses it, or that cannot share a transaction, is
placed by its own thread. The placements of one turn are reported to agents and other schedulers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moorage import errors
from moorage.gathering import Gathered, Gathering
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.scheduler import Placement, Scheduler, Selection

__all__ = ["SharedPlacements"]

#: Seconds that a request waits for its turn before its own thread places it: a plugin may be slow.
_PATIENCE = 0.2
#: Seconds that a request waits for the end of its turn. Callers wait as long ([rpc] call_timeout).
_UNTIL_END = 60.0


@dataclass(slots=True, eq=False)
class _Waiting(Gathered[Selection]):
    work: Placement


class SharedPlacements:
    """Places instances with one scheduler. Safe for use by several threads.

    :param placed: called after claims, with the selections that are on a host.
    :param most: how many requests are placed together; 1: each is placed by its own thread, beside the others.
    :param leaders: how many sets of requests are placed at a time.
    """

    def __init__(
        self, scheduler: Scheduler, placed: Callable[[Sequence[Selection]], None], most: int, leaders: int
    ) -> None:
        self._scheduler = scheduler
        self._placed = placed
        gathering = Gathering[_Waiting](
            self._place_turn, lambda each: each.work.spec.instance_uuid, lambda: most, _PATIENCE, _UNTIL_END, leaders
        )
        self._gathering = gathering if most > 1 else None

    def place(self, spec: RequestSpec, request_id: str) -> Selection:
        """Places an instance, alone or in one turn with others; see :meth:`moorage.scheduling.scheduler.Scheduler.place`.

        :raises Unavailable: the turn with the request has not ended in time. A repetition finds what it has claimed.
        """
        mine = _Waiting(self._scheduler.prepare(spec, request_id))
        if self._gathering is not None and not self._gathering.join(mine):
            raise errors.Unavailable(
                f"The placement of instance {spec.instance_uuid} has not ended for {_UNTIL_END:g} seconds; whether it is made is "
                "unknown. Try again.",
                outcome="unknown",
            )
        if mine.error is not None:
            raise mine.error
        if mine.outcome is None:
            mine.outcome = self._scheduler.place_prepared(mine.work)
            self._report([mine.outcome])
        return mine.outcome

    def place_many(self, spec: RequestSpec, uuids: Sequence[str], request_id: str) -> list[Selection]:
        """Places several instances alike; see :meth:`moorage.scheduling.scheduler.Scheduler.place_many`."""
        selections = self._scheduler.place_many(spec, uuids, request_id)
        self._report(selections)
        return selections

    def _place_turn(self, turn: Sequence[_Waiting]) -> None:
        """Places the requests of one turn. Those that cannot be placed together are left to their own threads."""
        if len(turn) == 1:
            outcomes: list[Selection | Exception | None] = [self._scheduler.place_prepared(turn[0].work)]
        else:
            outcomes = self._scheduler.place_prepared_set([each.work for each in turn])
        for each, outcome in zip(turn, outcomes, strict=True):
            if isinstance(outcome, Selection):
                each.outcome = outcome
            elif outcome is not None:
                each.error = outcome
            else:
                each.alone = True
        self._report([each.outcome for each in turn if each.outcome is not None])

    def _report(self, selections: Sequence[Selection]) -> None:
        """Reports the selections that are on a host. An instance whose create was repeated may be on none by now."""
        self._placed([each for each in selections if each.record.host])
