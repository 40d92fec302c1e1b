# SPDX-License-Identifier: Apache-2.0
"""The table of instances; written by :mod:`moorage_plugins.compute.instances` alone."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, exact, partial_index
from moorage_plugins.schema import plugins_metadata

__all__ = ["instances"]

instances = sa.Table(
    "instances",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("status", exact(40), nullable=False),
    sa.Column("host", exact(255), nullable=False),
    sa.Column("node", exact(255), nullable=False),
    sa.Column("node_uuid", Uuid, nullable=False),
    sa.Column("flavorid", exact(255), nullable=False),
    sa.Column("resources", JsonText, nullable=False),
    sa.Column("project_id", exact(255), nullable=False),
    sa.Column("user_id", exact(255), nullable=False),
    sa.Column("fault", sa.Text, nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.Column("request", JsonText, nullable=False),
    sa.Column("server_group", exact(255), nullable=False, server_default=""),
    #: What the operation in progress is to make of it.
    sa.Column("pending", JsonText),
    #: The node to which a resize or a live migration moves it; empty while it stays.
    sa.Column("destination_uuid", Uuid, nullable=False, default="", server_default=""),
    #: What the driver of its host saw: running, stopped, ended, failed, or gone. unknown: it was not looked at since it came here.
    sa.Column("actual_state", exact(16), nullable=False, default="unknown", server_default="unknown"),
    sa.Column("actual_detail", sa.String(1000), nullable=False, default="", server_default=""),
    #: Since when it was seen so.
    sa.Column("actual_at", Micros, nullable=False, default=0, server_default="0"),
    #: How often it was started again since it last ran for long.
    sa.Column("restarts", sa.Integer, nullable=False, default=0, server_default="0"),
    #: The version of the flavor; 0: the request brought its resources along, or an earlier release wrote the row.
    sa.Column("flavor_version", sa.Integer, nullable=False, default=0, server_default="0"),
    sa.UniqueConstraint("uuid", name="uq_instances_uuid"),
    sa.Index("ix_instances_host", "host", "uuid"),
    sa.Index("ix_instances_node", "node_uuid"),
    # Few instances have these.
    sa.Index("ix_instances_server_group", "server_group", **partial_index("server_group <> ''")),
    sa.Index("ix_instances_destination", "destination_uuid", **partial_index("destination_uuid <> ''")),
)
