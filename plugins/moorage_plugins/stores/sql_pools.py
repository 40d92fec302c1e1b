# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that knows which providers share with which, and which ones changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import SHARES, ChangeSource, PoolSource, ProviderUsage
from moorage.db.changes import ChangeReader, RecentRows
from moorage_plugins.stores import statements
from moorage_plugins.stores.sql_part import SqlPart, shown
from moorage_plugins.stores.tables import provider_aggregates, provider_traits, resource_providers

__all__ = ["SqlPools"]

#: A join, so that databases begin with the index of traits: few providers share. SQLite runs EXISTS once for each provider.
_OF_SHARING = sa.and_(
    provider_traits.c.resource_provider_id == resource_providers.c.id, provider_traits.c.trait == SHARES
)
_SHARING = sa.select(*statements.provider_columns).where(_OF_SHARING).order_by(resource_providers.c.uuid)
_SHARING_UUIDS = sa.select(resource_providers.c.uuid).where(_OF_SHARING)
#: Without an index on ``updated_at``: every claim would write it, and the table is small enough to be looked through.
_CHANGES = ChangeReader(resource_providers, resource_providers.c.generation, resource_providers.c.residents)
_AGGREGATES_OF = (
    sa.select(resource_providers.c.uuid, provider_aggregates.c.aggregate_uuid)
    .join_from(
        resource_providers, provider_aggregates, provider_aggregates.c.resource_provider_id == resource_providers.c.id
    )
    .where(resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True)))
)


class SqlPools(SqlPart, PoolSource, ChangeSource):
    """Pools, and which providers changed."""

    @override
    def recent_providers(self, since: int) -> RecentRows:
        with self._database.read() as tx:
            return _CHANGES.read(tx, since)

    @override
    def provider_uuids(self) -> frozenset[str]:
        with self._database.read() as tx:
            return _CHANGES.uuids(tx)

    @override
    def sharing(self) -> frozenset[str]:
        with self._database.read() as tx:
            return frozenset(tx.execute(_SHARING_UUIDS).scalars())

    @override
    def pools(self, providers: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        with self._database.read() as tx:
            sharing = tx.execute(_SHARING).all()
            if not sharing:
                return {}
            of_pool: dict[str, set[str]] = {}
            numbers = [row.id for row in sharing]
            for uuid, aggregate in tx.execute(_AGGREGATES_OF, {"uuids": [row.uuid for row in sharing]}).all():
                of_pool.setdefault(uuid, set()).add(aggregate)
            near: dict[str, set[str]] = {}
            for uuid, aggregate in tx.execute(_AGGREGATES_OF, {"uuids": list(providers)}).all():
                near.setdefault(uuid, set()).add(aggregate)
            items = self._inventory_rows(tx, numbers)
        usages = {
            row.uuid: ProviderUsage(
                shown(row, items.get(row.id, ())), {item.resource_class: used for item, used in items.get(row.id, ())}
            )
            for row in sharing
        }
        found = {}
        for uuid, aggregates in near.items():
            pools = tuple(
                usage for pool, usage in usages.items() if pool != uuid and aggregates & of_pool.get(pool, set())
            )
            if pools:
                found[uuid] = pools
        return found
