# SPDX-License-Identifier: Apache-2.0
"""Conditions on a provider, in SQL: each is an expression over ``resource_providers``."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from moorage_plugins.stores.checks import SEED_RULE
from moorage_plugins.stores.tables import inventories, provider_aggregates, provider_traits, resource_providers

__all__ = ["fits", "has_aggregate", "has_trait", "in_tree"]

_TREE = resource_providers.alias("tree")


def fits(
    of_class: int, amount: int, step_rule: str, provider: sa.FromClause = resource_providers
) -> sa.ColumnElement[bool]:
    """The provider has room for an amount of a class, by the formulas of :func:`capacity_statements.take`."""
    stepped: sa.ColumnElement[bool] = sa.literal(amount, sa.BigInteger) % inventories.c.step_size == 0
    if step_rule == SEED_RULE:
        stepped = sa.or_(inventories.c.min_unit == amount, stepped)
    return sa.exists().where(
        inventories.c.resource_provider_id == provider.c.id,
        inventories.c.resource_class_id == of_class,
        inventories.c.min_unit <= amount,
        inventories.c.max_unit >= amount,
        stepped,
        inventories.c.used + amount <= (inventories.c.total - inventories.c.reserved) * inventories.c.allocation_ratio,
    )


def has_trait(names: Iterable[str], provider: sa.FromClause = resource_providers) -> sa.ColumnElement[bool]:
    """The provider has at least one of the traits."""
    return sa.exists().where(
        provider_traits.c.resource_provider_id == provider.c.id, provider_traits.c.trait.in_(sorted(names))
    )


def has_aggregate(uuids: Iterable[str], provider: sa.FromClause = resource_providers) -> sa.ColumnElement[bool]:
    """The provider is in at least one of the aggregates."""
    return sa.exists().where(
        provider_aggregates.c.resource_provider_id == provider.c.id,
        provider_aggregates.c.aggregate_uuid.in_(sorted(uuids)),
    )


def in_tree(uuid: str, provider: sa.FromClause = resource_providers) -> sa.ColumnElement[bool]:
    """The provider is in the tree in which the provider of this uuid is."""
    return provider.c.root_uuid == sa.select(_TREE.c.root_uuid).where(_TREE.c.uuid == uuid).scalar_subquery()
