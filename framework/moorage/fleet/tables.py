# SPDX-License-Identifier: Apache-2.0
"""The table of nodes; written by :mod:`moorage.fleet.nodes` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["nodes"]

nodes = sa.Table(
    "nodes",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("host", exact(255)),
    sa.Column("shard", exact(255)),
    sa.Column("resource_class", exact(80)),
    sa.Column("properties", JsonText, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_nodes_uuid"),
    sa.UniqueConstraint("name", name="uq_nodes_name"),
    sa.Index("ix_nodes_shard_id", "shard", "id"),
    sa.Index("ix_nodes_host", "host"),
)
