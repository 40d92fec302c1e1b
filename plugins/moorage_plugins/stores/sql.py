# SPDX-License-Identifier: Apache-2.0
"""The allocation store on a database: the conditional claim of the design.

One transaction: the consumer's row; then, for each provider in the order of its id, a raise of its generation (which makes the
claimers of that provider take turns) and ONE conditional statement that takes all its classes; then the allocations in one
statement. Room is taken only where it is: no read decides anything, so no isolation level is relied on. When the rowcount says
that something was not taken, the transaction is rolled back and the reason is read afterwards.

The consumer's row comes first, in claims and in releases, because it is what a repetition of the same claim meets: the
repetition waits there, before it takes any room or holds up anybody at a provider, and then learns that it is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_db import exception as db_errors
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationItem,
    AllocationStore,
    Auditable,
    Capability,
    ClaimOutcome,
    ClaimRequest,
    Companion,
    Drift,
    HasChildren,
    ProviderUsage,
    ResourceProvider,
)
from moorage.db import Duplicate
from moorage_plugins.stores import statements
from moorage_plugins.stores.checks import check_providers, check_request, refusal
from moorage_plugins.stores.providers import ensure
from moorage_plugins.stores.sql_catalogue import SqlCatalogue
from moorage_plugins.stores.sql_names import SqlNames
from moorage_plugins.stores.sql_part import shown
from moorage_plugins.stores.tables import allocations, resource_providers

__all__ = ["SqlStore"]

LOG = logging.getLogger(__name__)
#: How often providers are brought to their state in a transaction of its own when others write the same unique values.
_ENSURE_TRIES = 3


class _RefusedError(Exception):
    """Inside of a claim: not everything was taken; the transaction must be undone."""


class _TakenError(Exception):
    """Inside of a claim: there is such a consumer already."""


class _StaleError(Exception):
    """Inside of a claim: the remembered id of a provider is not its id any more."""


class SqlStore(SqlCatalogue, SqlNames, AllocationStore, Auditable):
    """Claims in SQLite, PostgreSQL or MariaDB; several hosts may use it at once.

    A claim of one provider costs four statements and a commit, one of k providers 2 + 2k, however many consumers they have.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = frozenset({Capability.SHARED, Capability.DURABLE, Capability.SHARED_TRANSACTION})

    # -- providers ------------------------------------------------------------------------------------------------

    @override
    def ensure_providers(self, providers: Sequence[ResourceProvider], transaction: Any | None = None) -> int:
        check_providers(providers)
        if transaction is not None:
            return ensure(transaction, self._classes, providers)
        for _ in range(_ENSURE_TRIES - 1):
            try:
                return self._database.run(lambda tx: ensure(tx, self._classes, providers))
            except Duplicate as error:
                LOG.debug("Others write the same providers (%s); looking again.", error)
        return self._database.run(lambda tx: ensure(tx, self._classes, providers))

    @override
    def delete_provider(self, uuid: str, transaction: Any | None = None) -> bool:
        def work(tx: sa.Connection) -> bool:
            number = tx.execute(statements.PROVIDER_ID, {"of_uuid": uuid}).scalar_one_or_none()
            # The turn first: whoever claims waits until this has ended, and then finds no provider.
            if number is None or tx.execute(statements.TURN, {"of_provider": number, "of_uuid": uuid}).rowcount != 1:
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

        return work(transaction) if transaction is not None else self._database.run(work)

    # -- claims ---------------------------------------------------------------------------------------------------

    @override
    def claim(self, request: ClaimRequest, companion: Companion | None = None) -> ClaimOutcome:
        check_request(request)
        for _ in range(self._attempts):
            try:
                return self._database.run(lambda tx: self._claim(tx, request, companion))
            except _TakenError:
                earlier = self._earlier(request)
                if earlier is not None:
                    return earlier
            except _StaleError:
                with self._lock:
                    for uuid in request.resources:
                        self._ids.pop(uuid, None)
            except _RefusedError:
                self._explain(request)
        raise errors.StoreBusy(
            f"The claim of {request.consumer} was refused {self._attempts} times, yet seemed to fit each time it was "
            "looked at; try again."
        )

    def _claim(self, tx: sa.Connection, request: ClaimRequest, companion: Companion | None) -> ClaimOutcome:
        try:
            tx.execute(
                statements.ADD_CONSUMER,
                {
                    "uuid": request.consumer,
                    "consumer_type": request.consumer_type,
                    "project_id": request.project,
                    "user_id": request.user,
                    "request_id": request.request_id,
                },
            )
        except db_errors.DBDuplicateEntry as error:
            raise _TakenError from error
        providers = self._provider_ids(tx, request.resources)
        rows: list[dict[str, Any]] = []
        items: list[AllocationItem] = []
        for number, uuid in sorted((number, uuid) for uuid, number in providers.items()):
            wanted = sorted(request.resources[uuid].items())
            numbered = [(self._classes.number(tx, name), amount) for name, amount in wanted]
            self._take(tx, number, uuid, numbered)
            rows += [
                {
                    "consumer_id": request.consumer,
                    "resource_provider_id": number,
                    "resource_class_id": of_class,
                    "used": amount,
                }
                for of_class, amount in numbered
            ]
            items += [AllocationItem(uuid, request.consumer, name, amount) for name, amount in wanted]
        tx.execute(statements.ADD_ALLOCATIONS, rows)
        if companion is not None:
            companion(tx)
        return ClaimOutcome(request.consumer, 1, tuple(items))

    def _take(self, tx: sa.Connection, number: int, uuid: str, wanted: Sequence[tuple[int, int]]) -> None:
        if tx.execute(statements.TURN, {"of_provider": number, "of_uuid": uuid}).rowcount != 1:
            raise _StaleError
        taken = tx.execute(statements.take(len(wanted), self._step_rule), _values(number, wanted)).rowcount
        if taken != len(wanted):
            raise _RefusedError

    def _provider_ids(self, tx: sa.Connection, uuids: Iterable[str]) -> dict[str, int]:
        """Ids by uuid. ``tx`` must not have created providers: what it read is remembered.

        :raises NotFound: there is no such provider.
        """
        known = self._ids
        missing = [uuid for uuid in uuids if uuid not in known]
        if missing:
            rows = tx.execute(statements.PROVIDER_IDS, {"uuids": missing}).all()
            with self._lock:
                known.update({row.uuid: row.id for row in rows})
        found = {uuid: known.get(uuid) for uuid in uuids}
        for uuid, number in found.items():
            if number is None:
                raise errors.NotFound(f"There is no resource provider {uuid}.", provider=uuid)
        return {uuid: number for uuid, number in found.items() if number is not None}

    def _earlier(self, request: ClaimRequest) -> ClaimOutcome | None:
        """What an earlier try of the same request took; None when there is no such consumer any more.

        :raises Conflict: the consumer's claim is of another request.
        """
        with self._database.read() as tx:
            row = tx.execute(statements.KNOWN_CONSUMER, {"of_consumer": request.consumer}).first()
            if row is None:
                return None
            if request.request_id is not None and row.request_id == request.request_id:
                held = tx.execute(statements.HELD, {"of_consumer": request.consumer}).all()
                names = self._classes.names(tx, {each.resource_class_id for each in held})
                items = [
                    AllocationItem(each.provider, request.consumer, names[each.resource_class_id], each.used)
                    for each in held
                ]
                return ClaimOutcome(request.consumer, row.generation, tuple(items), repeated=True)
        raise errors.Conflict(
            f"Consumer {request.consumer} holds a claim of another request already; release it first.",
            consumer=request.consumer,
        )

    def _explain(self, request: ClaimRequest) -> None:
        """Raise why the claim was refused; return when it would fit by what is read now."""
        with self._database.read() as tx:
            rows = tx.execute(statements.PROVIDER_IDS, {"uuids": list(request.resources)}).all()
            numbers = {row.uuid: row.id for row in rows}
            found = self._inventory_rows(tx, numbers.values())
            self._classes.numbers(tx, {name for wanted in request.resources.values() for name in wanted})
        for uuid, number in sorted(numbers.items(), key=lambda pair: pair[1]):
            present = {item.resource_class: (item, used) for item, used in found.get(number, ())}
            for name, amount in sorted(request.resources[uuid].items()):
                item, used = present.get(name, (None, 0))
                reason = refusal(uuid, name, amount, item, used, self._step_rule)
                if reason is not None:
                    raise reason

    @override
    def release(self, consumer: str, transaction: Any | None = None) -> bool:
        if transaction is not None:
            return self._release(transaction, consumer)
        return self._database.run(lambda tx: self._release(tx, consumer))

    def _release(self, tx: sa.Connection, consumer: str) -> bool:
        # The consumer's row first: of two that release at once the second waits here, and then finds nothing.
        if tx.execute(statements.DROP_CONSUMER, {"of_consumer": consumer}).rowcount != 1:
            return False
        held: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for row in tx.execute(statements.HELD, {"of_consumer": consumer}).all():
            held.setdefault((row.resource_provider_id, row.provider), []).append((row.resource_class_id, row.used))
        for (number, uuid), amounts in held.items():
            tx.execute(statements.TURN, {"of_provider": number, "of_uuid": uuid})
            tx.execute(statements.give_back(len(amounts)), _values(number, amounts))
        tx.execute(statements.DROP_ALLOCATIONS, {"of_consumer": consumer})
        return True

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
        """The condition that a row comes after the key, in a form of which every database uses the index."""
        consumer, provider, name = after
        number = tx.execute(statements.PROVIDER_ID, {"of_uuid": provider}).scalar_one_or_none() or 0
        of_class = self._classes.number(tx, name)
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
        query = sa.select(*statements.provider_columns).order_by(resource_providers.c.uuid).limit(limit)
        query = query.where(resource_providers.c.uuid > after)
        if providers is not None:
            query = query.where(resource_providers.c.uuid.in_(providers))
        with self._database.read() as tx:
            found = tx.execute(query).all()
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
            if number is None or tx.execute(statements.TURN, turn).rowcount != 1:
                return False
            tx.execute(statements.RECOUNT, {"of_provider": number})
            return True

        return self._database.run(work)


def _values(number: int, amounts: Sequence[tuple[int, int]]) -> Mapping[str, int]:
    """The parameters of ``take`` and ``give_back``."""
    values = {"of_provider": number}
    for position, (of_class, amount) in enumerate(amounts):
        values[f"class_{position}"], values[f"amount_{position}"] = of_class, amount
    return values
