# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that knows who shares with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import SHARES, PoolSource, ProviderUsage
from moorage_plugins.stores import sql_filters, statements
from moorage_plugins.stores.sql_part import SqlPart, shown
from moorage_plugins.stores.tables import provider_aggregates, resource_providers

__all__ = ["SqlPools"]

_SHARING = (
    sa.select(*statements.provider_columns).where(sql_filters.has_trait([SHARES])).order_by(resource_providers.c.uuid)
)
_AGGREGATES = sa.select(resource_providers.c.uuid, provider_aggregates.c.aggregate_uuid).join_from(
    resource_providers, provider_aggregates, provider_aggregates.c.resource_provider_id == resource_providers.c.id
)


class SqlPools(SqlPart, PoolSource):
    """Pools."""

    @override
    def pools(self, providers: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        with self._database.read() as tx:
            sharing = tx.execute(_SHARING).all()
            if not sharing:
                return {}
            of_pool: dict[str, set[str]] = {}
            numbers = [row.id for row in sharing]
            for uuid, aggregate in tx.execute(_AGGREGATES.where(resource_providers.c.id.in_(numbers))).all():
                of_pool.setdefault(uuid, set()).add(aggregate)
            near: dict[str, set[str]] = {}
            for uuid, aggregate in tx.execute(_AGGREGATES.where(resource_providers.c.uuid.in_(providers))).all():
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
