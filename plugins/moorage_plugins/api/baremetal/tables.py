# SPDX-License-Identifier: Apache-2.0
"""Ports and portgroups of nodes; written by :mod:`moorage_plugins.api.baremetal.ports` alone.

``node_id`` is the id of a row of the core's ``nodes``, without a foreign key: a plugin must be removable. What is left of a node
that was removed by other means joins with nothing, so no request sees it; see ``ports.remove_strays``.
"""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, exact
from moorage_plugins.schema import plugins_metadata

__all__ = ["portgroups", "ports"]

portgroups = sa.Table(
    "baremetal_portgroups",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("node_id", sa.BigInteger, nullable=False),
    sa.Column("name", exact(255)),
    sa.Column("address", exact(18)),
    sa.Column("mode", exact(255), nullable=False),
    sa.Column("standalone_ports_supported", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("physical_network", exact(64)),
    sa.Column("properties", JsonText, nullable=False),
    sa.Column("extra", JsonText, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros),
    sa.UniqueConstraint("uuid", name="uq_baremetal_portgroups_uuid"),
    sa.UniqueConstraint("name", name="uq_baremetal_portgroups_name"),
    sa.UniqueConstraint("address", name="uq_baremetal_portgroups_address"),
    sa.Index("ix_baremetal_portgroups_node_id", "node_id", "id"),
)
ports = sa.Table(
    "baremetal_ports",
    plugins_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("node_id", sa.BigInteger, nullable=False),
    sa.Column("portgroup_uuid", Uuid),
    sa.Column("address", exact(18), nullable=False),
    sa.Column("name", exact(255)),
    sa.Column("description", exact(255)),
    sa.Column("vendor", exact(32)),
    sa.Column("category", exact(80)),
    sa.Column("physical_network", exact(64)),
    sa.Column("pxe_enabled", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("is_smartnic", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("local_link_connection", JsonText, nullable=False),
    sa.Column("extra", JsonText, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros),
    sa.UniqueConstraint("uuid", name="uq_baremetal_ports_uuid"),
    sa.UniqueConstraint("address", name="uq_baremetal_ports_address"),
    sa.UniqueConstraint("name", name="uq_baremetal_ports_name"),
    sa.Index("ix_baremetal_ports_node_id", "node_id", "id"),
    sa.Index("ix_baremetal_ports_portgroup_uuid", "portgroup_uuid"),
)
