# SPDX-License-Identifier: Apache-2.0
"""Records the events of nodes; every module that writes the table of nodes calls it after its write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from moorage.db import JournalEvent, record
from moorage.db.schema import names_of
from moorage.fleet.interface import STATES
from moorage.fleet.tables import nodes

__all__ = ["record_created", "record_deleted", "record_nodes"]

#: What an event says of a node: nothing that users wrote.
_STATE = (
    nodes.c.name, nodes.c.host, nodes.c.shard, nodes.c.resource_class, nodes.c.instance_uuid, nodes.c.provision_state,
    nodes.c.power_state,
    *(nodes.c[flag] for flag in STATES),
)  # fmt: skip
_FIND = sa.select(nodes.c.uuid, nodes.c.generation, *_STATE).where(
    nodes.c.uuid.in_(sa.bindparam("of_uuids", expanding=True))
)
_NAMES = names_of(_STATE)
#: Uuids in one statement.
_PART = 1000


def record_created(tx: sa.Connection, rows: Iterable[Mapping[str, Any]]) -> None:
    """Record that nodes were inserted.

    :param rows: what was inserted of each; columns that are left out are NULL.
    """
    for row in rows:
        record(tx, JournalEvent("node.create", f"node/{row['uuid']}", 0, {name: row.get(name) for name in _NAMES}))


def record_nodes(tx: sa.Connection, uuids: Iterable[str]) -> None:
    """Record that nodes were changed; one read for 1,000 nodes."""
    wanted = sorted(set(uuids))
    for start in range(0, len(wanted), _PART):
        for row in tx.execute(_FIND, {"of_uuids": wanted[start : start + _PART]}):
            state = dict(zip(_NAMES, row[2:], strict=True))
            state |= {flag: bool(state[flag]) for flag in STATES}
            record(tx, JournalEvent("node.change", f"node/{row.uuid}", row.generation, state))


def record_deleted(tx: sa.Connection, uuid: str) -> None:
    """Record that a node was removed."""
    record(tx, JournalEvent("node.delete", f"node/{uuid}", 0))
