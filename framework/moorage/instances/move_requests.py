# SPDX-License-Identifier: Apache-2.0
"""Chooses where instances that exist go next: resize, migrate, live_migrate, unshelve, evacuate, rebuild."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from oslo_log import log as logging

from moorage import errors
from moorage.instances.action_kinds import (
    EVACUATE,
    LIVE_MIGRATE,
    OPERATE,
    OPERATIONS,
    ActionKind,
    check_action,
    has_begun,
)
from moorage.instances.in_place import InPlace
from moorage.instances.interface import (
    DEPARTURE,
    Instance,
    InstanceStore,
    move_consumer,
)
from moorage.instances.moves import (
    kept_elsewhere,
)
from moorage.rpc.server import rpc_method
from moorage.scheduling.interface import Claimer, Flavor, InstanceRecord, RequestSpec, ServerGroup
from moorage.scheduling.resource_request import as_far_as_parsed, spread_providers
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.traits import asks_for_traits
from moorage.services.interface import MIGRATES, RUNS_COMMANDS

__all__ = ["MovesEndpoint", "spec_of"]

LOG = logging.getLogger(__name__)


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
        if not has_begun(instance, request_id):
            try:
                self._begin(instance, OPERATIONS[operation], wanted, request_id)
            except errors.Conflict:
                instance = self._instances.get(instance_uuid)
                if not has_begun(instance, request_id):
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
        check_action(instance, kind, self._in_place.lacking)
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
        """Returns the request of a resize, which stays in its place where the host cannot move instances to other hosts."""
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
        """Returns the request without the host that keeps a copy of the instance, or has not let go of it since its last move.

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


def spec_of(instance: Instance) -> RequestSpec:
    """Returns the request that an instance came from, as far as it can be parsed."""
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
    """Returns the request for the next node of an instance."""
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
