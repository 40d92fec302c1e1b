# SPDX-License-Identifier: Apache-2.0
"""The tables of seed 001, with the ``used`` counter, consumers, trees, traits and aggregates; written by the sql store alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, Uuid, exact, partial_index
from moorage_plugins.schema import plugins_metadata

__all__ = [
    "TABLES",
    "allocations",
    "consumers",
    "inventories",
    "provider_aggregates",
    "provider_traits",
    "quota_projects",
    "quotas",
    "resource_classes",
    "resource_providers",
    "traits",
]

#: Custom classes. A deleted one keeps its row, without a name, so that its number never comes to mean another class.
resource_classes = sa.Table(
    "resource_classes",
    plugins_metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", exact(255)),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("updated_at", Micros, nullable=False, default=0),
    sa.UniqueConstraint("name", name="uq_resource_classes_name"),
)

#: Parent and root are named by uuid: a root knows its own before it has a row.
resource_providers = sa.Table(
    "resource_providers",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("can_host", sa.Boolean(create_constraint=False), nullable=False, default=True),
    sa.Column("parent_uuid", Uuid),
    sa.Column("root_uuid", Uuid, nullable=False),
    sa.Column("updated_at", Micros, nullable=False, default=0),
    #: Version of the node's instances; unlike the generation it also rises when resources are given back.
    sa.Column("residents", sa.BigInteger, nullable=False, default=0, server_default="0"),
    sa.UniqueConstraint("uuid", name="uq_resource_providers_uuid"),
    sa.UniqueConstraint("name", name="uq_resource_providers_name"),
    sa.Index("ix_resource_providers_parent", "parent_uuid"),
    sa.Index("ix_resource_providers_root", "root_uuid"),
)

inventories = sa.Table(
    "inventories",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("resource_provider_id", sa.BigInteger, nullable=False),
    sa.Column("resource_class_id", sa.Integer, nullable=False),
    sa.Column("total", sa.BigInteger, nullable=False),
    sa.Column("reserved", sa.BigInteger, nullable=False),
    sa.Column("min_unit", sa.BigInteger, nullable=False),
    sa.Column("max_unit", sa.BigInteger, nullable=False),
    sa.Column("step_size", sa.BigInteger, nullable=False),
    sa.Column("allocation_ratio", sa.Double, nullable=False),
    sa.Column("used", sa.BigInteger, nullable=False, default=0),
    sa.UniqueConstraint("resource_provider_id", "resource_class_id", name="uq_inventories_provider_class"),
    sa.Index("ix_inventories_class", "resource_class_id"),
)

#: Custom traits; the standard ones are those of os-traits.
traits = sa.Table(
    "traits",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("updated_at", Micros, nullable=False, default=0),
    sa.UniqueConstraint("name", name="uq_traits_name"),
)

provider_traits = sa.Table(
    "provider_traits",
    plugins_metadata,
    sa.Column("resource_provider_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("trait", exact(255), primary_key=True),
    sa.Index("ix_provider_traits_trait", "trait", "resource_provider_id"),
)

provider_aggregates = sa.Table(
    "provider_aggregates",
    plugins_metadata,
    sa.Column("resource_provider_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("aggregate_uuid", Uuid, primary_key=True),
    sa.Index("ix_provider_aggregates_aggregate", "aggregate_uuid", "resource_provider_id"),
)

consumers = sa.Table(
    "consumers",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("consumer_type", exact(255), nullable=False),
    sa.Column("project_id", exact(255), nullable=False),
    sa.Column("user_id", exact(255), nullable=False),
    sa.Column("request_id", exact(255)),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False, default=0),
    sa.Column("expires_at", Micros),
    #: 1: what it holds is in ``quotas.used`` of its project. Always 0 where the project has no limit.
    sa.Column("counted", sa.SmallInteger, nullable=False, server_default="0"),
    #: The consumer that it counts together with: of both, the larger amount of each class counts.
    sa.Column("counts_with", Uuid),
    sa.UniqueConstraint("uuid", name="uq_consumers_uuid"),
    sa.Index("ix_consumers_project_id", "project_id", "counted", "user_id"),
    # Few consumers have these.
    sa.Index("ix_consumers_counts_with", "counts_with", **partial_index("counts_with IS NOT NULL")),
    sa.Index("ix_consumers_expires_at", "expires_at", **partial_index("expires_at IS NOT NULL")),
)

allocations = sa.Table(
    "allocations",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("resource_provider_id", sa.BigInteger, nullable=False),
    sa.Column("consumer_id", Uuid, nullable=False),
    sa.Column("resource_class_id", sa.Integer, nullable=False),
    sa.Column("used", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("consumer_id", "resource_provider_id", "resource_class_id", name="uq_allocations_consumer"),
    sa.Index("ix_allocations_provider", "resource_provider_id", "resource_class_id"),
)

#: A row for each project that has limits. Every write of the project's counters writes this row first.
quota_projects = sa.Table(
    "quota_projects",
    plugins_metadata,
    sa.Column("project_id", exact(255), primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
)

#: Limits of projects, and what their counted consumers hold.
quotas = sa.Table(
    "quotas",
    plugins_metadata,
    sa.Column("project_id", exact(255), primary_key=True),
    sa.Column("resource_class_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("maximum", sa.BigInteger, nullable=False),
    sa.Column("used", sa.BigInteger, nullable=False),
)

TABLES: tuple[sa.Table, ...] = (
    allocations,
    consumers,
    inventories,
    provider_aggregates,
    provider_traits,
    quota_projects,
    quotas,
    resource_classes,
    resource_providers,
    traits,
)
