# SPDX-License-Identifier: Apache-2.0
"""Places the instances of several requests together: one thread decides for all requests that wait, and claims in few transactions.

The threads share the work as :mod:`moorage.gathering` says. A request whose node refuses it, or that cannot share a transaction, is
left to be placed by itself. The placements of one turn are reported to agents and other schedulers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moorage import errors
from moorage.gathering import Gathered, Gathering
from moorage.rpc.server import incoming
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.placement import Placement, Selection
from moorage.scheduling.scheduler import Scheduler

__all__ = ["SharedPlacements"]

#: Seconds that a request waits for its turn before its own thread places it: a plugin may be slow.
_PATIENCE = 0.2
#: Seconds that a request waits for the end of its turn. Callers wait as long ([rpc] call_timeout).
_UNTIL_END = 60.0

#: What became of a request: its selection, its error, or None if it has to be placed by itself.
Outcome = Selection | Exception | None


@dataclass(slots=True, eq=False)
class _Waiting(Gathered[Sequence[Outcome]]):
    """Holds the requests of one thread."""

    works: Sequence[Placement]


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
        gathering = Gathering[_Waiting](self._place_turn, _instances, lambda: most, _PATIENCE, _UNTIL_END, leaders)
        self._gathering = gathering if most > 1 else None

    def prepare(self, spec: RequestSpec, request_id: str) -> Placement:
        """Begins the decision of a request for the thread that serves it."""
        return self._scheduler.prepare(spec, request_id)

    def place(self, work: Placement) -> Selection:
        """Places an instance, alone or in one turn with others; see :meth:`moorage.scheduling.scheduler.Scheduler.place`.

        :raises Unavailable: the turn with the request has not ended in time. A repetition finds what it has claimed.
        """
        [found] = self.place_each([work])
        if isinstance(found, Exception):
            raise found
        if found is None:
            found = self._scheduler.place_prepared(work)
            self._report([found])
        return found

    def place_each(self, works: Sequence[Placement]) -> Sequence[Outcome]:
        """Places different instances in one turn, perhaps together with those of other threads.

        :returns: of each what became of it. One for which that is None has to be placed by itself.
        :raises Unavailable: the turn has not ended in time. A repetition finds what it has claimed.
        """
        mine = _Waiting(works)
        if self._gathering is not None and not self._gathering.join(mine):
            raise errors.Unavailable(
                f"The placement of instance {', '.join(_instances(mine))} has not ended for {_UNTIL_END:g} seconds; whether it is "
                "made is unknown. Try again.",
                outcome="unknown",
            )
        if mine.error is not None:
            raise mine.error
        return mine.outcome or [None] * len(works)

    def place_many(self, spec: RequestSpec, uuids: Sequence[str], request_id: str) -> list[Selection]:
        """Places several instances alike; see :meth:`moorage.scheduling.scheduler.Scheduler.place_many`."""
        selections = self._scheduler.place_many(spec, uuids, request_id)
        self._report(selections)
        return selections

    def _place_turn(self, turn: Sequence[_Waiting]) -> None:
        """Places the requests of one turn."""
        works = [work for each in turn for work in each.works]
        instead = self._answers_instead(turn)
        outcomes: Sequence[Outcome] = self._scheduler.place_prepared_set(works, instead)
        if len(works) == 1 and outcomes[0] is None:
            outcomes = [self._scheduler.place_prepared(works[0], instead)]
        first = 0
        for each in turn:
            each.outcome = outcomes[first : first + len(each.works)]
            first += len(each.works)
        self._report([each for each in outcomes if isinstance(each, Selection)])

    def _answers_instead(self, turn: Sequence[_Waiting]) -> Callable[[errors.MoorageError], None] | None:
        """Returns a function that answers the requests of a turn with an error if the calling thread hangs.

        None if the transport cannot answer a call from another thread.
        """
        message = incoming()
        gathering, answer_early = self._gathering, message.answer_early if message is not None else None
        if gathering is None or answer_early is None:
            return None

        def answer(error: errors.MoorageError) -> None:
            gathering.give_up(turn, error)
            answer_early(error)

        return answer

    def _report(self, selections: Sequence[Selection]) -> None:
        """Reports the selections that are on a host. An instance whose create was repeated may be on none by now."""
        self._placed([each for each in selections if each.record.host])


def _instances(waiting: _Waiting) -> list[str]:
    return [work.spec.instance_uuid for work in waiting.works]
