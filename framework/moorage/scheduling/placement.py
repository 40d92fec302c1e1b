# SPDX-License-Identifier: Apache-2.0
"""Defines the state of a request during its scheduling decision, and the result of the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from oslo_context import context as oslo_context

from moorage.scheduling.decisions import Decision
from moorage.scheduling.filter_and_weigh import Ranking
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Claimer, InstanceRecord, NodeState, RequestSpec
from moorage.scheduling.scheduling_policy import SchedulingPolicy
from moorage.scheduling.snapshot import Snapshot

__all__ = ["Choice", "Placement", "Refused", "Reserver", "Selection", "ViewReserver"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Holds the node that was claimed for an instance.

    :param repeated: an earlier try of the same request had claimed it.
    :param record: has no host, and the selection no node, where the instance exists and holds nothing on any node.
    :param alternates: (host, node) of the next best, where it could go when its build fails.
    :param limits: what the filters promised of the node; the claim has checked those that it knows.
    :param shown: what the claim wrote, and ``token``; see :class:`moorage.scheduling.interface.claims.ClaimResult`.
    """

    record: InstanceRecord
    node_uuid: str
    repeated: bool
    attempts: int
    alternates: tuple[tuple[str, str], ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    token: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds a request for a node while it is decided.

    ``key`` names its claim. The decision has the id of the request, by which users find it.
    """

    policy: SchedulingPolicy
    spec: RequestSpec
    decision: Decision
    claimer: Claimer
    held: InstanceRecord | None
    key: str
    #: Rises from request to request; an earlier request does not give way to a reservation of a later one.
    number: int
    #: The request; the thread of another request may do the work.
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)
    #: Nodes that have refused it and are not tried again; those that may be, because their providers may have changed.
    refused: set[str] = field(default_factory=set)
    outdated: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Choice:
    """Holds a node that a ranking offers, and the ranking and snapshot that it comes from.

    :param others: rows of the next best.
    """

    fleet: Snapshot
    ranking: Ranking
    row: int
    others: Sequence[int]
    limits: Mapping[str, Any]

    @property
    def node(self) -> NodeState:
        """Returns the node."""
        return self.fleet.nodes[self.row]


class Reserver(Protocol):
    """Puts what is being claimed into the view, and takes it back when nothing came of it."""

    def reserve(self, record: InstanceRecord) -> None:
        """Shows an instance that is being claimed on a node, and no longer where it was reserved before."""

    def unreserve(self, record: InstanceRecord) -> None:
        """Removes an instance whose claim failed, unless a message has said something else of it meanwhile."""

    def claimed(self, records: Sequence[InstanceRecord]) -> None:
        """Adds instances that the store has and the view may lack."""


class Refused(Protocol):
    """Keeps refusals."""

    def record(self, decision: Decision) -> None:
        """Keeps the decision on a request that was refused."""

    def find(self, name: str) -> dict[str, Any] | None:
        """Returns a refusal by its request or instance; None: none was kept."""


class ViewReserver:
    """Reserves in a view without instances."""

    def __init__(self, view: FleetView) -> None:
        self._view = view

    def reserve(self, record: InstanceRecord) -> None:
        """Counts an instance as used."""
        self._view.hold(record)

    def unreserve(self, record: InstanceRecord) -> None:
        """Counts an instance no more."""
        self._view.let_go(record.uuid)

    def claimed(self, records: Sequence[InstanceRecord]) -> None:
        """Does nothing: this view keeps no instances."""
