# SPDX-License-Identifier: Apache-2.0
"""The tables of nodes and aggregates; written by :mod:`moorage.fleet.nodes` and :mod:`moorage.fleet.aggregates` alone.

Every plugin may read it: tables of plugins join with ``nodes.c.id``, which never changes and is never used again.
"""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["aggregate_members", "aggregates", "nodes"]

nodes = sa.Table(
    "nodes",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("host", exact(255)),
    sa.Column("shard", exact(255)),
    sa.Column("resource_class", exact(80)),
    sa.Column("properties", JsonText, nullable=False),
    sa.Column("driver", exact(255)),
    sa.Column("driver_info", JsonText, nullable=False, server_default=sa.text("('{}')")),
    sa.Column("conductor_group", exact(255), nullable=False, server_default=""),
    sa.Column("owner", exact(255)),
    sa.Column("lessee", exact(255)),
    sa.Column("description", sa.Text),
    sa.Column("extra", JsonText, nullable=False, server_default=sa.text("('{}')")),
    sa.Column("instance_uuid", Uuid),
    sa.Column("instance_info", JsonText, nullable=False, server_default=sa.text("('{}')")),
    sa.Column("reservation", exact(255)),
    sa.Column("provision_state", exact(40), nullable=False, server_default="available"),
    sa.Column("target_provision_state", exact(40)),
    sa.Column("provision_updated_at", Micros),
    sa.Column("power_state", exact(40)),
    sa.Column("target_power_state", exact(40)),
    sa.Column("maintenance", sa.Boolean(create_constraint=False), nullable=False, server_default=sa.false()),
    sa.Column("maintenance_reason", sa.Text),
    sa.Column("maintenance_since", Micros),
    sa.Column("maintenance_by", exact(255)),
    sa.Column("disabled", sa.Boolean(create_constraint=False), nullable=False, server_default=sa.false()),
    sa.Column("disabled_reason", sa.Text),
    sa.Column("disabled_since", Micros),
    sa.Column("disabled_by", exact(255)),
    sa.Column("draining", sa.Boolean(create_constraint=False), nullable=False, server_default=sa.false()),
    sa.Column("draining_reason", sa.Text),
    sa.Column("draining_since", Micros),
    sa.Column("draining_by", exact(255)),
    sa.Column("fault", exact(255)),
    sa.Column("last_error", sa.Text),
    sa.Column("generation", sa.BigInteger, nullable=False, default=0),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_nodes_uuid"),
    sa.UniqueConstraint("name", name="uq_nodes_name"),
    sa.UniqueConstraint("instance_uuid", name="uq_nodes_instance_uuid"),
    sa.Index("ix_nodes_shard_id", "shard", "id"),
    sa.Index("ix_nodes_host", "host"),
    # Schedulers read the few nodes with one of these flags every second.
    sa.Index("ix_nodes_disabled", "disabled"),
    sa.Index("ix_nodes_maintenance", "maintenance"),
    sa.Index("ix_nodes_draining", "draining"),
    # Schedulers read what changed.
    sa.Index("ix_nodes_updated_at", "updated_at"),
    # Without it SQLite gives the number of a node that was removed to the next one.
    sqlite_autoincrement=True,
)

aggregates = sa.Table(
    "aggregates",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("metadata", JsonText, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_aggregates_uuid"),
    sa.UniqueConstraint("name", name="uq_aggregates_name"),
)
#: ``kind`` is ``host`` (the member is an agent's name: all its nodes belong) or ``node`` (the member is a node's uuid).
aggregate_members = sa.Table(
    "aggregate_members",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("aggregate", Uuid, nullable=False),
    sa.Column("kind", exact(8), nullable=False),
    sa.Column("member", exact(255), nullable=False),
    sa.UniqueConstraint("aggregate", "kind", "member", name="uq_aggregate_members_member"),
)
