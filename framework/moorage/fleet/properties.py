# SPDX-License-Identifier: Apache-2.0
"""Changing single properties of a node, without saying the others again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database, now
from moorage.fleet.tables import nodes

__all__ = ["merge_properties"]


def merge_properties(database: Database, node_uuid: str, changes: Mapping[str, Any]) -> None:
    """Set properties of a node; a None takes one away.

    The row is written first (its generation), so of two who change different properties at the same time none is lost.

    :raises NotFound: there is no such node.
    """

    def work(tx: sa.Connection) -> None:
        touch = sa.update(nodes).where(nodes.c.uuid == node_uuid)
        if tx.execute(touch.values(generation=nodes.c.generation + 1, updated_at=now())).rowcount != 1:
            raise errors.NotFound(f"There is no node {node_uuid}; moorage node list shows all.")
        present = tx.execute(sa.select(nodes.c.properties).where(nodes.c.uuid == node_uuid)).scalar_one()
        merged = {key: value for key, value in {**present, **changes}.items() if value is not None}
        tx.execute(touch.values(properties=merged))

    database.run(work)
