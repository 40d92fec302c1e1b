# SPDX-License-Identifier: Apache-2.0
"""The steps of a move between two hosts: live_migrate, migrate, and a resize to another host.

A move is one operation that the agents of the two hosts hand to each other. The row of the operation says which agent has the right
to act; each hand-over is the fenced end of one step and the beginning of the next one, in one transaction, with a new token.
``pending["phase"]`` of the instance says where the move stands.

========== =========== ============================================== ============================================================
phase      acts        does                                           when it fails
========== =========== ============================================== ============================================================
prepare    destination checks and makes what it needs; nothing        the move ends: the instance is active on the source,
                       executes                                       with the fault
transfer   source      cold: stops the workload. live: carries it,    the source lets the workload go on; the move ends as above
                       then both sides are paused. Its end is
                       **the commit**
activate   destination starts what it has prepared                    the instance stays on the destination, stopped, with the
                                                                      fault
revert     source      lets the workload go on, and ends the move     the instance is what the driver sees, with the fault
========== =========== ============================================== ============================================================

The commit is the only point of no return. One transaction of the source writes that the instance is on the destination, gives it
the resources there and ``departed_consumer`` those on the source, hands the operation to the destination, and creates the
operation ``let_go`` for the source, whose end releases the resources on the source. Before it, whatever fails ends with the
workload on the source. After it there is only forward.

At most one copy executes: the destination makes a copy that does not execute, and starts it only when it holds the operation,
which the source hands on only when its own copy is stopped or paused. An agent that stood still, and goes on when another one has
its place, can write nothing, because its token is an earlier one. The drivers refuse its calls for the same reason: each call
that stops, carries or starts a workload has the token of its operation as its order
(:class:`moorage.drivers.interface.PowerControl`).

Ends that die:

* The destination, before the commit: the move waits for its agent. ``revert_move`` ends it, by request, or by a scheduler as soon
  as an operator has declared that agent dead. A cleaner that takes the operation over leaves the instance active on the source.
* The source, before the commit: the move waits for its agent, which alone knows what runs there. The instance can be evacuated
  when the host is fenced. A cleaner leaves the instance there, stopped with the actual state ``unknown``.
* The destination, after the commit: the move waits for its agent. The instance can be evacuated when the host is fenced. A
  cleaner leaves the instance there, stopped with the actual state ``unknown``.
* The source, after the commit: it keeps its resources until its agent has let go (:mod:`moorage.instances.departures`).

A move to another node of the same host has no second side. The agent replaces the workload in its place, in one step without a
phase.

A resize can be reverted after its commit, until it is confirmed (:mod:`moorage.instances.resizes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moorage.instances.availability import not_forced_down
from moorage.work.interface import OnlyIf

__all__ = [
    "ACTIVATE",
    "MOVES",
    "OF_PHASE",
    "PREPARE",
    "RESIZED",
    "REVERT",
    "REVERT_RESIZE",
    "TRANSFER",
    "acting_host",
    "is_revertible",
    "kept_elsewhere",
    "kept_source",
    "may_commit",
    "still_kept",
]

#: The operations that the agents are given. Agents of earlier releases know none of them.
PREPARE, TRANSFER, ACTIVATE, REVERT = "prepare_move", "transfer_move", "activate_move", "revert_move"
#: Operation -> ``pending["phase"]``.
OF_PHASE: Mapping[str, str] = {each: each.removesuffix("_move") for each in (PREPARE, TRANSFER, ACTIVATE, REVERT)}
REVERT_RESIZE = "revert_resize"
#: What is asked for.
MOVES = frozenset({"resize", "migrate", "live_migrate", REVERT_RESIZE})
#: Status of an instance that has its new flavor and whose resize is not confirmed.
RESIZED = "resized"


def is_revertible(pending: Mapping[str, Any]) -> bool:
    """Returns whether a move is in progress that has not been committed."""
    return pending.get("phase") in (OF_PHASE[PREPARE], OF_PHASE[TRANSFER])


def acting_host(operation: str, host: str, pending: Mapping[str, Any]) -> str:
    """Returns the host whose agent does an operation on an instance.

    :param host: where the instance is.
    """
    destination = operation == PREPARE or operation in MOVES
    return str(pending.get("host", host)) if destination else host


def kept_source(pending: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the place and the flavor to which an unconfirmed resize can be reverted; empty when there is none."""
    found: Mapping[str, Any] = pending.get("kept") or {}
    return found


def kept_elsewhere(host: str, pending: Mapping[str, Any]) -> str:
    """Returns the other host that keeps a stopped copy of an instance for the revert of its resize; empty when none does.

    :param host: where the instance is.
    """
    kept = str(kept_source(pending).get("host", ""))
    return kept if kept != host else ""


def still_kept(pending: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an instance whose resize stays unconfirmed after an operation; empty where nothing is kept."""
    kept = kept_source(pending)
    return {"status": RESIZED, "pending": {"operation": "resize", "kept": kept}} if kept else {}


def may_commit(destination: str) -> OnlyIf:
    """Returns the condition of a commit: no operator has declared the agent of the destination dead.

    Without it, the workload would wait for a host that may never come back.
    """
    return not_forced_down(destination)
