# SPDX-License-Identifier: Apache-2.0
"""Ranks nodes for requests alike: requests that differ only in the uuid and name of the instance.

If no plugin reads the project and the user of a request, requests may differ in these too.

If the plugins judge each node alone, a change of one node changes no other node's answer. So their answers about all nodes are
kept for a moment. Before a set of requests, the plugins are asked again about the nodes whose use has changed. Each decision of the
set takes resources of one node: the plugins are asked in advance about the nodes that are likely to be chosen, with one more
instance on each. A chosen node that shows the use that they were asked about is not asked about again. The rankings are computed
from these answers. They equal rankings by the plugins, of the fleet as it was when the set began and with the requests of the set
that were decided before.

A request that is decided alone is a set of one. It is left to a ranking of its own if no answers about its kind are kept and none
like it came in the second before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from moorage import errors
from moorage.clock import Clock
from moorage.scheduling.filter_and_weigh import Judgement, Ranking
from moorage.scheduling.fleet_view import FleetView, Moment
from moorage.scheduling.interface import Mask, RequestSpec, Rows
from moorage.scheduling.placement import Placement
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.request import property_types
from moorage.scheduling.sample import Sample, may_sample
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot, Use, use_of
from moorage.scheduling.weights import KeptWeights

__all__ = ["AlikeRequests", "AlikeSets", "what_is_asked"]

#: Kinds of requests whose answers are kept, and nodes that these answers cover in all at most. Each takes 60 bytes or more.
_KINDS, _NODES = 64, 1 << 20
#: Groups of requests alike that a further request of a set is compared with.
_GROUPS = 16
#: Seconds for which answers about all nodes are kept. An answer may depend on more than the use of its node.
_KEPT = 1.0
#: Seconds for which single requests are ranked by themselves after answers that could not be kept. Where filters must judge the
#: chosen node again, or no node passes, such a request is ranked a second time.
_ALONE = 10.0
#: If the use of more nodes has changed, the plugins are asked about all nodes.
_MANY = 512
#: About how many nodes at least the plugins are asked with one more instance on each.
_FORESEEN = 64

_OWNER = ("project_id", "user_id")
_the_same: Callable[[RequestSpec], tuple[Any, ...]] = operator.attrgetter(
    *(
        each.name
        for each in fields(RequestSpec)
        if each.compare and each.name not in ("instance_uuid", "properties", *_OWNER)
    )
)
_owner = operator.attrgetter(*_OWNER)


def what_is_asked(spec: RequestSpec, *, ignores_owner: bool = False) -> tuple[Any, ...]:
    """Returns the fields of a request without the uuid and name of the instance. Two requests are alike if these are equal.

    :param ignores_owner: leave out the project and the user too.
    """
    properties = {name: value for name, value in spec.properties.items() if name != "name"}
    return *_the_same(spec), properties, property_types(spec.image), () if ignores_owner else _owner(spec)


@dataclass(slots=True)
class _Known:
    """Holds the answers of the plugins.

    :param fleet: the snapshot that the rows of rankings refer to. :param now: the judgement of its nodes.
    :param rows: the rows that the nodes of ``now.rows`` have in the view.
    :param weights: the weights of these nodes.
    :param moment: the answers have the changes of the view up to this moment.
    :param until: when the answers expire, on the monotonic clock.
    :param requests: how many more requests the nodes are enough for.
    :param later: index in ``rows`` -> the raw weights with one more instance there, and the use with it. It has likely nodes that
        pass with that instance.
    :param shown: row in the view -> the use for which the answers hold. It has nodes that were chosen after they had been likely.
    """

    fleet: Snapshot
    now: Judgement
    rows: Rows
    weights: KeptWeights
    moment: Moment
    until: float
    requests: float
    later: dict[int, tuple[Sequence[float], Use]] = field(default_factory=dict)
    shown: dict[int, Use] = field(default_factory=dict)

    def nested(self, rows: Rows) -> Mask:
        """Returns which rows of the view are of nodes with several providers. Fleets that have such nodes are not sampled."""
        return np.zeros(len(rows), dtype=np.bool_) if isinstance(self.fleet, Sample) else self.fleet.nested[rows]


class AlikeRequests:
    """Ranks nodes for requests alike, set after set. Used by one thread at a time.

    :param asked: what the requests ask, by :func:`what_is_asked`.
    """

    def __init__(
        self, ranker: Ranker, view: FleetView, policy: SchedulingPolicy, asked: tuple[Any, ...], clock: Clock
    ) -> None:
        self.policy = policy
        self.asked = asked
        self._ranker = ranker
        self._view = view
        self._clock = clock
        self._known: _Known | None = None
        #: How many requests of the set are not ranked yet.
        self._left = 0
        #: Whether the answers have all that the requests of the set have taken.
        self._current = False
        #: Whether most nodes can take more than one instance.
        self._foresees = True
        #: How many requests the answers have served, and how many are expected while the next answers are kept.
        self._served = self._expected = 0
        #: When the last set began, and until when single requests do not try to make answers that can be kept.
        self._begun = self._alone_until = -math.inf

    @property
    def kept(self) -> int:
        """Returns the number of nodes with kept answers. All of these nodes have passed the filters."""
        return 0 if self._known is None else len(self._known.rows)

    def drop_expired(self) -> None:
        """Drops answers that expired so long ago that they say nothing about the rate of requests either."""
        if self._known is not None and self._clock.monotonic() >= self._known.until + _KEPT:
            self._known, self._expected = None, 0

    def begin(self, count: int) -> bool:
        """Begins a set of so many requests.

        :returns: whether answers are kept, or made now would serve further requests: whether a single request belongs here.
        """
        now = self._clock.monotonic()
        soon, self._begun = now < self._begun + _KEPT, now
        self._left, self._current, self._foresees = count, False, True
        self.drop_expired()
        known = self._known
        if known is not None and now >= known.until:
            self._known, self._expected = None, self._served
        elif known is not None and known.requests < count:
            # A sample was used up early.
            self._known, self._expected = None, 2 * self._served
        return self._known is not None or (soon and now >= self._alone_until)

    def rank(self, spec: RequestSpec, refused: Collection[str]) -> tuple[Snapshot, Ranking]:
        """Ranks the nodes for the next request of the set. Does not wait for claims of other requests.

        :param refused: uuids of nodes that have refused this request.
        :returns: the ranking, and the snapshot that its rows refer to. More may be in use than the snapshot shows.
        :raises PluginFailed: a plugin raised.
        """
        self._left -= 1
        if refused:
            self._current = False
            return self._ranker.rank(self.policy, spec, None, refused)
        known, self._known = self._known, None
        if known is not None and not self._current:
            self._ranker.freshen()
            known = self._with_changes(known, spec)
        lasts = known is not None or self._left > 0
        if known is None:
            fleet, ranking, known = self._rank_all(spec)
        else:
            fleet, ranking = known.fleet, known.now.ranking(*known.weights.best(self.policy.looked_at))
        if known is not None:
            known.requests -= 1
            self._served += 1
            if lasts and self._foresees and not self._current:
                self._foresee(known, spec)
        self._known, self._current = known, True
        return fleet, ranking

    def take(self, row: int | None) -> None:
        """Says which row the last ranked request has chosen, and that the caller puts its instance into the view; None: no row."""
        known = self._known
        if row is None or known is None or not self._current:
            return
        place = int(np.searchsorted(known.now.rows, row))
        later = known.later.pop(place, None)
        if later is None:
            self._current = False
        else:
            weights, known.shown[row] = later
            known.weights.change(place, weights)

    def _rank_all(self, spec: RequestSpec) -> tuple[Snapshot, Ranking, _Known | None]:
        """Ranks all nodes, or a sample of them. Returns the answers too, if they can serve further requests."""
        keeps = not self.policy.pipeline.not_alone and may_sample(spec)
        moment, _ = self._view.changes(None)
        # A sample rather than all nodes: several schedulers that rank all of them choose the same ones.
        wanted, self._served = max(1 + self._left, min(self._expected, self._ranker.most_sampled)), 0
        fleet, ranking = self._ranker.rank(self.policy, spec, None, (), wanted if keeps else 1)
        if not keeps or ranking.skipped or ranking.promising or ranking.passed < 2:
            self._alone_until = self._clock.monotonic() + _ALONE
            return fleet, ranking, None
        judged = ranking.judgement
        now, rows, requests = Judgement(judged.rows, judged.considered, judged.removed, []), judged.rows, math.inf
        if isinstance(fleet, Sample):
            rows, requests = fleet.rows[rows], self._ranker.requests_for(self.policy, ranking)
        weights = KeptWeights(judged.weighings, len(rows))
        return fleet, ranking, _Known(fleet, now, rows, weights, moment, self._clock.monotonic() + _KEPT, requests)

    def _with_changes(self, known: _Known, spec: RequestSpec) -> _Known | None:
        """Asks the plugins about the nodes whose use has changed. Returns None if they must be asked about all nodes."""
        changed = self._outdated(known, spec)
        if changed is None or not len(changed):
            return None if changed is None else known
        answers = self._ask(self._nodes(known, changed, spec), spec)
        if answers is None:
            return None
        passed = changed[answers.rows]
        if len(passed) and len(answers.weighings) != known.weights.weighers:
            # A weigher that counts for some nodes alone was not asked.
            return None
        before, after = _within(changed, known.rows), np.zeros(len(changed), dtype=np.bool_)
        after[answers.rows] = True
        left = before & ~after
        if (after & ~before).any() or (left.any() and not (before | after).all()):
            # It is not known which filter has removed a node before.
            return None
        places = np.searchsorted(known.rows, passed)
        for place in places.tolist():
            known.later.pop(place, None)
        if len(places):
            known.weights.change_all(places, answers.weighings)
        return _without(known, changed[left], answers.removed) if left.any() else known

    def _foresee(self, known: _Known, spec: RequestSpec) -> None:
        """Asks the plugins about the nodes that are likely to be chosen, with one more instance on each."""
        # A node for this request and for each request after it.
        likely, _ = known.weights.best(self._left + 1)
        if known.later.keys() >= set(likely.tolist()):
            return
        # The number of nodes hardly counts: those that this set does not take serve the next ones.
        places, _ = known.weights.best(max(2 * len(likely), _FORESEEN))
        rows = np.sort(known.rows[places])
        rows = rows[~known.nested(rows)]
        nodes = self._nodes(known, rows, spec)
        if nodes is not None:
            nodes = nodes.with_more_on(nodes.all_rows, spec.flavor, counted=self._view.tracked)
        answers = self._ask(nodes, spec)
        if nodes is not None and answers is not None and len(answers.weighings) == known.weights.weighers:
            passed = np.searchsorted(known.rows, rows[answers.rows]).tolist()
            of_flavor = nodes.flavor_counts(spec.flavor.flavorid)
            use = use_of(nodes.used.values(), nodes.num_instances, nodes.num_io_ops, of_flavor)
            shown = [use[row] for row in answers.rows.tolist()]
            known.later = dict(zip(passed, zip(_raw(answers), shown, strict=True), strict=True))
        self._foresees = 2 * len(known.later) > len(places)

    def _outdated(self, known: _Known, spec: RequestSpec) -> Rows | None:
        """Returns the rows of the view whose answers may not hold any more; None: the plugins must be asked about all nodes."""
        known.moment, changed = self._view.changes(known.moment)
        if changed is None or len(changed) > _MANY:
            return None
        if isinstance(known.fleet, Sample):
            changed = changed[_within(changed, known.fleet.rows)]
        if known.nested(changed).any():
            # The whole fleet shows what is used of the providers below a node, and of the pools that it shares with others.
            return None
        if not known.shown:
            return changed
        use = self._view.use(changed, spec.flavor.flavorid)
        outdated = [row for row, now in zip(changed.tolist(), use, strict=True) if known.shown.get(row) != now]
        for row in outdated:
            known.shown.pop(row, None)
        return np.array(outdated, dtype=np.intp)

    def _nodes(self, known: _Known, rows: Rows, spec: RequestSpec) -> Snapshot | None:
        """Returns the nodes of some rows of the view as they are now; None: the rows may stand for other nodes now."""
        return self._view.sample_since(known.moment, rows, spec.flavor.flavorid)

    def _ask(self, nodes: Snapshot | None, spec: RequestSpec) -> Judgement | None:
        """Asks the plugins about some nodes. Returns None if there are no answers that can be kept."""
        if nodes is None:
            return None
        try:
            ranking = self._ranker.run(self.policy, spec, nodes, judged_only=True)
        except errors.MoorageError:
            # A ranking of all nodes asks the plugin again, and raises this if it must be.
            return None
        return None if ranking.skipped or ranking.promising else ranking.judgement


class AlikeSets:
    """Divides sets of requests into requests alike, and keeps what ranks for these. Used by one thread at a time."""

    def __init__(self, ranker: Ranker, view: FleetView, clock: Clock) -> None:
        self._ranker = ranker
        self._view = view
        self._clock = clock
        #: By the time when they were asked last, the earliest first.
        self._kept: list[AlikeRequests] = []

    def divide(self, works: Sequence[Placement]) -> Iterator[tuple[AlikeRequests, Sequence[int]]]:
        """Yields what ranks for requests alike, and their indexes, group by group. A group begins when it is yielded.

        It yields nothing for a single request that :meth:`AlikeRequests.begin` leaves to a ranking of its own.
        """
        self._forget()
        groups: list[tuple[SchedulingPolicy, tuple[Any, ...], list[int]]] = []
        for index, work in enumerate(works):
            asked = what_is_asked(work.spec, ignores_owner=not work.policy.pipeline.reads_owner)
            for policy, same, indexes in groups[-_GROUPS:]:
                if policy is work.policy and same == asked:
                    indexes.append(index)
                    break
            else:
                groups.append((work.policy, asked, [index]))
        for policy, asked, indexes in groups:
            requests = self._requests(policy, asked)
            if requests.begin(len(indexes)) or len(works) > 1:
                yield requests, indexes

    def _requests(self, policy: SchedulingPolicy, asked: tuple[Any, ...]) -> AlikeRequests:
        for index, each in enumerate(self._kept):
            if each.policy is policy and each.asked == asked:
                del self._kept[index]
                break
        else:
            each = AlikeRequests(self._ranker, self._view, policy, asked, self._clock)
        self._kept.append(each)
        del self._kept[:-_KINDS]
        return each

    def _forget(self) -> None:
        """Drops expired answers, then those of the least recently requested kinds, down to :data:`_NODES` nodes in all."""
        for each in self._kept:
            each.drop_expired()
        sizes = [each.kept for each in self._kept]
        total, first = sum(sizes), 0
        while total > _NODES:
            total -= sizes[first]
            first += 1
        del self._kept[:first]


def _without(known: _Known, rows: Rows, removed: Mapping[str, int]) -> _Known | None:
    """Takes nodes that do not pass any more out of the answers. Returns None if fewer than two are left.

    :param removed: filter -> how many of them it has removed.
    """
    places = np.searchsorted(known.rows, rows)
    if len(known.rows) - len(places) < 2:
        return None
    before = known.now
    counts = {name: before.removed.get(name, 0) + removed.get(name, 0) for name in {**before.removed, **removed}}
    known.now = Judgement(np.delete(before.rows, places), before.considered, counts, [])
    known.rows = np.delete(known.rows, places)
    known.weights.drop(places)
    known.later.clear()
    return known


def _raw(answers: Judgement) -> Sequence[Sequence[float]]:
    """Returns the raw weights of each row."""
    columns = [each.raw.tolist() for each in answers.weighings]
    return list(zip(*columns, strict=True)) if columns else [()] * len(answers.rows)


def _within(rows: Rows, others: Rows) -> Mask:
    """Returns which of the rows are among the others. Both ascend."""
    if not len(others):
        return np.zeros(len(rows), dtype=np.bool_)
    places = np.minimum(np.searchsorted(others, rows), len(others) - 1)
    found: Mask = others[places] == rows
    return found
