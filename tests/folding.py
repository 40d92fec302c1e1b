# SPDX-License-Identifier: Apache-2.0
"""Folds the journal and compares the result with the tables: the journal alone must reproduce them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa

from moorage.allocation.interface import AllocationStore
from moorage.db import Database
from moorage.db.tables import events
from moorage.fleet.tables import nodes
from moorage.services.tables import services
from moorage.testing.allocation import all_allocations
from moorage_plugins.compute.tables import instances

__all__ = ["differences", "fold"]

#: Subject -> its state.
State = dict[str, Mapping[str, Any]]


def fold(found: Iterable[Any]) -> State:
    """The last state of every subject that was not deleted."""
    state: State = {}
    for each in found:
        if each.kind.startswith(("cleanup.", "operation.")):
            # They tell of work on the subject; what it is afterwards, its own events say.
            continue
        if each.kind.endswith(".delete"):
            if each.subject not in state:
                raise AssertionError(f"{each.subject} was deleted and never made")
            del state[each.subject]
        elif each.kind.startswith("service."):
            state[each.subject] = {"epoch": each.state["epoch"]}
        else:
            state[each.subject] = each.state
    return state


def differences(database: Database, store: AllocationStore) -> list[str]:
    """Compares all events, numbered ones first, with the tables. Nothing may be written meanwhile."""
    with database.read() as tx:
        number = sa.func.coalesce(events.c.number, 2**62)
        state = fold(tx.execute(sa.select(events).order_by(number, events.c.id)))
        stored = {**dict(_stored(tx, state)), **_held(store)}
    kinds = ("instance/", "claim/", "node/", "service/")
    folded = {subject: value for subject, value in state.items() if subject.startswith(kinds)}
    return [
        f"{subject}: the journal says {folded.get(subject)}, the table {stored.get(subject)}"
        for subject in sorted(folded.keys() | stored.keys())
        if folded.get(subject) != stored.get(subject)
    ]


def _stored(tx: sa.Connection, state: State) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for table, kind in ((instances, "instance"), (nodes, "node")):
        for row in tx.execute(sa.select(table)).mappings():
            subject = f"{kind}/{row['uuid']}"
            yield subject, {name: row[name] for name in state.get(subject, {"status": None})}
    for row in tx.execute(sa.select(services)).mappings():
        yield f"service/{row['uuid']}", {"epoch": row["epoch"]}


def _held(store: AllocationStore) -> State:
    held: dict[str, dict[str, dict[str, int]]] = {}
    for each in all_allocations(store):
        held.setdefault(f"claim/{each.consumer}", {}).setdefault(each.provider, {})[each.resource_class] = each.used
    return {subject: {"holds": holds} for subject, holds in held.items()}
