# SPDX-License-Identifier: Apache-2.0
"""Plans and their journals; written by :mod:`moorage.sharding.plans` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["shard_moves", "shard_plans"]

shard_plans = sa.Table(
    "shard_plans",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("strategy", exact(255), nullable=False),
    sa.Column("status", exact(20), nullable=False),
    sa.Column("request", JsonText, nullable=False),
    sa.Column("summary", JsonText, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_shard_plans_uuid"),
    sqlite_autoincrement=True,
)
#: The journal: a row of it changes in the transaction that changes the node.
shard_moves = sa.Table(
    "shard_moves",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("plan_id", sa.BigInteger, nullable=False),
    sa.Column("node_uuid", Uuid, nullable=False),
    sa.Column("source", exact(255)),
    sa.Column("target", exact(255)),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("status", exact(20), nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Index("ix_shard_moves_plan_id", "plan_id", "status", "id"),
)
