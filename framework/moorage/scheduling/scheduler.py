# SPDX-License-Identifier: Apache-2.0
"""Selecting nodes from memory, and claiming them one by one until one holds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import errors, randomness, threads
from moorage.clock import Clock
from moorage.context import acting_for
from moorage.read_only import EMPTY, replaced
from moorage.rpc.server import request_id as id_of_request
from moorage.scheduling.alike import AlikeRequests, what_is_asked
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
from moorage.scheduling.ranker import Ranker
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.resource_request import needed_powers
from moorage.scheduling.sample import Sampler
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot

__all__ = ["Placement", "Scheduler", "Selection"]

LOG = logging.getLogger(__name__)

#: How often ``max_attempts`` nodes are tried for one request; the fleet is ranked again in between.
_ROUNDS = 4
#: How often a node is judged again because its instances changed between the judgement and the claim.
_JUDGEMENTS = 10
#: Groups of requests alike that a further request of a set is compared with.
_KINDS = 16
#: Kinds of requests for which the answers of plugins are kept from set to set.
_KEPT = 8
#: Nodes of a decision that are remembered.
_REMEMBERED = 3


@dataclass(frozen=True, slots=True)
class Selection:
    """A node that was claimed for an instance. ``repeated``: an earlier try of the same request had done it.

    :param record: has no host, and the selection no node, where the instance exists and holds nothing on any node.
    :param alternates: (host, node) of the next best, where it could go when its build fails.
    :param limits: what the filters promised of the node; the claim has checked those that it knows.
    :param shown: what the claim wrote, and ``token``; see :class:`moorage.scheduling.interface.ClaimResult`.
    """

    record: InstanceRecord
    node_uuid: str
    repeated: bool
    attempts: int
    alternates: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    token: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds a request for a node while it is decided.

    ``key`` names its claim. The decision has the id of the request, by which users find it.
    """

    policy: SchedulingPolicy
    spec: RequestSpec
    decision: Decision
    claimer: Claimer
    held: InstanceRecord | None
    key: str
    #: Rises from request to request; an earlier request does not give way to a reservation of a later one.
    number: int
    #: The request; the thread of another request may do the work.
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)
    #: Nodes that have refused it and are not tried again; those that may be, because their providers may have changed.
    refused: set[str] = field(default_factory=set)
    outdated: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Choice:
    """A node that a ranking offers, and what it was judged by.

    :param others: rows of the next best.
    """

    fleet: Snapshot
    ranking: Ranking
    row: int
    others: Sequence[int]
    limits: Mapping[str, Any]

    @property
    def node(self) -> NodeState:
        return self.fleet.nodes[self.row]


class Reserver(Protocol):
    """Puts what is being claimed into the view, and takes it back when nothing came of it."""

    def reserve(self, record: InstanceRecord) -> None:
        """It is being claimed there; also when it was reserved elsewhere before."""

    def unreserve(self, record: InstanceRecord) -> None:
        """Nothing came of it; harmless when a message has said something else meanwhile."""

    def claimed(self, records: Sequence[InstanceRecord]) -> None:
        """Adds instances that the store has and the view may lack."""


class Refused(Protocol):
    """Where refusals are kept."""

    def record(self, decision: Decision) -> None:
        """It was refused."""

    def find(self, name: str) -> dict[str, Any] | None:
        """One that was kept, by request id or instance."""


class _Held:
    """Reserves in a view without instances."""

    def __init__(self, view: FleetView) -> None:
        self._view = view

    def reserve(self, record: InstanceRecord) -> None:
        """Count it as used."""
        self._view.hold(record)

    def unreserve(self, record: InstanceRecord) -> None:
        """Count it no more."""
        self._view.let_go(record.uuid)

    def claimed(self, records: Sequence[InstanceRecord]) -> None:
        """Do nothing: this view keeps no instances."""


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
        self._reserver = reserver or _Held(view)
        self._refused = refused
        self._decided = decided
        self._residents = residents
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
        self._clock = clock
        #: What ranks for requests alike, the newest last.
        self._kept: list[AlikeRequests] = []
        self._decisions = Decisions(decisions)

    def refresh(self, *, older_than: float = 0.0) -> bool:
        """Reads the nodes into the view; see :meth:`moorage.scheduling.fleet_refresher.FleetRefresher.refresh`."""
        return self._freshness.refresh(older_than=older_than)

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

    def place_prepared(self, work: Placement) -> Selection:
        """Selects and claims a node for a request that was prepared; see :meth:`place`."""
        return work.policy.guard.request(lambda: self._place(work))

    def place_prepared_set(self, works: Sequence[Placement]) -> list[Selection | Exception | None]:
        """Selects nodes for several requests, each on top of the ones before, and claims them in few transactions.

        It awaits no claim of another request, and tries one node for each.

        :param works: of different instances.
        :returns: of each the selection, the error, or None: :meth:`place_prepared` has to place it.
        :raises PluginTimeout: a plugin hung; this process is about to end.
        """
        return self._policy().guard.request(lambda: self._place_set(works, alike=False))

    def place_many(self, spec: RequestSpec, uuids: Sequence[str], request_id: str) -> list[Selection]:
        """Place several instances alike, each on top of the ones before; all of them or (by an error) none.

        :raises NoValidHost: there is no room for all; what had been claimed was given back.
        """
        policy = self._policy()
        return policy.guard.request(lambda: self._place_many(policy, spec, uuids, request_id))

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

    def _place_many(
        self, policy: SchedulingPolicy, spec: RequestSpec, uuids: Sequence[str], request_id: str
    ) -> list[Selection]:
        works = [
            self._work(
                policy, self._ranker.with_members(replaced(spec, instance_uuid=uuid), uuids[:number]), request_id
            )
            for number, uuid in enumerate(uuids)
        ]
        placed: dict[str, Selection | Exception] = {}
        try:
            found = self._place_set(works, alike=True)
            placed |= {uuid: each for uuid, each in zip(uuids, found, strict=True) if each is not None}
            for each in found:
                if isinstance(each, Exception):
                    raise each
            for uuid, work in zip(uuids, works, strict=True):
                if uuid not in placed:
                    try:
                        placed[uuid] = self._place(work)
                    except Exception as error:
                        placed[uuid] = error
                        raise
            done = [each for uuid in uuids if isinstance(each := placed[uuid], Selection)]
            self._confirm_repeated(done)
        except BaseException as error:
            self._undo(placed, error)
            raise
        return done

    def _confirm_repeated(self, done: Sequence[Selection]) -> None:
        """See to it that an earlier try of a request for several, which may still run, gives none of its instances back.

        Nor those that this try has made: the earlier one may not know whether its claims of them hold. It gives such back before it
        gives back what this try has found. What was given back cannot be made again.

        :raises Conflict: it has done so.
        """
        holding = [each.record.uuid for each in done if each.node_uuid]
        if self._set_claimer is None or not holding or not any(each.repeated for each in done):
            return
        try:
            self._set_claimer.confirm(holding)
        except errors.Conflict as error:
            raise errors.Conflict(
                "An earlier try of the request has given its instances back, or they were changed meanwhile; ask again with other "
                "uuids.",
                **error.details,
            ) from error

    def _undo(self, placed: Mapping[str, Selection | Exception], error: BaseException) -> None:
        """Give back what was placed of several instances alike, and say in the error what came of that.

        :param placed: by instance, what became of each that was tried.
        """
        done = [each for each in placed.values() if isinstance(each, Selection)]
        made = {each.record.uuid: each.record for each in done if not each.repeated}
        uncertain = [uuid for uuid, each in placed.items() if isinstance(each, Exception) and _is_unknown(each)]
        # If any was placed before, the request is a repetition, which finds them once more.
        is_first = made and len(made) == len(done)
        left, kept = list[str](), list[str]()
        # The uncertain ones first: a later try that makes them finds those that were made here, and so confirms them.
        for uuid in (*(uncertain if is_first else ()), *made):
            try:
                if not self._gave_back(uuid):
                    left.append(uuid)
                elif uuid in made:
                    self._reserver.unreserve(made[uuid])
            except errors.InUse:
                LOG.info("Instance %s stays: a later try of its request has found it.", uuid)
                kept.append(uuid)
        if left and isinstance(error, errors.MoorageError):
            error.details["left_behind"] = left
            error.message += f" Of the instances alike, {', '.join(left)} could not be given back; delete them."
        elif is_first and not kept and isinstance(error, errors.MoorageError):
            # Their uuids cannot be used again, so a repetition of the request needs others.
            error.details["undone"] = True

    def _gave_back(self, uuid: str) -> bool:
        """Undo a placement; False (and a line in the log) when that fails.

        :raises InUse: another try of the request has found it.
        """
        for last in (False, True):
            try:
                self._claimer.release(uuid)
            except errors.InUse:
                raise
            except Exception as error:
                if last:
                    LOG.exception("Instance %s was placed for nothing and could not be given back; delete it.", uuid)
                    return False
                LOG.warning("Instance %s could not be given back (%s); once more.", uuid, error)
        return True

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
            node was found without a wait, or the instances of the node must be judged again.
        """
        outcomes: list[Selection | Exception | None] = [None] * len(works)
        if self._set_claimer is None or len(works) < 2:
            return outcomes
        chosen: list[tuple[int, _Choice, InstanceRecord]] = []
        wanted: list[WantedClaim] = []
        with self._reserving() as reserve:
            with self._selecting:
                for place, choice in self._choices_of_set(works, outcomes, alike):
                    work = works[place]
                    record, spec = self._wanted(work, choice)
                    reserve(work, record)
                    chosen.append((place, choice, record))
                    wanted.append(WantedClaim(spec, choice.node.uuid, choice.node.host, work.key, work.context))
            results = self._set_claimer.claim_many(wanted)
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
    ) -> Iterator[tuple[int, _Choice]]:
        """Chooses nodes for the requests of a set, one after the other; requests alike follow each other.

        The caller reserves each node before it asks for the next one.

        :param alike: the set is one bulk request. Otherwise an error becomes the outcome of its request.
        """
        for policy, asked, places in _alike(works):
            requests = self._requests_alike(policy, asked)
            requests.begin(len(places))
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

    def _requests_alike(self, policy: SchedulingPolicy, asked: tuple[Any, ...]) -> AlikeRequests:
        """Returns what ranks for requests that ask this. It is kept for the next sets."""
        for each in self._kept:
            if each.policy is policy and each.asked == asked:
                return each
        self._kept.append(AlikeRequests(self._ranker, self.view, policy, asked, self._clock))
        del self._kept[:-_KEPT]
        return self._kept[-1]

    def _choice_in_set(self, work: Placement, requests: AlikeRequests) -> _Choice | None:
        """Chooses the best node for a request of a set; None: the request has to be placed by itself."""
        with acting_for(work.context):
            # It must not await the claims before it, which are made with it.
            fleet, ranking = requests.rank(work.spec, work.refused)
            candidates = self._noted(work, fleet, ranking)
            if not candidates or (ranking.promising and self._residents is not None):
                return None
            return self._choice(work, fleet, ranking, candidates)

    def _choice(self, work: Placement, fleet: Snapshot, ranking: Ranking, rows: Sequence[int]) -> _Choice:
        """The best of the rows."""
        return _Choice(
            fleet, ranking, rows[0], rows[1 : 1 + work.policy.alternates], self._limits(work, fleet, rows[0])
        )

    def _selected(self, work: Placement, choice: _Choice, result: ClaimResult, record: InstanceRecord) -> Selection:
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
            return {}
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

    def _wanted(self, work: Placement, choice: _Choice) -> tuple[InstanceRecord, RequestSpec]:
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

    def _claim(self, work: Placement, choice: _Choice) -> Selection | None:
        """Claim a node; None when that is refused. Other requests see it as taken meanwhile."""
        record, spec = self._wanted(work, choice)
        try:
            with self._reserving() as reserve:
                reserve(work, record)
                result = self._claim_as_judged(work, choice, spec)
        except errors.MoorageError as error:
            self._note_refusal(work, choice, error)
            return None
        return self._selected(work, choice, result, record)

    def _note_refusal(self, work: Placement, choice: _Choice, error: BaseException) -> None:
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

    def _claim_as_judged(self, work: Placement, choice: _Choice, spec: RequestSpec) -> ClaimResult:
        """Claim a node while its instances are those that the filters judge.

        :raises ConstraintViolated: a filter refuses the node by now, or its instances change all the time.
        """
        node, key = choice.node, work.key
        if self._residents is None or not choice.ranking.promising:
            return work.claimer.claim(spec, node.uuid, node.host, key)
        # Requests of this scheduler do not race each other for one node; the version decides among schedulers.
        with self._reservations.acquire(node.uuid):
            for _ in range(_JUDGEMENTS):
                found = self._residents(node.uuid)
                self._judge(work, choice, found)
                try:
                    return work.claimer.claim(replaced(spec, residents=found.version), node.uuid, node.host, key)
                except errors.ResidentsChanged as error:
                    LOG.debug("%s (%s)", error.message, spec.instance_uuid)
        raise errors.ConstraintViolated(
            f"The instances of node {node.name} changed {_JUDGEMENTS} times while it was being claimed.",
            provider=node.uuid,
        )

    def _judge(self, work: Placement, choice: _Choice, found: Residents) -> None:
        """Ask the filters that judged instances again, with the node's instances as the store has them.

        :raises ConstraintViolated: one of them refuses the node.
        """
        fleet = choice.fleet.with_residents(choice.row, found.records)
        group, project = work.spec.server_group, work.spec.project_id
        members = [
            each.uuid
            for each in found.records
            if group is not None and (each.server_group, each.project_id) == (group.name, project)
        ]
        spec = self._ranker.with_members(work.spec, members)
        refusing = work.policy.pipeline.refused_by(work.policy.guard, fleet, choice.row, spec, choice.ranking)
        if not refusing:
            return
        known = choice.fleet.instances_on(choice.row)
        # For the next ranking.
        self._reserver.claimed([each for each in found.records if each.uuid not in known])
        raise errors.ConstraintViolated(
            f"Filter {refusing} refuses node {choice.node.name} by now.", provider=choice.node.uuid, filter=refusing
        )

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


def _alike(works: Sequence[Placement]) -> Sequence[tuple[SchedulingPolicy, tuple[Any, ...], Sequence[int]]]:
    """Groups requests alike that one policy decides; returns of each group the policy, what is asked, and the indexes."""
    found: list[tuple[Placement, tuple[Any, ...], list[int]]] = []
    for place, work in enumerate(works):
        asked = what_is_asked(work.spec)
        for first, same, places in found[-_KINDS:]:
            if first.policy is work.policy and same == asked:
                places.append(place)
                break
        else:
            found.append((work, asked, [place]))
    return [(first.policy, asked, places) for first, asked, places in found]


def _is_unknown(error: BaseException) -> bool:
    """Whether a claim failed at its commit, which may have been done."""
    return isinstance(error, errors.StoreUnavailable) and error.details.get("outcome") == "unknown"
