# SPDX-License-Identifier: Apache-2.0
"""The allocation store on a database: all parts together, with the reading of whole stores and the audit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationItem,
    ClaimOutcome,
    ClaimRelease,
    ClaimRequest,
    Companion,
    Drift,
    FullStore,
    HasChildren,
    Merge,
    ProviderUsage,
    ResourceProvider,
    StoreCapability,
    context_of,
)
from moorage.clock import Clock
from moorage.db import Database, Duplicate
from moorage_plugins.stores import statements
from moorage_plugins.stores.checks import as_change, check_changes, check_providers, check_request
from moorage_plugins.stores.combiner import Combiner, Member, is_combinable
from moorage_plugins.stores.providers import DeletedMeanwhile, ensure
from moorage_plugins.stores.sql_candidates import SqlCandidates
from moorage_plugins.stores.sql_catalogue import SqlCatalogue
from moorage_plugins.stores.sql_claim_sets import SqlClaimSets
from moorage_plugins.stores.sql_names import SqlNames
from moorage_plugins.stores.sql_part import no_such_provider, shown
from moorage_plugins.stores.sql_pools import SqlPools
from moorage_plugins.stores.sql_quota_limits import SqlQuotas
from moorage_plugins.stores.sql_trees import SqlTrees
from moorage_plugins.stores.tables import allocations, resource_providers

__all__ = ["SqlStore"]

LOG = logging.getLogger(__name__)
#: How often providers are brought to their state in a transaction of its own when others write the same unique values.
_ENSURE_TRIES = 3
#: How many transactions of claims a process runs at a time on a server: one can compute while another one waits for the disk.
_LANES = 2

_PROVIDERS = (
    sa.select(*statements.provider_columns)
    .where(resource_providers.c.uuid > sa.bindparam("after", type_=sa.String))
    .order_by(resource_providers.c.uuid)
    .limit(sa.bindparam("of_limit", type_=sa.Integer))
)
_PROVIDERS_OF = _PROVIDERS.where(resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True)))


class SqlStore(SqlCatalogue, SqlNames, SqlClaimSets, SqlPools, SqlTrees, SqlQuotas, SqlCandidates, FullStore):
    """Claims in SQLite, PostgreSQL or MariaDB; several hosts may use it at once.

    A claim of one provider costs four statements and a commit, one of k providers 2 + 2k, however many consumers they have. Claims
    of new consumers that come at once share them (:mod:`moorage_plugins.stores.combiner`).
    """

    api_version: ClassVar[tuple[int, int]] = (2, 0)
    capabilities = frozenset({StoreCapability.SHARED, StoreCapability.DURABLE, StoreCapability.SHARED_TRANSACTION})

    def __init__(self, *, conf: Any, database: Database, clock: Clock) -> None:
        super().__init__(conf=conf, database=database, clock=clock)
        self.claims_together = largest = conf.allocation_sql.claims_per_transaction
        self.lanes = 1 if database.dialect == "sqlite" else _LANES
        combiner = Combiner(self._alone, self._together, self._look_up, largest, database.lock_timeout, self.lanes)
        self._combiner = combiner if largest > 1 else None

    # -- providers ------------------------------------------------------------------------------------------------

    @override
    def ensure_providers(self, providers: Sequence[ResourceProvider], transaction: Any | None = None) -> int:
        return self._ensure(providers, None, transaction)

    @override
    def merge_providers(
        self, providers: Sequence[ResourceProvider], merge: Merge, transaction: Any | None = None
    ) -> int:
        return self._ensure(providers, merge, transaction)

    def _ensure(self, providers: Sequence[ResourceProvider], merge: Merge | None, transaction: Any | None) -> int:
        check_providers(providers)
        if transaction is not None:
            return ensure(transaction, self._classes, providers, merge)
        for _ in range(_ENSURE_TRIES - 1):
            try:
                return self._database.run(lambda tx: ensure(tx, self._classes, providers, merge))
            except (Duplicate, DeletedMeanwhile) as error:
                LOG.debug("Others write the same providers (%s); looking again.", error)
        return self._database.run(lambda tx: ensure(tx, self._classes, providers, merge))

    @override
    def delete_provider(self, uuid: str, transaction: Any | None = None) -> bool:
        def work(tx: sa.Connection) -> bool:
            number = tx.execute(statements.PROVIDER_ID, {"of_uuid": uuid}).scalar_one_or_none()
            # The row's lock first: a claim waits until this transaction has ended, and then finds no provider.
            if (
                number is None
                or tx.execute(statements.BUMP_GENERATION, {"of_provider": number, "of_uuid": uuid}).rowcount != 1
            ):
                return False
            held = tx.execute(statements.COUNT_HELD, {"of_provider": number}).scalar_one()
            if held:
                raise errors.InUse(
                    f"Provider {uuid} has {held} allocations; release them first.",
                    provider=uuid,
                    holder=f"{held} allocations",
                )
            children = tx.execute(statements.HAS_CHILDREN, {"of_uuid": uuid}).scalar_one()
            if children:
                raise HasChildren(
                    f"Provider {uuid} is the parent of {children} others; remove or move those first.",
                    provider=uuid,
                    holder=f"{children} children",
                )
            for drop in (statements.DROP_INVENTORIES, statements.DROP_PROVIDER_TRAITS):
                tx.execute(drop, {"of_provider": number})
            tx.execute(statements.DROP_PROVIDER_AGGREGATES, {"of_provider": number})
            tx.execute(statements.DROP_PROVIDER, {"of_provider": number})
            return True

        try:
            return work(transaction) if transaction is not None else self._database.run(work)
        finally:
            self._forget([uuid])

    # -- claims ---------------------------------------------------------------------------------------------------

    @override
    def replace(
        self, changes: Sequence[AllocationChange], companion: Companion | None = None
    ) -> tuple[ClaimOutcome, ...]:
        if self._combiner is not None and len(changes) == 1 and is_combinable(changes[0], companion):
            check_changes(changes)
            return (self._combiner.claim(changes[0], companion),)
        return super().replace(changes, companion)

    @override
    def claim(self, request: ClaimRequest, companion: Companion | None = None) -> ClaimOutcome:
        check_request(request)
        change = as_change(request)
        if self._combiner is not None and is_combinable(change, companion):
            return self._combiner.claim(change, companion)
        return self._persistently([change], (), companion)[0]

    @override
    def claim_many(self, claims: Sequence[tuple[ClaimRequest, Companion | None]]) -> list[ClaimOutcome | BaseException]:
        changes = [(as_change(request), companion) for request, companion in claims]
        if (
            self._combiner is None
            or len({change.consumer for change, _ in changes}) < len(changes)
            or not all(is_combinable(change, companion) for change, companion in changes)
        ):
            return super().claim_many(claims)
        try:
            for request, _ in claims:
                check_request(request)
        except errors.InvalidInput:
            # Alone, each learns what is wrong with it.
            return super().claim_many(claims)
        return self._combiner.claim_many([Member(*each, context_of(each[1])) for each in changes])

    @override
    def release(self, consumer: str, transaction: Any | None = None, *, residents: Sequence[str] = ()) -> bool:
        def work(tx: sa.Connection) -> bool:
            return self._drop(tx, consumer, residents=residents)

        return work(transaction) if transaction is not None else self._database.run(work)

    @override
    def release_many(self, releases: Sequence[ClaimRelease], transaction: Any | None = None) -> None:
        if transaction is None:
            self._database.run(functools.partial(self.release_many, releases))
        elif len(releases) > 1 and transaction.dialect.delete_returning:
            self._drop_many(transaction, releases)
        else:
            super().release_many(releases, transaction)

    @override
    def residents(self, provider: str, transaction: Any | None = None) -> int:
        if transaction is None:
            with self._database.read() as tx:
                return self.residents(provider, tx)
        found: int | None = transaction.execute(statements.RESIDENTS, {"of_uuid": provider}).scalar()
        if found is None:
            raise no_such_provider(provider)
        return found

    # -- reading --------------------------------------------------------------------------------------------------

    @override
    def allocations(
        self,
        *,
        consumers: Sequence[str] | None = None,
        providers: Sequence[str] | None = None,
        after: tuple[str, str, str] | None = None,
        limit: int = 1000,
    ) -> list[AllocationItem]:
        query = statements.PAGE.limit(limit)
        if consumers is not None:
            query = query.where(allocations.c.consumer_id.in_(consumers))
        if providers is not None:
            query = query.where(resource_providers.c.uuid.in_(providers))
        with self._database.read() as tx:
            if after is not None:
                query = query.where(self._beyond(tx, after))
            rows = tx.execute(query).all()
            names = self._classes.names(tx, {row.resource_class_id for row in rows})
        return [
            AllocationItem(provider, consumer, names[of_class], used) for consumer, provider, of_class, used in rows
        ]

    def _beyond(self, tx: sa.Connection, after: tuple[str, str, str]) -> sa.ColumnElement[bool]:
        """Returns the condition that a row comes after the key, in a form for which every database uses the index."""
        consumer, provider, name = after
        number = tx.execute(statements.PROVIDER_ID, {"of_uuid": provider}).scalar_one_or_none() or 0
        of_class = self._classes.numbers(tx, [name])[name]
        columns = allocations.c
        return sa.and_(
            columns.consumer_id >= consumer,
            sa.or_(
                columns.consumer_id > consumer,
                columns.resource_provider_id > number,
                sa.and_(columns.resource_provider_id == number, columns.resource_class_id > of_class),
            ),
        )

    @override
    def usages(
        self, *, after: str = "", limit: int = 1000, providers: Sequence[str] | None = None
    ) -> list[ProviderUsage]:
        values = {"after": after, "of_limit": limit}
        with self._database.read() as tx:
            if providers is None:
                found = tx.execute(_PROVIDERS, values).all()
            else:
                found = tx.execute(_PROVIDERS_OF, {**values, "uuids": list(providers)}).all()
            rows = self._inventory_rows(tx, [row.id for row in found])
        return [
            ProviderUsage(
                shown(row, rows.get(row.id, ())), {item.resource_class: used for item, used in rows.get(row.id, ())}
            )
            for row in found
        ]

    # -- audit ----------------------------------------------------------------------------------------------------

    @override
    def drift(self) -> list[Drift]:
        with self._database.read() as tx:
            rows = tx.execute(statements.DRIFT).all()
            names = self._classes.names(tx, {row.resource_class_id for row in rows})
        found = [Drift(row.provider, names[row.resource_class_id], row.counted, int(row.held)) for row in rows]
        return sorted(found, key=lambda each: (each.provider, each.resource_class))

    @override
    def recount(self, provider: str) -> bool:
        def work(tx: sa.Connection) -> bool:
            number = tx.execute(statements.PROVIDER_ID, {"of_uuid": provider}).scalar_one_or_none()
            turn = {"of_provider": number, "of_uuid": provider}
            if number is None or tx.execute(statements.BUMP_GENERATION, turn).rowcount != 1:
                return False
            tx.execute(statements.RECOUNT, {"of_provider": number})
            return True

        return self._database.run(work)
