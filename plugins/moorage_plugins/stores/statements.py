# SPDX-License-Identifier: Apache-2.0
"""The statements of the sql store, built once.

A row's condition stands in the statement that writes the row, so that no isolation level is relied on. Amounts and totals are
whole numbers up to 2**31 and the ratio is a double: ``(total - reserved) * allocation_ratio`` is one multiplication of IEEE
doubles on SQLite, PostgreSQL, MariaDB and in Python, and ``used + amount`` stays below 2**53, so all compare alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import sqlalchemy as sa

from moorage.db import now
from moorage_plugins.stores.checks import SEED_RULE
from moorage_plugins.stores.tables import (
    allocations,
    consumers,
    inventories,
    provider_aggregates,
    provider_traits,
    resource_providers,
)

__all__ = [
    "ADD_ALLOCATIONS",
    "ADD_CONSUMER",
    "COUNT_HELD",
    "DRIFT",
    "DROP_ALLOCATIONS",
    "DROP_CONSUMER",
    "DROP_INVENTORIES",
    "DROP_PROVIDER",
    "DROP_PROVIDER_AGGREGATES",
    "DROP_PROVIDER_TRAITS",
    "HAS_CHILDREN",
    "HELD",
    "INVENTORIES_OF",
    "KNOWN_CONSUMER",
    "NEXT_GENERATION",
    "PAGE",
    "PROVIDER_ID",
    "PROVIDER_IDS",
    "PROVIDER_ROW",
    "RECOUNT",
    "TOUCH",
    "TURN",
    "give_back",
    "provider_columns",
    "take",
]

_OF_PROVIDER = sa.bindparam("of_provider", type_=sa.BigInteger)
_OF_CONSUMER = sa.bindparam("of_consumer", type_=sa.String)
_LARGE = sa.BigInteger

ADD_CONSUMER = sa.insert(consumers).values(generation=1, created_at=now(), updated_at=now())
DROP_CONSUMER = sa.delete(consumers).where(consumers.c.uuid == _OF_CONSUMER)
KNOWN_CONSUMER = sa.select(consumers.c.request_id, consumers.c.generation).where(consumers.c.uuid == _OF_CONSUMER)
ADD_ALLOCATIONS = sa.insert(allocations)
DROP_ALLOCATIONS = sa.delete(allocations).where(allocations.c.consumer_id == _OF_CONSUMER)

PROVIDER_ID = sa.select(resource_providers.c.id).where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
PROVIDER_IDS = sa.select(resource_providers.c.uuid, resource_providers.c.id).where(
    resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True))
)
#: What is shown of a provider, in the order of the reader.
provider_columns = (
    resource_providers.c.id,
    resource_providers.c.uuid,
    resource_providers.c.name,
    resource_providers.c.can_host,
    resource_providers.c.generation,
    resource_providers.c.parent_uuid,
    resource_providers.c.root_uuid,
    resource_providers.c.updated_at,
)
PROVIDER_ROW = sa.select(*provider_columns).where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
HAS_CHILDREN = sa.select(sa.func.count()).where(resource_providers.c.parent_uuid == sa.bindparam("of_uuid"))
DROP_PROVIDER_TRAITS = sa.delete(provider_traits).where(provider_traits.c.resource_provider_id == _OF_PROVIDER)
DROP_PROVIDER_AGGREGATES = sa.delete(provider_aggregates).where(
    provider_aggregates.c.resource_provider_id == _OF_PROVIDER
)
DROP_PROVIDER = sa.delete(resource_providers).where(resource_providers.c.id == _OF_PROVIDER)
DROP_INVENTORIES = sa.delete(inventories).where(inventories.c.resource_provider_id == _OF_PROVIDER)
INVENTORIES_OF = (
    sa.select(
        inventories.c.resource_provider_id, inventories.c.resource_class_id, inventories.c.total,
        inventories.c.reserved, inventories.c.min_unit, inventories.c.max_unit, inventories.c.step_size,
        inventories.c.allocation_ratio, inventories.c.used,
    )
    .where(inventories.c.resource_provider_id.in_(sa.bindparam("numbers", expanding=True)))
    .order_by(inventories.c.resource_provider_id, inventories.c.resource_class_id)
)  # fmt: skip

#: Every write that can change what fits.
NEXT_GENERATION = {
    resource_providers.c.generation: resource_providers.c.generation + 1,
    resource_providers.c.updated_at: now(),
}
#: Whoever has raised the generation has the turn until the transaction ends: all writers of a provider's counters come this
#: way first. The uuid is asked for as well, since a remembered id may have been given to another provider since.
TURN = (
    sa.update(resource_providers)
    .where(resource_providers.c.id == _OF_PROVIDER, resource_providers.c.uuid == sa.bindparam("of_uuid"))
    .values(NEXT_GENERATION)
)
#: Changes of a tree write the rows of its root and of the parent first, so that they take turns; the generation stays.
TOUCH = (
    sa.update(resource_providers).where(resource_providers.c.uuid == sa.bindparam("of_uuid")).values(updated_at=now())
)
#: What a consumer holds, in the order in which providers are locked.
HELD = (
    sa.select(
        allocations.c.resource_provider_id,
        allocations.c.resource_class_id,
        allocations.c.used,
        resource_providers.c.uuid.label("provider"),
    )
    .join_from(allocations, resource_providers, allocations.c.resource_provider_id == resource_providers.c.id)
    .where(allocations.c.consumer_id == _OF_CONSUMER)
    .order_by(allocations.c.resource_provider_id, allocations.c.resource_class_id)
)
COUNT_HELD = sa.select(sa.func.count()).where(allocations.c.resource_provider_id == _OF_PROVIDER)

#: Allocations in the order of the unique index on these three columns. MariaDB would rather begin with the providers, and then
#: sort all allocations for every page; it is told not to.
PAGE = (
    sa.select(
        allocations.c.consumer_id,
        resource_providers.c.uuid.label("provider"),
        allocations.c.resource_class_id,
        allocations.c.used,
    )
    .join_from(allocations, resource_providers, allocations.c.resource_provider_id == resource_providers.c.id)
    .order_by(allocations.c.consumer_id, allocations.c.resource_provider_id, allocations.c.resource_class_id)
    .prefix_with("STRAIGHT_JOIN", dialect="mysql")
    .prefix_with("STRAIGHT_JOIN", dialect="mariadb")
)


@functools.lru_cache(maxsize=64)
def take(classes: int, step_rule: str) -> sa.Update:
    """Take amounts of ``classes`` resource classes of a provider, each where all its conditions hold.

    Parameters: of_provider, and class_N and amount_N for N below ``classes``. It took everything when the rowcount is
    ``classes``; otherwise the transaction must be rolled back.
    """
    conditions = []
    for of_class, amount in _pairs(classes):
        stepped: sa.ColumnElement[bool] = amount % inventories.c.step_size == 0
        if step_rule == SEED_RULE:
            stepped = sa.or_(inventories.c.min_unit == amount, stepped)
        conditions.append(
            sa.and_(
                inventories.c.resource_class_id == of_class,
                inventories.c.min_unit <= amount,
                inventories.c.max_unit >= amount,
                stepped,
                inventories.c.used + amount
                <= (inventories.c.total - inventories.c.reserved) * inventories.c.allocation_ratio,
            )
        )
    return (
        sa.update(inventories)
        .where(inventories.c.resource_provider_id == _OF_PROVIDER, sa.or_(*conditions))
        .values(used=inventories.c.used + _amount(classes))
    )


@functools.lru_cache(maxsize=64)
def give_back(classes: int) -> sa.Update:
    """Give amounts of ``classes`` resource classes of a provider back; parameters as for :func:`take`."""
    return (
        sa.update(inventories)
        .where(
            inventories.c.resource_provider_id == _OF_PROVIDER,
            inventories.c.resource_class_id.in_([of_class for of_class, _ in _pairs(classes)]),
        )
        .values(used=inventories.c.used - _amount(classes))
    )


def _pairs(classes: int) -> Sequence[tuple[sa.BindParameter[int], sa.BindParameter[int]]]:
    return [
        (sa.bindparam(f"class_{number}", type_=sa.Integer), sa.bindparam(f"amount_{number}", type_=_LARGE))
        for number in range(classes)
    ]


def _amount(classes: int) -> sa.ColumnElement[int]:
    whens = [(inventories.c.resource_class_id == of_class, amount) for of_class, amount in _pairs(classes)]
    return sa.case(*whens, else_=sa.literal(0, _LARGE))


_SUMS = (
    sa.select(
        allocations.c.resource_provider_id,
        allocations.c.resource_class_id,
        sa.cast(sa.func.sum(allocations.c.used), _LARGE).label("held"),
    )
    .group_by(allocations.c.resource_provider_id, allocations.c.resource_class_id)
    .subquery("sums")
)
_SAME_CLASS = sa.and_(
    inventories.c.resource_provider_id == _SUMS.c.resource_provider_id,
    inventories.c.resource_class_id == _SUMS.c.resource_class_id,
)
#: Counters that differ from the sums, and sums without a counter; one statement, since that is one moment at READ COMMITTED.
DRIFT = sa.union_all(
    sa.select(
        resource_providers.c.uuid.label("provider"),
        inventories.c.resource_class_id,
        inventories.c.used.label("counted"),
        sa.func.coalesce(_SUMS.c.held, 0).label("held"),
    )
    .select_from(inventories)
    .join(resource_providers, inventories.c.resource_provider_id == resource_providers.c.id)
    .outerjoin(_SUMS, _SAME_CLASS)
    .where(inventories.c.used != sa.func.coalesce(_SUMS.c.held, 0)),
    sa.select(
        sa.func.coalesce(resource_providers.c.uuid, "").label("provider"),
        _SUMS.c.resource_class_id,
        sa.cast(sa.null(), _LARGE).label("counted"),
        _SUMS.c.held.label("held"),
    )
    .select_from(_SUMS)
    .outerjoin(resource_providers, _SUMS.c.resource_provider_id == resource_providers.c.id)
    .outerjoin(inventories, _SAME_CLASS)
    .where(inventories.c.id.is_(None)),
)
#: Only for who has the turn.
RECOUNT = (
    sa.update(inventories)
    .where(inventories.c.resource_provider_id == _OF_PROVIDER)
    .values(
        used=sa.select(sa.cast(sa.func.coalesce(sa.func.sum(allocations.c.used), 0), _LARGE))
        .where(
            allocations.c.resource_provider_id == inventories.c.resource_provider_id,
            allocations.c.resource_class_id == inventories.c.resource_class_id,
        )
        .scalar_subquery()
    )
)
