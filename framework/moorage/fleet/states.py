# SPDX-License-Identifier: Apache-2.0
"""The states of a node that keep new instances away: disabled, maintenance and draining.

Each has a flag, a reason, the time since when, and who began it (``maintenance``, ``maintenance_reason``, ``maintenance_since``,
``maintenance_by``). They are independent of each other: a node that leaves maintenance may still be disabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from oslo_context import context as oslo_context

from moorage.db import now
from moorage.fleet.interface import STATES
from moorage.fleet.tables import nodes

__all__ = ["BEGIN_STATES", "begun_by", "with_since"]

_LONGEST = 255
#: Sets since when and by whom, for nodes that were inserted with a flag.
BEGIN_STATES = sa.update(nodes).values(
    {
        name: sa.case((nodes.c[flag] == sa.true(), value), else_=sa.null())
        for flag in STATES
        for name, value in (
            (f"{flag}_since", now()),
            (f"{flag}_by", sa.bindparam("begun_by", type_=nodes.c.disabled_by.type)),
        )
    }
)


def begun_by() -> str | None:
    """Returns the user whose request this thread does; None outside of requests."""
    return (getattr(oslo_context.get_current(), "user_id", None) or "")[:_LONGEST] or None


def with_since(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Columns to write, completed by since when and by whom; in the order in which they must be written.

    Also by when the provision state was written.

    A flag that is set again keeps the time at which it was set first, and who set it. MariaDB evaluates assignments from left to
    right, so both come before the flag that they read.
    """
    since: dict[str, Any] = {}
    for flag in STATES:
        if flag in changes:
            for name, value in (
                (f"{flag}_since", now()),
                (f"{flag}_by", sa.literal(begun_by(), nodes.c.disabled_by.type)),
            ):
                kept = sa.case((nodes.c[flag] == sa.true(), nodes.c[name]), else_=value)
                since[name] = kept if changes[flag] else None
    if "provision_state" in changes:
        since["provision_updated_at"] = now()
    return since | dict(changes)
