# SPDX-License-Identifier: Apache-2.0
"""Ranks nodes for requests that differ only in the uuid and name of their instances, each on top of the ones before.

The nodes are ranked for the first request. If the plugins judge each node alone, it is enough for the others to know what they say
of a node that an earlier one has taken. They are asked that once, for all nodes that are likely to be taken. A ranking from what is
known costs a fraction of one by the plugins, and is the same while nothing else changes the fleet.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from moorage.scheduling.filter_and_weigh import Judgement, Ranking
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.sample import Sample, may_sample
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot

__all__ = ["AlikeRequests", "what_is_asked"]

_the_same: Callable[[RequestSpec], tuple[Any, ...]] = operator.attrgetter(
    *(each.name for each in fields(RequestSpec) if each.compare and each.name not in ("instance_uuid", "properties"))
)


def what_is_asked(spec: RequestSpec) -> tuple[Any, ...]:
    """What a request asks for, beside the uuid and name of the instance that it is for; equal for requests alike."""
    return *_the_same(spec), {name: value for name, value in spec.properties.items() if name != "name"}


@dataclass(slots=True)
class _Known:
    """Keeps what the plugins said.

    :param now: of the nodes that passed, as they are now.
    :param later: of the same nodes, with one more instance on each of those that are likely to be taken; None: nobody has asked.
    :param likely: places of those among the nodes that passed, if they would still pass, and have not been taken.
    """

    fleet: Snapshot
    now: Judgement
    later: Judgement | None = None
    likely: set[int] = field(default_factory=set)


class AlikeRequests:
    """Ranks nodes for requests alike, one after the other. Used by one thread.

    :param count: how many requests there are.
    """

    def __init__(self, ranker: Ranker, view: FleetView, policy: SchedulingPolicy, count: int) -> None:
        self._ranker = ranker
        self._view = view
        self._policy = policy
        self._left = count
        self._known: _Known | None = None
        self._taken: int | None = None
        self._useful = True

    def rank(self, spec: RequestSpec, refused: Collection[str]) -> tuple[Snapshot, Ranking]:
        """Rank without the nodes that refused this request; awaits no claim of another request.

        :returns: the ranking, and a fleet that has its nodes; what is in use of them may be more than it has.
        :raises PluginFailed: a plugin raised.
        """
        self._left -= 1
        found = None if refused else self._rank_known(spec)
        if found is not None:
            return found
        fleet, ranking = self._ranker.rank(self._policy, spec, None, refused)
        self._known = None
        if self._left and self._useful and not refused and self._may_keep(spec, fleet, ranking):
            self._known = _Known(fleet, ranking.judgement.own())
        return fleet, ranking

    def take(self, row: int | None) -> None:
        """The last request takes a node of its ranking; None: it takes none."""
        self._taken = row

    def _rank_known(self, spec: RequestSpec) -> tuple[Snapshot, Ranking] | None:
        """Rank by what is known; None if that does not have the node that was taken last."""
        known, row = self._known, self._taken
        if known is None:
            return None
        if row is not None:
            place = int(np.searchsorted(known.now.rows, row))
            if known.later is None:
                self._ask(known, spec)
                # Where even this node is of no use any more, as if each instance fills one, the next answer is no use either.
                self._useful = place in known.likely
            if known.later is None or place not in known.likely:
                return None
            known.now.take_over(known.later, place)
            known.likely.remove(place)
        return known.fleet, known.now.ranking(self._policy.looked_at)

    def _ask(self, known: _Known, spec: RequestSpec) -> None:
        """Asks the plugins of nodes that are likely to be taken, with one more instance on each."""
        places = known.now.best(self._left + 2)
        rows = known.now.rows[places]
        fleet = known.fleet.with_more_on(rows, spec.flavor, counted=self._view.tracked)
        found = self._policy.pipeline.judge_again(self._policy.guard, fleet, spec, known.now)
        if found is not None:
            passed, known.later = found
            known.likely = set(places[passed[places]].tolist())

    def _may_keep(self, spec: RequestSpec, fleet: Snapshot, ranking: Ranking) -> bool:
        """Whether the plugins judged each node of the whole fleet alone, and all that they go by are its columns."""
        is_part = isinstance(fleet, Sample) or self._view.any_nested
        left_out = ranking.skipped or ranking.promising or ranking.passed < 2
        return self._policy.pipeline.judges_alone and may_sample(spec) and not (is_part or left_out)
