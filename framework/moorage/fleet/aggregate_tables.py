# SPDX-License-Identifier: Apache-2.0
"""The tables of aggregates; written by :mod:`moorage.fleet.aggregates` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["aggregate_members", "aggregates"]

aggregates = sa.Table(
    "aggregates",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("metadata", JsonText, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_aggregates_uuid"),
    sa.UniqueConstraint("name", name="uq_aggregates_name"),
)
#: ``kind`` is ``host`` (the member is an agent's name: all its nodes belong) or ``node`` (the member is a node's uuid).
aggregate_members = sa.Table(
    "aggregate_members",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("aggregate", Uuid, nullable=False),
    sa.Column("kind", exact(8), nullable=False),
    sa.Column("member", exact(255), nullable=False),
    sa.UniqueConstraint("aggregate", "kind", "member", name="uq_aggregate_members_member"),
)
