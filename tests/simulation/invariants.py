# SPDX-License-Identifier: Apache-2.0
"""The invariants that the simulation checks: what is promised, on which page, by which checker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["INVARIANTS", "Invariant", "table"]


class Invariant(NamedTuple):
    """One promise.

    :param promised: the page of the documentation. :param checker: the method that looks, and when.
    """

    name: str
    promised: str
    checker: str


INVARIANTS: Sequence[Invariant] = (
    Invariant("Never over any limit", "allocation", "Placement.check_room, Claims.check_step: after each commit"),
    Invariant(
        "A counter of a provider is the sum of its allocations",
        "allocation",
        "Placement._check_allocations, Claims.check_step: at rest",
    ),
    Invariant("A claim holds all of its parts or none", "allocation", "Claims.check: at rest"),
    Invariant("No claim belongs to nothing", "allocation", "Placement._check_allocations, Claims.check: at rest"),
    Invariant("Of several requests for one consumer at most one gets it", "allocation", "Claims.check: at rest"),
    Invariant("A repetition of a request finds its claim", "allocation", "Claims._claim, Placement._create: at once"),
    Invariant("No increment at a generation is lost", "allocation", "Claims.check: at rest"),
    Invariant("A consumer that holds nothing has no row", "allocation", "Claims.check: at rest"),
    Invariant(
        "A limit of a project counts what its counted consumers hold",
        "allocation",
        "Quotas.check_step: after each commit",
    ),
    Invariant("No claim exceeds a limit that was set before", "allocation", "Quotas.check_step: after each commit"),
    Invariant("No limit refuses what fits", "allocation", "Quotas._do: at once; Quotas.check: at rest"),
    Invariant("Limits count all that is held", "allocation", "Quotas.check: at rest"),
    Invariant(
        "Answers about a consumer are those of some order of the operations",
        "allocation",
        "ConsumerHistories.check: over the whole history",
    ),
    Invariant(
        "Answers about an instance are those of some order of the operations",
        "scheduling",
        "InstanceHistories.check: over the whole history",
    ),
    Invariant("What was acknowledged exists exactly once", "scheduling", "Placement.check: at rest"),
    Invariant("What was deleted stays deleted", "scheduling", "Placement.check: at rest"),
    Invariant(
        "A request is refused only if each node that it might have had no room at some moment of it",
        "scheduling",
        "Placement.check_refusal: at each refusal",
    ),
    Invariant(
        "What a scheduler has claimed is in its view",
        "scheduling",
        "Placement.check_claimed: after each claim",
    ),
    Invariant("What a filter promised is true", "scheduling", "Promises.check_step: after each commit"),
    Invariant(
        "At most one copy of an instance executes while it moves",
        "moves",
        "Moves.check_copies, SharedInstances.check_hosts: after each commit and each call of a driver",
    ),
    Invariant(
        "An operation on an instance begins only when none is in progress",
        "../cleanup",
        "SharedInstances.check_begun: after each commit",
    ),
    Invariant(
        "A resize that is not confirmed can be reverted",
        "moves",
        "Moves.check_kept: after each commit",
    ),
    Invariant(
        "A resize confirms itself only when the agent has seen its instance run",
        "moves",
        "Moves.check_ends: after each commit",
    ),
    Invariant("A move is committed only to a copy that is there", "moves", "Moves.check_ends: after each commit"),
    Invariant("An instance runs on its host, and nowhere else", "scheduling", "Placement.quiet: at rest"),
    Invariant(
        "Nothing is evacuated from a host whose agent has started again",
        "scheduling",
        "Evacuations.check_turns: after each commit",
    ),
    Invariant(
        "An agent that serves has destroyed what was evacuated from its host",
        "scheduling",
        "Evacuations.started_role: at once",
    ),
    Invariant("Where hosts fence themselves, no two copies run at once", "fences", "SelfFences.witness: at once"),
    Invariant(
        "No jump of the database's clock fences a living host",
        "../howto/dead-host",
        "AutomaticEvacuations.check_fences: after each commit",
    ),
    Invariant(
        "No more hosts are fenced automatically in a period than the brake allows",
        "../howto/dead-host",
        "AutomaticEvacuations.check_fences: after each commit",
    ),
    Invariant(
        "No host is fenced automatically while half of the agents are silent",
        "../howto/dead-host",
        "AutomaticEvacuations.check_fences: after each commit",
    ),
    Invariant(
        "A host that is lost and fenced itself is evacuated without an operator",
        "../howto/dead-host",
        "AutomaticEvacuations._operator: in 400 seconds",
    ),
    Invariant("One effect for each token", "fences", "Placement.check: at rest"),
    Invariant("An operation has at most one effect", "fences", "Leases.check_step: after each commit"),
    Invariant("No token is given twice", "fences", "Leases._give: at once"),
    Invariant("No operation takes the place of another unasked", "fences", "Leases.check_step: after each commit"),
    Invariant(
        "No change follows one of a later token",
        "fences",
        "Leases.check_step, Workload.check_tokens: after each commit",
    ),
    Invariant("A resource has the token of its last change", "fences", "Leases.check_step: after each commit"),
    Invariant("Views of schedulers converge to the store", "scheduling", "Placement.quiet: at rest"),
    Invariant(
        "Instances on hosts whose agents tell nothing are read from the store",
        "../howto/upgrade",
        "Versions.quiet: at rest",
    ),
    Invariant(
        "No agent of an earlier release gets a step of a move", "moves", "Versions.check_moves: after each commit"
    ),
    Invariant("Events are numbered without a gap", "journal", "Placement.check_numbers: after each commit"),
    Invariant("The journal reproduces instances and claims", "journal", "Placement.check: at rest"),
    Invariant(
        "A webhook gets every event that it wants, in order", "journal", "Deliveries._accept: at once; check: at rest"
    ),
    Invariant(
        "A cursor moves forward only, over events that were accepted",
        "journal",
        "Deliveries.check_step: after each commit",
    ),
    Invariant("Every operation ends", "cleanup", "Placement.quiet, Cleaning.quiet, Leases.check: at rest"),
    Invariant("Every orphan reaches its documented end state", "cleanup", "Cleaning.check: at rest"),
    Invariant(
        "A volume, a snapshot and a restored backup have the data they were given", "cleanup", "Volumes.check: at rest"
    ),
    Invariant("A deleted volume, snapshot or backup stays deleted", "cleanup", "Volumes.check: at rest"),
    Invariant("No file belongs to nothing", "cleanup", "Volumes.quiet: at rest"),
    Invariant("Requests for cleanup are closed, but for three at most", "cleanup", "Cleaning.check: at rest"),
    Invariant(
        "A request for cleanup is closed only when nothing of it is left",
        "cleanup",
        "Cleaning.check_closed: after each commit",
    ),
    Invariant("Nothing of a living host is cleaned", "cleanup", "Cleaning.check: in schedules without faults"),
    Invariant(
        "Cleaners take nothing from a service that lives and renews",
        "cleanup",
        "Cleaning.check_taken: after each commit",
    ),
    Invariant("A search for work waits for no lock", "fences", "_SteppedSite._hold: at once, on servers"),
    Invariant("No service ends without a reason", "coordination", "Workload._main: in schedules without faults"),
    Invariant(
        "A tick of an object has at most one effect", "coordination", "Ticks.check, Sweeps.check: after each commit"
    ),
    Invariant("No effect follows one of a later ring", "coordination", "Ticks.check, Sweeps.check: after each commit"),
    Invariant("Each object is handled when all is well", "coordination", "Ticks.quiet: at rest"),
    Invariant("A node in use stays in its shard", "sharding", "Shards.check_step: after each commit"),
    Invariant("A node is where the journal of its plan says", "sharding", "Shards.check: at rest"),
    Invariant("A plan that has ended has nothing left to do", "sharding", "Shards.check: at rest"),
    Invariant(
        "A plan that was taken back is not carried out again", "sharding", "Shards.check_undone: after each commit"
    ),
)


def checkers(of: Invariant) -> Sequence[tuple[str, str]]:
    """Class and method of each checker of an invariant."""
    found: list[tuple[str, str]] = []
    for part in of.checker.split("; "):
        names = part.partition(":")[0]
        for name in names.split(", "):
            owner, _, method = name.rpartition(".")
            # A method without a class is of the one before.
            found.append((owner or found[-1][0], method))
    return found


def table() -> str:
    """The table for the documentation."""
    lines = [".. list-table::", "   :header-rows: 1", "", "   * - Invariant", "     - Promised in", "     - Checked by"]
    for each in INVARIANTS:
        lines += [f"   * - {each.name}", f"     - :doc:`{each.promised}`", f"     - {each.checker}"]
    return "\n".join(lines) + "\n"
