# SPDX-License-Identifier: Apache-2.0
"""Production code with one guard, fence, token or order of writes taken out: some schedule must break an invariant.

A mutant is planted by patching, in the forked process that runs a batch. ``make simulate MUTANTS=1`` prints how many schedules each
one survives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from moorage.allocation.interface import Expect
from moorage.cleanup import coordinator as supervisor
from moorage.cleanup import orphans, requests
from moorage.control_plane import evacuation_task
from moorage.coordination import ring_ledger, tick_leases
from moorage.coordination.ring_manager import RingManager
from moorage.db import database, events
from moorage.instances import create as placing
from moorage.instances import in_place, move_claims, resizes
from moorage.instances.availability import Availability
from moorage.journal import delivery, subscriptions
from moorage.scheduling.bulk import BulkPlacer
from moorage.scheduling.epochs import ConfirmedEpochs
from moorage.scheduling.fleet_refresher import FleetRefresher
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.reservations import Reservations
from moorage.scheduling.view_repair import UntrackedHosts
from moorage.services import automatic_fences, registry
from moorage.services.automatic_fences import AutomaticFences
from moorage.services.heartbeat import Heartbeat
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.sharding import plans
from moorage.work import fences as work_fences
from moorage.work import operation_statements
from moorage.work import operations as workers
from moorage_plugins.compute import agent, cleanup, instances, resize_confirmation, self_fence, unknown_workloads
from moorage_plugins.compute import operations as compute_operations
from moorage_plugins.drivers import simulated
from moorage_plugins.stores import (
    capacity_statements,
    combiner,
    quota_enforcement,
    sql,
    sql_claim_sets,
    sql_claims,
    sql_holdings,
    statements,
    tables,
)
from tests.simulation import planting, runner
from tests.simulation.planting import (
    both,
    drop,
    ignoring,
    nothing,
    put,
    silent,
    unguarded,
    wrap,
)
from tests.simulation.workloads import self_fences

__all__ = ["MUTANTS", "Mutant", "run"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of production code.

    :param workloads: those that can find it; the first is measured.
    """

    name: str
    workloads: tuple[str, ...]
    plant: Callable[[], object]
    #: Why it survives, when it does.
    survives: str = ""
    #: The quickest engine that finds it.
    engine: str = "memory"


_V, _L, _W, _D, _E, _Q = ("volumes",), ("leases",), ("sweeps",), ("deliveries",), ("evacuations",), ("quotas",)
_M, _I = ("moves",), ("shared_instances",)
_F = ("self_fences",)
_A, _N, _B, _Z = ("automatic_evacuations",), ("versions",), ("creates",), ("stale_feeds",)
_HC, _HI = ("consumer_histories",), ("instance_histories",)
_P, _R, _C, _K, _T, _S = (
    ("placement",),
    ("promises",),
    ("claims",),
    ("cleaning",),
    ("ticks",),
    ("shards",),
)
_ONE_WRITER = "SQLite has one writer, so no other transaction comes between; the stepped servers' job"
_ROW_LOCK = "the operation's row is locked meanwhile, and its own condition is looked at again"
_NO_ANSWER = "no client of this workload relies on the answer"
_OTHER = "another guard on the same path refuses it; see the mutant that removes both"

_MEMBER = "a member looks at its own lease and ring before each write; see the mutants with any ring"
_ANY_RING = put(RingManager, "is_current", lambda self, snapshot: True)
# The search before the claim has the same conditions, in the same transaction.
_ANY_TICK = both(drop(tick_leases, "_CLAIM", "tick <"), drop(tick_leases, "_LOCK", "tick <"))
_OLD_RING = both(drop(tick_leases, "_CLAIM", "token <="), drop(tick_leases, "_LOCK", "token <="))

MUTANTS: Sequence[Mutant] = (
    # Leases, tokens and fences of operations.
    Mutant("finish without the token", _P, planting.finish_without_token),
    Mutant("write without the fence", _P, unguarded("WRITE", "REMOVE"), _OTHER),
    Mutant(
        "finish without token and write without fence",
        _P,
        both(planting.finish_without_token, unguarded("WRITE", "REMOVE")),
    ),
    Mutant(
        "finish that finds no row passes",
        _P,
        planting.finish_without_looking,
        _OTHER,
    ),
    Mutant(
        "finish that finds no row passes, write without fence",
        _P,
        both(planting.finish_without_looking, unguarded("WRITE", "REMOVE")),
    ),
    Mutant(
        "what ends together does not count the rows of instances, operations end without the token",
        _B,
        both(
            planting.finish_without_token,
            wrap(instances.ComputeInstances, "write_many", lambda old: lambda *given: old(*given) or True),
        ),
    ),
    Mutant("tokens that do not rise", _P, planting.same_tokens),
    # Fences of hosts.
    Mutant(
        "evacuations do not look at the fence",
        _E,
        put(ServiceRegistry, "hold_fence", lambda self, tx, host, **how: True),
    ),
    Mutant("a fence outlives the start of its agent", _E, drop(registry, "_HOLD_FENCE", "fenced_epoch")),
    Mutant(
        "agents serve before they destroy what was evacuated",
        _E,
        put(unknown_workloads.UnknownWorkloads, "remove_all", lambda self, known: {}),
    ),
    # Moves.
    Mutant("a move is committed before its source has stopped", _M, put(simulated.SimulatedDriver, "stop", nothing)),
    Mutant("a destination starts what is not committed", _M, put(simulated.SimulatedDriver, "prepare", planting.eager)),
    Mutant(
        "a move is reverted after its commit",
        _M,
        put(in_place, "is_revertible", lambda pending: bool(pending.get("phase"))),
    ),
    Mutant(
        "a destination starts before it has the operation",
        _M,
        planting.started_early,
    ),
    Mutant(
        "no host has to let go of what has moved",
        _M,
        wrap(agent.InstanceWork, "_write_result", planting.without_departure),
    ),
    Mutant(
        "the operation of a move is handed on without the commit of its claims",
        _M,
        put(agent, "_changes_claims", lambda result: False),
    ),
    # Resizes.
    Mutant(
        "a source removes the copy that it keeps",
        _M,
        both(
            wrap(agent, "belongs_here", planting.without_kept_copies),
            wrap(unknown_workloads, "belongs_here", planting.without_kept_copies),
        ),
    ),
    Mutant(
        "a source lets go before the resize is confirmed",
        _M,
        wrap(agent.InstanceWork, "_write_result", planting.not_keeping),
    ),
    Mutant(
        "a confirmation does not let the source go", _M, wrap(resizes.KeptSources, "let_go", planting.kept_for_ever)
    ),
    Mutant(
        "a resize in its place takes the new amount only",
        _M,
        put(compute_operations, "_larger", lambda one, other: other),
    ),
    Mutant("an operation forgets what is kept", _M, put(compute_operations, "still_kept", lambda pending: {})),
    Mutant(
        "a resize confirms itself whatever runs",
        _M,
        put(resize_confirmation.DueResizes, "_confirm", planting.confirmed),
    ),
    Mutant(
        "a revert does not look for the copy that was kept",
        _M,
        put(compute_operations, "_find_kept", planting.any_kept),
    ),
    Mutant("a deletion forgets what is kept", _M, put(compute_operations, "kept_elsewhere", lambda host, pending: "")),
    # Hosts that fence themselves.
    Mutant("a lease counts from the answer of its heartbeat", _F, put(Heartbeat, "_beat", planting.late_moment)),
    Mutant("guardians keep no margin", _F, put(self_fence, "SELF_FENCE_MARGIN", 0.0)),
    Mutant("the store keeps no margin", _F, planting.no_margin_of_store),
    Mutant("a heartbeat of unknown outcome renews the lease", _F, wrap(Heartbeat, "_beat", planting.hopeful_beat)),
    Mutant(
        "a start keeps the lease that was promised before",
        _F,
        wrap(ServiceRegistry, "_begin", planting.kept_promise),
    ),
    Mutant(
        "an agent that was replaced renews the lease",
        _F,
        wrap(self_fences, "keep_lease", planting.late_lease),
        "what it says is older than the promise of the next agent, but for a shorter lease that begins in this moment",
    ),
    # Histories.
    Mutant(
        "reads answer what they have read before", _HC, wrap(sql_holdings.SqlHoldings, "consumer", planting.stale_reads)
    ),
    Mutant(
        "consumers change without their generation (histories)",
        _HC,
        wrap(statements, "change_consumer", planting.no_generation),
    ),
    Mutant(
        "a release says that there was nothing",
        _HC,
        wrap(sql_claims.SqlAllocationLedger, "_drop", planting.silent_drop),
    ),
    Mutant(
        "a claim whose commit failed is acknowledged (histories)",
        _HC,
        wrap(database, "_end", lambda old: planting.deaf_end),
    ),
    Mutant(
        "commits of unknown outcome are run again (histories)",
        _HC,
        wrap(database.Database, "_retried", planting.eager_retries),
    ),
    Mutant(
        "a late create of a deleted instance (histories)",
        _HI,
        wrap(workers.SqlOperationStore, "create", planting.never_first),
    ),
    # Two releases at once.
    Mutant(
        "hosts whose agents tell nothing are not read", _N, put(UntrackedHosts, "freshen", lambda self, hosts: False)
    ),
    Mutant(
        "agents of an older release are asked for all steps of a move",
        _N,
        put(Availability, "lacking", lambda self, powers: frozenset()),
    ),
    # The brake of automatic evacuations.
    Mutant("any number of hosts is fenced in a period", _A, put(AutomaticFences, "_take_slot", nothing)),
    Mutant("hosts are fenced while most agents are silent", _A, put(AutomaticFences, "_refuse_silence", nothing)),
    Mutant(
        "engines believe the clock of the database",
        _A,
        put(LivenessObserver, "silent_for", lambda self, uuid: float("inf")),
    ),
    Mutant("a slot is taken again before its period is over", _A, planting.slots_are_free),
    Mutant(
        "a slot is taken whenever it was used",
        _A,
        drop(automatic_fences, "_TAKE", "fenced_at"),
        _ONE_WRITER,
    ),
    Mutant(
        "a fence overlooks the heartbeat since the last look",
        _A,
        drop(registry, "_FENCE_ITSELF_AT", "beat ="),
        "the time since the heartbeat is a condition, too; both fail when the database's clock jumps in the same moment",
    ),
    Mutant("fenced hosts are not evacuated", _A, put(evacuation_task.EvacuateHosts, "_left", lambda self, host: ())),
    Mutant("hosts are fenced by themselves at any time", _F, drop(registry, "_FENCE_ITSELF", "self_fence +")),
    Mutant(
        "tokens that do not rise, write without fence",
        _P,
        both(planting.same_tokens, unguarded("WRITE", "REMOVE")),
    ),
    Mutant(
        "take what a live owner has",
        _P,
        drop(operation_statements, "TAKE", "expires_at"),
        "agents take what is addressed to them only, and the token stops the earlier owner",
    ),
    Mutant(
        "give back without the token",
        _P,
        drop(operation_statements, "RELEASE", "token"),
        "the operation is done twice then, and each try has its token",
    ),
    Mutant("renew without the token", _P, drop(operation_statements, "RENEW", "token"), _OTHER),
    Mutant(
        "no renewals",
        _P,
        put(workers.SqlOperationStore, "renew_many", lambda self, leases: []),
        "an expired lease is taken again by its own agent",
    ),
    Mutant(
        "a second operation begins beside the first",
        _I,
        wrap(workers.SqlOperationStore, "create", planting.always_forced),
    ),
    # Instances.
    Mutant(
        "changes ignore the fence that was read",
        _I,
        wrap(instances.ComputeInstances, "change", ignoring("fence", "expected")),
    ),
    Mutant(
        "a late create of a deleted instance",
        _P,
        wrap(workers.SqlOperationStore, "create", planting.never_first),
    ),
    Mutant(
        "the agent takes its own unknown commit for a takeover",
        _P,
        wrap(database, "_end", planting.certain_end),
    ),
    Mutant(
        "no repeated create is known",
        _P,
        both(
            put(sql_claims.SqlAllocationLedger, "_repeated", planting.not_repeated),
            put(placing.StoreClaimer, "earlier", nothing),
        ),
    ),
    Mutant(
        "what moved away stays on its old host",
        _P,
        put(unknown_workloads.UnknownWorkloads, "remove", lambda self, uuid, token: False),
        "the source removes it by an operation of its own; this look is for what that missed",
    ),
    Mutant(
        "the driver destroys what is newer than it was told",
        _P,
        wrap(simulated.SimulatedDriver, "destroy", planting.of_any_token),
    ),
    Mutant(
        "a deletion keeps its claim",
        _P,
        both(
            wrap(agent.InstanceWork, "finish", planting.without_releases),
            put(sql.SqlStore, "release_many", nothing),
        ),
    ),
    Mutant(
        "deletions that end together keep their claims",
        _B,
        put(sql_holdings.SqlHoldings, "_drop_many", nothing),
    ),
    Mutant(
        "a deletion of unknown outcome is taken for done by the fence that it began with",
        _B,
        put(agent.InstanceWork, "is_written", planting.written_by_fence),
        "its lease ends, and the agent takes it again",
    ),
    Mutant(
        "a move keeps the room that it held meanwhile",
        _P,
        put(move_claims, "move_consumer", lambda uuid: uuid[:-1] + "f"),
    ),
    Mutant(
        "lost messages are found by no sweep",
        _P,
        put(agent.ComputeAgent, "sweep", nothing),
    ),
    Mutant(
        "the claim is committed without its operation",
        _P,
        put(workers.SqlOperationStore, "create", lambda self, *a, **o: 1),
    ),
    Mutant("an agent finishes without a transaction", _P, planting.no_transactions),
    Mutant(
        "a commit that failed is reported as done",
        _B,
        wrap(database, "_end", lambda old: planting.deaf_end),
    ),
    Mutant(
        "a failed commit leaves its transaction open",
        ("claims", "placement"),
        wrap(database, "_end", lambda old: planting.leaking_end),
    ),
    # Promises of filters.
    Mutant(
        "claims ignore the version of residents",
        _R,
        drop(statements, "BUMP_GENERATION_IF_SEEN", "residents"),
    ),
    Mutant(
        "claims do not raise the version of residents",
        _R,
        both(
            silent(statements, "BUMP_GENERATION", "residents"),
            silent(statements, "BUMP_GENERATION_IF_SEEN", "residents"),
        ),
    ),
    # Claims that share transactions.
    Mutant(
        "combined claims are answered before their commit",
        _B,
        wrap(sql_claim_sets.SqlClaimSets, "_claim_together", planting.answered_early),
    ),
    Mutant(
        "a refused claim undoes the others of its transaction",
        _B,
        put(sql_claim_sets.SqlClaimSets, "_together", planting.refusals_undo_others),
    ),
    Mutant(
        "claims of a commit of unknown outcome are not looked up",
        _B,
        put(sql_claim_sets.SqlClaimSets, "_look_up", planting.believe_committed),
    ),
    Mutant(
        "combined claims that lost a race are taken for made",
        _B,
        wrap(combiner.Combiner, "_make", planting.lost_races_are_won),
    ),
    # Refusals.
    Mutant("refusals are not verified by the store", _Z, put(FleetRefresher, "before_refusal", nothing)),
    Mutant("use that instances explain is not doubted", _Z, put(FleetView, "limit_foreign", nothing)),
    Mutant("refusals recount no instances", _Z, put(FleetRefresher, "_recount_hosts", nothing)),
    Mutant("a recount drops what is being claimed", _B, put(Reservations, "instances", lambda self: set())),
    Mutant(
        "epochs of services that have started are not looked up",
        _Z,
        wrap(ConfirmedEpochs, "confirms", planting.late_epochs),
        "the host is asked for its instances some seconds later, and refusals recount them",
    ),
    Mutant(
        "epochs of services that have started are not looked up, refusals recount no instances",
        _Z,
        both(
            wrap(ConfirmedEpochs, "confirms", planting.late_epochs),
            put(FleetRefresher, "_recount_hosts", nothing),
        ),
    ),
    # Claims.
    Mutant(
        "claims take without looking at the room",
        _C,
        wrap(capacity_statements, "take", planting.no_room_check),
    ),
    Mutant(
        "claims of nodes take without looking at the room",
        _P,
        wrap(capacity_statements, "take", planting.no_room_check),
    ),
    Mutant(
        "a claim takes of the first of its providers only",
        _C,
        wrap(sql_claims.SqlAllocationLedger, "_take", planting.first_provider_only),
    ),
    Mutant(
        "consumers change without their generation",
        _C,
        wrap(statements, "change_consumer", planting.no_generation),
    ),
    Mutant(
        "a consumer that must be new may exist",
        _C,
        wrap(sql_claims.SqlAllocationLedger, "_enter", planting.expects_anything),
    ),
    Mutant(
        "no repeated claim is known",
        _C,
        put(sql_claims.SqlAllocationLedger, "_repeated", planting.not_repeated),
    ),
    Mutant(
        "a repeated change raises the consumer again",
        _C,
        wrap(statements, "change_consumer", planting.no_request),
        _OTHER,
    ),
    Mutant(
        "replaced allocations stay",
        _C,
        put(statements, "DROP_ALLOCATIONS_OF", sa.text("SELECT 1")),
    ),
    Mutant(
        "what is given up is not given back",
        _C,
        wrap(
            capacity_statements,
            "release",
            lambda old: lambda classes: planting.no_rows(old(classes)),
        ),
    ),
    Mutant("claims in several transactions", _C, planting.no_transactions),
    Mutant(
        "a claim whose commit failed is acknowledged",
        _C,
        wrap(database, "_end", lambda old: planting.deaf_end),
    ),
    Mutant(
        "commits of unknown outcome are run again",
        _C,
        wrap(database.Database, "_retried", planting.eager_retries),
    ),
    Mutant(
        "a released consumer keeps its row",
        _C,
        both(
            put(statements, "DROP_CONSUMER", planting.no_rows(statements.DROP_CONSUMER)),
            put(statements, "DROP_CONSUMER_RETURNING", planting.no_rows(statements.DROP_CONSUMER_RETURNING)),
        ),
    ),
    Mutant(
        "no turn at the provider",
        _C,
        put(statements, "BUMP_GENERATION", planting.turn_for_all(statements.BUMP_GENERATION)),
        _ONE_WRITER,
    ),
    # The journal.
    Mutant("changes of instances are not recorded", _P, put(instances, "_record_row", lambda *rest, **more: None)),
    Mutant("the next transaction writes the events of an undone one", _P, wrap(events, "begin", planting.kept_events)),
    # Deliveries of the journal.
    Mutant("a cursor moves before the delivery", _D, wrap(delivery._Delivery, "_deliver", planting.cursor_first)),
    Mutant("a cursor moves without the lease", _D, drop(subscriptions, "_DELIVERED", "token"), _OTHER),
    Mutant("a cursor moves from another place", _D, drop(subscriptions, "_DELIVERED", "position"), _OTHER),
    Mutant(
        "a cursor moves without the lease and from any place",
        _D,
        both(drop(subscriptions, "_DELIVERED", "token"), drop(subscriptions, "_DELIVERED", "position")),
    ),
    # Limits of projects.
    Mutant("limits count and do not refuse", _Q, drop(quota_enforcement, "COUNT_WITHIN", "maximum")),
    Mutant("a move counts twice", _Q, put(quota_enforcement, "_most", planting.count_sides)),
    Mutant(
        "a release gives nothing back to limits",
        _Q,
        wrap(sql_claims.SqlAllocationLedger, "_give_back", planting.uncounted_release),
    ),
    Mutant(
        "changes of counted consumers are not counted", _Q, wrap(statements, "change_consumer", planting.unheeded_mark)
    ),
    Mutant("claims overlook a limit that was set meanwhile", _Q, drop(statements, "BUMP_GENERATION", "quota_projects")),
    Mutant(
        "claims that began before a limit are never counted",
        _Q,
        lambda: planting.everywhere(quota_enforcement.UNCOUNTED, quota_enforcement.UNCOUNTED.where(sa.false())),
    ),
    Mutant(
        "limits refuse their last unit",
        _Q,
        lambda: planting.everywhere(
            quota_enforcement.COUNT_WITHIN,
            quota_enforcement.COUNT_WITHIN.where(tables.quotas.c.used + 1 < tables.quotas.c.maximum),
        ),
    ),
    Mutant("no turn at the project", _Q, planting.no_project_turn, _ONE_WRITER),
    # Cleaning.
    Mutant(
        "cleaners take what living services have",
        _K,
        planting.search("OrphansOfService", "worker_epoch"),
        "the search in the same transaction has the same condition; see the mutant that searches without it",
    ),
    Mutant("cleaners find and take what living services have", _K, planting.whatever_service_has),
    Mutant(
        "cleaners release no claims",
        _K,
        wrap(cleanup.InstanceHandler, "finish_batch", planting.without_release),
    ),
    Mutant(
        "an eviction overlooks heartbeats",
        _K,
        drop(registry, "_EVICT", "beat"),
        "only a zombie notices, which its token stops",
    ),
    Mutant(
        "evicted services go on",
        _K,
        drop(registry, "_BEAT", "epoch"),
        "tokens and fences stop what it writes",
    ),
    Mutant(
        "requests are closed before their end",
        _K,
        put(requests.RequestStore, "close_if_done", planting.close_at_once),
    ),
    Mutant("orphans end without the token", _K, drop(orphans, "_END", "token"), _OTHER),
    Mutant(
        "orphans end and are written without token and fence",
        _K,
        both(
            drop(orphans, "_END", "token"),
            drop(operation_statements, "FINISH", "token"),
            unguarded("WRITE", "REMOVE"),
        ),
    ),
    # Periodic tasks.
    Mutant("a tick is claimed twice", _T, _ANY_TICK),
    Mutant("a claim under an old ring", _T, _OLD_RING, _MEMBER),
    Mutant(
        "a handling ends after a later claim",
        _T,
        drop(tick_leases, "_END", "sweep"),
        _MEMBER,
    ),
    Mutant("a handling ends twice", _T, drop(tick_leases, "_END", "finished"), _MEMBER),
    Mutant("work under a ring that has changed", _T, _ANY_RING, _OTHER),
    Mutant(
        "any ring, a claim under an old one",
        _T,
        both(_ANY_RING, _OLD_RING),
        "its tick is older, too, unless the database's clock was set back meanwhile; see the mutant of sweeps",
    ),
    Mutant(
        "any ring, a handling ends after a later claim",
        _T,
        both(_ANY_RING, drop(tick_leases, "_END", "sweep")),
        "the later handling marks the row as finished; only between a third claim and its end it is not. See the mutant of sweeps",
    ),
    Mutant("rings are proposed over each other", _T, drop(ring_ledger, "_MOVE", "token"), _OTHER),
    Mutant(
        "handlings are finished without a claim",
        _T,
        put(tick_leases.SqlTickLeases, "end", nothing),
        _MEMBER,
    ),
    Mutant(
        "any ring, handlings are finished without a claim",
        _T,
        both(_ANY_RING, put(tick_leases.SqlTickLeases, "end", nothing)),
    ),
    # Volumes.
    Mutant(
        "volumes end and are written without token and fence",
        _V,
        both(
            drop(orphans, "_END", "token"),
            # Without the token alone, the finish of the second owner finds no row, and undoes what it wrote.
            put(workers.SqlOperationStore, "end", planting.end_without_looking),
            unguarded("WRITE", "REMOVE"),
            planting.unfenced_volumes,
        ),
    ),
    Mutant(
        "orphans of volumes are never found",
        _V,
        put(supervisor.CleanupCoordinator, "sample", nothing),
    ),
    # Shards.
    Mutant(
        "nodes move from a shard where they are not",
        _S,
        planting.mover("nodes.shard IS"),
    ),
    Mutant("nodes in use move", _S, planting.mover("OR")),
    Mutant(
        "plans are carried out after they were taken back",
        _S,
        wrap(plans.Plans, "_step", planting.advance_blindly),
    ),
    Mutant(
        "the journal forgets conflicts",
        _S,
        put(plans.Plans, "_journal", planting.forgetful_journal),
    ),
    Mutant("moves and journal in several transactions", _S, planting.no_transactions),
    # Operations alone.
    Mutant("finish without the token (leases)", _L, drop(operation_statements, "FINISH", "token")),
    Mutant(
        "finish that finds no row passes (leases)",
        _L,
        put(workers.SqlOperationStore, "end", planting.end_without_looking),
    ),
    Mutant(
        "what ends together ends without the token (leases)", _L, drop(operation_statements, "FINISH_MANY", "token")
    ),
    Mutant(
        "what ends together does not count its rows (leases)",
        _L,
        put(workers.SqlOperationStore, "end_many", planting.end_many_without_looking),
    ),
    Mutant("tokens that do not rise (leases)", _L, planting.same_tokens),
    Mutant(
        "the token of a creation is given again",
        _L,
        both(
            drop(operation_statements, "BEGIN_RETURNING", "attempts"),
            drop(operation_statements, "LOCK_NEW", "attempts"),
        ),
    ),
    Mutant(
        "a message begins whatever operation is new",
        _L,
        both(drop(operation_statements, "BEGIN_RETURNING", "token"), drop(operation_statements, "LOCK_NEW", "token")),
        "the owner gets the token of that operation; the token of the message pins which resources were not written with it",
    ),
    Mutant(
        "the token of a creation is given again, finish and write without token",
        _P,
        both(
            drop(operation_statements, "BEGIN_RETURNING", "attempts"),
            planting.finish_without_token,
            unguarded("WRITE", "REMOVE"),
        ),
    ),
    Mutant(
        "a try of a request for several confirms nothing of an earlier one",
        _B,
        wrap(BulkPlacer, "_confirm_repeated", lambda old: nothing),
    ),
    Mutant(
        "a try of a request for several confirms only what it has found",
        _Z,
        wrap(BulkPlacer, "_confirm_repeated", planting.confirmed_found),
    ),
    Mutant("what a later try has confirmed is given back", _B, put(placing, "_NEW", Expect.ANYTHING)),
    Mutant("a doubled message begins a build twice", _B, drop(operation_statements, "BEGIN_RETURNING", "attempts")),
    Mutant(
        "take what a live owner has, finish without the token",
        _L,
        both(drop(operation_statements, "TAKE", "expires_at"), drop(operation_statements, "FINISH", "token")),
    ),
    Mutant(
        "orphans end without the token (leases)",
        _L,
        drop(orphans, "_END", "token"),
    ),
    Mutant(
        "a second operation replaces the first (leases)",
        _L,
        wrap(workers.SqlOperationStore, "create", planting.always_forced),
    ),
    Mutant("fences that are purged leave no floor", _L, put(work_fences, "_RAISE_FLOOR", sa.text("SELECT 1"))),
    Mutant("a fence that was raised since is purged", _L, drop(work_fences, "_REMOVE", "token")),
    Mutant("operations end in several transactions", _L, planting.no_transactions),
    Mutant(
        "a finish whose commit failed is reported as done",
        _L,
        wrap(database, "_end", lambda old: planting.deaf_end),
        _NO_ANSWER,
    ),
    # Tick leases alone.
    Mutant("a tick is claimed twice (sweeps)", _W, _ANY_TICK),
    Mutant("a claim under an old ring (sweeps)", _W, _OLD_RING),
    Mutant("a handling ends after a later claim (sweeps)", _W, drop(tick_leases, "_END", "sweep")),
    Mutant("a handling ends twice (sweeps)", _W, drop(tick_leases, "_END", "finished")),
    Mutant("what others claimed is handled", _W, drop(tick_leases, "_CLAIMED", "sweep"), _OTHER),
    Mutant(
        "what others claimed is handled, and ends",
        _W,
        both(drop(tick_leases, "_CLAIMED", "sweep"), drop(tick_leases, "_END", "sweep")),
    ),
    # Races between write transactions: SQLite has one writer, so only stepped servers can find these.
    *(
        Mutant(name, workloads, plant, survives, engine)
        for engine in ("postgresql", "mariadb")
        for name, workloads, plant, survives in (
            ("room is looked up, and then taken, without a turn", _C, planting.looked_up_room, ""),
            ("a limit is looked up, and then counted, without a turn", _Q, planting.looked_up_limits, ""),
            ("no turn at the project", _Q, planting.no_project_turn, ""),
            ("a generation is looked up, and then the consumer is written", _C, planting.looked_up_generation, ""),
            ("a release does not write the consumer first", _C, planting.late_drop, ""),
            ("a search for ticks waits for locks", _W, planting.waiting("tick_leases", "_LOCK"), ""),
            ("a search for orphans waits for locks", _L, planting.waiting_orphans, ""),
            (
                "a tick is looked up, and then claimed",
                _W,
                both(
                    drop(tick_leases, "_CLAIM", "tick <"),
                    drop(tick_leases, "_CLAIM", "token <="),
                    planting.unlocked("tick_leases", "_LOCK"),
                ),
                "",
            ),
            ("an operation is looked up before its fence is raised", _L, planting.early_look, ""),
            ("the fence is raised after the operation is taken", _L, planting.late_fence, _ROW_LOCK),
        )
    ),
)


def run(names: Sequence[str], most: int, only: Sequence[str] | None, seconds: float) -> int:
    """Plant each mutant and look how many schedules it survives; 1 when one survives that should not.

    :param only: the names of those that are planted; None: all.
    :param seconds: for each mutant at most.
    """
    failed = 0
    runners: dict[tuple[str, str], runner.Runner] = {}
    for mutant in MUTANTS:
        if mutant.workloads[0] not in names or (only is not None and mutant.name not in only):
            continue
        key = mutant.workloads[0], mutant.engine
        if key not in runners:
            runners[key] = runner.Runner(*key)
            runners[key].warm()
        needed, tried, verdict = fall(runners[key], mutant, most, seconds)
        failed += int(needed is None and not mutant.survives)
        what = f"SURVIVED {tried} ({mutant.survives or 'unexplained'})" if needed is None else f"{needed:5} schedules"
        sys.stdout.write(f"{mutant.name:60} {mutant.engine + '/' + key[0]:20} {what}  {verdict[:110]}\n")
        sys.stdout.flush()
    return int(bool(failed))


def fall(made: runner.Runner, mutant: Mutant, most: int, seconds: float) -> tuple[int | None, int, str]:
    """How many schedules it takes until one breaks an invariant (None: it survives), how many were tried, and the verdict."""
    began, number = time.monotonic(), 0
    for number, result in enumerate(made.many([str(seed) for seed in range(most)], mutant.plant), 1):
        if "mend the mutant" in result.verdict:
            raise LookupError(result.verdict)
        if result.verdict:
            return number, number, result.verdict.partition("\n")[0]
        if time.monotonic() - began > seconds:
            break
    return None, number, ""
