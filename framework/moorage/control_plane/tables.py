# SPDX-License-Identifier: Apache-2.0
"""Tables of the control plane itself."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["idempotency_keys"]

#: Answers to requests that came with an Idempotency-Key; written by :mod:`moorage.control_plane.idempotency`.
idempotency_keys = sa.Table(
    "idempotency_keys",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("scope", exact(64), nullable=False),
    sa.Column("fingerprint", exact(64), nullable=False),
    sa.Column("operation", Uuid, nullable=False),
    sa.Column("owner", Uuid, nullable=False),
    sa.Column("busy_until", Micros, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("status", sa.Integer),
    sa.Column("answer", JsonText),
    sa.UniqueConstraint("scope", name="uq_idempotency_keys_scope"),
    sa.Index("ix_idempotency_keys_created_at", "created_at"),
)
