# SPDX-License-Identifier: Apache-2.0
"""Tables of subscriptions to the journal, and of webhooks. The journal itself is in :mod:`moorage.db.tables`."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["subscriptions", "webhooks"]

#: One row for each follower of the journal whose place is kept; written by :mod:`moorage.journal.subscriptions` alone.
subscriptions = sa.Table(
    "event_subscriptions",
    core_metadata,
    #: ``webhook/UUID`` or ``observer/NAME``.
    sa.Column("name", exact(160), primary_key=True),
    #: The cursor: the number of the last event that was delivered, or that the follower does not want.
    sa.Column("position", sa.BigInteger, nullable=False),
    #: Events that were purged before they were delivered.
    sa.Column("missed", sa.BigInteger, nullable=False),
    #: The lease of the process that delivers; see :mod:`moorage.work.lease`.
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("owner", Uuid),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("expires_at", Micros, nullable=False),
    #: Failed deliveries since the last one that succeeded; the first of them was at ``failing_since``, 0 when there is none.
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("failing_since", Micros, nullable=False),
    sa.Column("retry_at", Micros, nullable=False),
    sa.Column("last_error", sa.String(1000), nullable=False),
    sa.Column("last_error_at", Micros, nullable=False),
    sa.Column("delivered_at", Micros, nullable=False),
)

#: Written by :mod:`moorage.journal.webhooks` alone.
webhooks = sa.Table(
    "webhooks",
    core_metadata,
    sa.Column("uuid", Uuid, primary_key=True),
    sa.Column("name", exact(80), nullable=False),
    sa.Column("url", sa.String(2000), nullable=False),
    sa.Column("secret", exact(120), nullable=False),
    sa.Column("kinds", JsonText, nullable=False),
    sa.Column("projects", JsonText, nullable=False),
    sa.Column("enabled", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("name", name="uq_webhooks_name"),
)
