# SPDX-License-Identifier: Apache-2.0
"""Changes single properties of a node, and its states; what is not named stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database, now
from moorage.fleet.events import record_nodes
from moorage.fleet.interface import Along
from moorage.fleet.states import with_since
from moorage.fleet.tables import nodes

__all__ = ["change_node"]


def change_node(
    database: Database,
    node_uuid: str,
    properties: Mapping[str, Any],
    states: Mapping[str, Any] | None = None,
    *,
    along: Along | None = None,
) -> None:
    """Change single properties of a node and its states, all in one transaction. A property that is None is removed.

    The node's row is written first (its generation), so that two concurrent changes of different properties both last.

    :param states: columns as :func:`moorage.fleet.interface.check_states` returns them.
    :param along: called after the node's row was written, before the commit.
    :raises NotFound: there is no such node.
    """

    def work(tx: sa.Connection) -> None:
        row = sa.update(nodes).where(nodes.c.uuid == node_uuid)
        columns = {**with_since(states or {}), "generation": nodes.c.generation + 1, "updated_at": now()}
        if tx.execute(row.ordered_values(*columns.items())).rowcount != 1:
            raise errors.NotFound(f"There is no node {node_uuid}; moorage node list shows all.")
        if properties:
            present = tx.execute(sa.select(nodes.c.properties).where(nodes.c.uuid == node_uuid)).scalar_one()
            merged = {key: value for key, value in {**present, **properties}.items() if value is not None}
            tx.execute(row.values(properties=merged))
        if along is not None:
            along(tx)
        record_nodes(tx, [node_uuid])

    database.run(work)
