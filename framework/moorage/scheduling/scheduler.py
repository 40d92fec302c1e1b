# SPDX-License-Identifier: Apache-2.0
"""Selects nodes for requests from memory, and claims them one by one until a claim holds."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from oslo_log import log as logging

from moorage import errors, randomness, threads
from moorage.clock import Clock
from moorage.context import acting_for
from moorage.read_only import EMPTY, replaced
from moorage.rpc.server import request_id as id_of_request
from moorage.scheduling.alike import AlikeRequests, AlikeSets
from moorage.scheduling.bulk import BulkPlacer
from moorage.scheduling.constraints import scarce_resources, unfiltered
from moorage.scheduling.decisions import Decision, Decisions
from moorage.scheduling.dry_run import dry_run, reasons_of_node
from moorage.scheduling.filter_and_weigh import Ranking
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import (
    Claimer,
    ClaimResult,
    ExcludedTargets,
    FleetSource,
    Holds,
    InstanceRecord,
    NodeState,
    RequestSpec,
    Residents,
    SetClaimer,
    WantedClaim,
)
from moorage.scheduling.judged_claims import JudgedClaims
from moorage.scheduling.placement import Choice, Placement, Refused, Reserver, Selection, ViewReserver
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.resource_request import needed_powers
from moorage.scheduling.sample import Sampler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot

__all__ = ["Scheduler"]

LOG = logging.getLogger(__name__)

#: How often ``max_attempts`` nodes are tried for one request; the fleet is ranked again in between.
_ROUNDS = 4
#: Nodes of a decision that are remembered.
_REMEMBERED = 3


class Scheduler:
    """Selects nodes. Safe for use by several threads; no method reads a store but to repair a stale refusal.

    :param policy: gives the policy in force; called once for each request.
    :param reserver: puts what is being claimed into the view; by default it is held there.
    :param freshen: called with the hosts before each ranking: reads the instances of those that do not tell of theirs.
    :param refused: where refusals are kept beyond this process's memory.
    :param decided: called after each decision of :meth:`place` and :meth:`place_many`, good or bad; a repeated one is none.
    :param residents: reads the instances of a node from the store. Filters that judge instances are asked again with them, and
        the claim holds only while they are as they were judged. None: concurrent requests may break what these filters promise.
    :param fields: the declared fields of the instance of a request on a node, as its agent is going to report them. None: no filter
        reads any.
    :param lacking: the hosts whose agents lack one of some powers; asked for requests that need some.
    :param recount: reads the instances of some hosts from the store into the view, but for those that are being claimed; see
        :meth:`moorage.scheduling.instance_tracker.InstanceTracker.reload_hosts`. None: the view keeps no instances.
    :param reservations: where the scheduler keeps what it is claiming; one that nothing else writes.
    """

    def __init__(
        self,
        view: FleetView,
        source: FleetSource,
        claimer: Claimer,
        policy: Callable[[], SchedulingPolicy],
        clock: Clock,
        random: randomness.Random,
        *,
        decisions: int = 2000,
        reserver: Reserver | None = None,
        freshen: Callable[[Mapping[str, object]], object] | None = None,
        refused: Refused | None = None,
        decided: Callable[[Decision], object] = lambda decision: None,
        residents: Callable[[str], Residents] | None = None,
        fields: Callable[[RequestSpec, NodeState], Mapping[str, Any]] | None = None,
        lacking: Callable[[Collection[str]], Collection[str]] = lambda powers: (),
        recount: Callable[[Sequence[str]], object] | None = None,
        reservations: Reservations | None = None,
    ) -> None:
        self.view = view
        self._claimer = claimer
        self._set_claimer = claimer if isinstance(claimer, SetClaimer) else None
        self._policy = policy
        self._random = random
        self._reserver = reserver or ViewReserver(view)
        self._refused = refused
        self._decided = decided
        self._fields = fields
        self._numbers = itertools.count(1)
        #: Held while nodes are selected for a set: several threads that rank take the interpreter's lock from each other at each
        #: operation on a column.
        self._selecting = threads.lock()
        self._reservations = reservations or Reservations()
        self._freshness = FleetRefresher(view, source, clock, recount)
        self._ranker = Ranker(
            view, self._freshness, self._reservations, clock, Sampler(random), freshen=freshen, lacking=lacking
        )
        self._sets = AlikeSets(self._ranker, view, clock)
        self._judged = JudgedClaims(self._ranker, self._reserver, self._reservations, residents)
        place_set = functools.partial(self._place_set, alike=True)
        self._bulk = BulkPlacer(claimer, self._reserver, place_set, self._place)
        self._decisions = Decisions(decisions)

    def refresh(self, *, older_than: float = 0.0, gently: bool = False) -> bool:
        """Reads the nodes into the view; see :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.refresh`."""
        return self._freshness.refresh(older_than=older_than, gently=gently)

    def rest(self) -> None:
        """Waits between two steps of a gentle reading; see :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.rest`."""
        self._freshness.rest()

    def changed(self) -> None:
        """Has the nodes read soon, because some were changed.

        See :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.changed`.
        """
        self._freshness.changed()

    def stop(self) -> None:
        """Ends the thread that reads changed nodes; see :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.stop`."""
        self._freshness.stop()

    def observe(self) -> None:
        """Reads the states of agents and nodes into the view.

        See :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.observe`.
        """
        self._freshness.observe()

    def apply_states(self, states: ExcludedTargets, read_at: float) -> None:
        """Applies states that the caller has read to the view.

        See :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.apply_states`.
        """
        self._freshness.apply_states(states, read_at)

    def place(
        self,
        spec: RequestSpec,
        request_id: str,
        *,
        claimer: Claimer | None = None,
        held: InstanceRecord | None = None,
        tried: Sequence[Mapping[str, Any]] = (),
    ) -> Selection:
        """Select a node and claim it; the next best when a claim is refused, a bounded number of times.

        :param claimer: claims in place of the one for new instances.
        :param held: for an instance that stays where it is until it has moved: what is held on the node meanwhile.
        :param tried: builds of the instance that failed before, for the decision.
        :raises NoValidHost: no node can take it; says why.
        :raises PluginFailed: a plugin raised.
        :raises PluginTimeout: a plugin hung; this process is about to end.
        """
        work = self._work(self._policy(), spec, request_id, claimer, held)
        work.decision.tried = tuple(tried)
        return self.place_prepared(work)

    def prepare(self, spec: RequestSpec, request_id: str) -> Placement:
        """Begins the decision of a request for the thread that serves it."""
        return self._work(self._policy(), spec, request_id)

    def place_prepared(
        self, work: Placement, instead: Callable[[errors.MoorageError], None] | None = None
    ) -> Selection:
        """Selects and claims a node for a request that was prepared; see :meth:`place`.

        :param instead: see :meth:`moorage.scheduling.plugin_runner.PluginRunner.request`.
        """
        return work.policy.guard.request(lambda: self._place(work), instead)

    def place_prepared_set(
        self, works: Sequence[Placement], instead: Callable[[errors.MoorageError], None] | None = None
    ) -> list[Selection | Exception | None]:
        """Selects nodes for several requests, each on top of the ones before, and claims them in few transactions.

        It awaits no claim of another request, and tries one node for each.

        :param works: of different instances. :param instead: as for :meth:`place_prepared`.
        :returns: of each the selection, the error, or None: :meth:`place_prepared` has to place it.
        :raises PluginTimeout: a plugin hung; this process is about to end.
        """
        return self._policy().guard.request(lambda: self._place_set(works, alike=False), instead)

    def place_many(self, spec: RequestSpec, uuids: Sequence[str], request_id: str) -> list[Selection]:
        """Place several instances alike, each on top of the ones before; all of them or (by an error) none.

        :raises NoValidHost: there is no room for all; what had been claimed was given back.
        """
        policy = self._policy()
        return policy.guard.request(lambda: self._bulk.place(self._works_alike(policy, spec, uuids, request_id)))

    def confirm(self, spec: RequestSpec, request_id: str) -> None:
        """Ask the filters whether an instance may stay where it is (``spec.rebuild``); claims nothing.

        :raises NoValidHost: it may not; says why.
        """
        policy = self._policy()
        work = self._work(policy, spec, request_id)
        policy.guard.request(lambda: self._confirm(work))

    def select(self, spec: RequestSpec, count: int, *, explain: bool = False) -> dict[str, Any]:
        """Where ``count`` instances alike would go, without claiming anything; with reasons on demand.

        Each is placed on top of the ones before.
        """
        policy = self._policy()
        return policy.guard.request(
            lambda: dry_run(self._ranker, policy, spec, count, record=self._record, explain=explain)
        )

    def decision(self, name: str, node: str | None = None) -> dict[str, Any]:
        """What was decided of a request, by its id or its instance: from memory, a refusal also from the store.

        :param node: also say what the filters say of this node now.
        :raises NotFound: this scheduler was not asked, or has forgotten.
        """
        found = self._decisions.get(name)
        if found is None:
            stored = self._refused.find(name) if self._refused is not None else None
            if stored is None:
                raise errors.NotFound(f"This scheduler knows of no decision on request {name}.")
            return stored
        answer = found.to_json()
        if node is not None:
            answer["node_asked_for"] = node
            policy, fleet = self._policy(), self.view.snapshot()
            answer["reasons_now"] = policy.guard.request(
                lambda: reasons_of_node(self._ranker, policy, found.spec, fleet, node)
            )
        return answer

    # -- deciding -------------------------------------------------------------------------------------------------

    def _work(
        self,
        policy: SchedulingPolicy,
        spec: RequestSpec,
        key: str,
        claimer: Claimer | None = None,
        held: InstanceRecord | None = None,
    ) -> Placement:
        decision = Decision(id_of_request(key), spec)
        self._decisions.add(decision)
        return Placement(policy, spec, decision, claimer or self._claimer, held, key, next(self._numbers))

    def _works_alike(
        self, policy: SchedulingPolicy, spec: RequestSpec, uuids: Sequence[str], request_id: str
    ) -> list[Placement]:
        """Begins the decisions of a bulk request. The instances before one are members of its server group."""
        return [
            self._work(
                policy, self._ranker.with_members(replaced(spec, instance_uuid=uuid), uuids[:number]), request_id
            )
            for number, uuid in enumerate(uuids)
        ]

    def _confirm(self, work: Placement) -> None:
        fleet, ranking, _ = self._rank(work)
        if not len(ranking.rows):
            raise self._refusal(fleet, ranking, work)
        node = fleet.nodes[int(ranking.rows[0])]
        work.decision.outcome, work.decision.host, work.decision.node = "stays", node.host, node.name

    def _rank(self, work: Placement) -> tuple[Snapshot, Ranking, list[int]]:
        """Rank the fleet, without the nodes that have refused the request; the rows to try, best first."""
        fleet, ranking = self._ranker.rank(work.policy, work.spec, work.number, work.refused)
        return fleet, ranking, self._noted(work, fleet, ranking)

    def _noted(self, work: Placement, fleet: Snapshot, ranking: Ranking) -> list[int]:
        """Records a ranking in the decision of its request. Returns the rows to try, best first."""
        decision = work.decision
        decision.considered, decision.passed = ranking.considered, ranking.passed
        decision.removed, decision.skipped = ranking.removed, ranking.skipped
        decision.best = tuple(
            (fleet.nodes[row].host, fleet.nodes[row].name, float(weight))
            for row, weight in zip(ranking.rows[:_REMEMBERED].tolist(), ranking.weights, strict=False)
        )
        return self._candidates(work.policy, ranking)

    def _place(self, work: Placement) -> Selection:
        policy, decision = work.policy, work.decision
        while True:
            # Ranked again after each round of refusals: what others claimed has come to be known meanwhile.
            fleet, ranking, candidates = self._rank(work)
            for place in range(len(candidates)):
                choice = self._choice(work, fleet, ranking, candidates[place:])
                selection = self._claim(work, choice)
                if selection is not None:
                    return selection
                if "state" in decision.refusals[-1]:
                    # An agent may have more nodes than are tried: none of them is ranked again.
                    break
            if not candidates or len(decision.refusals) >= policy.max_attempts * _ROUNDS:
                return self._earlier(fleet, ranking, work)

    def _place_set(self, works: Sequence[Placement], *, alike: bool) -> list[Selection | Exception | None]:
        """Place several, each on top of the ones before; their claims share transactions.

        :param alike: where one finds no node, those after it are not tried.
        :returns: of each the selection, the error, or None: it has to be placed by itself. That is so if its claim was refused, no
            node was found without a wait, or the instances of the node must be judged again; and if it is the only one, and
            none like it came before.
        """
        outcomes: list[Selection | Exception | None] = [None] * len(works)
        if self._set_claimer is None:
            return outcomes
        chosen: list[tuple[int, Choice, InstanceRecord]] = []
        wanted: list[WantedClaim] = []
        with self._reserving() as reserve:
            with self._selecting:
                for place, choice in self._choices_of_set(works, outcomes, alike):
                    work = works[place]
                    record, spec = self._wanted(work, choice)
                    reserve(work, record)
                    chosen.append((place, choice, record))
                    wanted.append(WantedClaim(spec, choice.node.uuid, choice.node.host, work.key, work.context))
            results = self._set_claimer.claim_many(wanted) if wanted else ()
            for (_, _, record), result in zip(chosen, results, strict=True):
                if isinstance(result, BaseException):
                    self._reserver.unreserve(record)
        for (place, choice, record), result in zip(chosen, results, strict=True):
            work = works[place]
            try:
                with acting_for(work.context):
                    if isinstance(result, ClaimResult):
                        outcomes[place] = self._selected(work, choice, result, record)
                    else:
                        self._note_refusal(work, choice, result)
            except Exception as error:  # noqa: BLE001  (it is raised when all are known)
                outcomes[place] = error
        return outcomes

    def _choices_of_set(
        self, works: Sequence[Placement], outcomes: list[Selection | Exception | None], alike: bool
    ) -> Iterator[tuple[int, Choice]]:
        """Chooses nodes for the requests of a set, one after the other; requests alike follow each other.

        The caller reserves each node before it asks for the next one.

        :param alike: the set is one bulk request. Otherwise an error becomes the outcome of its request.
        """
        for requests, places in self._sets.divide(works):
            for place in places:
                try:
                    choice = self._choice_in_set(works[place], requests)
                except Exception as error:
                    if alike:
                        raise
                    outcomes[place] = error
                    choice = None
                requests.take(None if choice is None else choice.row)
                if choice is not None:
                    yield place, choice
                elif alike:
                    return

    def _choice_in_set(self, work: Placement, requests: AlikeRequests) -> Choice | None:
        """Chooses the best node for a request of a set; None: the request has to be placed by itself."""
        with acting_for(work.context):
            # It must not await the claims before it, which are made with it.
            fleet, ranking = requests.rank(work.spec, work.refused)
            candidates = self._noted(work, fleet, ranking)
            if not candidates or self._judged.judges(ranking):
                return None
            return self._choice(work, fleet, ranking, candidates)

    def _choice(self, work: Placement, fleet: Snapshot, ranking: Ranking, rows: Sequence[int]) -> Choice:
        """Returns the best of the rows."""
        return Choice(fleet, ranking, rows[0], rows[1 : 1 + work.policy.alternates], self._limits(work, fleet, rows[0]))

    def _selected(self, work: Placement, choice: Choice, result: ClaimResult, record: InstanceRecord) -> Selection:
        """Returns the selection of a node that was claimed.

        :param record: the instance as it was reserved on the node.
        """
        others = [choice.fleet.nodes[row] for row in choice.others]
        alternates = tuple([(other.host, other.name) for other in others])
        as_reserved = work.held is None and record.holds is None and result.holds is None
        known = record if as_reserved and result.node_uuid == choice.node.uuid else None
        return self._placed(work, choice.node, result, known, alternates, choice.limits)

    def _limits(self, work: Placement, fleet: Snapshot, row: int) -> Mapping[str, Any]:
        """What the filters promise of a node; nothing where they were not asked."""
        if unfiltered(work.spec):
            return EMPTY
        return work.policy.pipeline.limits(work.policy.guard, fleet, row, self._ranker.with_members(work.spec, ()))

    def _earlier(self, fleet: Snapshot, ranking: Ranking, work: Placement) -> Selection:
        """What an earlier try of the same request has claimed: its answer was lost, and it may be what fills the fleet now.

        :raises NoValidHost: there is none.
        """
        result = work.claimer.earlier(work.spec, work.key)
        if result is not None:
            if not result.node_uuid:
                return self._unplaced(work, result)
            for _ in range(2):
                now = self.view.snapshot()
                row = now.row_of_node.get(result.node_uuid)
                if row is not None:
                    return self._placed(work, now.nodes[row], result)
                self._freshness.refresh_if_stale()
        raise self._refusal(fleet, ranking, work)

    def _wanted(self, work: Placement, choice: Choice) -> tuple[InstanceRecord, RequestSpec]:
        """What is to be claimed of a node: the instance as others shall see it meanwhile, and the request for the claimer."""
        record = self._record(work.spec, choice.node)
        if work.held is not None:
            # An instance that moves is on its old node until it has moved; its destination is reserved under another uuid.
            record = replaced(record, uuid=work.held.uuid)
        decision = choice.ranking.judgement.counts
        propose = choice.fleet.proposal(choice.row, work.spec)
        if propose is not None:
            record = replaced(record, holds=propose(frozenset()))
        return record, replaced(work.spec, limits=choice.limits, decision=decision, propose=propose)

    def _claim(self, work: Placement, choice: Choice) -> Selection | None:
        """Claim a node; None when that is refused. Other requests see it as taken meanwhile."""
        record, spec = self._wanted(work, choice)
        try:
            with self._reserving() as reserve:
                reserve(work, record)
                result = self._judged.claim(work, choice, spec)
        except errors.MoorageError as error:
            self._note_refusal(work, choice, error)
            return None
        return self._selected(work, choice, result, record)

    def _note_refusal(self, work: Placement, choice: Choice, error: BaseException) -> None:
        """Note why a node refused the request, and what is outdated by that; raises an error that is no refusal of the node."""
        node, fleet = choice.node, choice.fleet
        gone = isinstance(error, errors.NotFound) and error.details.get("provider") == node.uuid
        full = isinstance(error, errors.CapacityExceeded | errors.ConstraintViolated)
        if not isinstance(error, errors.MoorageError) or not (gone or full):
            raise error
        if gone:
            self._freshness.mark_outdated()
        if "state" in error.details:
            self._freshness.mark_states_outdated()
        work.decision.refusals.append({"node": node.name, **error.details})
        if fleet.nested[choice.row] and node.uuid not in work.outdated:
            # Its providers may have changed since they were read: it may be tried once more.
            work.outdated.add(node.uuid)
            self._freshness.mark_providers_outdated()
        else:
            work.refused.add(node.uuid)

    @contextlib.contextmanager
    def _reserving(self) -> Iterator[Callable[[Placement, InstanceRecord], None]]:
        """Show other requests what is being claimed; a new instance stays in the view when its claim holds.

        :returns: shows it; called with the request, and the instance as it is going to be.
        """
        shown: list[tuple[Placement, InstanceRecord]] = []
        with self._reservations.holding() as hold:

            def reserve(work: Placement, record: InstanceRecord) -> None:
                hold(work.number, record)
                shown.append((work, record))
                self._reserver.reserve(record)

            try:
                yield reserve
            except BaseException:
                for _, record in shown:
                    self._reserver.unreserve(record)
                raise
            for work, record in shown:
                if work.held is not None:
                    self._reserver.unreserve(record)

    def _unplaced(self, work: Placement, result: ClaimResult) -> Selection:
        """Answers a repeated request whose instance exists and has left its node."""
        work.decision.outcome = "exists"
        flavor = work.spec.flavor
        record = InstanceRecord(
            work.spec.instance_uuid, "", "", flavor.flavorid, flavor.resources, work.spec.project_id
        )
        return Selection(record, "", result.repeated, len(work.decision.refusals) + 1)

    def _placed(
        self,
        work: Placement,
        node: NodeState,
        result: ClaimResult,
        record: InstanceRecord | None = None,
        alternates: tuple[tuple[str, str], ...] = (),
        limits: Mapping[str, Any] = EMPTY,
    ) -> Selection:
        """Records a claim in the view and in the decision, and returns its selection.

        :param record: the instance on the node; None: the method makes it from the request.
        """
        if not result.node_uuid:
            self._reserver.unreserve(self._record(work.spec, node))
            return self._unplaced(work, result)
        if result.node_uuid != node.uuid:
            # An earlier try of the same request had claimed another node.
            fleet = self.view.snapshot()
            row = fleet.row_of_node.get(result.node_uuid)
            node = node if row is None else fleet.nodes[row]
            if work.held is None:
                self._reserver.reserve(self._record(work.spec, node))
        if record is None:
            record = self._record(work.spec, node, result.holds)
        if work.held is not None:
            self.view.hold(replaced(work.held, host=node.host, node=node.name, holds=record.holds))
        elif result.holds is not None:
            # The claim may have taken of other providers than were proposed first.
            self._reserver.reserve(record)
        elif not result.repeated:
            # Another try of the same request, which was refused, may have taken it back out of the view.
            self._reserver.claimed((record,))
        decision = work.decision
        decision.outcome, decision.host, decision.node = "placed", node.host, node.name
        if not result.repeated:
            self._decided(decision)
        attempts = len(decision.refusals) + 1
        return Selection(
            record, result.node_uuid, result.repeated, attempts, alternates, limits, result.shown, result.token
        )

    def _candidates(self, policy: SchedulingPolicy, ranking: Ranking) -> list[int]:
        """Rows to try, best first; the first ``host_subset_size``, and equally good ones where that is wanted, shuffled."""
        rows: list[int] = ranking.rows[: max(policy.max_attempts, policy.host_subset_size)].tolist()
        if policy.shuffle_best and len(rows) > 1:
            equal = int((ranking.weights == ranking.weights[0]).sum())
            best = ranking.rows[:equal].tolist()
            self._random.shuffle(best)
            rows = [*best, *ranking.rows[equal : equal + len(rows)].tolist()][: len(rows)]
        size = min(policy.host_subset_size, len(rows))
        if size > 1:
            head = rows[:size]
            self._random.shuffle(head)
            rows = head + rows[size:]
        return rows[: policy.max_attempts]

    def _refusal(self, fleet: Snapshot, ranking: Ranking, work: Placement) -> errors.NoValidHost:
        spec, decision = work.spec, work.decision
        reasons = {name: count for name, count in ranking.removed.items() if count}
        refused = [refusal["provider"] for refusal in decision.refusals if "provider" in refusal]
        short = "" if spec.rebuild else scarce_resources(fleet, spec, refused)
        states = [refusal for refusal in decision.refusals if "state" in refusal]
        if not fleet.size:
            summary = "the fleet has no nodes"
        elif (powers := needed_powers(spec)) and not ranking.considered and not decision.refusals:
            summary = (
                f"no agent of the nodes that may be chosen offers {' and '.join(powers)}; moorage service list shows what "
                "each agent offers"
            )
        elif states and len(states) == len(decision.refusals):
            summary = f"node {states[-1]['node']} gets no new instances: {states[-1]['state']}"
        elif len(ranking.rows):
            summary = "others claimed every node that was tried first"
        elif short and not fleet.available.any():
            summary = "every node has an agent that is down, or is disabled, in maintenance or draining (see moorage host list)"
        elif short:
            summary = f"no node has enough {short} free"
        elif decision.refusals and not ranking.considered:
            summary = "every node that may be chosen refused the claim"
        else:
            last = max(reasons, key=lambda name: reasons[name], default="the request's own hosts and nodes")
            summary = f"filter {last} removed most nodes"
        if decision.refusals:
            reasons["refused claims"] = len(decision.refusals)
        decision.outcome = f"refused: {summary}"
        if self._refused is not None:
            self._refused.record(decision)
        self._decided(decision)
        LOG.info("Instance %s was refused: %s.", spec.instance_uuid, summary)
        return errors.NoValidHost(
            f"No node of {ranking.considered} can take the instance: {summary}.",
            reasons=reasons,
            summary=summary,
            considered=ranking.considered,
            request_id=decision.request_id,
        )

    def _record(self, spec: RequestSpec, node: NodeState, holds: Holds | None = None) -> InstanceRecord:
        return InstanceRecord(
            spec.instance_uuid,
            node.host,
            node.name,
            spec.flavor.flavorid,
            spec.flavor.resources,
            spec.project_id,
            self._fields(spec, node) if self._fields is not None else EMPTY,
            busy=True,
            server_group=spec.server_group.name if spec.server_group is not None else "",
            holds=holds,
        )
