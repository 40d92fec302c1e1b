# SPDX-License-Identifier: Apache-2.0
"""Nodes whose agent is up, for tests that claim and start no agent."""

from __future__ import annotations

from moorage.clock import SystemClock
from moorage.db import Database
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.instances.availability import Availability
from moorage.services.registry import ServiceRegistry

__all__ = ["ready_node"]


def ready_node(database: Database, uuid: str, host: str, *, down_time: float = 3600.0) -> Availability:
    """Create the node and start its host's agent; what claims check."""
    with database.write() as tx:
        NodeStore(database).ensure(tx, [NodeSpec(uuid, f"node-{uuid}", host)])
    ServiceRegistry(database, SystemClock()).enlist("agent", host, rpc_version="1.0")
    return Availability(database, down_time)
