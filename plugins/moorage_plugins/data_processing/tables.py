# SPDX-License-Identifier: Apache-2.0
"""Clusters, jobs and proxy users; written by :mod:`moorage_plugins.data_processing.store` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, exact
from moorage_plugins.schema import plugins_metadata

__all__ = ["clusters", "jobs", "proxy_users"]

clusters = sa.Table(
    "dp_clusters",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("host", exact(255), nullable=False),
    sa.Column("status", exact(40), nullable=False),
    sa.Column("transient", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("health", exact(10), nullable=False),
    sa.Column("changed_at", Micros, nullable=False),
    sa.Column("used_at", Micros, nullable=False),
    #: The highest token of a periodic task (of the ring) that wrote the row.
    sa.Column("fence", sa.BigInteger, nullable=False),
    #: The highest token of an operation (of its worker row) that wrote the row.
    sa.Column("operation_fence", sa.BigInteger, server_default="0", nullable=False),
    #: Place on the ring (md5), so that an engine reads its own clusters alone.
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_dp_clusters_uuid"),
    sa.Index("ix_dp_clusters_position", "position"),
    sa.Index("ix_dp_clusters_host", "host", "status"),
)

jobs = sa.Table(
    "dp_jobs",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("cluster", Uuid, nullable=False),
    sa.Column("command", JsonText, nullable=False),
    sa.Column("status", exact(40), nullable=False),
    sa.Column("exit_code", sa.Integer),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("changed_at", Micros, nullable=False),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_dp_jobs_uuid"),
    sa.Index("ix_dp_jobs_position", "position", "status"),
    sa.Index("ix_dp_jobs_cluster", "cluster", "status"),
)

proxy_users = sa.Table(
    "dp_proxy_users",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("name", exact(80), nullable=False),
    sa.Column("job", Uuid, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("name", name="uq_dp_proxy_users_name"),
    sa.Index("ix_dp_proxy_users_job", "job"),
)
