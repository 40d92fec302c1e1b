# SPDX-License-Identifier: Apache-2.0
"""Tables of scheduling: plugins that hung, server groups, refusals and flavors.

:mod:`moorage.scheduling.plugin_failures` writes the first, :mod:`moorage.scheduling.groups` the second,
:mod:`moorage.scheduling.decisions` the third, and :mod:`moorage.scheduling.flavors` the fourth.
"""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, JsonText, Micros, Uuid, core_metadata, exact

__all__ = ["flavors", "group_turns", "plugin_incidents", "refusals", "server_groups"]

plugin_incidents = sa.Table(
    "plugin_incidents",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("plugin", exact(255), nullable=False),
    sa.Column("at", Micros, nullable=False),
    sa.Index("ix_plugin_incidents_plugin_at", "plugin", "at"),
)

server_groups = sa.Table(
    "server_groups",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("name", exact(255), nullable=False),
    sa.Column("project_id", exact(255), nullable=False),
    sa.Column("policy", exact(40), nullable=False),
    sa.Column("max_server_per_host", sa.Integer, nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.UniqueConstraint("uuid", name="uq_server_groups_uuid"),
    sa.UniqueConstraint("project_id", "name", name="uq_server_groups_name"),
)

#: Rows on which claims of groups that requests bring along take turns, made when first needed.
group_turns = sa.Table(
    "group_turns",
    core_metadata,
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
)

refusals = sa.Table(
    "refusals",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("request_id", exact(255), nullable=False),
    sa.Column("instance_uuid", Uuid, nullable=False),
    sa.Column("at", Micros, nullable=False),
    sa.Column("decision", sa.Text, nullable=False),
    sa.Index("ix_refusals_request_id", "request_id"),
    sa.Index("ix_refusals_instance_uuid", "instance_uuid"),
    sa.Index("ix_refusals_at", "at"),
)

#: One row for each version of a flavor. Only ``deprecated``, ``successor``, ``generation`` and ``updated_at`` ever change.
flavors = sa.Table(
    "flavors",
    core_metadata,
    sa.Column("uuid", Uuid, primary_key=True),
    sa.Column("flavorid", exact(255), nullable=False),
    #: From 1, without gaps.
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("resources", JsonText, nullable=False),
    sa.Column("extra_specs", JsonText, nullable=False),
    #: It records what instances have, and cannot be requested.
    sa.Column("implicit", sa.Boolean(create_constraint=False), nullable=False),
    sa.Column("deprecated", sa.Boolean(create_constraint=False), nullable=False),
    #: The flavorid to ask for instead; empty: none was named.
    sa.Column("successor", exact(255), nullable=False),
    sa.Column("generation", sa.BigInteger, nullable=False),
    sa.Column("created_at", Micros, nullable=False),
    sa.Column("updated_at", Micros, nullable=False),
    sa.UniqueConstraint("flavorid", "version", name="uq_flavors_version"),
)
