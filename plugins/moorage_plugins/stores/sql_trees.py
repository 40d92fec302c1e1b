# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that knows which providers are below which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import ProviderUsage, TreeSource
from moorage_plugins.stores import statements
from moorage_plugins.stores.sql_part import SqlPart, shown
from moorage_plugins.stores.tables import resource_providers

__all__ = ["SqlTrees"]

_BELOW = (
    sa.select(*statements.provider_columns)
    .where(
        resource_providers.c.root_uuid.in_(sa.bindparam("roots", expanding=True)),
        resource_providers.c.parent_uuid.is_not(None),
    )
    .order_by(resource_providers.c.id)
)
_ROOTS_OF = sa.select(resource_providers.c.uuid, resource_providers.c.root_uuid).where(
    resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True))
)


class SqlTrees(SqlPart, TreeSource):
    """Trees."""

    @override
    def nested(self, roots: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        with self._database.read() as tx:
            rows = tx.execute(_BELOW, {"roots": list(roots)}).all()
            items = self._inventory_rows(tx, [row.id for row in rows]) if rows else {}
        found: dict[str, list[ProviderUsage]] = {}
        for row in rows:
            here = items.get(row.id, ())
            usage = ProviderUsage(shown(row, here), {item.resource_class: used for item, used in here})
            found.setdefault(row.root_uuid, []).append(usage)
        return {root: tuple(usages) for root, usages in found.items()}

    @override
    def roots_of(self, providers: Sequence[str]) -> Mapping[str, str]:
        with self._database.read() as tx:
            rows = tx.execute(_ROOTS_OF, {"uuids": list(providers)}).all()
        return {row.uuid: row.root_uuid for row in rows}
