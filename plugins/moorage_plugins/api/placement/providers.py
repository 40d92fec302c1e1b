# SPDX-License-Identifier: Apache-2.0
"""``/resource_providers``: the providers themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moorage import errors, randomness
from moorage.allocation.interface import (
    KEEP,
    FullStore,
    HasChildren,
    Keep,
    ProviderFilter,
    ResourceProvider,
    TreeTooDeep,
)
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, queries, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.error_codes import (
    CannotDeleteParent,
    DuplicateName,
    ProviderInUse,
    no_provider,
    subject,
)
from moorage_plugins.api.placement.validation import canonical_uuid

__all__ = ["routes", "path", "shown"]

_TREES: Version = (1, 14)
_BODY_OF_NEW: Version = (1, 20)
_REPARENTING: Version = (1, 37)
#: First version -> the links that it brings.
_LINKS: tuple[tuple[Version, str], ...] = (
    ((1, 0), "inventories"),
    ((1, 0), "usages"),
    ((1, 1), "aggregates"),
    ((1, 6), "traits"),
    ((1, 11), "allocations"),
)
#: Of a new provider the reason stands after these words, as Placement has it.
_WHY = "Object action {action} failed because: {reason}"


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
    providers = _Providers(store)
    many, one = "/resource_providers", "/resource_providers/{uuid}"
    return (
        *_versions("GET", many, providers.list, policies.PROVIDERS_LIST, "query"),
        Route("POST", many, providers.create, policies.PROVIDERS_CREATE, until=(1, 13), body=schemas.NEW_PROVIDER_1_0),
        Route("POST", many, providers.create, policies.PROVIDERS_CREATE, since=_TREES, body=schemas.NEW_PROVIDER_1_14),
        Route("GET", one, providers.show, policies.PROVIDERS_SHOW),
        Route("PUT", one, providers.update, policies.PROVIDERS_UPDATE, until=(1, 13), body=schemas.PROVIDER_1_0),
        Route("PUT", one, providers.update, policies.PROVIDERS_UPDATE, since=_TREES, body=schemas.PROVIDER_1_14),
        Route("DELETE", one, providers.delete, policies.PROVIDERS_DELETE),
    )


def _versions(method: str, path: str, handler: Any, policy: str, part: str) -> Iterator[Route]:
    """One route for each schema of the list's query."""
    steps: tuple[tuple[Version, Version | None, Any], ...] = (
        ((1, 0), (1, 2), schemas.PROVIDERS_1_0),
        ((1, 3), (1, 3), schemas.PROVIDERS_1_3),
        ((1, 4), (1, 13), schemas.PROVIDERS_1_4),
        ((1, 14), (1, 17), schemas.PROVIDERS_1_14),
        ((1, 18), None, schemas.PROVIDERS_1_18),
    )
    for since, until, schema in steps:
        yield Route(method, path, handler, policy, since=since, until=until, query=schema)


def path(uuid: str) -> str:
    """Returns the path of a provider, below the mount."""
    return f"/resource_providers/{uuid}"


def shown(request: Request, provider: ResourceProvider) -> dict[str, Any]:
    """Returns a provider as the wire has it."""
    url = request.prefix + path(provider.uuid)
    links = [{"rel": "self", "href": url}]
    links += [{"rel": rel, "href": f"{url}/{rel}"} for since, rel in _LINKS if request.version >= since]
    data: dict[str, Any] = {
        "uuid": provider.uuid,
        "name": provider.name,
        "generation": provider.generation,
        "links": links,
    }
    if request.version >= _TREES:
        data["parent_provider_uuid"] = provider.parent
        data["root_provider_uuid"] = provider.root
    return data


class _Providers:
    def __init__(self, store: FullStore) -> None:
        self._store = store

    def list(self, request: Request) -> Response:
        """``GET /resource_providers``."""
        query = request.query
        traits = queries.traits(query.get("required", ()), request.version)
        members = queries.aggregates(query.get("member_of", ()), request.version)
        resources = queries.last(query, "resources")
        uuid, tree = queries.last(query, "uuid"), queries.last(query, "in_tree")
        wanted = ProviderFilter(
            name=queries.last(query, "name"),
            uuid=uuid and canonical_uuid(uuid),
            in_tree=tree and canonical_uuid(tree),
            resources={} if resources is None else queries.resources(resources),
            required=traits.required,
            forbidden=traits.forbidden,
            member_of=members.required,
            not_member_of=members.forbidden,
        )
        try:
            found = self._store.find_providers(wanted)
        except errors.NotFound as error:
            if "resource_class" in error.details:
                text = f"Invalid resource class in resources parameter: {subject(error)}"
            else:
                text = f'Invalid trait(s) in "required" parameter: {subject(error)}'
            raise errors.InvalidInput(text, **error.details) from error
        changed = max((each.updated_at for each in found), default=0)
        return cached(request, Response(200, {"resource_providers": [shown(request, each) for each in found]}), changed)

    def create(self, request: Request) -> Response:
        """``POST /resource_providers``."""
        body = request.body
        uuid = canonical_uuid(body["uuid"]) if body.get("uuid") else randomness.new_uuid()
        parent = body.get("parent_provider_uuid")
        name = body["name"]
        try:
            found = self._store.create_provider(
                ResourceProvider(uuid, name, parent=None if parent is None else canonical_uuid(parent))
            )
        except errors.AlreadyExists as error:
            field = error.details.get("field", "name")
            raise DuplicateName(
                f"Conflicting resource provider {field}: {uuid if field == 'uuid' else name} already exists.",
                **error.details,
            ) from error
        except errors.InvalidInput as error:
            if error.details.get("path") != "parent":
                raise
            if isinstance(error, TreeTooDeep):
                reason = error.message
            elif parent is not None and canonical_uuid(parent) == uuid:
                reason = "parent provider UUID cannot be same as UUID. A provider cannot be its own parent."
            else:
                reason = "parent provider UUID does not exist."
            why = _WHY.format(action="create", reason=reason)
            raise errors.InvalidInput(
                f'Unable to create resource provider "{name}", {uuid}: {why}', path="parent_provider_uuid"
            ) from error
        where = {"location": request.base_url + path(uuid)}
        if request.version < _BODY_OF_NEW:
            return Response(201, None, where)
        return cached(request, Response(200, shown(request, found), where), found.updated_at)

    def show(self, request: Request) -> Response:
        """``GET /resource_providers/{uuid}``."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            found = self._store.provider(uuid)
        return cached(request, Response(200, shown(request, found)), found.updated_at)

    def update(self, request: Request) -> Response:
        """``PUT /resource_providers/{uuid}``: another name or, from 1.37 on freely, another parent."""
        uuid, name = request.path_params["uuid"], request.body["name"]
        parent: str | None | Keep = KEEP
        if "parent_provider_uuid" in request.body:
            given = request.body["parent_provider_uuid"]
            parent = None if given is None else canonical_uuid(given)
        try:
            with no_provider(uuid):
                found = self._store.update_provider(
                    uuid, name=name, parent=parent, reparent=request.version >= _REPARENTING
                )
        except errors.AlreadyExists as error:
            raise DuplicateName(f"Conflicting resource provider {name} already exists.", **error.details) from error
        except errors.InvalidInput as error:
            if error.details.get("path") != "parent":
                raise
            reason = error.message if isinstance(error, TreeTooDeep) else self._why_not(uuid, parent)
            why = _WHY.format(action="update", reason=reason)
            raise errors.InvalidInput(
                f"Unable to save resource provider {uuid}: {why}", path="parent_provider_uuid"
            ) from error
        return cached(request, Response(200, shown(request, found)), found.updated_at)

    def _why_not(self, uuid: str, parent: str | None | Keep) -> str:
        """Why a provider cannot get the parent, for a message; the store has refused it already."""
        if parent == uuid:
            return "creating loop in the provider tree is not allowed."
        if isinstance(parent, str):
            if not self._store.find_providers(ProviderFilter(uuid=parent)):
                return "parent provider UUID does not exist."
            if self._store.provider(uuid).parent is not None:
                above: str | None = parent
                while above is not None and above != uuid:
                    above = self._store.provider(above).parent
                if above is None:
                    return "re-parenting a provider is not currently allowed."
            return "creating loop in the provider tree is not allowed."
        return "un-parenting a provider is not currently allowed."

    def delete(self, request: Request) -> Response:
        """``DELETE /resource_providers/{uuid}``."""
        uuid = request.path_params["uuid"]
        try:
            gone = self._store.delete_provider(uuid)
        except HasChildren as error:
            raise CannotDeleteParent(
                f"Unable to delete parent resource provider {uuid}: It has child resource providers.", **error.details
            ) from error
        except errors.InUse as error:
            raise ProviderInUse(
                f"Unable to delete resource provider {uuid}: Resource provider has allocations.", **error.details
            ) from error
        if not gone:
            raise errors.NotFound(f"No resource provider with uuid {uuid} found for delete", provider=uuid)
        return Response(204)
