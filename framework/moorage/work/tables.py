# SPDX-License-Identifier: Apache-2.0
"""Tables of operations (``workers``, as the seed names it) and of fences."""

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
    # The column keeps its first name: services of the release before use it during an upgrade.
    sa.Column("addressed_to", exact(255), key="target_host", nullable=False),
    sa.Column("owner", Uuid),
    sa.Column("epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("expires_at", Micros, nullable=False, default=0),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),
    sa.Column("created_at", Micros, nullable=False),
    #: waiting, working, cleaning, retrying or quarantined: what ``moorage.work.interface.Phase`` names.
    sa.Column("phase", exact(16), nullable=False),
    #: The service that began the work last. Its death makes the row an orphan, even while a cleaner has it.
    sa.Column("worker", Uuid),
    sa.Column("worker_epoch", sa.BigInteger, nullable=False, default=0),
    sa.Column("next_try_at", Micros, nullable=False, default=0),
    sa.Column("last_error", sa.String(1000), nullable=False, default=""),
    sa.Column("updated_at", Micros, nullable=False),
    #: The request that asked for it (:func:`moorage.context.to_text`); NULL when none did, or an older release wrote it.
    sa.Column("request", sa.String(1000)),
    #: The project of the resource, whose members see the events of the operation; NULL when an older release wrote it.
    sa.Column("project_id", exact(255)),
    sa.UniqueConstraint("resource_type", "resource_id", name="uq_workers_resource"),
    sa.Index("ix_workers_addressed_to", "target_host", "resource_type", "resource_id"),
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
    #: When the token was raised last; :mod:`moorage.work.fences` purges old rows.
    sa.Column("raised_at", Micros, server_default="0", nullable=False),
)
