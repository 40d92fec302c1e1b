# SPDX-License-Identifier: Apache-2.0
"""Claims the destination of a move or an evacuation, in the transaction that begins it.

A move between hosts is one operation that the agents of both hand to each other (:mod:`moorage.instances.moves`). While it runs,
``move_consumer`` holds the resources on the destination. From its commit the instance holds the resources on the destination,
``departed_consumer`` those on the source, and an operation ``let_go`` is addressed to the source. The source's agent removes what
is left of the instance and ends that operation, which releases the resources. A source that is down keeps them held until its
agent is back. Of a pool that both nodes share, both amounts are held meanwhile.

An evacuation needs that the host of the instance is fenced (:meth:`ServiceRegistry.fence`): nothing of it runs there any more. So
the instance leaves with the transaction that begins the evacuation, which is the only point of no return. A move that is in
progress ends with that transaction. It writes the row of the host's agent on the condition that the fence holds. A start of that
agent ends the fence by a write of the same row, so the two take turns: an agent that starts finds every instance that was
evacuated on another host, and destroys what is left of it before it takes work. Where another host keeps a copy for the revert of
a resize, that host has to let go of the instance, and the room on the fenced host is given back by its fence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationLedger,
    AllocationStore,
    ClaimOutcome,
    ClaimRequest,
    Expect,
)
from moorage.instances.action_kinds import (
    EVACUATE,
    LIVE_MIGRATE,
    ActionKind,
    begin_action,
    has_ended,
)
from moorage.instances.availability import Availability
from moorage.instances.create import NodeNames, check_neighbours, record_placement
from moorage.instances.interface import (
    DEPARTURE,
    Instance,
    InstanceStore,
    claims_after_leaving,
    move_consumer,
)
from moorage.instances.moves import (
    MOVES,
    OF_PHASE,
    PREPARE,
    kept_elsewhere,
)
from moorage.instances.providers import claim_of_node
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import ClaimResult, RequestSpec
from moorage.services.registry import ServiceRegistry
from moorage.work.operations import SqlOperationStore

__all__ = ["MoveClaimer"]


@dataclass(frozen=True, slots=True)
class MoveClaimer:
    """A Claimer (see :mod:`moorage.scheduling.interface`) that claims the destination of one instance's move."""

    store: AllocationStore
    instances: InstanceStore
    workers: SqlOperationStore
    node_names: NodeNames
    groups: GroupStore
    availability: Availability
    registry: ServiceRegistry
    instance: Instance
    operation: ActionKind

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """Take the room and record what is to be done there, in one transaction."""
        to = {"host": host, "node": self.node_names.node_name(node_uuid), "node_uuid": node_uuid}
        values = self._values(spec, to, request_id)

        def take(held: Mapping[str, Mapping[str, int]]) -> ClaimOutcome:
            holds = {each: dict(held[each]) for each in held}
            written = {**values, "pending": {**values["pending"], "holds": holds}}
            return self._take(spec, held, request_id, node_uuid, lambda tx: self._record(tx, spec, to, written))

        outcome, holds = claim_of_node(node_uuid, spec.flavor.resources, spec.propose, take)
        if outcome.repeated:
            # Where it went then; its row says so.
            return self.earlier(spec, request_id) or ClaimResult(node_uuid, repeated=True)
        return ClaimResult(node_uuid, holds=holds)

    @property
    def _evacuates(self) -> bool:
        return self.operation.name == EVACUATE

    @property
    def _stays(self) -> bool:
        """Whether the instance stays on its host until it has moved. What is on no host is on its destination from now on."""
        return bool(self.instance.host) and not self._evacuates

    def _values(self, spec: RequestSpec, to: Mapping[str, str], request_id: str) -> dict[str, Any]:
        """What is written of the instance, without what it will hold."""
        # An instance keeps its extra specs in other operations, even if they cannot be parsed.
        kept = self.operation.name != "resize"
        asked = self.instance.request.get("extra_specs") or {} if kept else spec.flavor.extra_specs
        pending = {
            "operation": self.operation.name,
            "request_id": request_id,
            "flavorid": spec.flavor.flavorid,
            "flavor_version": spec.flavor.version,
            "resources": dict(spec.flavor.resources),
            "extra_specs": dict(asked),
            **({"limits": dict(spec.limits)} if spec.limits else {}),
            **to,
        }
        if self.operation.name in MOVES and to["host"] != self.instance.host:
            pending |= {"phase": OF_PHASE[PREPARE], "live": self.operation.name == LIVE_MIGRATE}
        if self._stays:
            return {"pending": pending}
        if self._evacuates:
            pending["left"] = self.instance.host
        unknown = {"actual_state": "unknown", "actual_detail": ""} if self._evacuates else {}
        return {"pending": pending, **to, **unknown}

    def _record(self, transaction: Any, spec: RequestSpec, to: Mapping[str, str], values: Mapping[str, Any]) -> None:
        """Begin the operation, in the transaction that claims its destination."""
        node_uuid, source = to["node_uuid"], self.instance.host if self._stays else ""
        check_neighbours(transaction, self.groups, self.instances, spec, node_uuid)
        only_if = self.availability.require(node_uuid, to["host"], source=source)
        stores = (self.instances, self.workers)
        token = begin_action(transaction, stores, self.instance, self.operation, to["host"], values, only_if)
        record_placement(transaction, spec, self.operation.name, to["node"], token)

    def _take(
        self,
        spec: RequestSpec,
        held: Mapping[str, Mapping[str, int]],
        request_id: str,
        node_uuid: str,
        record: Callable[[Any], None],
    ) -> ClaimOutcome:
        """Claim ``held``, and record the operation with it."""
        residents, project, user = {node_uuid: spec.residents}, spec.project_id, spec.user_id
        if not self.instance.host:
            request = ClaimRequest(
                spec.instance_uuid, held, request_id, project=project, user=user, residents=residents
            )
            return self.store.claim(request, record)
        if self._evacuates:
            return self._evacuate(held, residents, record)
        change = AllocationChange(
            move_consumer(spec.instance_uuid), held, Expect.NOTHING, project, user, consumer_type="MIGRATION",
            residents=residents, counts_with=spec.instance_uuid, enforce_quota=True,
        )  # fmt: skip
        return _ledger(self.store).replace([change], record)[0]

    def _evacuate(
        self,
        held: Mapping[str, Mapping[str, int]],
        residents: Mapping[str, int | None],
        record: Callable[[Any], None],
    ) -> ClaimOutcome:
        """Have the instance hold ``held``; what it held on its host stays held until that host's agent has let go.

        The destination of a move that is in progress has nothing that executes. Its agent removes what it has prepared.
        """
        ledger, left = _ledger(self.store), self.instance
        moving = left.pending.get("node_uuid")
        versions = {node: None for node in (left.node_uuid, moving) if node} | dict(residents)
        changes = claims_after_leaving(ledger, left, held, versions, departed=Expect.ANYTHING)
        kept = kept_elsewhere(left.host, left.pending)
        if kept:
            # What that host holds stays as it is, until its agent has let go.
            del changes[1:]
        if moving:
            changes.append(AllocationChange(move_consumer(left.uuid), {}))
        departure = self.workers.get(DEPARTURE, left.uuid)
        # An earlier host that has not let go of the instance gives its room back by its fence.
        hosts = {left.host} if departure is None else {left.host, departure.target_host}

        def leave(transaction: Any) -> None:
            for host in sorted(hosts):
                self._hold_fence(transaction, host)
            record(transaction)
            self.workers.create(
                transaction, DEPARTURE, left.uuid, "let_go", "leaving", target_host=kept or left.host, force=True,
                project_id=left.project_id,
            )  # fmt: skip

        return ledger.replace(changes, leave)[0]

    def _hold_fence(self, transaction: Any, host: str) -> None:
        if not self.registry.hold_fence(transaction, host):
            raise errors.Conflict(
                f"Instance {self.instance.uuid} is not evacuated, because host {host} is not fenced: it may run there. Make sure "
                f"that the host is off, then run moorage host evacuate {host} --fenced --reason TEXT.",
                instance=self.instance.uuid,
                host=host,
            )

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """Where an earlier try of the same request has sent it."""
        found = self.instances.get(spec.instance_uuid)
        if found.pending.get("request_id") == request_id:
            return ClaimResult(found.pending.get("node_uuid", found.node_uuid), repeated=True)
        return ClaimResult(found.node_uuid, repeated=True) if found.node_uuid and has_ended(found, request_id) else None

    def release(self, instance_uuid: str) -> None:
        """Nothing is held that was not recorded."""


def _ledger(store: AllocationStore) -> AllocationLedger:
    if not isinstance(store, AllocationLedger):
        raise errors.ConfigError("The allocation store cannot move claims, so instances cannot be moved; use sql.")
    return store
