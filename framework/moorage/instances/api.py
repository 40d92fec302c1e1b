# SPDX-License-Identifier: Apache-2.0
"""Instances in ``/scheduling/v1``: what joins scheduling, allocation and the agents."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moorage import errors, randomness
from moorage.db import MICROSECONDS
from moorage.http.routes import PolicyRule, Request, Response, Route
from moorage.instances.action_kinds import OPERATIONS
from moorage.instances.delete import Deleter
from moorage.instances.in_place import InPlace
from moorage.instances.interface import Instance, InstanceStore
from moorage.instances.reset_state import RESETTABLE, Resetter
from moorage.instances.resizes import Resizes
from moorage.scheduling.api import Resolver, allowed, check_free_form, check_request
from moorage.scheduling.request import REQUEST_PROPERTIES
from moorage.scheduling.resource_request import GivenResources, check_flavor, held_resources

__all__ = ["POLICIES", "AskAgent", "Creator", "routes", "uuids_of_set"]

SEE_HOSTS = "scheduling:instances:get:host"
RUN_COMMAND = "scheduling:instances:create:command"
EVACUATE_INSTANCE = "scheduling:instances:evacuate"
POLICIES = (
    PolicyRule(
        "scheduling:instances:create", "rule:system_member or rule:project_member", "Place and build an instance."
    ),
    PolicyRule(
        "scheduling:instances:get",
        "rule:system_reader or rule:project_reader",
        "List instances and show one. Their hosts and nodes need scheduling:instances:get:host.",
    ),
    PolicyRule("scheduling:instances:delete", "rule:system_member or rule:project_member", "Delete an instance."),
    PolicyRule(
        "scheduling:instances:action",
        "rule:system_member or rule:project_member",
        "Stop, start, reboot, rebuild, resize, move, shelve or unshelve an instance, confirm or revert its resize, or revert its "
        "move.",
    ),
    PolicyRule(SEE_HOSTS, "rule:system_reader", "See where instances are, and list those of a host."),
    PolicyRule("scheduling:instances:resize:host", "rule:system_admin", "Choose the host or node of a resize."),
    PolicyRule(
        "scheduling:instances:migrate:host", "rule:system_admin", "Choose the host or node of a cold migration."
    ),
    PolicyRule(
        "scheduling:instances:live_migrate:host", "rule:system_admin", "Choose the host or node of a live migration."
    ),
    PolicyRule("scheduling:instances:unshelve:host", "rule:system_admin", "Choose the host or node of an unshelving."),
    PolicyRule(
        EVACUATE_INSTANCE,
        "rule:system_admin",
        "Have an instance built on another host, after its host died and was fenced.",
        ("system",),
    ),
    PolicyRule(
        RUN_COMMAND,
        "rule:system_admin",
        "Say which command a new instance runs, which the compute driver of its host starts on that host.",
    ),
    PolicyRule(
        "scheduling:instances:console",
        "rule:system_admin or rule:project_member",
        "Read what an instance has written to its console.",
    ),
    PolicyRule(
        "scheduling:instances:usage",
        "rule:system_reader or rule:project_reader",
        "See the processor time and the memory that an instance uses.",
    ),
    PolicyRule(
        "scheduling:instances:reset_state",
        "rule:system_admin",
        "Set the status of an instance, whatever operation is in progress on it.",
        ("system",),
    ),
)

_UUID = {
    "type": "string",
    "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
}
#: Lines of a console unless a request says how many.
_CONSOLE_LINES = 100
#: Instances that one request makes at most.
_MOST = 100
_CREATE = {
    "type": "object",
    "properties": {
        "uuid": _UUID,
        "name": {"type": "string", "maxLength": 255},
        "count": {"type": "integer", "minimum": 1, "maximum": _MOST},
        # The program first. For compute drivers that run commands.
        "command": {
            "type": "array",
            "items": {"type": "string", "maxLength": 4096, "pattern": "^[^\\u0000]*$"},
            "minItems": 1,
            "maxItems": 64,
        },
        **REQUEST_PROPERTIES,
    },
    "required": ["flavor"],
    "additionalProperties": False,
}
_TEXT = {"type": "string", "minLength": 1, "maxLength": 255}
_QUERY = {
    "type": "object",
    "properties": {
        "host": _TEXT,
        "status": _TEXT,
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
        "after": {"type": "string", "maxLength": 36},
    },
    "additionalProperties": False,
}
_TO = {"host": _TEXT, "node": _TEXT}
_ACTIONS: Mapping[str, Mapping[str, Any]] = {
    "rebuild": {"image": REQUEST_PROPERTIES["image"]},
    "stop": {},
    "start": {},
    "reboot": {},
    "shelve_offload": {},
    "resize": {"flavor": REQUEST_PROPERTIES["flavor"], **_TO},
    "migrate": _TO,
    "live_migrate": _TO,
    "revert_move": {},
    "confirm_resize": {},
    "revert_resize": {},
    "unshelve": _TO,
    "evacuate": _TO,
}
_REQUIRED = {"resize": ["flavor"]}
#: The fault of an instance whose move was reverted.
_REVERTED = "The move was reverted by request."
_ACTION = {
    "type": "object",
    "properties": {
        name: {
            "type": ["object", "null"] if name not in _REQUIRED else "object",
            "properties": properties,
            "required": _REQUIRED.get(name, []),
            "additionalProperties": False,
        }
        for name, properties in _ACTIONS.items()
    },
    "minProperties": 1,
    "maxProperties": 1,
    "additionalProperties": False,
}
_RESET = {
    "type": "object",
    "properties": {"status": {"enum": list(RESETTABLE)}},
    "required": ["status"],
    "additionalProperties": False,
}
_LINES = {
    "type": "object",
    "properties": {"lines": {"type": "integer", "minimum": 1, "maximum": 10_000}},
    "additionalProperties": False,
}
_FORCE = {"type": "object", "properties": {"force": {"type": "boolean"}}, "additionalProperties": False}
#: Fields that name hosts or nodes.
_PLACES = frozenset({"host", "node", "node_uuid", "holds"})
#: What of ``pending`` names none: the operation in progress, and how far a move is. The rest says where an instance goes, and where
#: it was tried.
_PROGRESS = ("operation", "phase", "live")
_SHOWN = {
    "type": "object",
    "properties": {"uuid": {"type": "string"}, "status": {"type": "string"}, "host": {"type": "string"}},
}


#: Asks the agent of a host: host, method, arguments.
AskAgent = Callable[[str, str, str, Mapping[str, Any]], Any]


class Creator(Protocol):
    """How the API has an instance created; bound by the control plane."""

    def create(self, request: Mapping[str, Any], request_id: str) -> Mapping[str, Any] | None:
        """Have a scheduler place it; when that scheduler is lost, another one, for the same uuid and request_id.

        Returns the new instance as JSON data; None when it was placed before.
        """

    def create_many(
        self, request: Mapping[str, Any], uuids: Sequence[str], request_id: str
    ) -> Sequence[Mapping[str, Any]]:
        """Have a scheduler place several alike, all or none; likewise.

        Returns the new instances as JSON data; none if any was placed before.
        """

    def move(self, uuid: str, operation: str, wanted: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        """Have a scheduler find the place where an instance goes next, or say whether it may stay (rebuild); likewise.

        Returns the instance as JSON data.
        """


@dataclass(frozen=True, slots=True)
class _Creation:
    """The handler that creates one instance, or several."""

    instances: InstanceStore
    creator: Creator
    resolve: Resolver

    def __call__(self, request: Request) -> Response:
        if "command" in request.body:
            request.check_policy(RUN_COMMAND)
        body = dict(check_request(request))
        # A client that repeats a request gives the same Idempotency-Key or the same uuid again; either one names the claim.
        key = request.idempotency or body.get("uuid") or request.operation_id
        may_exist = bool(request.idempotency) or "uuid" in body
        body.setdefault("uuid", request.idempotency or randomness.new_ordered_uuid(request.received_at / MICROSECONDS))
        if "count" in body:
            return self._many(body, int(body.pop("count")), request, key, may_exist)
        return self._one(body, request, key, may_exist)

    def _one(self, body: Mapping[str, Any], request: Request, key: str, may_exist: bool) -> Response:
        """Create the instance; read it only if it may have been made before."""
        try:
            made = self.creator.create(self.resolve(body, request.context), key)
        except errors.MoorageError:
            # An earlier request, or this one before its answer was lost, may have made the instance. It is what was asked for, even
            # if a new one would be refused now.
            found = self.instances.find([body["uuid"]]) if may_exist else ()
            if not found:
                raise
            made = _repeated(found, body, request)[0].to_json()
        if made is None:
            made = _repeated([self.instances.get(body["uuid"])], body, request)[0].to_json()
        return Response(202, _shown(request)(made), {"Location": f"{request.prefix}/instances/{made['uuid']}"})

    def _many(self, body: Mapping[str, Any], count: int, request: Request, key: str, may_exist: bool) -> Response:
        uuids = uuids_of_set(body["uuid"], count)
        found = _repeated(self.instances.find(uuids), body, request) if may_exist else ()
        made: Sequence[Mapping[str, Any]] = ()
        if len(found) < count:
            made = self.creator.create_many(self.resolve(body, request.context), uuids, key)
            found = () if made else self.instances.find(uuids)
        if not made:
            _refuse_missing(found, count, request)
            made = [each.to_json() for each in found]
        shown = _shown(request)
        by_uuid = {each["uuid"]: shown(each) for each in made}
        return Response(202, {"instances": [by_uuid[each] for each in uuids]})


def uuids_of_set(first: str, count: int) -> Sequence[str]:
    """Derives the uuids of a bulk request's instances from the first uuid. A repeated request gets the same uuids.

    All begin with the first 12 digits of ``first``, so the rows of a set lie beside each other in each index by uuid. With random
    uuids each row would change pages of its own, which costs most of a store's writes once there are many instances.
    """
    name = uuid.UUID(first)
    same = str(name)[:14]
    return [str(name), *(same + str(uuid.uuid5(name, str(number)))[14:] for number in range(1, count))]


def routes(
    instances: InstanceStore,
    creator: Creator,
    deleter: Deleter,
    in_place: InPlace,
    resizes: Resizes,
    resetter: Resetter,
    resolve: Resolver,
    ask_agent: AskAgent,
    holds: Callable[[str], Mapping[str, Any]],
) -> Sequence[Route]:
    """Returns the routes, over the store of instances.

    :param holds: reads what a consumer holds: provider uuid -> resource class -> units.
    :param resolve: called with the body of a request for a new instance, or of a resize, and who asks.
    """

    def list_instances(request: Request) -> Response:
        query = dict(request.query)
        if "host" in query:
            request.check_policy(SEE_HOSTS)
        shown, limit = _shown(request), query.pop("limit", 1000)
        project = None if request.context.system_scope else request.context.project_id
        found = instances.list(limit=limit, project_id=project, **query)
        following = found[-1].uuid if len(found) == limit else None
        return Response(200, {"instances": [shown(each.to_json()) for each in found], "next_after": following})

    def show(request: Request) -> Response:
        found = instances.get(request.path_params["uuid"])
        _visible(found, request)
        return Response(200, _shown(request)({**found.to_json(), "holds": holds(found.uuid)}))

    def delete(request: Request) -> Response:
        force = request.query.get("force", False)
        deleter.delete(request.path_params["uuid"], force=force, check=lambda found: _visible(found, request))
        return Response(202)

    def act(request: Request) -> Response:
        found = instances.get(request.path_params["uuid"])
        _visible(found, request)
        ((name, wanted),) = request.body.items()
        wanted = _allowed_action(request, name, wanted or {})
        if "flavor" in wanted:
            wanted = resolve(wanted, request.context)
        if name in OPERATIONS and OPERATIONS[name].asks:
            moving = creator.move(found.uuid, name, wanted, request.operation_id)
            return Response(202, _shown(request)(moving))
        if end := ends.get(name):
            end(found, request.operation_id)
        else:
            in_place.begin(found.uuid, name, {**wanted, "request_id": request.operation_id}, known=found)
        return Response(202, _shown(request)(instances.get(found.uuid).to_json()))

    ends: Mapping[str, Callable[[Instance, str], None]] = {
        "revert_move": lambda found, request_id: in_place.revert_move(found.uuid, _REVERTED, known=found),
        "confirm_resize": lambda found, request_id: resizes.confirm(found.uuid, request_id, known=found),
        "revert_resize": lambda found, request_id: resizes.revert(found.uuid, request_id, known=found),
    }

    def reset(request: Request) -> Response:
        return Response(202, resetter.reset(request.path_params["uuid"], request.body["status"]).to_json())

    tags = ("instances",)
    may_create, may_get, may_delete, may_act = (rule.name for rule in POLICIES[:4])
    listing = {"type": "object", "properties": {"instances": {"type": "array", "items": _SHOWN}}}
    return (
        Route(
            "POST",
            "/instances",
            _Creation(instances, creator, resolve),
            may_create,
            "Place an instance and begin to build it; repeating it with the same uuid finds the first one. With count: so many "
            "alike, all or none.",
            {202: _SHOWN},
            body=_CREATE,
            tags=tags,
        ),
        Route("GET", "/instances", list_instances, may_get, "List instances.", {200: listing}, query=_QUERY, tags=tags),
        Route(
            "GET",
            "/instances/{uuid}",
            show,
            may_get,
            "Show an instance, and what it holds: provider uuid -> resource class -> units.",
            {200: _SHOWN},
            tags=tags,
        ),
        Route(
            "POST",
            "/instances/{uuid}/action",
            act,
            may_act,
            "Begin to stop, start, reboot, rebuild, resize, migrate, live_migrate, shelve_offload, unshelve or evacuate an "
            "instance, revert a move that is in progress (revert_move), or confirm or revert a resize that is not confirmed "
            "(confirm_resize, revert_resize); the body has the one that is meant.",
            {202: _SHOWN},
            body=_ACTION,
            tags=tags,
        ),
        *_questions(instances, ask_agent),
        Route(
            "POST",
            "/instances/{uuid}/reset-state",
            reset,
            POLICIES[-1].name,
            "Set the status of an instance. An operation that is in progress on it ends.",
            {202: _SHOWN},
            body=_RESET,
            tags=tags,
        ),
        Route(
            "DELETE",
            "/instances/{uuid}",
            delete,
            may_delete,
            "Begin to delete an instance; its claim is given back.",
            {202: None},
            query=_FORCE,
            tags=tags,
        ),
    )


def _questions(instances: InstanceStore, ask_agent: AskAgent) -> Sequence[Route]:
    """Returns the routes that ask the agent of an instance's host."""

    def ask(request: Request, method: str, **more: Any) -> Any:
        found = instances.get(request.path_params["uuid"])
        _visible(found, request)
        if not found.host:
            raise errors.Conflict(f"Instance {found.uuid} is {found.status} and on no host.", instance=found.uuid)
        return ask_agent(found.host, method, found.uuid, more)

    def console(request: Request) -> Response:
        lines = request.query.get("lines", _CONSOLE_LINES)
        return Response(200, {"output": ask(request, "console_of_instance", lines=lines)})

    def usage(request: Request) -> Response:
        return Response(200, ask(request, "usage_of_instance"))

    tags = ("instances",)
    return (
        Route(
            "GET",
            "/instances/{uuid}/console",
            console,
            "scheduling:instances:console",
            "Show the last lines that an instance wrote, 64 KiB at most. Needs a compute driver with the power compute.console.",
            {200: {"type": "object", "properties": {"output": {"type": "string"}}}},
            query=_LINES,
            tags=tags,
        ),
        Route(
            "GET",
            "/instances/{uuid}/usage",
            usage,
            "scheduling:instances:usage",
            "Show what an instance uses: processor time since it began, and memory. Needs a compute driver with the power "
            "compute.usage.",
            {
                200: {
                    "type": "object",
                    "properties": {"cpu_seconds": {"type": "number"}, "memory_bytes": {"type": "integer"}},
                }
            },
            tags=tags,
        ),
    )


def _allowed_action(request: Request, name: str, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """What an action shall do, checked beyond the route's own policy and schema.

    :raises Forbidden: the caller may not ask for it.
    :raises InvalidInput: it asks for something that is not supported.
    """
    if name == "evacuate":
        request.check_policy(EVACUATE_INSTANCE)
    elif wanted.keys() & _TO.keys():
        request.check_policy(f"scheduling:instances:{name}:host")
    check_free_form(request, wanted)
    check_flavor(wanted)
    return wanted


def _repeated(found: Sequence[Instance], body: Mapping[str, Any], request: Request) -> Sequence[Instance]:
    """Returns the instances of an earlier request, which must have been equal."""
    for each in found:
        _visible(each, request)
        _refuse_another(each, body)
    return found


def _refuse_another(found: Instance, body: Mapping[str, Any]) -> None:
    """What asks for something else under the uuid of an instance that is there is no repetition."""
    flavor = body["flavor"]
    if list(body.get("command") or ()) != list(found.request.get("command") or ()):
        raise errors.AlreadyExists(
            f"Instance {found.uuid} exists, is {found.status} and has another command than this request has; give another "
            "uuid, or none.",
            uuid=found.uuid,
            status=found.status,
        )
    # A flavor of the catalogue may have got another version since then.
    if flavor["flavorid"] != found.flavorid or ("resources" in flavor and _held(flavor) != dict(found.resources)):
        raise errors.AlreadyExists(
            f"Instance {found.uuid} exists, is {found.status} and has the flavor {found.flavorid} with other resources than "
            "these or another name; give another uuid, or none.",
            uuid=found.uuid,
            status=found.status,
        )


def _held(flavor: Mapping[str, Any]) -> Mapping[str, int]:
    """What an instance of a free-form flavor holds."""
    return dict(held_resources(GivenResources(flavor["resources"]), flavor.get("extra_specs") or {}))


def _visible(instance: Instance, request: Request) -> None:
    """Another project's instance does not exist."""
    if not request.context.system_scope and instance.project_id != request.context.project_id:
        raise errors.NotFound(f"There is no instance {instance.uuid}.")


def _refuse_missing(found: Sequence[Instance], count: int, request: Request) -> None:
    for each in found:
        _visible(each, request)
    if len(found) < count:
        raise errors.NotFound(f"{count - len(found)} of {count} instances were deleted while the others were created.")


def _shown(request: Request) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Returns what makes of an instance's data that which the caller may see."""
    return dict if allowed(request, SEE_HOSTS) else _without_places


def _without_places(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the owner of an instance may see of it."""
    seen = {name: value for name, value in data.items() if name not in _PLACES}
    if "pending" in data:
        seen["pending"] = {name: data["pending"][name] for name in _PROGRESS if name in data["pending"]}
    return seen
