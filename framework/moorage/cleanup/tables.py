# SPDX-License-Identifier: Apache-2.0
"""Workers and fences; written by :mod:`moorage.cleanup.workers` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, Uuid, core_metadata, exact

__all__ = ["fences", "workers"]

workers = sa.Table(
    "workers",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("resource_type", exact(40), nullable=False),
    sa.Column("resource_id", Uuid, nullable=False),
    sa.Column("operation", exact(40), nullable=False),
    sa.Column("status", exact(40), nullable=False),
    sa.Column("addressed_to", exact(255), nullable=False),
    sa.Column("owner", Uuid),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("expires_at", Micros, nullable=False, default=0),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("created_at", Micros, nullable=False),
    sa.UniqueConstraint("resource_type", "resource_id", name="uq_workers_resource"),
    sa.Index("ix_workers_addressed_to", "addressed_to", "resource_type", "owner"),
)

#: The last token of each resource; the row survives its workers, so that no token is ever used twice.
fences = sa.Table(
    "fences",
    core_metadata,
    sa.Column("resource_type", exact(40), primary_key=True),
    sa.Column("resource_id", Uuid, primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
)
