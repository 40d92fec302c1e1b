# SPDX-License-Identifier: Apache-2.0
"""Phases of operations, requests for cleanup and their history"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from moorage.db.schema import INNODB, BigId, exact

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "cleanup_history",
        sa.Column("id", BigId, nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("resource_type", exact(40), nullable=False),
        sa.Column("resource_id", exact(36), nullable=False),
        sa.Column("operation", exact(40), nullable=False),
        sa.Column("status", exact(40), nullable=False),
        sa.Column("outcome", exact(16), nullable=False),
        sa.Column("reason", sa.String(length=1000), nullable=False),
        sa.Column("worker", exact(36), nullable=True),
        sa.Column("worker_epoch", sa.BigInteger(), nullable=False),
        sa.Column("cleaner", exact(36), nullable=True),
        sa.Column("cleaner_epoch", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cleanup_history")),
        **INNODB,
    )
    with op.batch_alter_table("cleanup_history", schema=None) as batch_op:
        batch_op.create_index("ix_cleanup_history_at", ["at"], unique=False)
        batch_op.create_index("ix_cleanup_history_resource", ["resource_type", "resource_id"], unique=False)
        batch_op.create_index("ix_cleanup_history_worker", ["worker", "worker_epoch"], unique=False)

    op.create_table(
        "cleanup_requests",
        sa.Column("id", BigId, nullable=False),
        sa.Column("uuid", exact(36), nullable=False),
        sa.Column("service", exact(36), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("resource_type", exact(40), nullable=False),
        sa.Column("resource_id", exact(36), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=False),
        sa.Column("cluster", exact(255), nullable=True),
        sa.Column("host", exact(255), nullable=False),
        sa.Column("kind", exact(16), nullable=False),
        sa.Column("requested_by", exact(255), nullable=False),
        sa.Column("done_at", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cleanup_requests")),
        sa.UniqueConstraint("service", "epoch", "resource_type", "resource_id", name="uq_cleanup_requests_service"),
        sa.UniqueConstraint("uuid", name="uq_cleanup_requests_uuid"),
        **INNODB,
    )
    with op.batch_alter_table("cleanup_requests", schema=None) as batch_op:
        batch_op.create_index("ix_cleanup_requests_done_at", ["done_at"], unique=False)

    added: dict[str, sa.types.TypeEngine[Any]] = {
        "phase": exact(16),
        "worker": exact(36),
        "worker_epoch": sa.BigInteger(),
        "next_try_at": sa.BigInteger(),
        "last_error": sa.String(length=1000),
        "updated_at": sa.BigInteger(),
    }
    with op.batch_alter_table("workers", schema=None) as batch_op:
        for name, kind in added.items():
            batch_op.add_column(sa.Column(name, kind, nullable=True))
    # What is in progress while the schema changes goes on.
    op.execute(
        "UPDATE workers SET phase = CASE WHEN owner IS NULL THEN 'waiting' ELSE 'working' END, worker = owner, "
        "worker_epoch = epoch, next_try_at = 0, last_error = '', updated_at = created_at"
    )
    with op.batch_alter_table("workers", schema=None) as batch_op:
        for name, kind in added.items():
            if name != "worker":
                batch_op.alter_column(name, existing_type=kind, nullable=False)
        batch_op.create_index("ix_workers_worker", ["worker", "resource_type", "resource_id"], unique=False)
