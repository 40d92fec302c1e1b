# SPDX-License-Identifier: Apache-2.0
"""Begins operations on instances: stop, start, reboot, rebuild, resize, migrate, live_migrate, shelve_offload, unshelve, evacuate.

Each begins with one transaction that records the worker, the status while it is in progress and what is to come of it
(``pending``); the agent of the host that has the work to do ends it with another.

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

The id of the last request is kept with the instance when its operation has ended (``request["last_request_id"]``), so that a
repetition after a lost reply is known for one however late it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from oslo_log import log as logging

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationLedger,
    AllocationStore,
    ClaimOutcome,
    ClaimRequest,
    Expect,
)
from moorage.db import Database
from moorage.instances.availability import Availability, not_forced_down
from moorage.instances.create import NodeNames, check_neighbours, record_placement
from moorage.instances.interface import (
    DEPARTURE,
    Instance,
    InstanceStore,
    claims_after_leaving,
    move_consumer,
)
from moorage.instances.moves import (
    ACTIVATE,
    MOVES,
    OF_PHASE,
    PREPARE,
    RESIZED,
    REVERT,
    is_revertible,
    kept_elsewhere,
)
from moorage.instances.providers import claim_of_node
from moorage.rpc.server import rpc_method
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Claimer, ClaimResult, Flavor, InstanceRecord, RequestSpec, ServerGroup
from moorage.scheduling.resource_request import as_far_as_parsed, spread_providers
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.traits import asks_for_traits
from moorage.services.interface import LIVE_MIGRATES, MIGRATES, POWER_CONTROL, RUNS_COMMANDS
from moorage.services.registry import ServiceRegistry
from moorage.work.interface import OnlyIf
from moorage.work.operations import SqlOperationStore

__all__ = ["OPERATIONS", "InPlace", "MoveClaimer", "MovesEndpoint", "ActionKind", "spec_of"]

LOG = logging.getLogger(__name__)
OPERATE = "operate_instance"
#: From powers to the hosts whose agents lack one of them.
Lacking = Callable[[Collection[str]], Collection[str]]
LIVE_MIGRATE = "live_migrate"
EVACUATE = "evacuate"


@dataclass(frozen=True, slots=True)
class ActionKind:
    """One kind of operation.

    :param status: of the instance while it is in progress.
    :param begins: statuses in which it can begin.
    :param asks: a scheduler is asked: where the instance shall go, or whether it may stay where it is.
    :param powers: what the agent of the instance's host must offer, and that of its destination.
    :param does: the operation that the agent is given; empty: the one of this name.
    """

    name: str
    status: str
    begins: tuple[str, ...]
    asks: bool
    powers: tuple[str, ...] = ()
    does: str = ""


OPERATIONS: Mapping[str, ActionKind] = {
    each.name: each
    for each in (
        ActionKind("stop", "stopping", ("active",), False, (POWER_CONTROL,)),
        ActionKind("start", "starting", ("stopped",), False, (POWER_CONTROL,)),
        ActionKind("reboot", "rebooting", ("active", "stopped"), False, (POWER_CONTROL,)),
        ActionKind("rebuild", "rebuilding", ("active", "stopped"), True),
        ActionKind("shelve_offload", "shelving", ("active",), False),
        ActionKind("resize", "resizing", ("active",), True),
        ActionKind("migrate", "migrating", ("active",), True, (MIGRATES,)),
        ActionKind(LIVE_MIGRATE, "migrating", ("active",), True, (MIGRATES, LIVE_MIGRATES)),
        ActionKind("unshelve", "unshelving", ("shelved_offloaded",), True),
        # To its destination it is an instance that comes from nowhere; agents of earlier releases can build it, too.
        ActionKind(
            EVACUATE, "evacuating", ("active", "stopped", "migrating", "resizing", RESIZED), True, does="unshelve"
        ),  # fmt: skip
    )
}


def _check(instance: Instance, operation: ActionKind, lacking: Lacking) -> None:
    if instance.status not in operation.begins:
        advice = " Confirm its resize, or revert it." if instance.status == RESIZED else ""
        raise errors.Conflict(
            f"Instance {instance.uuid} is {instance.status}; {operation.name} needs one that is "
            f"{' or '.join(operation.begins)}.{advice}",
            instance=instance.uuid,
            status=instance.status,
        )
    for power in operation.powers:
        if instance.host in lacking([power]):
            raise errors.Conflict(
                f"The {operation.name} of instance {instance.uuid} is not possible: the compute driver of its host does not have "
                f"the power {power}. moorage service list shows what each agent offers.",
                instance=instance.uuid,
                power=power,
            )


def _begin(
    transaction: Any,
    stores: tuple[InstanceStore, SqlOperationStore],
    instance: Instance,
    operation: ActionKind,
    host: str,
    values: Mapping[str, Any],
    only_if: OnlyIf | None = None,
) -> int:
    """Write the operation's row and the instance's in one transaction; returns the token."""
    instances, workers = stores
    does = PREPARE if "phase" in values["pending"] else operation.does or operation.name
    # An evacuation takes the place of a move that is in progress, and of nothing else: the status would be another one.
    token = workers.create(
        transaction, instances.resource_type, instance.uuid, does, operation.status, target_host=host,
        force=operation.name == EVACUATE, only_if=only_if, project_id=instance.project_id,
    )  # fmt: skip
    changes = {"status": operation.status, "fault": "", **values}
    if not instances.change(
        transaction, instance.uuid, token, changes, expected=operation.begins, fence=instance.fence
    ):
        raise errors.Conflict(f"Instance {instance.uuid} has just become something else; look again.")
    return token


@dataclass(frozen=True, slots=True)
class InPlace:
    """Begins what happens where the instance is: stop, start, reboot, rebuild and shelve_offload.

    :param lacking: the hosts whose agents lack one of some powers.
    """

    database: Database
    instances: InstanceStore
    workers: SqlOperationStore
    cast: Callable[[str, str, str], None]
    lacking: Lacking = lambda powers: ()

    def begin(self, uuid: str, name: str, pending: Mapping[str, Any], *, known: Instance | None = None) -> None:
        """Record the operation, then send a message to the agent. Does nothing when ``pending["request_id"]`` has begun it already.

        :param known: the instance as it was when the operation was decided on; it must not have changed since.

        :raises NotFound: there is no such instance.
        :raises Conflict: its status does not allow it (InUse: an operation on it is in progress), or the agent of its host is
            declared dead.
        """
        instance, operation = known or self.instances.get(uuid), OPERATIONS[name]
        if "request_id" in pending and _known(instance, pending["request_id"]):
            return
        _check(instance, operation, self.lacking)
        stores = (self.instances, self.workers)
        values = {"pending": {"operation": name, **pending}}
        only_if = not_forced_down(instance.host)
        self.database.run(lambda tx: _begin(tx, stores, instance, operation, instance.host, values, only_if) and None)
        self.cast(instance.host, OPERATE, uuid)

    def revert_move(self, uuid: str, reason: str, *, known: Instance | None = None) -> None:
        """Have the source of a move end it, and let the workload go on there. Does nothing when that has begun already.

        It takes turns with the commit of the move: both write the instance on the condition that the other one has not.

        :param reason: becomes the fault of the instance.
        :param known: the instance as it was when that was decided on.
        :raises NotFound: there is no such instance.
        :raises Conflict: no move is in progress, or it has been committed.
        """
        instance = known or self.instances.get(uuid)
        pending = instance.pending
        if pending.get("phase") == OF_PHASE[REVERT]:
            return
        if not is_revertible(pending):
            why = (
                "its move has passed the point of no return, and goes on"
                if pending.get("phase") == OF_PHASE[ACTIVATE]
                else f"it is {instance.status}, and does not move between two hosts"
            )
            raise errors.Conflict(f"No move of instance {uuid} can be reverted: {why}.", instance=uuid)

        def begin(transaction: Any) -> None:
            token = self.workers.create(
                transaction, self.instances.resource_type, uuid, REVERT, instance.status, target_host=instance.host,
                force=True, only_if=not_forced_down(instance.host), project_id=instance.project_id,
            )  # fmt: skip
            values = {"pending": {**pending, "phase": OF_PHASE[REVERT], "reason": reason}}
            if not self.instances.change(
                transaction, uuid, token, values, expected=(instance.status,), fence=instance.fence
            ):
                raise errors.Conflict(f"The move of instance {uuid} has just gone a step further; look again.")

        self.database.run(begin)
        self.cast(instance.host, OPERATE, uuid)


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
        token = _begin(transaction, stores, self.instance, self.operation, to["host"], values, only_if)
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
        return ClaimResult(found.node_uuid, repeated=True) if found.node_uuid and _done(found, request_id) else None

    def release(self, instance_uuid: str) -> None:
        """Nothing is held that was not recorded."""


def _ledger(store: AllocationStore) -> AllocationLedger:
    if not isinstance(store, AllocationLedger):
        raise errors.ConfigError("The allocation store cannot move claims, so instances cannot be moved; use sql.")
    return store


class MovesEndpoint:
    """Served by schedulers beside the family's own: chooses where instances that exist go next.

    :param holds: reads what a consumer holds: provider uuid -> resource class -> units.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        claimer: Callable[[Instance, ActionKind], Claimer],
        instances: InstanceStore,
        in_place: InPlace,
        holds: Callable[[str], Mapping[str, Mapping[str, int]]],
    ) -> None:
        self._scheduler = scheduler
        self._holds = holds
        self._claimer = claimer
        self._instances = instances
        self._in_place = in_place

    @rpc_method
    def move_instance(
        self, instance_uuid: str, operation: str, wanted: Mapping[str, Any], request_id: str
    ) -> dict[str, Any]:
        """Begin a resize, migration, unshelving, evacuation or rebuild; repeating it with the same request_id changes nothing.

        Returns where the instance goes, and the whole ``instance`` as the beginning of the operation has left it.

        :param wanted: ``flavor`` (resize), ``image`` (rebuild; without one it keeps its own), ``host`` and ``node`` where it goes.
        :raises NoValidHost: says why.
        :raises Conflict: its status does not allow it.
        """
        instance = self._instances.get(instance_uuid)
        if not _known(instance, request_id):
            try:
                self._begin(instance, OPERATIONS[operation], wanted, request_id)
            except errors.Conflict:
                instance = self._instances.get(instance_uuid)
                if not _known(instance, request_id):
                    raise
                # The first try was still at it, elsewhere.
            instance = self._instances.get(instance_uuid)
        pending = instance.pending if instance.pending.get("request_id") == request_id else {}
        return {
            "uuid": instance.uuid,
            "host": pending.get("host", instance.host),
            "node": pending.get("node", instance.node),
            "instance": instance.to_json(),
        }

    def _begin(self, instance: Instance, kind: ActionKind, wanted: Mapping[str, Any], request_id: str) -> None:
        _check(instance, kind, self._in_place.lacking)
        spec = self._away_from_source(instance, kind, self._resized(instance, kind, _moving(instance, kind, wanted)))
        if spec.rebuild:
            if asks_for_traits(spec):
                spec = replace(spec, held_providers=spread_providers(spec, self._holds(instance.uuid)))
            self._scheduler.confirm(spec, request_id)
            pending = {"image": dict(spec.image), "request_id": request_id}
            self._in_place.begin(instance.uuid, kind.name, pending, known=instance)
            return
        held = InstanceRecord(
            move_consumer(instance.uuid), "", "", spec.flavor.flavorid, spec.flavor.resources, spec.project_id
        )
        kept = kept_elsewhere(instance.host, instance.pending)
        try:
            chosen = self._scheduler.place(
                spec, request_id, claimer=self._claimer(instance, kind), held=held if instance.host else None
            )
        except errors.NoValidHost as error:
            if not kept:
                raise
            raise errors.NoValidHost(
                f"{error.message} Host {kept} is left out, because it keeps the copy of instance {instance.uuid} from before its "
                f"resize. To use that host and lose that copy, run moorage instance confirm-resize {instance.uuid}, wait until "
                f"the agent of {kept} has removed the copy, and evacuate the instance again.",
                **error.details,
            ) from error
        LOG.info("The %s of instance %s goes to host %s.", kind.name, instance.uuid, chosen.record.host)
        self._in_place.cast(chosen.record.host, OPERATE, instance.uuid)
        if abandoned := instance.pending.get("host"):
            # It was evacuated while it moved there.
            self._in_place.cast(abandoned, "look_at_instance", instance.uuid)
        if kept:
            self._in_place.cast(kept, "let_go_instance", instance.uuid)

    def _resized(self, instance: Instance, kind: ActionKind, spec: RequestSpec) -> RequestSpec:
        """The request of a resize, which stays in its place where the host cannot move instances to other hosts."""
        if kind.name != "resize":
            return spec
        if instance.host not in self._in_place.lacking([MIGRATES]):
            return replace(spec, powers=(*spec.powers, MIGRATES))
        if spec.requested_host not in (None, instance.host):
            raise errors.Conflict(
                f"The resize of instance {instance.uuid} to another host is not possible: the compute driver of its host does not "
                f"have the power {MIGRATES}. Leave out the host to resize the instance in its place.",
                instance=instance.uuid,
                power=MIGRATES,
            )
        return replace(spec, requested_host=instance.host)

    def _away_from_source(self, instance: Instance, kind: ActionKind, spec: RequestSpec) -> RequestSpec:
        """The request without the host that keeps a copy of the instance, or has not let go of it since its last move.

        :raises Conflict: the instance would move again, which needs that the source of its last move has let go.
        """
        departure = None if spec.rebuild else self._in_place.workers.get(DEPARTURE, instance.uuid)
        if kept := kept_elsewhere(instance.host, instance.pending):
            return replace(spec, ignore_hosts=(*spec.ignore_hosts, kept))
        if departure is None:
            return spec
        source = departure.target_host
        if instance.host and kind.name != EVACUATE:
            # Members of projects may move their instances, and do not see hosts.
            LOG.warning(
                "Instance %s moves when the agent of host %s has removed what is left of it.", instance.uuid, source
            )
            raise errors.Conflict(
                f"Instance {instance.uuid} has moved before, and the agent of its last host has not removed what is left of it. "
                f"Check with moorage service list that all agents are up, and try the {kind.name} again.",
                instance=instance.uuid,
            )
        return replace(spec, ignore_hosts=(*spec.ignore_hosts, source))


def _done(instance: Instance, request_id: str) -> bool:
    """Whether the operation that the request asked for has ended, as the last one."""
    return bool(instance.request.get("last_request_id") == request_id)


def _known(instance: Instance, request_id: str) -> bool:
    return instance.pending.get("request_id") == request_id or _done(instance, request_id)


def spec_of(instance: Instance) -> RequestSpec:
    """The request that an instance came from, as far as it can be parsed."""
    request = instance.request
    group = request.get("server_group")
    spec = RequestSpec(
        instance_uuid=instance.uuid,
        flavor=Flavor(
            instance.flavorid,
            dict(instance.resources),
            dict(request.get("extra_specs") or {}),
            instance.flavor_version,
        ),
        project_id=instance.project_id,
        user_id=instance.user_id,
        hints=request.get("hints") or {},
        image=request.get("image") or {},
        availability_zone=request.get("availability_zone"),
        server_group=None
        if group is None
        else ServerGroup(group["name"], group["policy"], group.get("max_server_per_host", 1)),
        all_projects=bool(request.get("all_projects")),
        properties={"name": instance.name},
        powers=(RUNS_COMMANDS,) if request.get("command") else (),
    )
    return as_far_as_parsed(spec)


def _moving(instance: Instance, operation: ActionKind, wanted: Mapping[str, Any]) -> RequestSpec:
    """The request for the place where an instance goes next."""
    spec = spec_of(instance)
    if flavor := wanted.get("flavor"):
        extra_specs = dict(flavor.get("extra_specs") or {})
        version = int(flavor.get("version", 0))
        spec = replace(spec, flavor=Flavor(flavor["flavorid"], dict(flavor["resources"]), extra_specs, version))
    rebuild = operation.name == "rebuild"
    group = spec.server_group
    if group is not None and operation.name == EVACUATE:
        group = replace(group, left=instance.node_uuid)
    return replace(
        spec,
        image=(wanted.get("image") or spec.image) if rebuild else spec.image,
        server_group=group,
        requested_host=instance.host if rebuild else wanted.get("host"),
        requested_node=instance.node_uuid if rebuild else wanted.get("node"),
        rebuild=rebuild,
        ignore_nodes=(instance.node_uuid,) if operation.name in (LIVE_MIGRATE, "migrate") else (),
        ignore_hosts=(instance.host,) if operation.name == EVACUATE else (),
        powers=(*spec.powers, *operation.powers),
    )
