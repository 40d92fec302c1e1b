# SPDX-License-Identifier: Apache-2.0
"""Dry run: predicts, for each orphan, what a cleaner would do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from moorage import plugin_isolation
from moorage.cleanup.interface import CleanupHandler
from moorage.extensions import origin_of
from moorage.work.interface import Operation

__all__ = ["Key", "predict", "blocked_reason", "stale_reason"]

#: Type and id of a resource.
Key = tuple[str, str]


def blocked_reason(resource_type: str, paused: Collection[str], handled: Collection[str]) -> str:
    """Why resources of the type are not cleaned at present, for people; empty when they are."""
    if resource_type not in handled:
        return f"no enabled handler cleans a {resource_type} ([cleanup] enabled_handlers)"
    if resource_type in paused or "*" in paused:
        return f"the cleaning of the type {resource_type} is paused ([cleanup] paused)"
    return ""


def stale_reason(status: str | None, expected: str) -> str:
    """Why an orphan needs nothing."""
    if status is None:
        return "the resource is gone"
    return f"the resource is {status}, the operation was of {expected}"


def predict(
    transaction: Any,
    rows: Sequence[Operation],
    handlers: Mapping[str, CleanupHandler],
    paused: Collection[str],
    *,
    own: bool = False,
) -> dict[Key, str]:
    """Returns a sentence for each row that a cleaner could take and would not clean.

    :param own: the cleaner's own earlier incarnations are meant.
    """
    found: dict[Key, str] = {}
    for kind in {row.resource_type for row in rows}:
        some = [row for row in rows if row.resource_type == kind]
        hinders = blocked_reason(kind, paused, handlers)
        if not hinders and own and not handlers[kind].cleans_own:
            hinders = "its service goes on with it by itself"
        if hinders:
            found |= {(kind, row.resource_id): f"no: {hinders}" for row in some}
            continue
        found |= _stale(transaction, handlers[kind], some)
    return found


def _stale(transaction: Any, handler: CleanupHandler, rows: Sequence[Operation]) -> dict[Key, str]:
    try:
        with plugin_isolation.isolate_plugin_call(origin_of(handler)):
            resources = handler.read(transaction, [row.resource_id for row in rows])
    except Exception as error:  # noqa: BLE001  (the operator reads the reason)
        text = f"unknown: its handler cannot read it ({type(error).__name__}: {error})"
        return {(row.resource_type, row.resource_id): text for row in rows}
    found: dict[Key, str] = {}
    for row in rows:
        resource = resources.get(row.resource_id)
        status = None if resource is None else resource.status
        if status != row.status or status not in handler.cleanable:
            text = f"stale: {stale_reason(status, row.status)}; the row ends, nothing is written"
            found[row.resource_type, row.resource_id] = text
    return found
