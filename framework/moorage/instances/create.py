# SPDX-License-Identifier: Apache-2.0
"""From a request to an operation: select, claim, instance row and worker row in one transaction, then the message to the agent.

What is lost on the way is repaired without an operator: a request that is repeated (same uuid, same request id) finds its claim; an
agent that missed the message finds the worker row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from oslo_context import context as oslo_context
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationLedger,
    AllocationStore,
    BatchCompanion,
    ClaimOutcome,
    ClaimRequest,
    GenerationConflict,
    RefusedTogether,
    StoreCapability,
)
from moorage.clock import Clock
from moorage.context import acting_for
from moorage.db import Database, JournalEvent
from moorage.db import record as record_event
from moorage.instances.availability import Availability
from moorage.instances.delete import DELETE
from moorage.instances.interface import Instance, InstanceStore, move_consumer
from moorage.instances.providers import claim_of_node, no_proposal
from moorage.read_only import replaced
from moorage.scheduling.groups import GroupStore, check_policy, is_promised
from moorage.scheduling.instance_fields import FieldSet
from moorage.scheduling.interface import ClaimResult, Holds, NodeState, RequestSpec, Residents, WantedClaim
from moorage.work.interface import ExistedBefore, OnlyIf
from moorage.work.operations import NewOperation, SqlOperationStore

__all__ = [
    "StoreClaimer",
    "check_neighbours",
    "check_store",
    "new_instance",
    "pending_holds",
    "read_fields",
    "read_residents",
    "record_placement",
    "refused_neighbours",
]

LOG = logging.getLogger(__name__)

BUILD = "build"
#: The generation of a claim that nobody has changed.
_NEW = 1


class NodeNames(Protocol):
    """Where the names of nodes are known."""

    def node_name(self, uuid: str) -> str:
        """Returns the node's name."""


def read_residents(database: Database, store: AllocationStore, instances: InstanceStore) -> Callable[[str], Residents]:
    """Returns a function that reads the instances of a node with their version.

    The version is read first, and both over one connection: a claim that finds this version finds these instances.
    """

    def read(node_uuid: str) -> Residents:
        def work(transaction: Any) -> Residents:
            version = store.residents(node_uuid, transaction)
            return Residents(version, tuple(instances.on_node(node_uuid, transaction)))

        return database.read_run(work)

    return read


def read_fields(declared: FieldSet, clock: Clock) -> Callable[[RequestSpec, NodeState], Mapping[str, Any]] | None:
    """A function that returns the declared fields of the instance that a request makes on a node; None when none are declared.

    They are those of the row that the claim writes. Only ``created_at`` is the time of the given clock, because the database has
    not given its own yet.
    """
    if not declared:
        return None

    def read(spec: RequestSpec, node: NodeState) -> Mapping[str, Any]:
        instance = new_instance(spec, node.host, node.name, node.uuid)
        return declared.of(replaced(instance, created_at=int(clock.wall() * 1e6)))

    return read


def check_store(store: AllocationStore, name: str) -> None:
    """Refuse a store that cannot write claim, instance and worker together.

    :raises ConfigError: names the option.
    """
    if StoreCapability.SHARED_TRANSACTION not in store.capabilities:
        raise errors.ConfigError(
            f"[allocation] store = {name} cannot write claims and instances in one transaction, which the roles need; "
            "use sql."
        )


@dataclass(frozen=True, slots=True)
class StoreClaimer:
    """Binds the scheduler's Claimer to the allocation store, the instances and the workers."""

    store: AllocationStore
    instances: InstanceStore
    workers: SqlOperationStore
    node_names: NodeNames
    groups: GroupStore
    availability: Availability
    database: Database | None = None
    cast: Callable[[str, str, str], None] | None = None
    #: How often a build that fails is tried again on another node.
    retries: Callable[[], int] = lambda: 0

    def claim(self, spec: RequestSpec, node_uuid: str, host: str, request_id: str) -> ClaimResult:
        """Take the room and record what is to be done there, all in one transaction."""
        wanted = WantedClaim(spec, node_uuid, host, request_id)
        tries: list[_Creation] = []

        def take(resources: Holds) -> ClaimOutcome:
            request, creation = self._creation(wanted, resources)
            tries.append(creation)
            return self.store.claim(request, creation)

        try:
            outcome, holds = claim_of_node(node_uuid, spec.flavor.resources, spec.propose, take)
        except (GenerationConflict, ExistedBefore):
            # The instance of an earlier try of this request has been moved since, with its claim; or it has lost its claim.
            earlier = self.earlier(spec, request_id)
            if earlier is None:
                raise
            return earlier
        return self._result(outcome, tries[-1], holds)

    def claim_many(self, wanted: Sequence[WantedClaim]) -> list[ClaimResult | BaseException]:
        """Claim as :meth:`claim` does, in few transactions. Of the providers of a node only the first proposal is tried."""
        held = [
            {each.node_uuid: each.spec.flavor.resources}
            if each.spec.propose is None
            else each.spec.propose(frozenset())
            for each in wanted
        ]
        claims = [
            (place, *self._creation(wanted[place], resources))
            for place, resources in enumerate(held)
            if resources is not None
        ]
        results: list[ClaimResult | BaseException] = [no_proposal(each.node_uuid) for each in wanted]
        outcomes = self.store.claim_many([(request, creation) for _, request, creation in claims])
        for (place, _, creation), outcome in zip(claims, outcomes, strict=True):
            each = wanted[place]
            if isinstance(outcome, GenerationConflict | ExistedBefore):
                results[place] = self.earlier(each.spec, each.request_id) or outcome
            elif isinstance(outcome, BaseException):
                results[place] = outcome
            else:
                holds = None if each.spec.propose is None else held[place]
                results[place] = self._result(outcome, creation, holds)
        return results

    def _creation(self, wanted: WantedClaim, resources: Holds) -> tuple[ClaimRequest, _Creation]:
        """What the store claims, and what is written with it."""
        spec, node_uuid = wanted.spec, wanted.node_uuid
        request = ClaimRequest(
            consumer=spec.instance_uuid,
            resources=resources,
            request_id=wanted.request_id,
            project=spec.project_id,
            user=spec.user_id,
            residents={node_uuid: spec.residents},
        )
        pending = {**self._pending(spec, wanted.request_id), **pending_holds(spec, resources)}
        node = self.node_names.node_name(node_uuid)
        instance = new_instance(spec, wanted.host, node, node_uuid, pending=pending)
        return request, _Creation(self, spec, instance, wanted.context)

    def _result(self, outcome: ClaimOutcome, made: _Creation, holds: Holds | None) -> ClaimResult:
        if outcome.repeated:
            return ClaimResult(self._node(outcome), repeated=True)
        return ClaimResult(
            made.instance.node_uuid,
            shown=made.instance.to_json(),
            holds=holds,
            token=made.token,
            together=outcome.together,
        )

    def earlier(self, spec: RequestSpec, request_id: str) -> ClaimResult | None:
        """Returns where the instance is, whatever became of it since its first claim; None: there is no such instance.

        Its row was written with that claim. The API compares the request with the instance before and after.
        """
        try:
            found = self.instances.get(spec.instance_uuid)
        except errors.NotFound:
            return None
        # One that is in error, or shelved, holds nothing on any node.
        return ClaimResult("" if found.status == "error" else found.node_uuid, repeated=True)

    def _node(self, outcome: ClaimOutcome) -> str:
        """Returns the node of a repeated claim, which may hold nothing of the node's own provider."""
        with contextlib.suppress(errors.NotFound):
            return self.instances.get(outcome.consumer).node_uuid
        return outcome.providers[0]

    def confirm(self, instances: Sequence[str]) -> None:
        """Raise the generations of the claims, in one transaction. Later tries find the instances themselves, as after a move."""
        if not isinstance(self.store, AllocationLedger):
            return
        changes = []
        for uuid in instances:
            holding = self.store.consumer(uuid)
            if holding is None:
                raise errors.Conflict(f"The claim of instance {uuid} was given back meanwhile.", consumer=uuid)
            held: dict[str, dict[str, int]] = {}
            for item in holding.allocations:
                held.setdefault(item.provider, {})[item.resource_class] = item.used
            changes.append(AllocationChange(uuid, held, holding.consumer.generation))
        self.store.replace(changes)

    def release(self, instance_uuid: str) -> None:
        """Take back what was claimed and recorded; an agent that has begun finds that it may not finish."""
        of_type = self.instances.resource_type

        def undo(transaction: Any) -> None:
            token = self.workers.create(
                transaction, of_type, instance_uuid, DELETE, "deleting", target_host="", force=True
            )
            self.instances.remove(transaction, instance_uuid, token)
            self.workers.withdraw(transaction, of_type, instance_uuid, token)

        if self.database is None or not isinstance(self.store, AllocationLedger):
            self.store.release(instance_uuid)
            return
        host, nodes = "", list[str]()
        with contextlib.suppress(errors.NotFound):
            instance = self.instances.get(instance_uuid)
            host, nodes = instance.host, [instance.node_uuid] if instance.node_uuid else []
        change = AllocationChange(instance_uuid, {}, _NEW, residents=dict.fromkeys(nodes))
        try:
            self.store.replace([change], undo)
        except GenerationConflict as error:
            if error.details["present"] is None:
                return
            raise errors.InUse(
                f"The claim of instance {instance_uuid} was confirmed or changed since it was made.",
                consumer=instance_uuid,
                holder="a later request",
            ) from error
        if host and self.cast is not None:
            # The agent may have built it already, and reported it.
            self.cast(host, "look_at_instance", instance_uuid)

    def _pending(self, spec: RequestSpec, request_id: str) -> dict[str, Any]:
        """What the agent and later tries of the build need. A request that names its host or node is tried nowhere else."""
        named = spec.force_hosts or spec.force_nodes or spec.requested_host or spec.requested_node
        optional = {
            "limits": dict(spec.limits),
            "retries": 0 if named else self.retries(),
            "ignore_hosts": list(spec.ignore_hosts),
            "ignore_nodes": list(spec.ignore_nodes),
        }
        return {"operation": BUILD, "request_id": request_id, **{name: each for name, each in optional.items() if each}}


@dataclass(slots=True, eq=False)
class _Creation(BatchCompanion):
    """Writes the instance and its operation in the transaction of the claim.

    :ivar instance: as the last transaction has written it; a transaction that lost a race runs again. ``token``: of its operation.
    """

    claimer: StoreClaimer
    spec: RequestSpec
    instance: Instance
    context: oslo_context.RequestContext | None
    token: int = 0

    @override
    def __call__(self, transaction: Any) -> None:
        claimer, spec, instance = self.claimer, self.spec, self.instance
        check_neighbours(transaction, claimer.groups, claimer.instances, spec, instance.node_uuid)
        # The client may have deleted the instance while an earlier try of its request was still running: ``first``.
        self.token = claimer.workers.create(
            transaction, claimer.instances.resource_type, instance.uuid, BUILD, instance.status, target_host=instance.host,
            first=True, only_if=self._open(), project_id=spec.project_id,
        )  # fmt: skip
        record_placement(transaction, spec, BUILD, instance.node, self.token)
        self.instance = claimer.instances.insert(transaction, instance)

    @classmethod
    @override
    def together(cls, transaction: Any, companions: Sequence[_Creation]) -> None:
        claimer = companions[0].claimer
        placed = [(each.spec, each.instance.node_uuid) for each in companions]
        crowded = refused_neighbours(transaction, claimer.groups, claimer.instances, placed)
        if crowded:
            raise RefusedTogether([companions[place] for place in crowded])
        operations = [
            NewOperation(each.instance.uuid, each.instance.host, each.spec.project_id, each.context, each._open())
            for each in companions
        ]
        of_type = claimer.instances.resource_type
        try:
            tokens = claimer.workers.create_many(
                transaction, of_type, BUILD, companions[0].instance.status, operations, first=True
            )
        except ExistedBefore as error:
            known = error.details["resources"]
            raise RefusedTogether([each for each in companions if each.instance.uuid in known]) from error
        if tokens is None:
            raise RefusedTogether([each for each in companions if each._is_refused(transaction)])
        for each in companions:
            with acting_for(each.context):
                record_placement(transaction, each.spec, BUILD, each.instance.node, tokens[each.instance.uuid])
        written = claimer.instances.insert_many(
            transaction, [each.instance for each in companions], [each.context for each in companions]
        )
        for each, instance in zip(companions, written, strict=True):
            each.instance, each.token = instance, tokens[instance.uuid]

    def _open(self) -> OnlyIf:
        return self.claimer.availability.require(self.instance.node_uuid, self.instance.host)

    def _is_refused(self, transaction: Any) -> bool:
        """Returns whether the node takes no new instances by now."""
        try:
            self._open().refuse(transaction)
        except (errors.ConstraintViolated, errors.NotFound):
            return True
        return False


def pending_holds(spec: RequestSpec, holds: Holds) -> Mapping[str, Any]:
    """What tells the agent which providers a claim takes of; nothing where the node has one provider."""
    return {} if spec.propose is None else {"holds": {uuid: dict(taken) for uuid, taken in holds.items()}}


def new_instance(
    spec: RequestSpec, host: str, node: str, node_uuid: str, *, pending: Mapping[str, Any] | None = None
) -> Instance:
    """Returns the instance of a request as its claim on a node writes it; the database adds the timestamps."""
    return Instance(
        uuid=spec.instance_uuid,
        name=str(spec.properties.get("name", "")),
        status="building",
        host=host,
        node=node,
        node_uuid=node_uuid,
        flavorid=spec.flavor.flavorid,
        resources=dict(spec.flavor.resources),
        project_id=spec.project_id,
        user_id=spec.user_id,
        request=request_of(spec),
        server_group=spec.server_group.name if spec.server_group is not None else "",
        pending=pending or {},
        flavor_version=spec.flavor.version,
    )


def record_placement(transaction: Any, spec: RequestSpec, operation: str, node: str, token: int) -> None:
    """Record in the journal how a node was chosen, and when the API received the request (by the clock of the API's host)."""
    context = oslo_context.get_current()
    state = {"operation": operation, "node": node, "received_at": getattr(context, "received_at", 0), **spec.decision}
    record_event(
        transaction, JournalEvent("operation.place", f"instance/{spec.instance_uuid}", token, state, spec.project_id)
    )


def check_neighbours(
    transaction: Any, groups: GroupStore, instances: InstanceStore, spec: RequestSpec, node_uuid: str
) -> None:
    """Check inside the claim what depends on other instances: the policy of a server group, and limits that filters promised.

    The scheduler's view may not know these instances yet. The claim has written the node's row before, so that claims of one node
    run one after the other. It writes the group's row here, so that claims of one group do so on different nodes, too.

    :raises ConstraintViolated: the instance may not be on this node; another node may do.
    """
    _Neighbours(transaction, groups, instances, [spec]).check(spec, node_uuid)


def refused_neighbours(
    transaction: Any, groups: GroupStore, instances: InstanceStore, placed: Sequence[tuple[RequestSpec, str]]
) -> list[int]:
    """Check several claims of one transaction as :func:`check_neighbours` does, each with those before it; places of the refused.

    :param placed: what is placed on which node.
    """
    neighbours = _Neighbours(transaction, groups, instances, [spec for spec, _ in placed])
    refused = []
    for place, (spec, node_uuid) in enumerate(placed):
        try:
            neighbours.check(spec, node_uuid)
        except errors.ConstraintViolated:
            refused.append(place)
        else:
            neighbours.placed.append((spec, node_uuid))
    return refused


class _Neighbours:
    """The instances that the claims of one transaction find: those in the store, and those that earlier claims place.

    :param specs: of all claims; their groups are held.
    """

    def __init__(
        self, transaction: Any, groups: GroupStore, instances: InstanceStore, specs: Sequence[RequestSpec]
    ) -> None:
        self._transaction = transaction
        self._instances = instances
        promised = [
            (group.name, spec.project_id)
            for spec in specs
            if (group := spec.server_group) is not None and is_promised(group)
        ]
        #: Whether the group of a name and a project is stored.
        self._stored = groups.hold(transaction, promised) if promised else {}
        self.placed: list[tuple[RequestSpec, str]] = []

    def check(self, spec: RequestSpec, node_uuid: str) -> None:
        """See :func:`check_neighbours`."""
        group = spec.server_group
        if group is not None and is_promised(group):
            check_policy(group, node_uuid, self._nodes_of_members(spec, group.name))
        counted = {"num_instances": False, "num_io_ops": True}
        if spec.limits.keys().isdisjoint(counted):
            return
        residents = self._instances.on_node(node_uuid, self._transaction)
        # An instance that is resized on its own node stands there twice and counts once.
        resized = {move_consumer(each.uuid) for each in residents}
        there = [each.busy for each in residents if each.uuid != spec.instance_uuid and each.uuid not in resized]
        there += [True for _, node in self.placed if node == node_uuid]
        for name, only_busy in counted.items():
            number = sum(busy or not only_busy for busy in there)
            limit = spec.limits.get(name)
            if limit is not None and number >= limit:
                raise errors.ConstraintViolated(
                    f"Node {node_uuid} has {number} {'busy ' if only_busy else ''}instances by now, and filters take {limit} for "
                    f"too many.",
                    provider=node_uuid,
                    limit=name,
                )

    def _nodes_of_members(self, spec: RequestSpec, group: str) -> list[str]:
        """Returns the nodes of the other members of a group. The members of a group that is not stored are of one project."""
        stored = self._stored[group, spec.project_id]
        project = None if stored else spec.project_id
        members = self._instances.group_members(group, self._transaction, project_id=project)
        found = [node for uuid, node in members if uuid != spec.instance_uuid]
        for other, node in self.placed:
            alike = other.server_group is not None and other.server_group.name == group
            if alike and (stored or other.project_id == spec.project_id):
                found.append(node)
        return found


def request_of(spec: RequestSpec) -> dict[str, Any]:
    """What of a request is kept with its instance, for later operations and for filters that want it."""
    request: dict[str, Any] = {
        "extra_specs": dict(spec.flavor.extra_specs),
        "hints": {name: list(values) for name, values in spec.hints.items()},
    }
    if spec.all_projects:
        request["all_projects"] = True
    if command := spec.properties.get("command"):
        request["command"] = list(command)
    if spec.image:
        request["image"] = dict(spec.image)
    if spec.availability_zone is not None:
        request["availability_zone"] = spec.availability_zone
    if spec.server_group is not None:
        group = spec.server_group
        request["server_group"] = {
            "name": group.name,
            "policy": group.policy,
            "max_server_per_host": group.max_server_per_host,
        }
    return request
