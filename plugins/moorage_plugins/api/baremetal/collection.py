# SPDX-License-Identifier: Apache-2.0
"""Listing and showing, the same for nodes, ports and portgroups."""

from __future__ import annotations

import json
import uuid as uuid_module
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.control_plane.interface import ApiTools
from moorage.fleet.tables import nodes
from moorage.http.routes import Request, Response, Version
from moorage_plugins.api.baremetal import query as queries
from moorage_plugins.api.baremetal.fields import Field, Resource
from moorage_plugins.api.baremetal.query import Filter, Listing
from moorage_plugins.api.baremetal.rendering import Renderer

__all__ = ["Collection", "is_uuid", "node_target"]

_LARGEST_CACHE = 1000


class Collection:
    """What can be read of one resource.

    :param kind: the resource's name in policies (``node``, ``port``, ``portgroup``).
    :param named: the column that may stand for the uuid in a path, besides it; None: there is none.
    """

    def __init__(
        self, tools: ApiTools, resource: Resource, kind: str, filters: Mapping[str, Filter], named: Any | None
    ) -> None:
        self.tools = tools
        self.resource = resource
        self._kind = kind
        self._filters = filters
        self._named = named
        self._renderers: dict[tuple[Any, ...], Renderer] = {}

    def list(self, request: Request) -> Response:
        """``GET /v1/<resource>``."""
        return self.page(request, queries.read(self.resource, request, self._filters, detail=False))

    def detail(self, request: Request) -> Response:
        """``GET /v1/<resource>/detail``."""
        return self.page(request, queries.read(self.resource, request, self._filters, detail=True))

    def show(self, request: Request) -> Response:
        """``GET /v1/<resource>/<uuid or name>``."""
        return self.shown(request, request.path_params["ident"], queries.chosen_fields(self.resource, request))

    def page(self, request: Request, listing: Listing) -> Response:
        """Returns a page of what the caller may see."""
        visible = self.visible_to(request)
        if visible is not None:
            listing = queries.restricted(listing, visible)
        links = not listing.chosen or "links" in queries.texts(request.query["fields"])
        renderer = self._renderer(listing.fields, request.version, links=links, sub=listing.detail)
        with self.tools.database.read() as tx:
            after = None if listing.marker is None else self._marker(tx, listing)
            rows = tx.execute(listing.statement(self.resource, renderer.columns, after)).all()
        body = f'{{"{self.resource.name}":[{",".join(renderer.render(rows, request.base_url))}]'
        if len(rows) == listing.limit:
            body += f',"next":{json.dumps(queries.next_link(request, listing, rows[-1][1]))}'
        return Response(200, (body + "}").encode())

    def shown(self, request: Request, ident: str, fields: Sequence[Field] | None = None, status: int = 200) -> Response:
        """One thing, in full unless some fields were chosen."""
        chosen = fields is not None
        shown = fields or queries.visible(self.resource, request.version)
        links = not chosen or "links" in queries.texts(request.query.get("fields", []))
        renderer = self._renderer(tuple(shown), request.version, links=links, sub=not chosen)
        row = self.row(request, ident, renderer.columns)
        text = renderer.render([row], request.base_url)[0]
        headers = {"Location": f"{request.base_url}/v1/{self.resource.name}/{row[1]}"} if status == 201 else {}
        return Response(status, text.encode(), headers)

    def row(self, request: Request, ident: str, columns: Sequence[Any]) -> Any:
        """Returns the row of a thing that the caller may see.

        :raises NotFound: there is none, or the caller may not see it.
        """
        statement = sa.select(*columns).select_from(self.resource.source).where(self._is(ident))
        visible = self.visible_to(request)
        if visible is not None:
            statement = statement.where(visible)
        with self.tools.database.read() as tx:
            found = tx.execute(statement).first()
        if found is None:
            raise self._missing(ident)
        return found

    def visible_to(self, request: Request) -> sa.ColumnElement[bool] | None:
        """Returns the condition of what the caller may see; None: all."""
        try:
            request.check_policy(f"baremetal:{self._kind}:list_all")
        except errors.Forbidden:
            request.check_policy(f"baremetal:{self._kind}:list")
            project = request.context.project_id
            return sa.or_(nodes.c.owner == project, nodes.c.lessee == project) if project else sa.false()
        return None

    def _renderer(self, fields: Sequence[Field], version: Version, *, links: bool, sub: bool) -> Renderer:
        key = (tuple(field.name for field in fields), version, links, sub)
        found = self._renderers.get(key)
        if found is None:
            if len(self._renderers) >= _LARGEST_CACHE:
                self._renderers.clear()
            found = self._renderers[key] = Renderer(self.resource, fields, version, links=links, sub=sub)
        return found

    def _marker(self, tx: sa.Connection, listing: Listing) -> Any:
        value = sa.null() if listing.order is None else listing.order
        found = tx.execute(
            sa.select(self.resource.ident, value)
            .select_from(self.resource.source)
            .where(self.resource.uuid == listing.marker)
        ).first()
        if found is None:
            raise self._missing(str(listing.marker))
        return found

    def _is(self, ident: str) -> sa.ColumnElement[bool]:
        if is_uuid(ident):
            found: sa.ColumnElement[bool] = self.resource.uuid == ident.lower()
            return found
        if self._named is None:
            raise self._missing(ident)
        named: sa.ColumnElement[bool] = self._named == ident
        return named

    def _missing(self, ident: str) -> errors.NotFound:
        return errors.NotFound(f"{self.resource.singular} {ident} could not be found.")


def is_uuid(text: str) -> bool:
    """It is a uuid in its usual form."""
    try:
        return str(uuid_module.UUID(text)) == text.lower()
    except ValueError:
        return False


def node_target(row: Any) -> dict[str, Any]:
    """What policies may look at of a node (a row with owner and lessee)."""
    return {"node.owner": row.owner, "node.lessee": row.lessee}
