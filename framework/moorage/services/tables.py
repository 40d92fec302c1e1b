# SPDX-License-Identifier: Apache-2.0
"""The table of services, written by :mod:`moorage.services.registry` alone, and that of its brake."""

from __future__ import annotations

import sqlalchemy as sa

from moorage.db.schema import BigId, Micros, Uuid, core_metadata, exact
from moorage.services.interface import NEVER_ASSUMED

__all__ = ["automatic_fences", "lacking", "offering", "services"]

services = sa.Table(
    "services",
    core_metadata,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False),
    sa.Column("host", exact(255), nullable=False),
    sa.Column("binary", exact(64), nullable=False),
    sa.Column("cluster", exact(255)),
    #: The shard whose nodes an agent serves; NULL: the nodes that are given to its host.
    sa.Column("shard", exact(255)),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("beat", sa.BigInteger, nullable=False),
    sa.Column("beat_at", Micros, nullable=False),
    sa.Column("started_at", Micros, nullable=False),
    sa.Column("rpc_version", sa.String(16), nullable=False),
    sa.Column("disabled", sa.Boolean(create_constraint=False), nullable=False, default=False),
    sa.Column("disabled_reason", sa.String(255), nullable=False, default=""),
    #: The agent services that an agent runs with what they can do, as " compute compute.commands block_storage "; NULL: an agent of
    #: an earlier version, which may run any.
    sa.Column("offers", exact(1000)),
    sa.Column("forced_down", sa.Boolean(create_constraint=False), nullable=False, default=False),
    #: The epoch of an agent in which its host was fenced; NULL: it was not. With another epoch it has started since.
    sa.Column("fenced_epoch", sa.BigInteger),
    sa.Column("fence_reason", sa.String(255), nullable=False, server_default=""),
    #: Instances that were evacuated since then.
    sa.Column("evacuated", sa.BigInteger, nullable=False, server_default="0"),
    #: Microseconds, less a margin, after which the host of an agent ends its workloads when no heartbeat is confirmed; NULL: it
    #: does not. Heartbeats write it; each start empties it.
    sa.Column("self_fence", sa.BigInteger),
    #: ``started_at`` of the agent that promised ``self_fence``. An agent of a release without promises empties neither column; its
    #: start makes ``started_at`` differ, which ends the promise.
    sa.Column("self_fence_start", Micros),
    sa.UniqueConstraint("uuid", name="uq_services_uuid"),
    sa.UniqueConstraint("host", "binary", name="uq_services_host_binary"),
)


#: The slots of the brake on automatic fences, each with its last use (:mod:`moorage.services.automatic_fences`).
automatic_fences = sa.Table(
    "automatic_fences",
    core_metadata,
    sa.Column("slot", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("fenced_at", Micros, nullable=False),
    sa.Column("host", exact(255), nullable=False),
)


def offering(service: str, of: sa.FromClause = services) -> sa.ColumnElement[bool]:
    """Returns the condition that an agent runs an agent service, as far as is known.

    :param of: the table, or an alias of it.
    """
    found = of.c.offers
    return sa.or_(found.is_(None), found.contains(f" {service} ", autoescape=True))


def lacking(power: str, of: sa.FromClause = services) -> sa.ColumnElement[bool]:
    """Returns the condition that an agent lacks a power (``compute.commands``) of its agent service.

    An agent of an earlier version names no powers, and may have those that are assumed of it.
    """
    service = power.partition(".")[0]
    without = sa.not_(of.c.offers.contains(f" {power} ", autoescape=True))
    if power in NEVER_ASSUMED:
        return sa.or_(of.c.offers.is_(None), without)
    return sa.and_(of.c.offers.contains(f" {service}.", autoescape=True), without)
