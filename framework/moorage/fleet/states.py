# SPDX-License-Identifier: Apache-2.0
"""The two states of a node that keep new instances away: disabled and maintenance.

Each has a flag, a reason and the time since when (``maintenance``, ``maintenance_reason``, ``maintenance_since``). They are
independent of each other: a node that leaves maintenance may still be disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from moorage.db import now
from moorage.fleet.interface import STATES
from moorage.fleet.tables import nodes

__all__ = ["BEGIN_STATES", "with_since"]

#: Sets since when, for nodes that were inserted with a flag.
BEGIN_STATES = sa.update(nodes).values(
    {f"{flag}_since": sa.case((nodes.c[flag] == sa.true(), now()), else_=sa.null()) for flag in STATES}
)


def with_since(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Columns to write, completed by since when; in the order in which they must be written.

    A flag that is set again keeps the time at which it was set first. MariaDB evaluates assignments from left to right, so the
    time comes before the flag that it reads.
    """
    since: dict[str, Any] = {}
    for flag in STATES:
        if flag in changes:
            kept = sa.case((nodes.c[flag] == sa.true(), nodes.c[f"{flag}_since"]), else_=now())
            since[f"{flag}_since"] = kept if changes[flag] else None
    return since | dict(changes)
