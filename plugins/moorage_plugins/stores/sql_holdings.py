# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that reads what consumers hold, renews it, and drops it: on request, or when its time is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import (
    AllocationItem,
    AllocationLedger,
    ClaimRelease,
    Consumer,
    ConsumerHolding,
    ProviderHolding,
    UsageTotal,
)
from moorage.context import acting_for
from moorage.db import MICROSECONDS, JournalEvent, execute_set, record
from moorage_plugins.stores import capacity_statements, statements
from moorage_plugins.stores.quota_enforcement import CountedBefore
from moorage_plugins.stores.sql_part import SqlPart, shown

__all__ = ["SqlHoldings", "counted_before", "microseconds", "parameters"]


class SqlHoldings(SqlPart, AllocationLedger):
    """What consumers hold."""

    # -- reading --------------------------------------------------------------------------------------------------

    @override
    def consumer(self, uuid: str) -> ConsumerHolding | None:
        with self._database.read() as tx:
            row = tx.execute(statements.CONSUMER, {"of_consumer": uuid}).first()
            if row is None:
                return None
            held = tx.execute(statements.HELD_BY, {"consumers": [uuid]}).all()
            names = self._classes.names(tx, {each.resource_class_id for each in held})
        return ConsumerHolding(
            _consumer(row),
            tuple(AllocationItem(each.uuid, uuid, names[each.resource_class_id], each.used) for each in held),
            {each.uuid: shown(each) for each in held},
        )

    @override
    def consumers(self, *, after: str = "", limit: int = 1000) -> list[Consumer]:
        with self._database.read() as tx:
            return [
                _consumer(row)
                for row in tx.execute(statements.CONSUMER_PAGE, {"after": after, "of_limit": limit}).all()
            ]

    @override
    def provider_holding(self, uuid: str) -> ProviderHolding:
        with self._database.read() as tx:
            row = self._provider_row(tx, uuid)
            held = tx.execute(statements.HELD_OF, {"of_provider": row.id}).all()
            names = self._classes.names(tx, {each.resource_class_id for each in held})
        return ProviderHolding(
            shown(row),
            tuple(AllocationItem(uuid, each.consumer_uuid, names[each.resource_class_id], each.used) for each in held),
            {each.consumer_uuid: _consumer(each) for each in held},
        )

    @override
    def project_usages(
        self, project: str, *, user: str | None = None, consumer_type: str | None = None
    ) -> list[UsageTotal]:
        with self._database.read() as tx:
            counts, sums = (
                tx.execute(query).all() for query in statements.project_usages(project, user, consumer_type)
            )
            names = self._classes.names(tx, {row.resource_class_id for row in sums})
        totals: dict[str, dict[str, int]] = {}
        for row in sums:
            totals.setdefault(row.consumer_type, {})[names[row.resource_class_id]] = int(row.used)
        return [UsageTotal(row.consumer_type, row.consumers, totals.get(row.consumer_type, {})) for row in counts]

    # -- leases ---------------------------------------------------------------------------------------------------

    @override
    def renew(self, consumer: str, lifetime: float | None) -> bool:
        values = {"of_consumer": consumer, "new_lifetime": microseconds(lifetime)}
        return self._database.run(lambda tx: tx.execute(statements.RENEW, values).rowcount == 1)

    @override
    def expire(self, limit: int = 100) -> list[str]:
        with self._database.read() as tx:
            overdue = list(tx.execute(statements.OVERDUE, {"of_limit": limit}).scalars())
        return [
            uuid
            for uuid in overdue
            if self._database.run(lambda tx, uuid=uuid: self._drop(tx, uuid, overdue=True))  # type: ignore[misc]
        ]

    @override
    def has_expired(self) -> bool:
        with self._database.read() as tx:
            return tx.execute(statements.OVERDUE, {"of_limit": 1}).first() is not None

    def _drop(
        self,
        tx: sa.Connection,
        consumer: str,
        *,
        overdue: bool = False,
        residents: Sequence[str] = (),
    ) -> bool:
        """Give back all that a consumer holds; False when it holds nothing.

        :param overdue: only if its lifetime is over.
        :param residents: nodes that the consumer leaves, whether it holds anything of them or not.
        """
        # The consumer's row first: of two releases at once the second waits here, and then finds nothing.
        row = _drop_row(tx, consumer, overdue)
        if row is not None:
            record(tx, JournalEvent("claim.delete", f"claim/{consumer}", 0))
        held = self._give_back(tx, consumer, row) if row is not None else set()
        for uuid in sorted(set(residents) - held):
            tx.execute(statements.LEAVE, {"of_uuid": uuid})
        return row is not None

    def _drop_many(self, tx: sa.Connection, releases: Sequence[ClaimRelease]) -> None:
        """Does for several consumers what :meth:`_drop` does for each, in statements for sets and in the same order of locks."""
        contexts = {each.consumer: each.context for each in releases}
        dropped = tx.execute(statements.DROP_CONSUMERS_RETURNING, {"consumers": sorted(contexts)}).all()
        rows = {row.consumer_uuid: row for row in dropped}
        for consumer in sorted(rows):
            with acting_for(contexts[consumer]):
                record(tx, JournalEvent("claim.delete", f"claim/{consumer}", 0))
        left = self._give_back_many(tx, rows) if rows else set()
        for uuid in sorted({node for each in releases for node in each.residents} - left):
            tx.execute(statements.LEAVE, {"of_uuid": uuid})

    def _give_back_many(self, tx: sa.Connection, rows: Mapping[str, Any]) -> set[str]:
        """Gives back all that some consumers hold, and returns the providers of their allocations.

        :param rows: of the consumers before they were deleted.
        """
        consumers = sorted(rows)
        # In the order of the providers.
        amounts: dict[tuple[int, int], int] = {}
        providers: dict[int, str] = {}
        held: dict[str, dict[int, dict[int, int]]] = {}
        for each in tx.execute(statements.HELD_BY, {"consumers": consumers}).all():
            providers[each.id] = each.uuid
            key = each.id, each.resource_class_id
            amounts[key] = amounts.get(key, 0) + each.used
            held.setdefault(each.consumer_id, {}).setdefault(each.id, {})[each.resource_class_id] = each.used
        if providers:
            if tx.dialect.name != "sqlite" and len(providers) > 1:
                # A set statement locks in no order.
                tx.execute(statements.LOCK_PROVIDERS, {"numbers": sorted(providers)})
            turns = [{"of_provider": number, "of_uuid": uuid} for number, uuid in providers.items()]
            execute_set(tx, statements.GIVERS_TURN, turns)
            given = [parameters(number, {of_class: amount}) for (number, of_class), amount in amounts.items()]
            execute_set(tx, capacity_statements.release(1), given)
        tx.execute(statements.DROP_ALLOCATIONS_OF, {"consumers": consumers})
        counted = {uuid: counted_before(row, held.get(uuid, {}).values()) for uuid, row in rows.items() if row.counted}
        self._quotas.note(tx, (), counted, ())
        return set(providers.values())

    def _give_back(self, tx: sa.Connection, consumer: str, row: Any = None) -> set[str]:
        """Gives back all that a consumer holds, and returns the uuids of the providers that it held something of.

        :param row: of the consumer before it was deleted.
        """
        held: dict[tuple[int, str], dict[int, int]] = {}
        for each in tx.execute(statements.HELD_BY, {"consumers": [consumer]}).all():
            held.setdefault((each.id, each.uuid), {})[each.resource_class_id] = each.used
        for (number, uuid), amounts in held.items():
            tx.execute(statements.GIVERS_TURN, {"of_provider": number, "of_uuid": uuid})
            tx.execute(capacity_statements.release(len(amounts)), parameters(number, amounts))
        tx.execute(statements.DROP_ALLOCATIONS, {"of_consumer": consumer})
        if row is not None and row.counted:
            self._quotas.note(tx, (), {consumer: counted_before(row, held.values())}, ())
        return {uuid for _, uuid in held}


def _consumer(row: Any) -> Consumer:
    return Consumer(
        row.consumer_uuid,
        row.consumer_generation,
        row.project_id,
        row.user_id,
        row.consumer_type,
        row.consumer_updated_at,
        row.expires_at,
    )


def _drop_row(tx: sa.Connection, consumer: str, overdue: bool) -> Any:
    """Delete a consumer's row; the row as it was, or None if there is none."""
    key = {"of_consumer": consumer}
    if tx.dialect.delete_returning:
        drop = statements.DROP_OVERDUE_RETURNING if overdue else statements.DROP_CONSUMER_RETURNING
        return tx.execute(drop, key).first()
    if tx.execute(statements.HOLD_OVERDUE if overdue else statements.HOLD_CONSUMER, key).rowcount != 1:
        return None
    row = tx.execute(statements.CONSUMER, key).one()
    tx.execute(statements.DROP_CONSUMER, key)
    return row


def counted_before(row: Any, held: Iterable[Mapping[int, int]]) -> CountedBefore:
    """What the limits count of a consumer.

    :param held: what it holds of each provider, by the number of the class.
    """
    amounts: dict[int, int] = {}
    for of_provider in held:
        for of_class, amount in of_provider.items():
            amounts[of_class] = amounts.get(of_class, 0) + amount
    return CountedBefore(row.project_id, row.counts_with or row.consumer_uuid, amounts)


def microseconds(lifetime: float | None) -> int | None:
    """Seconds in microseconds; None, which is for ever, stays None."""
    return None if lifetime is None else int(lifetime * MICROSECONDS)


def parameters(number: int, amounts: Mapping[int, int]) -> Mapping[str, int]:
    """Returns the parameters of ``take`` and ``release``."""
    values = {"of_provider": number}
    for position, (of_class, amount) in enumerate(amounts.items()):
        values[f"class_{position}"], values[f"amount_{position}"] = of_class, amount
    return values
