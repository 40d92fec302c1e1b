# SPDX-License-Identifier: Apache-2.0
"""Traits and aggregates: of providers, and the traits that there are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import FullStore, GenerationConflict, ResourceProvider, Trait
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, queries, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.error_codes import ConcurrentUpdate, no_provider
from moorage_plugins.api.placement.validation import canonical_uuid

__all__ = ["routes", "standard_first"]

_AGGREGATES: Version = (1, 1)
_TRAITS: Version = (1, 6)
#: From here on aggregates come and go with the provider's generation.
_GENERATION: Version = (1, 19)
_CUSTOM = re.compile(r"CUSTOM_[A-Z0-9_]{1,248}")
_CHANGED = "Resource provider's generation already changed. Please update the generation and try again."


def standard_first(names: Iterable[str]) -> list[str]:
    """Traits in Placement's order: standard traits, then custom ones."""
    return sorted(names, key=lambda name: (name.startswith("CUSTOM_"), name))


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
    here = _Features(store)
    aggregates = "/resource_providers/{uuid}/aggregates"
    of_provider = "/resource_providers/{uuid}/traits"
    one = "/traits/{name}"
    return (
        Route("GET", aggregates, here.aggregates, policies.AGGREGATES_LIST, since=_AGGREGATES),
        Route(
            "PUT",
            aggregates,
            here.set_aggregates,
            policies.AGGREGATES_UPDATE,
            since=_AGGREGATES,
            until=(1, 18),
            body=schemas.AGGREGATES_1_1,
        ),
        Route(
            "PUT",
            aggregates,
            here.set_aggregates,
            policies.AGGREGATES_UPDATE,
            since=_GENERATION,
            body=schemas.AGGREGATES_1_19,
        ),
        Route("GET", of_provider, here.of_provider, policies.PROVIDER_TRAITS_LIST, since=_TRAITS),
        Route(
            "PUT",
            of_provider,
            here.set_traits,
            policies.PROVIDER_TRAITS_UPDATE,
            since=_TRAITS,
            body=schemas.PROVIDER_TRAITS,
        ),
        Route("DELETE", of_provider, here.clear_traits, policies.PROVIDER_TRAITS_DELETE, since=_TRAITS),
        Route("GET", "/traits", here.traits, policies.TRAITS_LIST, since=_TRAITS, query=schemas.TRAITS),
        Route("GET", one, here.show, policies.TRAITS_SHOW, since=_TRAITS),
        Route("PUT", one, here.create, policies.TRAITS_UPDATE, since=_TRAITS),
        Route("DELETE", one, here.delete, policies.TRAITS_DELETE, since=_TRAITS),
    )


class _Features:
    def __init__(self, store: FullStore) -> None:
        self._store = store

    # -- aggregates -----------------------------------------------------------------------------------------------

    def aggregates(self, request: Request) -> Response:
        """``GET .../aggregates``."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            provider, found = self._store.provider_aggregates(uuid)
        return self._aggregates(request, provider, found)

    def set_aggregates(self, request: Request) -> Response:
        """``PUT .../aggregates``."""
        uuid = request.path_params["uuid"]
        expected = request.body["resource_provider_generation"] if request.version >= _GENERATION else None
        given = request.body["aggregates"] if request.version >= _GENERATION else request.body
        aggregates = [canonical_uuid(each) for each in given]
        try:
            with no_provider(uuid):
                provider, _ = self._store.set_aggregates(uuid, set(aggregates), expected)
        except GenerationConflict as error:
            raise ConcurrentUpdate(_CHANGED, **error.details) from error
        return self._aggregates(request, provider, aggregates)

    def _aggregates(self, request: Request, provider: ResourceProvider, found: Sequence[str]) -> Response:
        body: dict[str, Any] = {"aggregates": list(found)}
        if request.version >= _GENERATION:
            body["resource_provider_generation"] = provider.generation
        return cached(request, Response(200, body))

    # -- traits of providers --------------------------------------------------------------------------------------

    def of_provider(self, request: Request) -> Response:
        """``GET .../traits``."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            provider, found = self._store.provider_traits(uuid)
        return self._of_provider(request, provider, found)

    def set_traits(self, request: Request) -> Response:
        """``PUT .../traits``."""
        uuid = request.path_params["uuid"]
        try:
            with no_provider(uuid):
                provider, found = self._store.set_traits(
                    uuid, set(request.body["traits"]), request.body["resource_provider_generation"]
                )
        except GenerationConflict as error:
            raise ConcurrentUpdate(_CHANGED, **error.details) from error
        except errors.NotFound as error:
            if "traits" not in error.details:
                raise
            raise errors.InvalidInput(f"No such trait {', '.join(error.details['traits'])}", **error.details) from error
        return self._of_provider(request, provider, found)

    def clear_traits(self, request: Request) -> Response:
        """``DELETE .../traits``."""
        uuid = request.path_params["uuid"]
        with no_provider(uuid):
            self._store.set_traits(uuid, set())
        return Response(204)

    def _of_provider(self, request: Request, provider: ResourceProvider, found: Sequence[str]) -> Response:
        body = {"traits": standard_first(found), "resource_provider_generation": provider.generation}
        return cached(request, Response(200, body), provider.updated_at)

    # -- traits ---------------------------------------------------------------------------------------------------

    def traits(self, request: Request) -> Response:
        """``GET /traits``."""
        names, prefix = _selection(queries.last(request.query, "name"))
        associated = queries.last(request.query, "associated")
        if associated is not None and associated.lower() not in {"true", "false"}:
            raise errors.InvalidInput(
                'The query parameter "associated" only accepts "true" or "false"', path="associated"
            )
        found = self._store.traits(
            names=names, prefix=prefix, associated=None if associated is None else associated.lower() == "true"
        )
        changed = max((each.updated_at for each in found), default=0)
        return cached(request, Response(200, {"traits": [each.name for each in found]}), changed)

    def show(self, request: Request) -> Response:
        """``GET /traits/{name}``: whether it exists."""
        return cached(request, Response(204), self._trait(request.path_params["name"]).updated_at)

    def create(self, request: Request) -> Response:
        """``PUT /traits/{name}``."""
        name = request.path_params["name"]
        if not _CUSTOM.fullmatch(name):
            raise errors.InvalidInput(
                'The trait is invalid. A valid trait must be no longer than 255 characters, start with the prefix "CUSTOM_" '
                'and use following characters: "A"-"Z", "0"-"9" and "_"',
                path="name",
            )
        created = self._store.create_trait(name)
        where = {"location": f"{request.base_url}/traits/{name}"}
        return cached(request, Response(201 if created else 204, None, where))

    def delete(self, request: Request) -> Response:
        """``DELETE /traits/{name}``."""
        name = request.path_params["name"]
        try:
            self._store.delete_trait(name)
        except errors.NotFound as error:
            raise _no_trait(name) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"Cannot delete standard trait {name}.", **error.details) from error
        except errors.InUse as error:
            raise errors.InUse(f"The trait {name} is in use by a resource provider.", **error.details) from error
        return Response(204)

    def _trait(self, name: str) -> Trait:
        found = self._store.traits(names={name})
        if not found:
            raise _no_trait(name)
        return found[0]


def _no_trait(name: str) -> errors.NotFound:
    return errors.NotFound(f"No such trait(s): {name}.", traits=[name])


def _selection(value: str | None) -> tuple[set[str] | None, str]:
    """Names and prefix that the parameter ``name`` asks for.

    :raises InvalidInput: it is malformed.
    """
    if value is None:
        return None, ""
    operator, colon, rest = value.partition(":")
    if not colon:
        raise errors.InvalidInput(
            "Badly formatted name parameter. Expected name query string parameter in form: "
            f'?name=[in|startswith]:[name1,name2|prefix]. Got: "{value:.200}"',
            path="name",
        )
    if operator == "in":
        return set(rest.split(",")), ""
    return None, rest if operator == "startswith" else ""
