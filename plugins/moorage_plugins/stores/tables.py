# SPDX-License-Identifier: Apache-2.0
"""The tables of seed 001, with the ``used`` counter and consumers; written by the sql store alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, exact
from moorage_plugins.schema import plugins_metadata

__all__ = ["allocations", "consumers", "inventories", "resource_classes", "resource_providers"]

resource_classes = sa.Table(
    "resource_classes",
    plugins_metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", exact(255), nullable=False),
    sa.UniqueConstraint("name", name="uq_resource_classes_name"),
)

resource_providers = sa.Table(
    "resource_providers",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", exact(36), nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("can_host", sa.Boolean(create_constraint=False), nullable=False, default=True),
    sa.UniqueConstraint("uuid", name="uq_resource_providers_uuid"),
    sa.UniqueConstraint("name", name="uq_resource_providers_name"),
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
)

consumers = sa.Table(
    "consumers",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", exact(36), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("consumer_type", exact(255), nullable=False),
    sa.Column("project_id", exact(255), nullable=False),
    sa.Column("user_id", exact(255), nullable=False),
    sa.Column("request_id", exact(255)),
    sa.Column("created_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_consumers_uuid"),
    sa.Index("ix_consumers_project_id", "project_id", "user_id"),
)

allocations = sa.Table(
    "allocations",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("resource_provider_id", sa.BigInteger, nullable=False),
    sa.Column("consumer_id", exact(36), nullable=False),
    sa.Column("resource_class_id", sa.Integer, nullable=False),
    sa.Column("used", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("consumer_id", "resource_provider_id", "resource_class_id", name="uq_allocations_consumer"),
    sa.Index("ix_allocations_provider", "resource_provider_id", "resource_class_id"),
)
