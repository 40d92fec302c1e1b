# SPDX-License-Identifier: Apache-2.0
"""``/allocations``, ``/resource_providers/{uuid}/allocations`` and ``/reshaper``: who holds what, and changes of it.

A change is one transaction of the store, which retries lost races by itself. So a claim that fits is not refused because others
claim of the same providers; ``generation`` of a provider in a body is read and ignored, as Placement does.

Beyond Placement: the header ``Idempotency-Key`` names a change, and a repetition of it after a lost reply changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationItem,
    Expect,
    FullStore,
    GenerationConflict,
    InventoryChange,
)
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.error_codes import (
    ConcurrentUpdate,
    InventoryInUse,
    UnknownProvider,
    no_provider,
    subject,
)
from moorage_plugins.api.placement.inventories import item
from moorage_plugins.api.placement.validation import canonical_uuid, is_uuid

__all__ = ["TYPES", "UNKNOWN_TYPE", "routes"]

_OWNERS: Version = (1, 8)
#: From here on bodies are mappings by provider, and show who owns a consumer.
_MAPPINGS: Version = (1, 12)
_GENERATIONS: Version = (1, 28)
TYPES: Version = (1, 38)
#: How a type is shown that nobody gave.
UNKNOWN_TYPE = "unknown"
#: Owner of what is claimed without one, before 1.8.
_NOBODY = "00000000-0000-0000-0000-000000000000"
_KEY_LENGTH = 255

_Schema = Mapping[str, Any]
_BODIES: tuple[tuple[Version, Version | None, _Schema], ...] = (
    ((1, 0), (1, 7), schemas.ALLOCATIONS_1_0),
    ((1, 8), (1, 11), schemas.ALLOCATIONS_1_8),
    ((1, 12), (1, 27), schemas.ALLOCATIONS_1_12),
    ((1, 28), (1, 33), schemas.ALLOCATIONS_1_28),
    ((1, 34), (1, 37), schemas.ALLOCATIONS_1_34),
    ((1, 38), None, schemas.ALLOCATIONS_1_38),
)
_MANY_BODIES: tuple[tuple[Version, Version | None, _Schema], ...] = (
    ((1, 13), (1, 27), schemas.MANY_ALLOCATIONS_1_13),
    ((1, 28), (1, 33), schemas.MANY_ALLOCATIONS_1_28),
    ((1, 34), (1, 37), schemas.MANY_ALLOCATIONS_1_34),
    ((1, 38), None, schemas.MANY_ALLOCATIONS_1_38),
)
_RESHAPE_BODIES: tuple[tuple[Version, Version | None, _Schema], ...] = (
    ((1, 30), (1, 33), schemas.RESHAPE_1_30),
    ((1, 34), (1, 37), schemas.RESHAPE_1_34),
    ((1, 38), None, schemas.RESHAPE_1_38),
)


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
    here = _Allocations(store)
    one, of_provider = "/allocations/{consumer}", "/resource_providers/{uuid}/allocations"
    return (
        Route("GET", one, here.show, policies.ALLOCATIONS_LIST),
        *_versions("PUT", one, here.put, policies.ALLOCATIONS_UPDATE, _BODIES),
        Route("DELETE", one, here.delete, policies.ALLOCATIONS_DELETE),
        *_versions("POST", "/allocations", here.post, policies.ALLOCATIONS_MANAGE, _MANY_BODIES),
        Route("GET", of_provider, here.of_provider, policies.PROVIDER_ALLOCATIONS_LIST),
        *_versions("POST", "/reshaper", here.reshape, policies.RESHAPE, _RESHAPE_BODIES),
    )


def _versions(
    method: str,
    path: str,
    handler: Callable[[Request], Response],
    policy: str,
    bodies: Sequence[tuple[Version, Version | None, _Schema]],
) -> Iterator[Route]:
    for since, until, body in bodies:
        yield Route(method, path, handler, policy, since=since, until=until, body=body)


class _Allocations:
    def __init__(self, store: FullStore) -> None:
        self._store = store

    # -- reading --------------------------------------------------------------------------------------------------

    def show(self, request: Request) -> Response:
        """``GET /allocations/{consumer}``: of who holds nothing, nothing; never 404."""
        holding = self._store.consumer(_lower(request.path_params["consumer"]))
        if holding is None:
            return cached(request, Response(200, {"allocations": {}}))
        held: dict[str, dict[str, Any]] = {}
        for each in holding.allocations:
            generation = holding.providers[each.provider].generation
            shown = held.setdefault(each.provider, {"resources": {}, "generation": generation})
            shown["resources"][each.resource_class] = each.used
        body: dict[str, Any] = {"allocations": held}
        consumer = holding.consumer
        if request.version >= _MAPPINGS:
            body |= {"project_id": consumer.project, "user_id": consumer.user}
        if request.version >= _GENERATIONS:
            body["consumer_generation"] = consumer.generation
        if request.version >= TYPES:
            body["consumer_type"] = consumer.consumer_type or UNKNOWN_TYPE
        return cached(request, Response(200, body), consumer.updated_at)

    def of_provider(self, request: Request) -> Response:
        """``GET /resource_providers/{uuid}/allocations``."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            holding = self._store.provider_holding(uuid)
        held = _by_consumer(holding.allocations)
        if request.version >= _GENERATIONS:
            for consumer, shown in held.items():
                shown["consumer_generation"] = holding.consumers[consumer].generation
        body = {"allocations": held, "resource_provider_generation": holding.provider.generation}
        changed = max((each.updated_at for each in holding.consumers.values()), default=0)
        return cached(request, Response(200, body), changed)

    # -- writing --------------------------------------------------------------------------------------------------

    def put(self, request: Request) -> Response:
        """``PUT /allocations/{consumer}``: what it holds from now on, instead of all that it held."""
        consumer = request.path_params["consumer"]
        if not is_uuid(consumer):
            raise errors.InvalidInput(f"Malformed consumer_uuid: {consumer:.100}", path="consumer_uuid")
        change = _change(request, canonical_uuid(consumer), request.body)
        self._replace((change,), f" for consumer {change.consumer}")
        return Response(204)

    def post(self, request: Request) -> Response:
        """``POST /allocations``: the same of several consumers, all or nothing."""
        self._replace([_change(request, consumer, body) for consumer, body in request.body.items()])
        return Response(204)

    def delete(self, request: Request) -> Response:
        """``DELETE /allocations/{consumer}``."""
        consumer = request.path_params["consumer"]
        if not self._store.release(_lower(consumer)):
            raise errors.NotFound(f"No allocations for consumer '{consumer}'", consumer=consumer)
        return Response(204)

    def reshape(self, request: Request) -> Response:
        """``POST /reshaper``: inventories and what is held of them, of several providers, in one step."""
        inventories = [
            InventoryChange(
                _lower(uuid),
                tuple(item(name, numbers) for name, numbers in body["inventories"].items()),
                body["resource_provider_generation"],
            )
            for uuid, body in request.body["inventories"].items()
        ]
        for each in inventories:
            self._check_provider(each)
        changes = [_change(request, consumer, body) for consumer, body in request.body["allocations"].items()]
        try:
            self._store.reshape(inventories, changes)
        except GenerationConflict as error:
            raise _conflict(error) from error
        except errors.InUse as error:
            raise InventoryInUse(f"update conflict: {error.message}", **error.details) from error
        except (errors.CapacityExceeded, errors.ConstraintViolated) as error:
            raise self._refused(error) from error
        except errors.NotFound as error:
            if "resource_class" not in error.details:
                raise _unknown_provider(error) from error
            raise errors.InvalidInput(f"malformed reshaper data: {subject(error)}", **error.details) from error
        return Response(204)

    def _check_provider(self, change: InventoryChange) -> None:
        """Say in Placement's words what is wrong with a provider, before the store says it in its own."""
        uuid, given = change.provider, change.expected_generation
        try:
            present = self._store.provider(uuid).generation
        except errors.NotFound as error:
            raise UnknownProvider(
                f"Resource provider {uuid} in inventories not found: {subject(error)}", provider=uuid
            ) from error
        if present != given:
            raise ConcurrentUpdate(
                f"resource provider generation conflict for provider {uuid}: actual: {present}, given: {given}",
                provider=uuid,
                present=present,
                expected=given,
            )

    def _replace(self, changes: Sequence[AllocationChange], whose: str = "") -> None:
        try:
            self._store.replace(changes)
        except GenerationConflict as error:
            raise _conflict(error) from error
        except (errors.CapacityExceeded, errors.ConstraintViolated) as error:
            raise self._refused(error) from error
        except errors.NotFound as error:
            if "resource_class" not in error.details:
                raise _unknown_provider(error) from error
            raise errors.InvalidInput(
                f"Unable to allocate inventory{whose}: {subject(error)}", **error.details
            ) from error

    def _refused(self, error: errors.CapacityExceeded | errors.ConstraintViolated) -> errors.Conflict:
        """Returns a refusal in Placement's words; its class, and so its code, stays."""
        uuid, name = error.details["provider"], error.details["resource_class"]
        if isinstance(error, errors.ConstraintViolated):
            why = "The requested amount would violate inventory constraints."
        elif any(each.resource_class == name for each in self._store.inventories(uuid).provider.inventories):
            why = "The requested amount would exceed the capacity."
        else:
            return type(error)(
                f"Unable to allocate inventory: Inventory for '{name}' on resource provider '{uuid}' invalid.",
                **error.details,
            )
        return type(error)(
            f"Unable to allocate inventory: Unable to create allocation for '{name}' on resource provider '{uuid}'. {why}",
            **error.details,
        )


def _by_consumer(allocations: Iterable[AllocationItem]) -> dict[str, dict[str, Any]]:
    held: dict[str, dict[str, Any]] = {}
    for each in allocations:
        held.setdefault(each.consumer, {"resources": {}})["resources"][each.resource_class] = each.used
    return held


def _lower(uuid: str) -> str:
    return canonical_uuid(uuid) if is_uuid(uuid) else uuid


def _change(request: Request, consumer: str, body: Mapping[str, Any]) -> AllocationChange:
    """What a body asks for; it satisfies the schema of its version."""
    given = body["allocations"]
    named = (
        [(each["resource_provider"]["uuid"], each) for each in given] if request.version < _MAPPINGS else given.items()
    )
    resources: dict[str, dict[str, int]] = {}
    for uuid, each in named:
        if _lower(uuid) in resources:
            raise errors.InvalidInput(f"Resource provider {_lower(uuid)} is named twice.", path="allocations")
        resources[_lower(uuid)] = {name: int(amount) for name, amount in each["resources"].items()}
    expected: int | Expect = Expect.ANYTHING
    if request.version >= _GENERATIONS:
        generation = body["consumer_generation"]
        expected = Expect.NOTHING if generation is None else int(generation)
    key = request.header("Idempotency-Key")
    if key is not None and len(key) > _KEY_LENGTH:
        raise errors.InvalidInput(f"Idempotency-Key has more than {_KEY_LENGTH} characters.", path="Idempotency-Key")
    return AllocationChange(
        _lower(consumer),
        resources,
        expected=expected,
        project=body.get("project_id", _NOBODY),
        user=body.get("user_id", _NOBODY),
        consumer_type=body.get("consumer_type"),
        request_id=key,
    )


def _conflict(error: GenerationConflict) -> ConcurrentUpdate:
    """Returns the conflict in Placement's words, which call the stored generation "expected"."""
    details = error.details
    if "consumer" in details:
        present = "null" if details["present"] is None else details["present"]
        text = f"consumer generation conflict - expected {present} but got {details['expected']}"
    else:
        text = f"resource provider generation conflict: {error.message}"
    return ConcurrentUpdate(text, **details)


def _unknown_provider(error: errors.NotFound) -> errors.InvalidInput:
    uuid = error.details.get("provider")
    return errors.InvalidInput(
        f"Allocation for resource provider '{uuid}' that does not exist.", path="allocations", provider=uuid
    )
