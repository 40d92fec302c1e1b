# SPDX-License-Identifier: Apache-2.0
"""Ranks the nodes of the fleet for a request: from memory, as fresh as a decision needs it, beside the claims in progress.

Of a large fleet it ranks a random sample instead, as long as the sample has enough nodes that pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from moorage import errors
from moorage.clock import Clock
from moorage.scheduling.constraints import requested_rows, unfiltered
from moorage.scheduling.filter_and_weigh import Pipeline, Ranking
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.resource_request import needed_powers
from moorage.scheduling.sample import Sampler, may_sample
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot
from moorage.scheduling.traits import asks_for_traits

__all__ = ["PATIENCE", "Ranker"]

#: Earlier claims that a request awaits before it is refused because of them, and the seconds for which it awaits each.
_AWAITED, PATIENCE = 16, 2.0
#: How many nodes a sample has for each request that it decides.
_SAMPLE = 256
#: Nodes of a sample that must pass for each request at least, and none of the fleet be strictly better; otherwise all nodes are
#: ranked.
_ENOUGH = 64


class Ranker:
    """Ranks nodes. Safe for use by several threads.

    :param sampler: chooses samples; None: all nodes are ranked for every request.
    :param freshen: called with the hosts before each ranking: reads the instances of those that do not tell of theirs.
    :param lacking: the hosts whose agents lack one of some powers; asked only for requests that need some.
    """

    def __init__(
        self,
        view: FleetView,
        freshness: FleetRefresher,
        reservations: Reservations,
        clock: Clock,
        sampler: Sampler | None = None,
        freshen: Callable[[Mapping[str, object]], object] | None = None,
        lacking: Callable[[Collection[str]], Collection[str]] = lambda powers: (),
    ) -> None:
        self._view = view
        self._freshness = freshness
        self._reservations = reservations
        self._clock = clock
        self._sampler = sampler
        self._freshen = freshen
        self._lacking = lacking
        #: The last answer of :meth:`_spreads`, and of which pipeline and fleet it is.
        self._spread: tuple[Pipeline | None, Snapshot | None, bool] = None, None, False

    def rank(
        self, policy: SchedulingPolicy, spec: RequestSpec, number: int | None, refused: Collection[str], alike: int = 1
    ) -> tuple[Snapshot, Ranking]:
        """Rank without the nodes that refused this request. With no candidate, read the fleet again and rank again.

        :param number: of the request; it rises from request to request. None: the claims of other requests are not awaited.
        :param alike: how many requests alike the ranking is to serve.
        :raises PluginFailed: a plugin raised.
        """
        self.freshen()
        found = self._rank_sample(policy, spec, refused, alike)
        if found is not None:
            return found
        fleet = self._view.snapshot()
        ranking = self.run(policy, spec, fleet, refused)
        if not len(ranking.rows):
            self._freshness.before_refusal(fleet, spec)
            # Another thread may have refreshed the view instead.
            newer = self._view.snapshot()
            if newer is not fleet:
                fleet, ranking = newer, self.run(policy, spec, newer, refused)
        if len(ranking.rows) or number is None:
            return fleet, ranking
        return self._rank_beside_reservations(policy, spec, number, refused, fleet, ranking)

    def _rank_sample(
        self, policy: SchedulingPolicy, spec: RequestSpec, refused: Collection[str], alike: int
    ) -> tuple[Snapshot, Ranking] | None:
        """Rank a random part of a large fleet; None where all nodes must be ranked."""
        sampler = self._sampler
        if alike > max(1, self.most_sampled):
            # One ranking of all nodes serves them.
            return None
        if sampler is None or refused or not policy.samples(self._view.size) or not may_sample(spec):
            # A request that was refused by nodes of its sample is ranked by all nodes, as it is refused by all of them only.
            return None
        if self._view.any_nested:
            # The columns of all providers are kept from request to request; those of a sample would be made for each.
            return None
        fleet = self._view.sample(functools.partial(sampler.choose, _SAMPLE * alike), spec.flavor.flavorid)
        if not self._spreads(policy, fleet.whole):
            return None
        ranking = self.run(policy, spec, fleet, refused)
        return (fleet, ranking) if self.requests_for(policy, ranking) >= alike else None

    @property
    def most_sampled(self) -> int:
        """Returns for how many requests alike a sample is chosen at most: it has no more than half of the nodes."""
        return self._view.size // (2 * _SAMPLE)

    def requests_for(self, policy: SchedulingPolicy, ranking: Ranking) -> int:
        """Returns how many requests alike the nodes of a sample are enough for."""
        return ranking.preferred // max(_ENOUGH, policy.looked_at or 1)

    def _spreads(self, policy: SchedulingPolicy, whole: Snapshot) -> bool:
        """Returns whether the weighers spread instances over all of the fleet; found out once for each reading of the nodes."""
        pipeline, fleet, answer = self._spread
        if pipeline is not policy.pipeline or fleet is not whole:
            answer = policy.pipeline.spreads_over(policy.guard, whole)
            self._spread = policy.pipeline, whole, answer
        return answer

    def _rank_beside_reservations(
        self,
        policy: SchedulingPolicy,
        spec: RequestSpec,
        number: int,
        refused: Collection[str],
        fleet: Snapshot,
        ranking: Ranking,
    ) -> tuple[Snapshot, Ranking]:
        """Rank again where only reservations of other requests stand in the way; otherwise return the empty ranking.

        Reservations of later requests do not count: two requests would exclude each other everywhere, and the claim decides
        anyway. An earlier request may still fail, so that the end of its claim is awaited. No request waits for a later one.
        """
        for _ in range(_AWAITED):
            later, earlier = self._reservations.beside(number)
            if later:
                without = fleet.without(later)
                found = self.run(policy, spec, without, refused)
                if len(found.rows):
                    return without, found
            if not earlier:
                break
            records = [*later, *(each.record for each in earlier)]
            if not len(self.run(policy, spec, fleet.without(records), refused).rows):
                break
            self._clock.wait(earlier[0].ended, PATIENCE)
            fleet = self._view.snapshot()
            ranking = self.run(policy, spec, fleet, refused)
            if len(ranking.rows):
                break
        return fleet, ranking

    def run(
        self,
        policy: SchedulingPolicy,
        spec: RequestSpec,
        fleet: Snapshot,
        refused: Collection[str] = (),
        *,
        judged_only: bool = False,
    ) -> Ranking:
        """Rank the nodes of a snapshot as it is.

        :param judged_only: ask the plugins, and do not compare the nodes.
        :raises InvalidInput: the request asks for traits that no filter judges.
        """
        filtered = not unfiltered(spec)
        if filtered and not policy.pipeline.judges_traits and asks_for_traits(spec):
            raise errors.InvalidInput(
                "The request asks for traits, and no enabled filter judges them. Add required_traits to [scheduling] "
                "enabled_filters.",
                path="body/flavor/extra_specs",
            )
        powers = needed_powers(spec)
        return policy.pipeline.run(
            policy.guard,
            fleet,
            requested_rows(fleet, spec, refused, self._lacking(powers) if powers else ()),
            self.with_members(spec, ()),
            most=0 if judged_only else policy.looked_at,
            filtered=filtered,
        )

    def with_members(self, spec: RequestSpec, more: Sequence[str]) -> RequestSpec:
        """Returns the request with the members of its server group that the view has, and some more."""
        group = spec.server_group
        if group is None:
            return spec
        known = self._view.group_members(spec.project_id, group.name)
        members = dict.fromkeys((*group.members, *sorted(known), *more))
        members.pop(spec.instance_uuid, None)
        return replace(spec, server_group=replace(group, members=tuple(members)))

    def freshen(self) -> None:
        """Reads what is known to be outdated, and the instances of hosts whose agents send no messages."""
        self._freshness.before_ranking()
        self._read_silent()

    def fleet(self) -> Snapshot:
        """Returns the fleet, refreshed before where hosts whose agents send no messages were read too long ago."""
        self._read_silent()
        return self._view.snapshot()

    def _read_silent(self) -> None:
        """Reads the instances of hosts whose agents send no messages again, if the last reading is too old."""
        if self._freshen is not None:
            self._freshen(self._view.rows_of_host)
