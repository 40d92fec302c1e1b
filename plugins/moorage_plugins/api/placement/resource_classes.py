# SPDX-License-Identifier: Apache-2.0
"""``/resource_classes``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import FullStore
from moorage.http.routes import Request, Response, Route, Version
from moorage_plugins.api.placement import policies, schemas
from moorage_plugins.api.placement.application import cached
from moorage_plugins.api.placement.validation import BodyValidator

__all__ = ["routes"]

_SINCE: Version = (1, 2)
#: From here on PUT has no body and makes sure that there is one.
_ENSURE: Version = (1, 7)


def routes(store: FullStore) -> Sequence[Route]:
    """Returns the routes over a store."""
    here = _Classes(store)
    many, one = "/resource_classes", "/resource_classes/{name}"
    return (
        Route("GET", many, here.list, policies.CLASSES_LIST, since=_SINCE),
        Route("POST", many, here.create, policies.CLASSES_CREATE, since=_SINCE, body=schemas.RESOURCE_CLASS),
        Route("GET", one, here.show, policies.CLASSES_SHOW, since=_SINCE),
        Route(
            "PUT", one, here.rename, policies.CLASSES_UPDATE, since=_SINCE, until=(1, 6), body=schemas.RESOURCE_CLASS
        ),
        Route("PUT", one, here.ensure, policies.CLASSES_UPDATE, since=_ENSURE),
        Route("DELETE", one, here.delete, policies.CLASSES_DELETE, since=_SINCE),
    )


def _path(name: str) -> str:
    return f"/resource_classes/{name}"


def _shown(request: Request, name: str) -> dict[str, Any]:
    return {"name": name, "links": [{"rel": "self", "href": request.prefix + _path(name)}]}


def _missing(name: str) -> errors.NotFound:
    return errors.NotFound(f"No such resource class {name}.", resource_class=name)


class _Classes:
    def __init__(self, store: FullStore) -> None:
        self._store = store
        self._named = BodyValidator(schemas.RESOURCE_CLASS, "name")

    def list(self, request: Request) -> Response:
        """``GET``: all."""
        found = self._store.resource_classes()
        changed = max((each.updated_at for each in found), default=0)
        return cached(
            request, Response(200, {"resource_classes": [_shown(request, each.name) for each in found]}), changed
        )

    def show(self, request: Request) -> Response:
        """``GET``: one."""
        name = request.path_params["name"]
        for each in self._store.resource_classes():
            if each.name == name:
                return cached(request, Response(200, _shown(request, name)), each.updated_at)
        raise _missing(name)

    def create(self, request: Request) -> Response:
        """``POST``: one more."""
        name = request.body["name"]
        if not self._store.create_resource_class(name):
            raise errors.AlreadyExists(f"Conflicting resource class already exists: {name}", resource_class=name)
        return Response(201, None, {"location": request.base_url + _path(name)})

    def ensure(self, request: Request) -> Response:
        """``PUT`` from 1.7 on: make sure that there is one of the name."""
        name = request.path_params["name"]
        self._named.check({"name": name})
        created = self._store.create_resource_class(name)
        return Response(201 if created else 204, None, {"location": request.base_url + _path(name)})

    def rename(self, request: Request) -> Response:
        """``PUT`` before 1.7: another name."""
        name, new = request.path_params["name"], request.body["name"]
        try:
            self._store.rename_resource_class(name, new)
        except errors.NotFound as error:
            raise _missing(name) from error
        except errors.AlreadyExists as error:
            raise errors.AlreadyExists(f"Resource class already exists: {new}", resource_class=new) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"Cannot update standard resource class {name}", path="name") from error
        return Response(200, _shown(request, new))

    def delete(self, request: Request) -> Response:
        """``DELETE``."""
        name = request.path_params["name"]
        try:
            self._store.delete_resource_class(name)
        except errors.NotFound as error:
            raise _missing(name) from error
        except errors.InvalidInput as error:
            raise errors.InvalidInput(
                f"Error in delete resource class: Cannot delete standard resource class {name}.", path="name"
            ) from error
        except errors.InUse as error:
            where = "limits of projects" if "limits" in error.details else "inventory"
            raise errors.InUse(
                f"Error in delete resource class: Cannot delete resource class {name}. Class is in use in {where}.",
                **error.details,
            ) from error
        return Response(204)
