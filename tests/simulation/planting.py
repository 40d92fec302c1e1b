# SPDX-License-Identifier: Apache-2.0
"""Changes of production code for mutants: tools that patch, and the changes that need more than a line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite as sqlite_dialect

from moorage import errors
from moorage.allocation.interface import ClaimOutcome, Expect
from moorage.cleanup import conditions as orphan_conditions
from moorage.cleanup import orphans
from moorage.cleanup.tables import cleanup_requests
from moorage.db import database, failures, sqlite
from moorage.drivers.interface import WorkloadState
from moorage.instances.moves import OF_PHASE, TRANSFER, kept_source
from moorage.services import automatic_fences, registry
from moorage.services.tables import automatic_fences as fence_slots
from moorage.services.tables import services
from moorage.sharding import moving
from moorage.sharding.tables import shard_moves
from moorage.work import fences, lease, operation_statements
from moorage.work import operations as workers
from moorage.work.interface import Phase
from moorage.work.tables import fences as fence_rows
from moorage.work.tables import workers as worker_rows
from moorage_plugins.block_storage.outcomes import ROWS
from moorage_plugins.compute import instances
from moorage_plugins.compute.operations import Done
from moorage_plugins.drivers.guarded import lease as lease_files
from moorage_plugins.drivers.simulated import SimulatedDriver
from moorage_plugins.stores import capacity_statements, quota_enforcement, sql_claims, sql_holdings, statements
from tests import hypervisors

_DIALECT = sqlite_dialect.dialect()

# -- tools --------------------------------------------------------------------------------------------------------


def everywhere(old: object, new: object) -> None:
    """Put an object in the place of another in all modules of Moorage that know it by a name of their own."""
    found = 0
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in ("moorage", "moorage_plugins"):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
                    found += 1
    if not found:
        raise LookupError(f"nothing refers to {old!r} any more; mend the mutant")


def without(statement: Any, fragment: str) -> Any:
    """The statement without the conditions whose SQL contains the fragment."""
    made = statement._generate()
    made._where_criteria = tuple(
        each for each in statement._where_criteria if fragment not in str(each.compile(dialect=_DIALECT))
    )
    if len(made._where_criteria) == len(statement._where_criteria):
        raise LookupError(f"{statement.compile(dialect=_DIALECT)} has no condition with {fragment}; mend the mutant")
    return made


def drop(module: Any, name: str, fragment: str) -> Callable[[], None]:
    """A mutant: a prebuilt statement without some conditions."""

    def plant() -> None:
        old = getattr(module, name)
        if isinstance(old, operation_statements.Transfer):
            new: Any = operation_statements.Transfer(without(old.plain, fragment))
        else:
            new = without(old, fragment)
        everywhere(old, new)

    return plant


def silent(module: Any, name: str, column: str) -> Callable[[], None]:
    """A mutant: a prebuilt UPDATE that does not write one of its columns."""

    def plant() -> None:
        old = getattr(module, name)
        made = old._generate()
        made._values = type(old._values)({key: value for key, value in old._values.items() if key.name != column})
        if len(made._values) == len(old._values):
            raise LookupError(f"{old.compile(dialect=_DIALECT)} does not write {column}; mend the mutant")
        everywhere(old, made)

    return plant


def unguarded(*names: str) -> Callable[[], None]:
    """A mutant: statements of :mod:`moorage.work.lease` that are built for each set of columns, without their guards."""

    def plant() -> None:
        instances._change.cache_clear()
        instances._change_many.cache_clear()
        for name in names:
            old = getattr(lease, name)
            everywhere(old, dataclasses.replace(old, guards=()))

    return plant


def kept_events(begin: Callable[..., None]) -> Callable[..., None]:
    """A mutant: a connection keeps the events of a transaction that was undone."""

    def begin_with(transaction: Any, service: str | None) -> None:
        if not transaction.info.get("moorage_events"):
            begin(transaction, service)

    return begin_with


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """A mutant: another attribute."""

    def plant() -> None:
        if not hasattr(owner, name):
            raise LookupError(f"{owner} has no {name}; mend the mutant")
        setattr(owner, name, value)

    return plant


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """A mutant: a function made of the one that is there."""
    return lambda: setattr(owner, name, make(getattr(owner, name)))


def both(*plants: Callable[[], None]) -> Callable[[], None]:
    """A mutant: several changes, where each alone is caught by the other guard."""

    def plant() -> None:
        for each in plants:
            each()

    return plant


def ignoring(*names: str) -> Callable[[Any], Any]:
    """Call it without some of its keyword arguments."""

    def make(function: Any) -> Any:
        def mutant(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **{name: value for name, value in options.items() if name not in names})

        return mutant

    return make


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


# -- single mutants that need more than a line --------------------------------------------------------------------


def confirmed_found(old: Any) -> Any:
    """Confirm of a request for several what an earlier try has made, and not what this one has."""

    def confirm(placer: Any, done: Any) -> None:
        old(placer, [each for each in done if each.repeated])

    return confirm


def same_tokens() -> None:
    old = fences.RAISE_MANY
    key: Any = sa.bindparam("of_resources", expanding=True)
    table = old.table
    everywhere(
        old,
        sa.update(table)
        .where(table.c.resource_type == sa.bindparam("of_type"), table.c.resource_id.in_(key))
        .values(token=table.c.token),
    )


def cursor_first(_: Any) -> Any:
    """Move the cursor of a follower, and then deliver."""

    def mutant(self: Any, events: Any) -> bool:
        held, last = self._now_held(), events[-1].number
        if not self._store.delivered(held, last, self._lease):
            return False
        self._note(dataclasses.replace(held, position=last))
        try:
            self._sink.deliver(events, held.missed)
        except errors.MoorageError:
            return False
        return True

    return mutant


def no_room_check(make: Any) -> Any:
    def mutant(classes: int, step_rule: str, lowering: bool = False, times: bool = False) -> Any:
        made = make(classes, step_rule, lowering, times)._generate()
        table = made.table
        numbers = [sa.bindparam(f"class_{place}", type_=sa.Integer) for place in range(classes)]
        made._where_criteria = (made._where_criteria[0], table.c.resource_class_id.in_(numbers))
        return made

    return mutant


def deaf_end(transaction: Any, *, commit: bool, same_process: bool) -> None:
    """Report a commit that failed as one that succeeded."""
    if not commit:
        transaction.rollback()
        return
    try:
        transaction.commit()
    except (failures.LostRaceError, errors.StoreUnavailable):
        transaction.connection.invalidate()


def certain_end(end: Any) -> Any:
    """Do not say that the outcome of a commit is unknown."""

    def mutant(*arguments: Any, **options: Any) -> None:
        try:
            end(*arguments, **options)
        except errors.StoreUnavailable as error:
            error.details.pop("outcome", None)
            raise

    return mutant


def leaking_end(transaction: Any, *, commit: bool, same_process: bool) -> None:
    """Leave the transaction of a failed commit open."""
    if not commit:
        database._undo(transaction)
        return
    try:
        transaction.commit()
    except errors.StoreUnavailable as error:
        error.details["outcome"] = "unknown"
        raise
    except BaseException:
        database._undo(transaction)
        raise


def eager_retries(retried: Any) -> Any:
    def mutant(self: Any, begin: Any, work: Any, attempts: Any, deadline: Any, idempotent: bool) -> Any:
        return retried(self, begin, work, attempts, deadline, True)

    return mutant


def no_transactions() -> None:
    """Each statement is a transaction of its own."""
    sqlite._BEGIN[True] = "SELECT 1"


def never_first(create: Any) -> Any:
    """Let a late try create what was deleted."""

    def mutant(*arguments: Any, **options: Any) -> Any:
        return create(*arguments, **{**options, "first": False})

    return mutant


def expects_anything(enter: Any) -> Any:
    def mutant(self: Any, tx: Any, change: Any, how: Any, counted: Any) -> Any:
        return enter(self, tx, dataclasses.replace(change, expected=Expect.ANYTHING), how, counted)

    return mutant


def not_repeated(self: Any, tx: Any, changes: Any) -> None:
    """Know no repetition."""


def close_at_once(self: Any, request: Any) -> bool:
    """Close a request whatever is left of it."""
    table = cleanup_requests
    close = sa.update(table).where(table.c.uuid == request.uuid).values(done_at=1)
    return bool(self._database.run(lambda tx: tx.execute(close).rowcount == 1))


def eager(driver: Any, workload: Any, token: int) -> str:
    """Has what is prepared run."""
    driver.spawn(workload, token)
    return f"{driver.tools.host}/{workload.uuid}/{token}"


def started_early() -> None:
    """Has the destination of a live migration run when the workload has arrived."""
    old = SimulatedDriver.transfer

    def transfer(driver: Any, uuid: str, token: int, order: int, to: str) -> None:
        old(driver, uuid, token, order, to)
        host, name, _ = to.split("/")
        hypervisors.put(driver.tools.conf.control_plane.state_dir, host, name, state=WorkloadState.RUNNING)

    setattr(SimulatedDriver, "transfer", transfer)  # noqa: B010  (as the other mutants)


def without_departure(old: Any) -> Any:
    """Writes the end of an operation without that of its source."""
    return lambda self, tx, job, result: old(self, tx, job, dataclasses.replace(result, left=""))


def without_kept_copies(belongs: Any) -> Any:
    """An instance is on its host, or moves there; no other host keeps anything."""

    def mutant(tools: Any, uuid: str) -> Any:
        found = belongs(tools, uuid)
        if not found:
            return found
        instance = tools.instances.get(uuid)
        return tools.identity.host in (instance.host, instance.pending.get("host"))

    return mutant


def not_keeping(finish: Any) -> Any:
    """The source of a resize has to let go at the commit."""
    return lambda self, tx, job, result: finish(self, tx, job, dataclasses.replace(result, keeps=False))


def kept_for_ever(let_go: Any) -> Any:
    """Writes the instance, and asks no host to let go."""

    def mutant(self: Any, seen: Any, write: Any) -> str:
        self.database.run(write)
        return ""

    return mutant


def without_releases(finish: Any) -> Any:
    """The end of an operation releases no claim."""
    return lambda self, tx, job, result: finish(self, tx, job, dataclasses.replace(result, releases=()))


def without_release(settle: Any) -> Any:
    def mutant(self: Any, transaction: Any, leases: Any, resources: Any) -> None:
        tools = self.tools
        self.tools = dataclasses.replace(tools, release=lambda consumer, tx: True)
        try:
            settle(self, transaction, leases, resources)
        finally:
            self.tools = tools

    return mutant


def advance_blindly(step: Any) -> Any:
    def mutant(self: Any, tx: Any, uuid: str, size: int, way: Any) -> Any:
        every = ("planned", "applying", "applied", "undoing", "undone")
        return step(self, tx, uuid, size, dataclasses.replace(way, begins=every))

    return mutant


def forgetful_journal(self: Any, tx: Any, mine: Any, taken: Any, lost: Any, way: Any) -> None:
    """Do not write which moves were lost."""
    numbers = [move.id for move in taken]
    within = shard_moves.c.id.between(min(numbers), max(numbers))
    tx.execute(sa.update(shard_moves).where(mine, within).values(status=way.kept))


def mover(fragment: str) -> Callable[[], None]:
    def make(init: Any) -> Any:
        def mutant(self: Any, has_instances: Any) -> None:
            init(self, has_instances)
            self._move = without(self._move, fragment)

        return mutant

    return wrap(moving.ShardMover, "__init__", make)


def search(kind: str, fragment: str) -> Callable[[], None]:
    def plant() -> None:
        for of, search in list(orphans._SEARCHES.items()):
            if of.__name__ == kind:
                take = operation_statements.Transfer(without(search.take.plain, fragment))
                orphans._SEARCHES[of] = search._replace(take=take)  # type: ignore[index]

    return plant


def whatever_service_has() -> None:
    """Cleaners find and take all that the service of a request works on, living or not, since the request or before."""
    of = worker_rows.c
    # The parameters stay used.
    condition = sa.and_(
        of.worker == orphan_conditions._DEAD,
        orphan_conditions._to_clean(orphan_conditions._phase(Phase.WORKING)),
        orphan_conditions._DEAD_EPOCH >= 0,
        orphan_conditions._UNTIL >= 0,
    )
    kind: Any = type("WhateverServiceHas", (), {"condition": condition, "attribution": {}})
    lease.TAKE_OVER = dataclasses.replace(lease.TAKE_OVER, guards=())
    orphans._SEARCHES[orphan_conditions.OrphansOfService] = orphans._search(kind)  # type: ignore[index]


def unfenced_volumes() -> None:
    """Write rows of volumes, snapshots and backups without their fence."""
    for rows in ROWS.values():
        rows._write = without(rows._write, "fence")


def finish_without_token() -> None:
    """End operations whoever has them, one by one and together."""
    for name in ("FINISH", "FINISH_MANY"):
        drop(operation_statements, name, "token")()


def finish_without_looking() -> None:
    """End operations whether or not their rows were there, one by one and together."""
    put(workers.SqlOperationStore, "end", end_without_looking)()
    put(workers.SqlOperationStore, "end_many", end_many_without_looking)()


def end_many_without_looking(self: Any, tx: Any, leases: Any) -> None:
    """End several operations, whether or not all of their rows were there."""
    for key, _ in workers.same_token(leases):
        tx.execute(operation_statements.FINISH_MANY, key)


def written_by_fence(self: Any, job: Any, result: Any) -> bool:
    """A deletion is done when the row of its instance has its token, or is gone."""
    try:
        return bool(self._tools.instances.get(job.lease.resource_id).fence == job.lease.token)
    except errors.NotFound:
        return result.changes is None


def end_without_looking(self: Any, tx: Any, held: Any) -> None:
    """End an operation whether or not its row was there."""
    tx.execute(operation_statements.FINISH, workers._key(held))


def always_forced(create: Any) -> Any:
    """Begin an operation in the place of the one that runs."""

    def mutant(self: Any, *arguments: Any, **options: Any) -> Any:
        return create(self, *arguments, **{**options, "force": True})

    return mutant


def no_generation(change: Any) -> Any:
    """Change a consumer whatever its generation is."""
    return lambda expected, counted: change(False, counted)


def no_request(change: Any) -> Any:
    """Change a consumer also for a request that was done."""
    return lambda expected, counted: without(change(expected, counted), "request_id")


def no_rows(statement: Any) -> Any:
    """The statement, for no row."""
    return statement.where(sa.false())


def turn_for_all(statement: Any) -> Any:
    """A turn that leaves the generation as it is."""
    table = statement.table
    return sa.update(table).where(table.c.id == sa.bindparam("of_provider")).values(updated_at=0)


def first_provider_only(take: Any) -> Any:
    """Take resources of the first provider of a transaction, and of no other."""

    def mutant(self: Any, tx: Any, number: int, plan: Any) -> None:
        if not plan.takes or tx.info.setdefault("first_provider", number) == number:
            take(self, tx, number, plan)

    def begin(self: Any, tx: Any, *arguments: Any) -> Any:
        tx.info.pop("first_provider", None)
        return change(self, tx, *arguments)

    change = sql_claims.SqlAllocationLedger._change
    put(sql_claims.SqlAllocationLedger, "_change", begin)()
    return mutant


def count_sides(amounts: Any, unit: str, of_class: int) -> int:
    """Count both sides of a move."""
    return sum(amounts.get((unit, of_class), {}).values())


def unheeded_mark(change: Any) -> Any:
    """Change a consumer as one that no limit counts, whether or not one does."""
    return lambda expected, counted: without(change(expected, False), "counted")


def uncounted_release(give_back: Any) -> Any:
    """Give back what a consumer holds to providers only."""
    return lambda self, tx, consumer, row=None: give_back(self, tx, consumer)


def looked_up_limits() -> None:
    """Claims read whether a limit has room, and then count whatever it has by then."""
    counting, within = quota_enforcement.COUNT, quota_enforcement.COUNT_WITHIN

    def write(self: Any, tx: Any, project: str, more: Any, enforced: Any) -> None:
        for row in tx.execute(quota_enforcement.LIMITS, {"of_project": project}).all():
            amount = more.get(row.resource_class_id, 0)
            if amount > 0 and enforced.get(row.resource_class_id, 0) > 0 and row.used + amount > row.maximum:
                raise self._exceeded(tx, project, row, amount)
        write_all(self, tx, project, more, {})

    write_all = quota_enforcement.QuotaCounter._write
    quota_enforcement.QuotaCounter._write = write  # type: ignore[method-assign]
    everywhere(within, counting)
    no_project_turn()


def no_project_turn() -> None:
    """Transactions that count for one project take no turn."""

    def look(self: Any, tx: Any, project: str) -> bool:
        return bool(tx.execute(quota_enforcement.VERSION, {"of_project": project}).first())

    quota_enforcement.QuotaCounter._hold = look  # type: ignore[method-assign]


# -- races between write transactions ----------------------------------------------------------------------------


def looked_up_room() -> None:
    """Claims read whether there is room, then take it without a condition, and take no turn at the provider."""
    made = no_room_check(capacity_statements.take)

    def looked_up(self: Any, tx: Any, number: int, plan: Any) -> None:
        for wanted in plan.takes:
            before = {
                row.resource_class_id: row for row in tx.execute(statements.INVENTORIES_OF, {"numbers": [number]})
            }
            if any(
                before[of_class].used + amount > (before[of_class].total - before[of_class].reserved)
                for of_class, amount in wanted.items()
            ):
                raise sql_claims.RefusedError
            tx.execute(made(len(wanted), self._step_rule), sql_holdings.parameters(number, wanted))

    sql_claims.SqlAllocationLedger._take = looked_up  # type: ignore[method-assign]
    sql_claims._take_turn = nothing


def looked_up_generation() -> None:
    """Claims compare a consumer's generation, and then write the consumer whatever it is."""
    enter = sql_claims.SqlAllocationLedger._enter

    def looked_up(self: Any, tx: Any, change: Any, how: Any, counted: Any) -> Any:
        if isinstance(change.expected, int):
            row = tx.execute(statements.CONSUMER, {"of_consumer": change.consumer}).first()
            if row is None or row.consumer_generation != change.expected:
                raise sql_claims._conflict(change, row)
            change = dataclasses.replace(change, expected=Expect.ANYTHING)
        return enter(self, tx, change, how, counted)

    sql_claims.SqlAllocationLedger._enter = looked_up  # type: ignore[method-assign]


def late_drop() -> None:
    """A release gives back what is held, and then deletes the consumer's row whether or not it is there."""

    def drop_late(self: Any, tx: Any, consumer: str, *, overdue: bool = False, residents: Any = ()) -> Any:
        self._give_back(tx, consumer)
        tx.execute(statements.DROP_CONSUMER, {"of_consumer": consumer})
        return True

    sql_claims.SqlAllocationLedger._drop = drop_late  # type: ignore[method-assign]


def waiting(module: str, name: str) -> Callable[[], None]:
    """A mutant: a search that waits for rows that others have locked."""

    def plant() -> None:
        owner = sys.modules[f"moorage.coordination.{module}"]
        everywhere(getattr(owner, name), getattr(owner, name).with_for_update())

    return plant


def unlocked(module: str, name: str) -> Callable[[], None]:
    """A mutant: a search that locks nothing."""

    def plant() -> None:
        owner = sys.modules[f"moorage.coordination.{module}"]
        made = getattr(owner, name)._generate()
        made._for_update_arg = None
        everywhere(getattr(owner, name), made)

    return plant


def waiting_orphans() -> None:
    """Searches for orphans wait for fences that others have locked."""
    for of, search in list(orphans._SEARCHES.items()):
        locking = search.find_and_lock.with_for_update(of=fence_rows)
        lock = search.lock.with_for_update()
        orphans._SEARCHES[of] = search._replace(find_and_lock=locking, lock=lock)  # type: ignore[index]


def early_look() -> None:
    """A new operation looks for another one before it raises the fence, and replaces what has come since."""
    create = workers.SqlOperationStore.create

    def looked_up(self: Any, tx: Any, kind: str, resource: str, *arguments: Any, **options: Any) -> Any:
        if not options.get("force"):
            row = tx.execute(operation_statements.GET, {"of_type": kind, "of_resource": resource}).first()
            if row is not None:
                raise errors.Conflict("There is an operation.")
        return create(self, tx, kind, resource, *arguments, **{**options, "force": True})

    put(workers.SqlOperationStore, "create", looked_up)()


def late_fence() -> None:
    """Operations are taken with the token that follows, and the fence is raised afterwards."""

    def transfer(self: Any, tx: Any, statement: Any, key: Any, identity: Any, locked: Any = ()) -> Any:
        of_many = {"of_type": key["of_type"], "of_resources": key["of_resources"]}
        mine = {"to_owner": identity.uuid, "to_epoch": identity.epoch}
        taking = statement.plain.values(token=operation_statements._RAISED + 1)
        changed = tx.execute(taking, {**key, **mine, "lease_micros": self._lease_micros}).rowcount
        tx.execute(fences.RAISE_MANY, of_many)
        return tx.execute(operation_statements.TAKEN, {**of_many, **mine}).all() if changed else ()

    workers.SqlOperationStore.transfer = transfer  # type: ignore[method-assign]


# -- hosts that fence themselves ----------------------------------------------------------------------------------


def late_moment(self: Any) -> bool:
    """A mutant of a heartbeat: the moment is from after the store's answer."""
    lease = self._lease
    if lease is None:
        return bool(self._registry.beat(self._identity))
    if not self._registry.beat_promising(self._identity, lease.promised()):
        return False
    lease.renewed(self._clock.boottime())
    return True


def hopeful_beat(beat: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A mutant of a heartbeat: one that may not have been committed renews the lease."""

    def beat_anyway(self: Any) -> bool:
        moment = self._clock.boottime()
        try:
            return beat(self)
        except errors.Unavailable:
            if self._lease is not None:
                self._lease.renewed(moment)
            raise

    return beat_anyway


def no_margin_of_store() -> None:
    """A mutant: the store takes a host for fenced when the lease is over, and not a margin later."""
    old = registry._FENCE_ITSELF
    early = without(old, "self_fence +").where(services.c.self_fence < registry._SINCE_BEAT)
    everywhere(old, early)


def kept_promise(begin: Callable[..., Any]) -> Callable[..., Any]:
    """A mutant: a new agent inherits the promise of the agent before."""

    def begin_with(self: Any, tx: Any, binary: str, host: str, declared: Any) -> Any:
        mine = sa.and_(services.c.binary == binary, services.c.host == host)
        before = tx.execute(sa.select(services.c.self_fence).where(mine)).scalar()
        begun = begin(self, tx, binary, host, declared)
        tx.execute(sa.update(services).where(mine).values(self_fence=before, self_fence_start=services.c.started_at))
        return begun

    return begin_with


def late_lease(keep: Callable[..., None]) -> Callable[..., None]:
    """A mutant: the file of the lease is that of the newest agent, also where an earlier one writes it."""

    def keep_anyway(folder: Any, epoch: int, until: float) -> None:
        keep(folder, max([epoch, *lease_files._epochs(folder / "lease")]), until)

    return keep_anyway


def slots_are_free() -> None:
    """A mutant: the brake takes each slot for a free one."""
    automatic_fences._SLOTS = sa.select(fence_slots.c.slot, sa.literal(1).label("free"))
    everywhere(automatic_fences._TAKE, without(automatic_fences._TAKE, "fenced_at"))


def answered_early(claim_together: Any) -> Any:
    """Answer claims of a combined transaction before its commit."""

    def mutant(self: Any, tx: Any, members: Any) -> Any:
        outcomes = claim_together(self, tx, members)
        for each, outcome in zip(members, outcomes, strict=True):
            each.outcome = outcome
            each.woken.set()
        return outcomes

    return mutant


def refusals_undo_others(self: Any, members: Any) -> None:
    """Answer the claims that were undone because of others as if they were made."""
    try:
        outcomes = self._database.run(lambda tx: self._claim_together(tx, members))
    except (errors.StoreUnavailable, errors.StoreBusy):
        raise
    except Exception:
        out = self._misfits(members)
        for each in members:
            each.alone = each in out
        believe_committed(self, [each for each in members if not each.alone])
    else:
        for each, outcome in zip(members, outcomes, strict=True):
            each.outcome = outcome


def believe_committed(self: Any, members: Any) -> None:
    """Take claims for made without a look."""
    for each in members:
        each.outcome = ClaimOutcome(each.change.consumer, 1, ())


def lost_races_are_won(make: Any) -> Any:
    """Take claims whose transaction lost a race for made."""

    def mutant(self: Any, batch: Any) -> None:
        make(self, batch)
        if all(each.alone and not each.decided for each in batch):
            believe_committed(self, batch)

    return mutant


def stale_reads(consumer: Any) -> Any:
    """A mutant: every other read of a process answers what the one before has answered."""

    def mutant(self: Any, uuid: str) -> Any:
        before = vars(self).pop("mutant_read", None)
        if before is not None:
            return before[0]
        found = consumer(self, uuid)
        vars(self)["mutant_read"] = (found,)
        return found

    return mutant


def silent_drop(drop_consumer: Any) -> Any:
    """A mutant: a release gives back what there was, and says that there was nothing."""

    def mutant(*arguments: Any, **options: Any) -> bool:
        drop_consumer(*arguments, **options)
        return False

    return mutant


def late_epochs(confirms: Any) -> Any:
    """A mutant: a message with a new epoch is refused, and the table of services is read later."""

    def mutant(self: Any, origin: Any, host: str) -> bool:
        later, self._next = self._next, float("inf")
        try:
            return bool(confirms(self, origin, host))
        finally:
            self._next = later

    return mutant


def confirmed(self: Any, row: Any, seen: Any) -> str:
    """A mutant: the time decides alone."""
    self._tools.confirm_resize(self._tools.instances.get(row.uuid))
    return ""


def any_kept(held: Any) -> Any:
    """A mutant: the first step of the revert of a resize does nothing."""
    pending = {
        **held.instance.pending,
        "phase": OF_PHASE[TRANSFER],
        "prepared": kept_source(held.instance.pending)["token"],
    }
    return Done(held.lease, held.instance, {"pending": pending}, goes_on=(TRANSFER, held.instance.host))


def of_any_token(destroy: Any) -> Any:
    """Destroys a workload whatever its token is."""
    return lambda driver, uuid, up_to_token: destroy(driver, uuid, 1 << 40)
