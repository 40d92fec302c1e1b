# SPDX-License-Identifier: Apache-2.0
"""Tables of rings, of their adoption by members, of claims of ticks, and of operators' requests to periodic tasks."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, core_metadata, exact

__all__ = ["adoptions", "claims", "rings", "runs", "tasks", "totals"]

#: The ring of each group, which all members adopt; written by :mod:`moorage.coordination.ring_ledger` alone, as ``adoptions``.
rings = sa.Table(
    "coordination_rings",
    core_metadata,
    sa.Column("group_name", exact(80), primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("members", JsonText, nullable=False),
    sa.Column("replicas", sa.Integer, nullable=False),
    sa.Column("hash_function", exact(20), nullable=False),
    sa.Column("changed_at", Micros, nullable=False),
)

#: The newest token that a member works under: it has stopped everything that it did under smaller ones.
adoptions = sa.Table(
    "coordination_adoptions",
    core_metadata,
    sa.Column("group_name", exact(80), primary_key=True),
    sa.Column("member", exact(160), primary_key=True),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("adopted_at", Micros, nullable=False),
)

#: The last claim of each object; written by :mod:`moorage.coordination.tick_leases` alone.
claims = sa.Table(
    "periodic_claims",
    core_metadata,
    sa.Column("task", exact(80), primary_key=True),
    sa.Column("object_id", exact(255), primary_key=True),
    sa.Column("tick", Micros, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("owner", exact(160), nullable=False),
    sa.Column("sweep", exact(32), nullable=False),
    sa.Column("finished", sa.Boolean(create_constraint=False), nullable=False),
)

#: What operators asked for; a task without a row runs as configured. Written by :mod:`moorage.coordination.task_store`.
tasks = sa.Table(
    "periodic_tasks",
    core_metadata,
    sa.Column("name", exact(80), primary_key=True),
    sa.Column("paused", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("reason", sa.String(255), nullable=False),
    sa.Column("requested_at", Micros, nullable=False),
    sa.Column("requested_object", exact(255), nullable=False),
)

#: Sweeps, the last ones of each task.
runs = sa.Table(
    "periodic_runs",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("task", exact(80), nullable=False),
    sa.Column("member", exact(160), nullable=False),
    sa.Column("tick", Micros, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("started_at", Micros, nullable=False),
    sa.Column("milliseconds", sa.BigInteger, nullable=False),
    sa.Column("owned", sa.Integer, nullable=False),
    sa.Column("handled", sa.Integer, nullable=False),
    sa.Column("acted", sa.Integer, nullable=False),
    sa.Column("failed", sa.Integer, nullable=False),
    sa.Column("fenced", sa.Integer, nullable=False),
    sa.Column("lost", sa.Integer, nullable=False, server_default="0"),
    sa.Column("skipped", sa.Integer, nullable=False, server_default="0"),
    sa.Column("ended", exact(20), nullable=False),
    sa.Column("problem", sa.String(255), nullable=False),
    sa.Index("ix_periodic_runs_task_id", "task", "id"),
)

#: What all sweeps of a task did since there is this table: they go on when sweeps are forgotten.
totals = sa.Table(
    "periodic_totals",
    core_metadata,
    sa.Column("task", exact(80), primary_key=True),
    *(
        sa.Column(name, sa.BigInteger, nullable=False)
        for name in (
            *("complete", "stale", "broken", "milliseconds"),
            *("handled", "acted", "failed", "fenced", "lost", "skipped"),
        )
    ),
)
