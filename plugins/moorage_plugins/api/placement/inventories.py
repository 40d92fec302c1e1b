# SPDX-License-Identifier: Apache-2.0
"""``/resource_providers/{uuid}/inventories``, and what is used of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import FullStore, GenerationConflict, InventoryItem, ResourceProvider
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.error_codes import ConcurrentUpdate, InventoryInUse, no_provider, subject
from moorage_plugins.api.placement.providers import path

__all__ = ["check_capacity", "held_classes", "item", "routes"]

#: From here on ``reserved`` may be all of ``total``.
_ALL_RESERVED: Version = (1, 26)
_FIELDS = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
    here = _Inventories(store)
    many = "/resource_providers/{uuid}/inventories"
    one = many + "/{resource_class}"
    return (
        Route("GET", many, here.list, policies.INVENTORIES_LIST),
        Route("POST", many, here.create, policies.INVENTORIES_CREATE, body=schemas.NEW_INVENTORY),
        Route("PUT", many, here.replace, policies.INVENTORIES_UPDATE, body=schemas.INVENTORIES),
        Route("DELETE", many, here.clear, policies.INVENTORIES_DELETE, since=(1, 5)),
        Route("GET", one, here.show, policies.INVENTORIES_SHOW),
        Route("PUT", one, here.update, policies.INVENTORIES_UPDATE, body=schemas.INVENTORY),
        Route("DELETE", one, here.delete, policies.INVENTORIES_DELETE),
        Route("GET", "/resource_providers/{uuid}/usages", here.usages, policies.PROVIDER_USAGES),
    )


def item(resource_class: str, given: Mapping[str, Any]) -> InventoryItem:
    """Returns an inventory from the wire, where ``1.0`` is as whole as ``1``."""
    numbers = {name: int(given[name]) for name in _FIELDS[:-1] if name in given}
    return InventoryItem(resource_class, allocation_ratio=float(given.get("allocation_ratio", 1.0)), **numbers)


def check_capacity(version: Version, provider: str, items: Iterable[InventoryItem]) -> None:
    """Refuses inventories whose capacity is not positive; from 1.26 on only those whose capacity is negative.

    :raises InvalidInput: names the class.
    """
    for each in items:
        capacity = int(each.capacity)
        if capacity < 0 or (capacity == 0 and version < _ALL_RESERVED):
            limit = "greater than" if version >= _ALL_RESERVED else "greater than or equal to"
            raise errors.InvalidInput(
                f"Invalid inventory for '{each.resource_class}' on resource provider '{provider}'. "
                f"The reserved value is {limit} total.",
                path=f"inventories/{each.resource_class}/reserved",
            )


def held_classes(store: FullStore, provider: str, kept: Iterable[str] = ()) -> str:
    """Placement's words for inventories that cannot go because something is held of them."""
    usage = store.inventories(provider)
    kept = set(kept)
    names = [each.resource_class for each in usage.provider.inventories]
    held = ", ".join(name for name in names if name not in kept and usage.used.get(name))
    return f"Inventory for '{held}' on resource provider '{provider}' in use."


def _numbers(each: InventoryItem) -> dict[str, Any]:
    return {name: getattr(each, name) for name in _FIELDS}


def _one(
    request: Request,
    provider: ResourceProvider,
    each: InventoryItem,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = {**_numbers(each), "resource_provider_generation": provider.generation}
    return cached(request, Response(status, body, headers or {}), provider.updated_at)


def _all(request: Request, provider: ResourceProvider) -> Response:
    body = {
        "resource_provider_generation": provider.generation,
        "inventories": {each.resource_class: _numbers(each) for each in provider.inventories},
    }
    return cached(request, Response(200, body), provider.updated_at)


class _Inventories:
    def __init__(self, store: FullStore) -> None:
        self._store = store

    def list(self, request: Request) -> Response:
        """``GET``: all."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            return _all(request, self._store.inventories(uuid).provider)

    def show(self, request: Request) -> Response:
        """``GET``: one."""
        uuid, name = request.path_params["uuid"], request.path_params["resource_class"]
        with no_provider(uuid):
            provider = self._store.inventories(uuid).provider
        for each in provider.inventories:
            if each.resource_class == name:
                return _one(request, provider, each)
        raise errors.NotFound(f"No inventory of class {name} for {uuid}", resource_class=name)

    def usages(self, request: Request) -> Response:
        """``GET /resource_providers/{uuid}/usages``."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            usage = self._store.inventories(uuid)
        body = {"resource_provider_generation": usage.provider.generation, "usages": dict(usage.used)}
        return cached(request, Response(200, body))

    def create(self, request: Request) -> Response:
        """``POST``: one more."""
        uuid, name = request.path_params["uuid"], request.body["resource_class"]
        wanted = item(name, request.body)
        unable = f"Unable to create inventory for resource provider {uuid}"
        try:
            check_capacity(request.version, uuid, (wanted,))
            with no_provider(uuid):
                provider = self._store.add_inventory(uuid, wanted)
        except errors.AlreadyExists as error:
            raise ConcurrentUpdate(
                f"Update conflict: provider {uuid} has an inventory of {name} already.", **error.details
            ) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"{unable}: {error.message}", **error.details) from error
        except errors.NotFound as error:
            if "resource_class" not in error.details:
                raise
            raise errors.InvalidInput(f"{unable}: {subject(error)}", **error.details) from error
        where = {"location": f"{request.base_url}{path(uuid)}/inventories/{name}"}
        return _one(request, provider, _named(provider, wanted), 201, where)

    def update(self, request: Request) -> Response:
        """``PUT``: replaces one."""
        uuid, name = request.path_params["uuid"], request.path_params["resource_class"]
        wanted = item(name, request.body)
        unable = f"Unable to update inventory for resource provider {uuid}"
        try:
            check_capacity(request.version, uuid, (wanted,))
            with no_provider(uuid):
                provider = self._store.change_inventory(uuid, wanted, request.body["resource_provider_generation"])
        except GenerationConflict as error:
            raise ConcurrentUpdate("resource provider generation conflict", **error.details) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"{unable}: {error.message}", **error.details) from error
        except errors.NotFound as error:
            if "inventory" not in error.details and "resource_class" not in error.details:
                raise
            raise errors.InvalidInput(
                f"No inventory record with resource class for resource provider {uuid}: No inventory of class {name} "
                "found.",
                **error.details,
            ) from error
        return _one(request, provider, _named(provider, wanted))

    def replace(self, request: Request) -> Response:
        """``PUT``: replaces all."""
        uuid, given = request.path_params["uuid"], request.body["inventories"]
        items = [item(name, numbers) for name, numbers in given.items()]
        try:
            check_capacity(request.version, uuid, items)
            with no_provider(uuid):
                provider = self._store.set_inventories(uuid, items, request.body["resource_provider_generation"])
        except GenerationConflict as error:
            raise ConcurrentUpdate("resource provider generation conflict", **error.details) from error
        except errors.InUse as error:
            raise InventoryInUse(
                f"update conflict: {held_classes(self._store, uuid, given)}", **error.details
            ) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(
                f"Unable to update inventory for resource provider {uuid}: {error.message}", **error.details
            ) from error
        except errors.NotFound as error:
            if "resource_class" not in error.details:
                raise
            raise errors.InvalidInput(
                f"Unknown resource class in inventory for resource provider {uuid}: {subject(error)}", **error.details
            ) from error
        return _all(request, provider)

    def clear(self, request: Request) -> Response:
        """``DELETE``: all."""
        uuid = request.path_params["uuid"]
        try:
            with no_provider(uuid):
                self._store.set_inventories(uuid, ())
        except errors.InUse as error:
            raise InventoryInUse(held_classes(self._store, uuid), **error.details) from error
        return Response(204)

    def delete(self, request: Request) -> Response:
        """``DELETE``: one."""
        uuid, name = request.path_params["uuid"], request.path_params["resource_class"]
        try:
            with no_provider(uuid):
                self._store.remove_inventory(uuid, name)
        except errors.InUse as error:
            # Placement's code for this one refusal is that of a lost race, and clients know it.
            raise ConcurrentUpdate(
                f"Unable to delete inventory of class {name}: Inventory for '{name}' on resource provider '{uuid}' in "
                "use.",
                **error.details,
            ) from error
        except errors.NotFound as error:
            if "inventory" not in error.details and "resource_class" not in error.details:
                raise
            raise errors.NotFound(
                f"No inventory of class {name} found for delete: {subject(error)}", **error.details
            ) from error
        return Response(204)


def _named(provider: ResourceProvider, wanted: InventoryItem) -> InventoryItem:
    """Returns the stored inventory of the class."""
    return next((each for each in provider.inventories if each.resource_class == wanted.resource_class), wanted)
