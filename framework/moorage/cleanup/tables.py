# SPDX-License-Identifier: Apache-2.0
"""Tables of cleanup: requests, history, totals."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, Uuid, core_metadata, exact

__all__ = ["cleanup_history", "cleanup_requests", "cleanup_totals"]

#: Who shall be cleaned after. One row for each incarnation that ended and each filter: several who ask are one request.
cleanup_requests = sa.Table(
    "cleanup_requests",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("service", Uuid, nullable=False),
    #: Rows of the service's epochs before this one.
    sa.Column("epoch", sa.BigInteger, nullable=False),
    #: Empty: all.
    sa.Column("resource_type", exact(40), nullable=False),
    sa.Column("resource_id", Uuid, nullable=False),
    #: Rows touched after this moment are left alone (the seed's timestamp, of the database's clock).
    sa.Column("until", Micros, nullable=False),
    sa.Column("cluster", exact(255)),
    sa.Column("host", exact(255), nullable=False),
    sa.Column("kind", exact(16), nullable=False),
    sa.Column("requested_by", exact(255), nullable=False),
    #: NULL while it is open.
    sa.Column("done_at", Micros),
    sa.Column("created_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_cleanup_requests_uuid"),
    sa.UniqueConstraint("service", "epoch", "resource_type", "resource_id", name="uq_cleanup_requests_service"),
    sa.Index("ix_cleanup_requests_done_at", "done_at"),
)

#: What became of orphans; only ever added to, until it is too old.
cleanup_history = sa.Table(
    "cleanup_history",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("at", Micros, nullable=False),
    sa.Column("resource_type", exact(40), nullable=False),
    sa.Column("resource_id", Uuid, nullable=False),
    sa.Column("operation", exact(40), nullable=False),
    sa.Column("status", exact(40), nullable=False),
    sa.Column("outcome", exact(16), nullable=False),
    sa.Column("reason", sa.String(1000), nullable=False),
    sa.Column("worker", Uuid),
    sa.Column("worker_epoch", sa.BigInteger, nullable=False),
    sa.Column("cleaner", Uuid),
    sa.Column("cleaner_epoch", sa.BigInteger, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Index("ix_cleanup_history_resource", "resource_type", "resource_id"),
    sa.Index("ix_cleanup_history_worker", "worker", "worker_epoch"),
    sa.Index("ix_cleanup_history_at", "at"),
)

#: Outcomes of the lines that the history has no more, and claims of cleaners: what :mod:`moorage.cleanup.totals` names.
cleanup_totals = sa.Table(
    "cleanup_totals",
    core_metadata,
    sa.Column("resource_type", exact(40), primary_key=True),
    sa.Column("event", exact(16), primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
)
