# SPDX-License-Identifier: Apache-2.0
"""Ranks nodes for several requests alike: requests that differ only in the uuid and name of the instance.

The scheduler decides such requests one after the other. Each decision takes resources of one node. If the plugins judge each node
alone, only the weight of that node changes. The plugins are asked twice: about the fleet as it is, and about the fleet with one
more instance on each node that is likely to be chosen. The rankings of all these requests are computed from the two answers. They
equal rankings by the plugins while nothing else changes the fleet.
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
from moorage.scheduling.request import property_types
from moorage.scheduling.sample import may_sample
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot
from moorage.scheduling.weights import KeptWeights

__all__ = ["AlikeRequests", "what_is_asked"]

_the_same: Callable[[RequestSpec], tuple[Any, ...]] = operator.attrgetter(
    *(each.name for each in fields(RequestSpec) if each.compare and each.name not in ("instance_uuid", "properties"))
)


def what_is_asked(spec: RequestSpec) -> tuple[Any, ...]:
    """Returns all fields of a request but the uuid and name of the instance. They are equal for requests alike."""
    properties = {name: value for name, value in spec.properties.items() if name != "name"}
    return *_the_same(spec), properties, property_types(spec.image)


@dataclass(slots=True)
class _Known:
    """Holds the two answers of the plugins.

    :param fleet: the snapshot that the plugins were asked about.
    :param now: the judgement of the nodes. :param weights: their weights, with the requests that were decided since.
    :param later: the judgement with one more instance on each likely node; None: the plugins were not asked yet.
    :param likely: indexes in ``now.rows`` of the likely nodes that pass in ``later`` and were not chosen yet.
    """

    fleet: Snapshot
    now: Judgement
    weights: KeptWeights
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
        """Ranks the nodes for the next request. Does not wait for claims of other requests.

        :param refused: uuids of nodes that have refused this request.
        :returns: the ranking, and the snapshot that its rows refer to. More may be in use than the snapshot shows.
        :raises PluginFailed: a plugin raised.
        """
        self._left -= 1
        found = None if refused else self._rank_known(spec)
        if found is not None:
            return found
        keeps = self._left > 0 and self._useful and self._policy.pipeline.judges_alone and not refused
        fleet, ranking = self._ranker.rank(self._policy, spec, None, refused, 1 + self._left if keeps else 1)
        self._known = None
        if keeps and self._may_keep(spec, ranking):
            judgement = ranking.judgement
            self._known = _Known(fleet, judgement, KeptWeights(judgement.weighings, len(judgement.rows)))
        elif keeps:
            # A large sample would serve one request again.
            self._useful = False
        return fleet, ranking

    def take(self, row: int | None) -> None:
        """Says which row the last ranked request has chosen; None: no row."""
        self._taken = row

    def _rank_known(self, spec: RequestSpec) -> tuple[Snapshot, Ranking] | None:
        """Ranks by the kept answers; returns None if they do not cover the node that was chosen last."""
        known, row = self._known, self._taken
        if known is None:
            return None
        if row is not None:
            place = int(np.searchsorted(known.now.rows, row))
            if known.later is None:
                self._ask(known, spec)
                # If this node does not pass with one more instance, each instance probably fills a node: no use to ask again.
                self._useful = place in known.likely
            if known.later is None or place not in known.likely:
                return None
            known.weights.change(place, known.later.weighings)
            known.likely.remove(place)
        return known.fleet, known.now.ranking(*known.weights.best(self._policy.looked_at))

    def _ask(self, known: _Known, spec: RequestSpec) -> None:
        """Asks the plugins about the nodes that are likely to be chosen, with one more instance on each."""
        # The node of the last request, and one for this request and each one after it but the last.
        places, _ = known.weights.best(self._left + 1)
        rows = known.now.rows[places]
        fleet = known.fleet.with_more_on(rows, spec.flavor, counted=self._view.tracked)
        found = self._policy.pipeline.judge_again(self._policy.guard, fleet, spec, known.now)
        if found is not None:
            passed, known.later = found
            known.likely = set(places[passed[places]].tolist())

    def _may_keep(self, spec: RequestSpec, ranking: Ranking) -> bool:
        """Returns whether the answers of the plugins, which judge each node alone, can serve further requests alike."""
        if self._view.any_nested or not may_sample(spec):
            return False
        return not (ranking.skipped or ranking.promising) and ranking.passed > 1
