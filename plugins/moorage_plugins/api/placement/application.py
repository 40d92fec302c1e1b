# SPDX-License-Identifier: Apache-2.0
"""The Placement dialect's wire conventions: the headers that it needs, its errors, its version documents."""

from __future__ import annotations

import email.utils
import html
import http
import json
from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import ProviderCatalogue
from moorage.control_plane.interface import ApiTools
from moorage.http.application import Application
from moorage.http.dialect import Dialect, parse_version, requested_version
from moorage.http.error_statuses import MethodNotAllowed, NotAcceptable, UnsupportedMediaType
from moorage.http.routes import Request, Response, Route, Schema, Version
from moorage.http.validation import Validator
from moorage_plugins.api.placement.error_codes import (
    code,
    no_provider,
)
from moorage_plugins.api.placement.validation import BodyValidator, QueryValidator

__all__ = ["DIALECT", "PlacementApplication", "cached", "versions_document"]

JSON = "application/json"
DIALECT = Dialect("placement", (1, 0), (1, 39))
#: From here on answers say when what they show was last changed, and that it is not to be cached.
LAST_MODIFIED: Version = (1, 15)
#: From here on errors have codes.
ERROR_CODES: Version = (1, 23)


class PlacementApplication(Application):
    """Answers as Placement does."""

    request_id_header = "x-openstack-request-id"

    def __init__(self, routes: Sequence[Route], store: ProviderCatalogue, tools: ApiTools) -> None:
        super().__init__(DIALECT, routes, tools)
        self._store = store

    @override
    def read_version(self, request: Request) -> Version:
        found = requested_version(request.header("OpenStack-API-Version"), "placement")
        if found is None:
            return self.dialect.lowest
        if found == "latest":
            return self.dialect.highest
        try:
            version = parse_version(found)
        except ValueError:
            raise errors.InvalidInput(f"invalid version string: {found}") from None
        if not self.dialect.lowest <= version <= self.dialect.highest:
            low, high = (f"{major}.{minor}" for major, minor in (self.dialect.lowest, self.dialect.highest))
            raise errors.UnsupportedVersion(
                f"Unacceptable version header: {found}; {low} to {high} are served.", min_version=low, max_version=high
            )
        return version

    @override
    def version_headers(self, request: Request) -> Iterable[tuple[str, str]]:
        major, minor = request.version
        return ("openstack-api-version", f"placement {major}.{minor}"), ("vary", "openstack-api-version")

    @override
    def check_request(self, request: Request) -> None:
        if self.length(request) and not request.header("Content-Type"):
            raise errors.InvalidInput("content-type header required when content-length > 0", path="Content-Type")

    @override
    def check_route(self, request: Request, route: Route) -> None:
        if route.body is not None:
            given = request.header("Content-Type")
            if (given or "").partition(";")[0].strip().lower() != JSON:
                raise UnsupportedMediaType(f"The media type {given} is not supported, use {JSON}", path="Content-Type")
        if request.method == "GET" and not accepts(request.header("Accept"), JSON):
            raise NotAcceptable(f"Only {JSON} is provided", path="Accept")

    @override
    def no_such_version(self, request: Request, routes: Sequence[Route]) -> errors.MoorageError:
        if request.method == "DELETE" and request.path.endswith("/inventories"):
            # The one route that an old client learns of by the method.
            allow = ["GET", "POST", "PUT"]
            return MethodNotAllowed("The method specified is not allowed for this resource.", allow=allow)
        return _nothing()

    @override
    def wrong_body(self, request: Request, error: errors.InvalidInput) -> errors.MoorageError:
        # A wrong body for a provider that does not exist: the error names the missing provider, not the body.
        uuid = request.path_params.get("uuid")
        if uuid is not None:
            try:
                with no_provider(uuid):
                    self._store.provider(uuid)
            except errors.NotFound as missing:
                return missing
        return error

    @override
    def no_such_path(self, request: Request) -> errors.MoorageError:
        return _nothing()

    @override
    def compile_schema(self, schema: Schema, where: str) -> Validator:
        return QueryValidator(schema, where) if where == "query" else BodyValidator(schema, where)

    @override
    def read_json(self, raw: bytes) -> Any:
        try:
            return super().read_json(raw)
        except errors.InvalidInput as error:
            raise errors.InvalidInput(f"Malformed JSON: {error.message}", **error.details) from error

    @override
    def render_error(self, request: Request, error: errors.MoorageError, status: int) -> tuple[str, bytes]:
        title = http.HTTPStatus(status).phrase
        detail = error.message
        if not accepts(request.header("Accept"), JSON):
            page = f"<html><head><title>{status} {title}</title></head><body><h1>{status} {title}</h1>"
            return "text/html; charset=UTF-8", f"{page}{html.escape(detail)}</body></html>".encode()
        shown = {"status": status, "request_id": request.request_id, "title": title, "detail": detail}
        if request.version >= ERROR_CODES:
            shown["code"] = code(error)
        if isinstance(error, errors.UnsupportedVersion):
            shown |= {name: error.details[name] for name in ("min_version", "max_version")}
        if isinstance(error, errors.Conflict):
            # For programs: which class, how much was asked, how much is free.
            known = {
                name: error.details[name]
                for name in ("provider", "resource_class", "asked", "free")
                if name in error.details
            }
            if known:
                shown["moorage"] = known
        return JSON, json.dumps({"errors": [shown]}).encode()


def _nothing() -> errors.NotFound:
    return errors.NotFound("The resource could not be found.")


def accepts(header: str | None, kind: str) -> bool:
    """An Accept header allows a type (RFC 9110, 12.5.1): no header allows all; quality 0 forbids."""
    if not header:
        return True
    major = kind.partition("/")[0]
    best: tuple[int, float] | None = None
    for part in header.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        rank = {kind: 3, f"{major}/*": 2, "*/*": 1, "*": 1}.get(media, 0)
        if not rank or (best is not None and best[0] >= rank):
            continue
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            best = rank, float(quality)
        except ValueError:
            best = rank, 1.0
    return best is not None and best[1] > 0


def cached(request: Request, answer: Response, changed: int | None = None) -> Response:
    """Returns the answer with the headers that GETs have from 1.15.

    :param changed: when what it shows was last changed, in microseconds since the epoch; None or 0: not known, so now.
    """
    if request.version < LAST_MODIFIED:
        return answer
    stamp = email.utils.formatdate(changed / 1_000_000 if changed else None, usegmt=True)
    return Response(answer.status, answer.body, {**answer.headers, "last-modified": stamp, "cache-control": "no-cache"})


def versions_document(request: Request) -> Response:
    """``GET /``: what is served here; needs no authentication."""
    low, high = (f"{major}.{minor}" for major, minor in (DIALECT.lowest, DIALECT.highest))
    version = {
        "id": "v1.0",
        "max_version": high,
        "min_version": low,
        "status": "CURRENT",
        "links": [{"rel": "self", "href": request.prefix}],
    }
    return cached(request, Response(200, {"versions": [version]}))
