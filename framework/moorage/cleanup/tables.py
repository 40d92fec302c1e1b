# SPDX-License-Identifier: Apache-2.0
"""Workers and fences, written by :mod:`moorage.cleanup.workers` and :mod:`moorage.cleanup.orphans`; requests, history, totals."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, Uuid, core_metadata, exact

__all__ = ["cleanup_history", "cleanup_requests", "cleanup_totals", "fences", "workers"]

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
    #: waiting, working, cleaning, retrying or quarantined: what ``moorage.cleanup.interface.Phase`` names.
    sa.Column("phase", exact(16), nullable=False),
    #: Who began the work last: that owner's death makes the row an orphan, whoever cleans it since.
    sa.Column("worker", Uuid),
    sa.Column("worker_epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("next_try_at", Micros, nullable=False, default=0),
    sa.Column("last_error", sa.String(1000), nullable=False, default=""),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("resource_type", "resource_id", name="uq_workers_resource"),
    sa.Index("ix_workers_addressed_to", "addressed_to", "resource_type", "resource_id"),
    sa.Index("ix_workers_worker", "worker", "resource_type", "resource_id"),
)

#: The last token of each resource. The row survives the worker row, so that no token is used twice. The row with an empty
#: ``resource_id`` is the floor of its type: no resource of the type without a row of its own ever had a token above the floor.
fences = sa.Table(
    "fences",
    core_metadata,
    sa.Column("resource_type", exact(40), primary_key=True),
    sa.Column("resource_id", Uuid, primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    #: When the token was raised last; :mod:`moorage.cleanup.fences` purges old rows.
    sa.Column("raised_at", Micros, server_default="0", nullable=False),
)

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
