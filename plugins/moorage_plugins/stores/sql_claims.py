# SPDX-License-Identifier: Apache-2.0
"""Makes and changes claims in the sql store, by statements whose conditions are on the rows that they write.

One transaction: the rows of the consumers, in the order of their uuids; then, for each provider in the order of its id, a raise of
its generation (which makes the claimers of that provider take turns), ONE statement that gives back what is held of it, and
conditional statements that take what is wanted; then the allocations. Room is taken only where it is: no read decides anything
but what a consumer holds, and that is read behind its row. So no isolation level is relied on. When a rowcount says that
something was not taken, the transaction is rolled back and the reason is read afterwards.

The consumer's row comes first because it is what a repetition of the same request meets: the repetition waits there, before it
takes any room or locks a provider, and then finds the first claim.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from oslo_db import exception as db_errors
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationItem,
    ClaimOutcome,
    Companion,
    Expect,
    GenerationConflict,
    InventoryChange,
    InventoryItem,
)
from moorage.db import JournalEvent, record
from moorage_plugins.stores import capacity_statements, providers, statements
from moorage_plugins.stores.checks import check_changes, check_reshape, refusals, steps_of_reshape
from moorage_plugins.stores.quota_enforcement import CountedBefore
from moorage_plugins.stores.sql_holdings import SqlHoldings, counted_before, microseconds, parameters
from moorage_plugins.stores.sql_part import no_such_provider

__all__ = ["AtProvider", "RefusedError", "SqlAllocationLedger", "StaleError", "new_consumer", "record_claim"]

LOG = logging.getLogger(__name__)


class RefusedError(Exception):
    """Inside of a change: not everything was taken; the transaction must be undone."""


class _RacedError(Exception):
    """Inside of a change: the consumers are not as this try took them to be; look, in a new transaction."""


class StaleError(Exception):
    """Inside of a change: the remembered id of a provider is not its id any more."""


class _LimitedError(Exception):
    """Inside of a change: no turn was taken, perhaps because a project has limits."""


class _Try(enum.Enum):
    #: Consumers are taken to be new, which most are.
    OPTIMISTIC = "hopeful"
    #: The consumers are looked at first.
    CHECKED = "looking"


@dataclass(slots=True)
class AtProvider:
    """What a change does at one provider: give back by class number, then take consumer by consumer."""

    uuid: str
    gives: dict[int, int] = field(default_factory=dict)
    takes: list[dict[int, int]] = field(default_factory=list)
    #: The version of its residents that is expected; None: any.
    seen: int | None = None


class SqlAllocationLedger(SqlHoldings):
    """Makes and changes single claims, or several of one request, and changes inventories together with claims."""

    @override
    def replace(
        self, changes: Sequence[AllocationChange], companion: Companion | None = None
    ) -> tuple[ClaimOutcome, ...]:
        check_changes(changes)
        return self._persistently(changes, (), companion)

    @override
    def reshape(self, inventories: Sequence[InventoryChange], changes: Sequence[AllocationChange]) -> None:
        check_reshape(inventories, changes)
        self._persistently(changes, inventories, None)

    def _persistently(
        self,
        changes: Sequence[AllocationChange],
        inventories: Sequence[InventoryChange],
        companion: Companion | None,
        before_commit: Callable[[Sequence[ClaimOutcome]], object] = lambda outcomes: None,
        attempts: int | None = None,
    ) -> tuple[ClaimOutcome, ...]:
        """Make the changes in a transaction, and in new ones as long as it loses races.

        :param attempts: as for :meth:`moorage.db.Database.run`.
        :param before_commit: called with the outcomes as the last thing in each transaction.
        """
        how = _Try.OPTIMISTIC

        def work(tx: sa.Connection) -> tuple[ClaimOutcome, ...]:
            outcomes = self._change(tx, changes, inventories, companion, how)
            before_commit(outcomes)
            return outcomes

        for _ in range(self._attempts):
            try:
                return self._database.run(work, attempts=attempts)
            except _RacedError:
                how = _Try.CHECKED
            except GenerationConflict:
                # An earlier try of the same request may have made the difference, at any of its consumers.
                if how is _Try.CHECKED or all(each.request_id is None for each in changes):
                    raise
                how = _Try.CHECKED
            except StaleError:
                # A provider that a consumer leaves is named by its residents alone.
                self._forget({uuid for each in changes for uuid in (*each.resources, *each.residents)})
                self._forget({each.provider for each in inventories})
            except RefusedError:
                self._explain(changes, inventories)
        names = ", ".join(each.consumer for each in changes[:3])
        raise errors.StoreBusy(
            f"The claim of {names} was refused {self._attempts} times, yet seemed to fit each time it was looked at; try again."
        )

    def _change(
        self,
        tx: sa.Connection,
        changes: Sequence[AllocationChange],
        inventories: Sequence[InventoryChange],
        companion: Companion | None,
        how: _Try,
    ) -> tuple[ClaimOutcome, ...]:
        if how is _Try.CHECKED:
            repeated = self._repeated(tx, changes)
            if repeated is not None:
                return repeated
        counted: dict[str, Any] = {}
        known = [
            each.consumer
            for each in sorted(changes, key=lambda each: each.consumer)
            if self._enter(tx, each, how, counted)
        ]
        held = tx.execute(statements.HELD_BY, {"consumers": known}).all() if known else []
        rows, limited = self._exchange(tx, changes, inventories, held)
        if held:
            tx.execute(statements.DROP_ALLOCATIONS_OF, {"consumers": known})
        if rows:
            tx.execute(statements.ADD_ALLOCATIONS, rows)
        for each in changes:
            if not each.resources and each.consumer in known:
                tx.execute(statements.DROP_CONSUMER, {"of_consumer": each.consumer})
        self._quotas.note(tx, changes, _counted_before(counted, held), limited)
        if companion is not None:
            companion(tx)
        outcomes = self._outcomes(tx, changes, known)
        for each, outcome in zip(changes, outcomes, strict=True):
            if each.resources or each.consumer in known:
                record_claim(tx, each, outcome)
        return outcomes

    def _enter(self, tx: sa.Connection, change: AllocationChange, how: _Try, counted: dict[str, Any]) -> bool:
        """Writes the consumer's row, so that no other transaction changes what it holds. Returns whether the row existed.

        :param counted: gets the row as it was if the limits of its project count the consumer.
        :raises GenerationConflict: it is not the expected one.
        """
        hopeful = how is _Try.OPTIMISTIC and change.expected is Expect.ANYTHING and change.resources
        if change.expected is Expect.NOTHING or hopeful:
            return self._create(tx, change)
        values = {
            "of_consumer": change.consumer,
            "new_project": change.project,
            "new_user": change.user,
            "new_type": change.consumer_type,
            "new_request": change.request_id,
            "new_lifetime": microseconds(change.lifetime),
        }
        if isinstance(change.expected, int):
            values["of_generation"] = change.expected
        expects = isinstance(change.expected, int)
        if tx.execute(statements.change_consumer(expects, False), values).rowcount == 1:
            return True
        row = tx.execute(statements.CONSUMER, {"of_consumer": change.consumer}).first()
        if row is not None and row.counted:
            stays = change.project in (None, row.project_id)
            values |= {"of_project": row.project_id, "new_counted": int(stays)}
            if tx.execute(statements.change_consumer(expects, True), values).rowcount == 1:
                counted[change.consumer] = row
                return True
        if row is None and change.expected is Expect.ANYTHING:
            return self._create(tx, change) if change.resources else False
        if row is not None and (row.consumer_generation == change.expected or change.expected is Expect.ANYTHING):
            raise _RacedError
        raise _conflict(change, row)

    def _create(self, tx: sa.Connection, change: AllocationChange) -> bool:
        if not change.resources:
            row = tx.execute(statements.CONSUMER, {"of_consumer": change.consumer}).first()
            if row is not None:
                raise _conflict(change, row)
            return False
        values = new_consumer(change)
        try:
            if change.lifetime is None:
                tx.execute(statements.ADD_CONSUMER, values)
            else:
                tx.execute(statements.ADD_LEASED_CONSUMER, values | {"new_lifetime": microseconds(change.lifetime)})
        except db_errors.DBDuplicateEntry as error:
            raise _RacedError from error
        return False

    def _repeated(self, tx: sa.Connection, changes: Sequence[AllocationChange]) -> tuple[ClaimOutcome, ...] | None:
        """What an earlier try of the same request left; None when there was none.

        :raises Conflict: some of the consumers were changed since.
        :raises GenerationConflict: a consumer is there that must not be.
        """
        rows = {
            row.consumer_uuid: row
            for row in tx.execute(statements.CONSUMERS, {"consumers": [each.consumer for each in changes]}).all()
        }
        done = [
            each
            for each in changes
            if each.request_id is not None
            and each.consumer in rows
            and rows[each.consumer].request_id == each.request_id
        ]
        gone = [each for each in changes if not each.resources and each.consumer not in rows]
        if not done:
            for each in changes:
                if each.expected is Expect.NOTHING and each.consumer in rows:
                    raise _conflict(each, rows[each.consumer])
            return None
        if len(done) + len(gone) < len(changes):
            raise errors.Conflict(
                f"Request {done[0].request_id} was done, and some of its consumers were changed since; look what they hold.",
                consumer=done[0].consumer,
            )
        held = tx.execute(statements.HELD_BY, {"consumers": [each.consumer for each in done]}).all()
        names = self._classes.names(tx, {row.resource_class_id for row in held})
        items = {each.consumer: [] for each in changes}  # type: dict[str, list[AllocationItem]]
        for row in held:
            items[row.consumer_id].append(
                AllocationItem(row.uuid, row.consumer_id, names[row.resource_class_id], row.used)
            )
        return tuple(
            ClaimOutcome(
                each.consumer,
                rows[each.consumer].consumer_generation if each.consumer in rows else 0,
                tuple(items[each.consumer]),
                repeated=True,
            )
            for each in changes
        )

    def _exchange(
        self,
        tx: sa.Connection,
        changes: Sequence[AllocationChange],
        inventories: Sequence[InventoryChange],
        held: Sequence[Any],
    ) -> tuple[list[dict[str, Any]], set[str]]:
        """At each provider, in the order of ids: take the turn, give back, take.

        The allocations to store, and the projects that have limits.
        """
        plans, allocations = self._plans(tx, changes, inventories, held)
        reshaped = {each.provider: each for each in inventories}
        added: set[int] = set()
        unlimited, limited = self._limits(tx, changes)
        for number in sorted(plans):
            plan = plans[number]
            change = reshaped.get(plan.uuid)
            if change is not None:
                if self._turn(tx, plan.uuid, change.expected_generation).id != number:
                    raise StaleError  # deleted and made again since its id was remembered
                added |= self._reshape(tx, number, change, keep=True)
            else:
                limited |= self._first_turn(tx, number, plan, unlimited)
                unlimited = ""
            if plan.gives:
                tx.execute(capacity_statements.release(len(plan.gives)), parameters(number, plan.gives))
            self._take(tx, number, plan)
            if change is not None:
                self._reshape(tx, number, change, keep=False)
                steps = steps_of_reshape(change.items, bool(plan.gives or plan.takes))
                tx.execute(statements.MORE_GENERATIONS, {"of_provider": number, "of_steps": steps - 1})
        self._classes.hold(tx, added)
        if unlimited:
            # All providers are reshaped, so no turn has asked.
            limited |= self._quotas.look(tx, [unlimited])
        return allocations, limited

    def _limits(self, tx: sa.Connection, changes: Sequence[AllocationChange]) -> tuple[str, set[str]]:
        """Returns the project whose limits the first turn reads (empty: none), and the projects that are known to have limits.

        What is remembered is read here, once in a transaction: another thread may change it at any time. Of several projects that
        are not known to have limits a statement asks. They are rare: changes of several consumers, and claims made together.
        """
        projects = {each.project for each in changes if each.project and each.resources}
        limited = {each for each in projects if self._quotas.is_limited(each)}
        unknown = projects - limited
        if len(unknown) > 1:
            return "", limited | self._quotas.look(tx, unknown)
        return (unknown.pop() if unknown else ""), limited

    def _first_turn(self, tx: sa.Connection, number: int, plan: AtProvider, unlimited: str) -> set[str]:
        """As :func:`_take_turn`; the project, if it has limits."""
        try:
            _take_turn(tx, number, plan, unlimited)
        except _LimitedError:
            found = self._quotas.look(tx, [unlimited])
            _take_turn(tx, number, plan)
            return found
        return set()

    def _take(self, tx: sa.Connection, number: int, plan: AtProvider) -> None:
        before = dict(plan.gives)
        for wanted in plan.takes:
            # Above capacity only as far as the consumers held it before.
            lowers = [of_class for of_class, amount in wanted.items() if amount <= before.get(of_class, 0)]
            statement = capacity_statements.take(len(wanted), self._step_rule, bool(lowers))
            values = dict(parameters(number, wanted))
            if lowers:
                values |= {f"lowers_{place}": int(of_class in lowers) for place, of_class in enumerate(wanted)}
            if tx.execute(statement, values).rowcount != len(wanted):
                raise RefusedError
            for of_class, amount in wanted.items():
                before[of_class] = before.get(of_class, 0) - amount

    def _plans(
        self,
        tx: sa.Connection,
        changes: Sequence[AllocationChange],
        inventories: Sequence[InventoryChange],
        held: Sequence[Any],
    ) -> tuple[dict[int, AtProvider], list[dict[str, Any]]]:
        plans: dict[int, AtProvider] = {}
        for row in held:
            plan = plans.setdefault(row.id, AtProvider(row.uuid))
            plan.gives[row.resource_class_id] = plan.gives.get(row.resource_class_id, 0) + row.used
        wanted = {uuid for each in changes for uuid in each.resources} | {each.provider for each in inventories}
        seen: dict[str, int | None] = {}
        for each in changes:
            for uuid, version in each.residents.items():
                if seen.get(uuid) is None:
                    seen[uuid] = version
        wanted |= {uuid for uuid, version in seen.items() if version is not None}
        ids = self._provider_ids(tx, wanted)
        if not seen.keys() <= wanted:
            ids |= self._known_ids(tx, seen.keys() - wanted)
        for uuid, number in ids.items():
            plan = plans.setdefault(number, AtProvider(uuid))
            if plan.uuid != uuid:
                raise StaleError  # a remembered id that was given to another provider since
            plan.seen = seen.get(uuid)
        names = {name for each in changes for amounts in each.resources.values() for name in amounts}
        numbers = self._classes.numbers(tx, names)
        rows = []
        for each in changes:
            for uuid, amounts in sorted(each.resources.items()):
                numbered = sorted((numbers[name], amount) for name, amount in amounts.items())
                plans[ids[uuid]].takes.append(dict(numbered))
                rows += [
                    {
                        "consumer_id": each.consumer,
                        "resource_provider_id": ids[uuid],
                        "resource_class_id": of_class,
                        "used": amount,
                    }
                    for of_class, amount in numbered
                ]
        return plans, rows

    def _reshape(self, tx: sa.Connection, number: int, change: InventoryChange, *, keep: bool) -> set[int]:
        """Brings the inventories to their new state. With ``keep``, present inventories that the change leaves out stay."""
        present = self._inventory_rows(tx, [number]).get(number, [])
        wanted = {item.resource_class: item for item in change.items}
        if keep:
            wanted = {item.resource_class: item for item, _ in present} | wanted
        numbers = self._classes.numbers(tx, wanted)
        keyed = {numbers[name]: item for name, item in wanted.items()}
        rows = providers.present_inventories(tx, [number]).get(number, {})
        return providers.set_inventories(tx, self._classes, number, change.provider, keyed, rows)

    def _outcomes(
        self, tx: sa.Connection, changes: Sequence[AllocationChange], known: Sequence[str], together: int = 1
    ) -> tuple[ClaimOutcome, ...]:
        generations = {}
        if any(each.consumer in known and each.resources for each in changes):
            rows = tx.execute(statements.CONSUMERS, {"consumers": list(known)}).all()
            generations = {row.consumer_uuid: row.consumer_generation for row in rows}
        return tuple(
            ClaimOutcome(
                each.consumer,
                generations.get(each.consumer, 1) if each.resources else 0,
                tuple(
                    AllocationItem(uuid, each.consumer, name, amount)
                    for uuid, wanted in sorted(each.resources.items())
                    for name, amount in sorted(wanted.items())
                ),
                together=together,
            )
            for each in changes
        )

    def _provider_ids(self, tx: sa.Connection, uuids: Iterable[str]) -> dict[str, int]:
        """Ids by uuid. ``tx`` must not have created providers: what it read is remembered.

        :raises NotFound: there is no such provider.
        """
        wanted = list(uuids)
        found = self._known_ids(tx, wanted)
        for uuid in wanted:
            if uuid not in found:
                raise no_such_provider(uuid)
        return found

    def _known_ids(self, tx: sa.Connection, uuids: Iterable[str]) -> dict[str, int]:
        """Ids by uuid of the providers that exist; what ``tx`` read is remembered."""
        wanted = list(uuids)
        missing = [uuid for uuid in wanted if uuid not in self._ids]
        if missing:
            rows = tx.execute(statements.PROVIDER_IDS, {"uuids": missing}).all()
            with self._lock:
                self._ids.update({row.uuid: row.id for row in rows})
        return {uuid: number for uuid in wanted if (number := self._ids.get(uuid)) is not None}

    def _forget(self, uuids: Iterable[str]) -> None:
        with self._lock:
            for uuid in uuids:
                self._ids.pop(uuid, None)

    def _explain(self, changes: Sequence[AllocationChange], inventories: Sequence[InventoryChange] = ()) -> None:
        """Raise why the change was refused; return when it would fit by what is read now."""
        uuids = sorted({uuid for each in changes for uuid in each.resources})
        reshaped = {each.provider: each.items for each in inventories}
        with self._database.read() as tx:
            rows = tx.execute(statements.PROVIDER_IDS, {"uuids": uuids}).all()
            numbers = {row.uuid: row.id for row in rows}
            found = self._inventory_rows(tx, numbers.values())
            self._classes.numbers(
                tx, {name for each in changes for wanted in each.resources.values() for name in wanted}
            )
            held = tx.execute(statements.HELD_BY, {"consumers": [each.consumer for each in changes]}).all()
            names = self._classes.names(tx, {row.resource_class_id for row in held})
        own: dict[tuple[str, str], int] = {}
        for row in held:
            key = (row.uuid, names[row.resource_class_id])
            own[key] = own.get(key, 0) + row.used
        present: dict[tuple[str, str], tuple[InventoryItem, int]] = {}
        for uuid, number in numbers.items():
            used = {item.resource_class: amount for item, amount in found.get(number, ())}
            items = reshaped.get(uuid) or [item for item, _ in found.get(number, ())]
            for item in items:
                present[uuid, item.resource_class] = (item, used.get(item.resource_class, 0))
        for reason in refusals(changes, present, own, self._step_rule):
            raise reason


def _take_turn(tx: sa.Connection, number: int, plan: AtProvider, unlimited: str = "") -> None:
    """Write the provider's row, so that no other transaction changes its counters or residents.

    :param unlimited: a project that is taken to have no limits.
    :raises ResidentsChanged: its residents have another version than was seen.
    """
    key: dict[str, Any] = {"of_provider": number, "of_uuid": plan.uuid}
    if unlimited:
        key["of_project"] = unlimited
    if plan.seen is None:
        taken = tx.execute(statements.BUMP_GENERATION, key).rowcount == 1
    else:
        taken = tx.execute(statements.BUMP_GENERATION_IF_SEEN, {**key, "of_residents": plan.seen}).rowcount == 1
    if taken:
        return
    if unlimited:
        raise _LimitedError
    # A provider that was deleted and created again has another id under its uuid.
    if plan.seen is None or tx.execute(statements.PROVIDER_ID, {"of_uuid": plan.uuid}).scalar() != number:
        raise StaleError
    raise errors.ResidentsChanged(
        f"The instances of node {plan.uuid} changed since the filters judged them. Ask the filters again.",
        provider=plan.uuid,
    )


def _counted_before(rows: Mapping[str, Any], held: Sequence[Any]) -> dict[str, CountedBefore]:
    """What the limits counted of changed consumers, by consumer."""
    return {
        uuid: counted_before(row, ({each.resource_class_id: each.used} for each in held if each.consumer_id == uuid))
        for uuid, row in rows.items()
    }


def _conflict(change: AllocationChange, row: Any) -> GenerationConflict:
    expected = change.expected if isinstance(change.expected, int) else None
    present = None if row is None else row.consumer_generation
    if change.expected is Expect.NOTHING:
        message = f"Consumer {change.consumer} holds a claim of another request already; release it first."
    else:
        state = "holds nothing" if row is None else f"has generation {present}"
        message = (
            f"Consumer {change.consumer} {state}, and generation {expected} was expected: another request changed it. Read it "
            "again, then decide again."
        )
    return GenerationConflict(message, consumer=change.consumer, expected=expected, present=present)


def record_claim(tx: sa.Connection, change: AllocationChange, outcome: ClaimOutcome) -> None:
    """Record what a consumer holds from now on. The event names providers, so it is shown to readers of the system only."""
    what = "change" if change.resources else "delete"
    held = {uuid: dict(amounts) for uuid, amounts in change.resources.items()}
    record(tx, JournalEvent(f"claim.{what}", f"claim/{change.consumer}", outcome.consumer_generation, {"holds": held}))


def new_consumer(change: AllocationChange) -> dict[str, Any]:
    """Returns the parameters that insert the row of a new consumer, but for its lifetime."""
    return {
        "uuid": change.consumer,
        "consumer_type": change.consumer_type or "",
        "project_id": change.project or "",
        "user_id": change.user or "",
        "request_id": change.request_id,
        # Alone, a consumer counts with itself.
        "counts_with": None if change.counts_with == change.consumer else change.counts_with,
    }
