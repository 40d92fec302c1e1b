# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that edits providers one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    KEEP,
    Keep,
    ProviderFilter,
    ProviderUsage,
    ResourceProvider,
)
from moorage.db import Duplicate, now
from moorage_plugins.stores import providers, sql_filters, statements
from moorage_plugins.stores.checks import check_aggregates, check_classes, check_provider_name, check_providers
from moorage_plugins.stores.edits import Edit, InventoryEdits
from moorage_plugins.stores.sql_names import check_traits, ensure_traits, hold_traits
from moorage_plugins.stores.sql_part import SqlPart, shown
from moorage_plugins.stores.tables import provider_aggregates, provider_traits, resource_providers

__all__ = ["SqlCatalogue", "filter_conditions"]

_TRIES = 3
_TRAITS_OF = (
    sa.select(provider_traits.c.trait)
    .where(provider_traits.c.resource_provider_id == sa.bindparam("of_provider"))
    .order_by(provider_traits.c.trait)
)
_AGGREGATES_OF = (
    sa.select(provider_aggregates.c.aggregate_uuid)
    .where(provider_aggregates.c.resource_provider_id == sa.bindparam("of_provider"))
    .order_by(provider_aggregates.c.aggregate_uuid)
)
_TRAITS_OF_MANY = (
    sa.select(resource_providers.c.uuid, provider_traits.c.trait)
    .join_from(resource_providers, provider_traits, provider_traits.c.resource_provider_id == resource_providers.c.id)
    .where(resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True)))
)
_ADD_TRAITS = sa.insert(provider_traits)
_ADD_AGGREGATES = sa.insert(provider_aggregates)


class SqlCatalogue(SqlPart, InventoryEdits):
    """Providers, inventories, traits of providers, aggregates."""

    @override
    def create_provider(self, provider: ResourceProvider) -> ResourceProvider:
        check_providers([provider])

        def work(tx: sa.Connection) -> ResourceProvider:
            providers.add_provider(tx, self._classes, provider)
            return self._usage(tx, self._provider_row(tx, provider.uuid)).provider

        for _ in range(_TRIES):
            try:
                return self._database.run(work)
            except Duplicate:
                self._explain_taken(provider)
        raise errors.StoreBusy(f"Others create and delete provider {provider.uuid} all the time; try again later.")

    def _explain_taken(self, provider: ResourceProvider) -> None:
        """Raise which is taken; return when neither is any more."""
        columns = resource_providers.c
        query = sa.select(columns.uuid, columns.name).where(
            sa.or_(columns.uuid == provider.uuid, columns.name == provider.name)
        )
        with self._database.read() as tx:
            found = tx.execute(query).all()
        for row in found:
            if row.uuid == provider.uuid:
                raise errors.AlreadyExists(
                    f"There is a provider {provider.uuid} already.", field="uuid", provider=provider.uuid
                )
        if found:
            raise _name_taken(provider.name)

    @override
    def provider(self, uuid: str) -> ResourceProvider:
        with self._database.read() as tx:
            return shown(self._provider_row(tx, uuid))

    @override
    def find_providers(
        self, query: ProviderFilter | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ResourceProvider]:
        columns = resource_providers.c
        select = sa.select(*statements.provider_columns).order_by(columns.uuid)
        if after:
            select = select.where(columns.uuid > after)
        if limit is not None:
            select = select.limit(limit)
        with self._database.read() as tx:
            if query is not None:
                select = select.where(*self._conditions(tx, query))
            return [shown(row) for row in tx.execute(select).all()]

    def _conditions(self, tx: sa.Connection, query: ProviderFilter) -> list[sa.ColumnElement[bool]]:
        check_classes(query.resources)
        numbers = self._classes.numbers(tx, query.resources)
        check_traits(tx, query.forbidden.union(*query.required))
        found = filter_conditions(query)
        found += [sql_filters.fits(numbers[name], amount, self._step_rule) for name, amount in query.resources.items()]
        return found

    @override
    def update_provider(
        self,
        uuid: str,
        *,
        name: str | Keep = KEEP,
        can_host: bool | Keep = KEEP,
        parent: str | None | Keep = KEEP,
        reparent: bool = True,
    ) -> ResourceProvider:
        values = {key: value for key, value in (("name", name), ("can_host", can_host)) if value is not KEEP}
        if not isinstance(name, Keep):
            check_provider_name(name)

        def work(tx: sa.Connection) -> ResourceProvider:
            self._provider_row(tx, uuid)
            if not isinstance(parent, Keep):
                providers.move(tx, uuid, parent, reparent=reparent)
            change = sa.update(resource_providers).where(resource_providers.c.uuid == uuid)
            tx.execute(change.values(updated_at=now(), **values))
            return shown(self._provider_row(tx, uuid))

        try:
            return self._database.run(work)
        except Duplicate:
            raise _name_taken(str(name)) from None

    # -- inventories ----------------------------------------------------------------------------------------------

    @override
    def inventories(self, uuid: str) -> ProviderUsage:
        with self._database.read() as tx:
            return self._usage(tx, self._provider_row(tx, uuid))

    @override
    def _edit(self, uuid: str, expected: int | None, edit: Edit) -> ResourceProvider:
        def work(tx: sa.Connection) -> ResourceProvider:
            # The turn first: what is read afterwards stays as it is until the end.
            row = self._turn(tx, uuid, expected)
            self._apply(tx, row.id, uuid, edit)
            return self._usage(tx, row).provider

        return self._database.run(work)

    def _apply(self, tx: sa.Connection, number: int, uuid: str, edit: Edit) -> None:
        present = self._inventory_rows(tx, [number]).get(number, [])
        wanted = edit({item.resource_class: item for item, _ in present})
        numbers = self._classes.numbers(tx, (item.resource_class for item in wanted))
        rows = providers.present_inventories(tx, [number]).get(number, {})
        keyed = {numbers[item.resource_class]: item for item in wanted}
        self._classes.hold(tx, providers.set_inventories(tx, self._classes, number, uuid, keyed, rows))

    # -- traits and aggregates ------------------------------------------------------------------------------------

    @override
    def provider_traits(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        return self._with(uuid, _TRAITS_OF)

    @override
    def traits_of(self, providers: Sequence[str]) -> Mapping[str, frozenset[str]]:
        found: dict[str, set[str]] = {}
        with self._database.read() as tx:
            for uuid, trait in tx.execute(_TRAITS_OF_MANY, {"uuids": list(providers)}):
                found.setdefault(uuid, set()).add(trait)
        # Nodes of one kind have equal traits: one set for all of them.
        known: dict[frozenset[str], frozenset[str]] = {}
        frozen = ((uuid, frozenset(traits)) for uuid, traits in found.items())
        return {uuid: known.setdefault(traits, traits) for uuid, traits in frozen}

    @override
    def set_traits(
        self, uuid: str, traits: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        def work(tx: sa.Connection) -> tuple[ResourceProvider, tuple[str, ...]]:
            row = self._turn(tx, uuid, expected_generation)
            check_traits(tx, traits)
            _bring_traits(tx, row.id, set(tx.execute(_TRAITS_OF, {"of_provider": row.id}).scalars()), traits)
            return shown(row), tuple(sorted(traits))

        return self._database.run(work)

    @override
    def change_traits(
        self, uuid: str, added: Set[str], removed: Set[str] = frozenset(), transaction: Any | None = None
    ) -> bool:
        def work(tx: sa.Connection) -> bool:
            key = {"of_provider": self._provider_row(tx, uuid).id}
            present = set(tx.execute(_TRAITS_OF, key).scalars())
            if added <= present and present.isdisjoint(removed):
                return False
            self._turn(tx, uuid, None)
            ensure_traits(tx, added)
            # No other transaction changes them from here on.
            present = set(tx.execute(_TRAITS_OF, key).scalars())
            _bring_traits(tx, key["of_provider"], present, (present - removed) | added)
            return True

        return work(transaction) if transaction is not None else self._database.run(work)

    @override
    def provider_aggregates(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        return self._with(uuid, _AGGREGATES_OF)

    @override
    def set_aggregates(
        self, uuid: str, aggregates: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        check_aggregates(aggregates)

        def work(tx: sa.Connection) -> tuple[ResourceProvider, tuple[str, ...]]:
            if expected_generation is None:
                tx.execute(statements.TOUCH, {"of_uuid": uuid})
                row = self._provider_row(tx, uuid)
            else:
                row = self._turn(tx, uuid, expected_generation)
            of_provider = provider_aggregates.c.resource_provider_id == row.id
            tx.execute(sa.delete(provider_aggregates).where(of_provider))
            if aggregates:
                tx.execute(
                    _ADD_AGGREGATES,
                    [{"resource_provider_id": row.id, "aggregate_uuid": each} for each in sorted(aggregates)],
                )
            return shown(row), tuple(sorted(aggregates))

        return self._database.run(work)

    def _with(self, uuid: str, select: sa.Select[Any]) -> tuple[ResourceProvider, tuple[str, ...]]:
        with self._database.read() as tx:
            row = self._provider_row(tx, uuid)
            return shown(row), tuple(tx.execute(select, {"of_provider": row.id}).scalars().all())


def filter_conditions(query: ProviderFilter) -> list[sa.ColumnElement[bool]]:
    """What a query asks besides resources, whose classes have numbers."""
    columns = resource_providers.c
    found: list[sa.ColumnElement[bool]] = []
    if query.name is not None:
        found.append(columns.name == query.name)
    if query.uuid is not None:
        found.append(columns.uuid == query.uuid)
    if query.in_tree is not None:
        found.append(sql_filters.in_tree(query.in_tree))
    found += [sql_filters.has_trait(each) for each in query.required]
    found += [sql_filters.has_aggregate(each) for each in query.member_of]
    if query.forbidden:
        found.append(sa.not_(sql_filters.has_trait(query.forbidden)))
    if query.not_member_of:
        found.append(sa.not_(sql_filters.has_aggregate(query.not_member_of)))
    return found


def _name_taken(name: str) -> errors.AlreadyExists:
    return errors.AlreadyExists(f"Another provider has the name {name}.", field="name", name=name)


def _bring_traits(tx: sa.Connection, number: int, present: Set[str], wanted: Set[str]) -> None:
    """Write the traits of a provider that differ, for the transaction that has its turn."""
    gone, fresh = sorted(present - wanted), sorted(wanted - present)
    if gone:
        tx.execute(
            sa.delete(provider_traits).where(
                provider_traits.c.resource_provider_id == number, provider_traits.c.trait.in_(gone)
            )
        )
    if fresh:
        tx.execute(_ADD_TRAITS, [{"resource_provider_id": number, "trait": name} for name in fresh])
        hold_traits(tx, fresh)
