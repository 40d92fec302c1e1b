# SPDX-License-Identifier: Apache-2.0
"""The application of a dialect: a table of routes, each valid from one microversion to another.

What all dialects share is here: request ids, the version header, authentication, policy, bodies and queries against compiled
schemas, one shape for every error, counting. What a dialect does in its own way it overrides. It speaks WSGI itself, without
a web framework: dialects must answer to the letter as the service whose clients they serve, and a claim must cost little.
"""

from __future__ import annotations

import http
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from oslo_log import log as logging

from moorage import errors, foreign
from moorage.api.auth import challenge
from moorage.api.dialect import Dialect
from moorage.api.validation import Validator, parse_json, refuse_unstorable
from moorage.context import global_request_id, new_request_id
from moorage.control_plane.interface import ApiTools
from moorage.routes import Request, Response, Route, Schema, Version

__all__ = ["ANY_QUERY", "DialectApplication", "MethodNotAllowed", "Route"]

LOG = logging.getLogger(__name__)

#: The query of a route whose handler reads all parameters itself, and refuses those that it does not know.
ANY_QUERY: Schema = {"type": "object"}
_NO_QUERY: Schema = {"type": "object", "additionalProperties": False}


class MethodNotAllowed(errors.InvalidInput):
    """The path is known and the method is not; ``details['allow']`` lists the known ones."""


class _Path:
    """The routes of one path."""

    def __init__(self, template: str) -> None:
        self.template = template
        self.methods: dict[str, list[Route]] = {}
        names = re.findall(r"{(\w+)}", template)
        pattern = "".join(
            f"(?P<{piece[1:-1]}>[^/]+)" if piece.startswith("{") else re.escape(piece)
            for piece in re.split(r"({\w+})", template)
        )
        self.match = re.compile(pattern).fullmatch
        self.fixed = not names


class DialectApplication:
    """A table of routes as a WSGI callable.

    :param dialect: range of versions, statuses of errors, and (unless :meth:`render_error` is overridden) their shape.
    """

    def __init__(self, dialect: Dialect, routes: Sequence[Route], tools: ApiTools) -> None:
        self.dialect = dialect
        self.tools = tools
        self._max_body = int(tools.conf.api.max_body_bytes)
        self._fixed: dict[str, _Path] = {}
        self._matched: list[_Path] = []
        # Compiled now, each once: a schema with a mistake must not wait for the first request.  By identity, because schemas
        # are no keys; self.routes keeps them.
        self._validators: dict[int, Validator] = {id(_NO_QUERY): self.compile_schema(_NO_QUERY, "query")}
        paths: dict[str, _Path] = {}
        for route in routes:
            path = paths.setdefault(route.path, _Path(route.path))
            path.methods.setdefault(route.method, []).append(route)
            for schema, where in ((route.body, "body"), (route.query, "query")):
                if schema is not None and id(schema) not in self._validators:
                    self._validators[id(schema)] = self.compile_schema(schema, where)
        #: The table, for those who describe it.
        self.routes = tuple(routes)
        for path in paths.values():
            if path.fixed:
                self._fixed[path.template] = path
            else:
                self._matched.append(path)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """WSGI."""
        monotonic = self.tools.clock.monotonic
        began = monotonic()
        request = Request(
            environ,
            environ["REQUEST_METHOD"],
            # WSGI hands paths over as bytes in latin-1's clothes.
            environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace"),
            new_request_id(),
            self.dialect.lowest,
        )
        path = self._find(request)
        try:
            with foreign.isolate_plugin_call(self.dialect.service_type):
                request.version = self.read_version(request)
                answer = self._answer(request, path)
            status, headers, body = answer.status, [*answer.headers.items()], b""
            if answer.body is not None:
                given = answer.body
                body = given if isinstance(given, bytes) else json.dumps(given, separators=(",", ":")).encode()
                headers.append(("Content-Type", self.content_type))
        except Exception as error:  # noqa: BLE001  (the last resort: every error has the dialect's shape)
            status, headers, body = self._error(request, error)
        headers += self.version_headers(request)
        headers.append((self.request_id_header, request.request_id))
        if status != http.HTTPStatus.NO_CONTENT:
            headers.append(("Content-Length", str(len(body))))
        seconds = monotonic() - began
        level = LOG.debug if request.method in ("GET", "HEAD") else LOG.info
        level("%s %s: %d in %.3f s.", request.method, request.path, status, seconds)
        self.tools.count(request.method, path.template if path else "", status, seconds)
        start_response(f"{status} {http.HTTPStatus(status).phrase}", headers)
        return [] if request.method == "HEAD" else [body]

    # -- what a dialect may do in its own way ---------------------------------------------------------------------

    content_type = "application/json"
    request_id_header = "X-OpenStack-Request-ID"

    def read_version(self, request: Request) -> Version:
        """The microversion that the request asks for."""
        return self.dialect.version(_Headers(request.environ))

    def version_headers(self, request: Request) -> Iterable[tuple[str, str]]:
        """What every answer says of versions."""
        major, minor = request.version
        return (
            ("OpenStack-API-Version", f"{self.dialect.service_type} {major}.{minor}"),
            ("Vary", "OpenStack-API-Version"),
        )

    def check_call(self, request: Request) -> None:
        """Refuse a request for what is wrong with it before its path is looked at. Nothing by itself."""

    def check_route(self, request: Request, route: Route) -> None:
        """Refuse a request before its body is read, after authentication and policy. Nothing by itself."""

    def no_such_version(self, request: Request, routes: Sequence[Route]) -> errors.MoorageError:
        """The error for a route that exists, though not in the version asked for."""
        return errors.NotFound(
            f"{request.method} {request.path} does not exist in version {request.version[0]}.{request.version[1]}."
        )

    def wrong_body(self, request: Request, error: errors.InvalidInput) -> errors.MoorageError:
        """The error for a body that its schema refuses."""
        return error

    def no_such_path(self, request: Request) -> errors.MoorageError:
        """The error for a path that no route has."""
        return errors.NotFound(f"There is nothing at {request.path}.")

    def compile_schema(self, schema: Schema, where: str) -> Validator:
        """The validator of a schema; ``where`` is ``body`` or ``query``."""
        return Validator(schema, where)

    def read_json(self, raw: bytes) -> Any:
        """The data of a body."""
        return parse_json(raw)

    def render_error(self, request: Request, error: errors.MoorageError, status: int) -> tuple[str, bytes]:
        """Content type and body of an error."""
        return self.content_type, json.dumps(self.dialect.shape(error, status, request.request_id)).encode()

    # -- the steps ------------------------------------------------------------------------------------------------

    def _answer(self, request: Request, path: _Path | None) -> Response:
        route = self._route(request, path) if path is not None and self._is_public(request, path) else None
        if route is None:
            request.context = self.tools.authenticate(request.environ)
            request.context.request_id = request.request_id
            request.context.global_request_id = global_request_id(request.header("X-OpenStack-Request-ID"))
        request.context.update_store()
        self.check_call(request)
        if route is None:
            route = self._route(request, path)
        refuse_unstorable(dict(request.path_params), "path")
        if route.policy is not None:
            self.tools.check_policy(route.policy, request.context)
        self.check_route(request, route)
        request.query = self._query(request, route)
        request.body = self._body(request, route)
        return route.handler(request)

    def _find(self, request: Request) -> _Path | None:
        found = self._fixed.get(request.path)
        if found is not None:
            return found
        for path in self._matched:
            matched = path.match(request.path)
            if matched is not None:
                request.path_params = matched.groupdict()
                return path
        return None

    def _is_public(self, request: Request, path: _Path) -> bool:
        return any(route.public for routes in path.methods.values() for route in routes)

    def _route(self, request: Request, path: _Path | None) -> Route:
        if path is None:
            raise self.no_such_path(request)
        routes = path.methods.get("GET" if request.method == "HEAD" else request.method)
        if routes is None:
            allow = sorted(path.methods)
            raise MethodNotAllowed(
                f"The method {request.method} is not allowed for this resource. Allowed: {', '.join(allow)}.",
                allow=allow,
            )
        for route in routes:
            if route.serves(request.version):
                return route
        raise self.no_such_version(request, routes)

    def _query(self, request: Request, route: Route) -> dict[str, list[str]]:
        text = request.environ.get("QUERY_STRING", "")
        found: dict[str, list[str]] = {}
        if text:
            for name, value in parse_qsl(text, keep_blank_values=True):
                found.setdefault(name, []).append(value)
            refuse_unstorable(found, "query")
        self._validators[id(_NO_QUERY if route.query is None else route.query)].check(found)
        return found

    def _body(self, request: Request, route: Route) -> Any:
        if route.body is None:
            self._refuse_body(request)
            return None
        data = self.read_json(self._raw(request))
        try:
            self._validators[id(route.body)].check(data)
        except errors.InvalidInput as error:
            raise self.wrong_body(request, error) from error
        return data

    def _refuse_body(self, request: Request) -> None:
        """Refuse a body that says something; clients send null or an empty object where they have nothing to say."""
        raw = self._raw(request)
        if raw and (data := self.read_json(raw)):
            names = f" (it has {', '.join(sorted(data)[:10])})" if isinstance(data, dict) else ""
            raise errors.InvalidInput(
                f"{request.method} {request.path} takes no body{names}. Leave it out.", path="body"
            )

    def _raw(self, request: Request) -> bytes:
        environ = request.environ
        if "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower():
            raw: bytes = environ["wsgi.input"].read(self._max_body + 1)
        else:
            length = self.length(request)
            if length > self._max_body:
                raise errors.PayloadTooLarge(f"The body has {length} bytes; {self._max_body} are allowed.")
            raw = environ["wsgi.input"].read(length) if length else b""
        if len(raw) > self._max_body:
            raise errors.PayloadTooLarge(f"The body has more than the {self._max_body} bytes that are allowed.")
        return raw

    def length(self, request: Request) -> int:
        """The length of the body in bytes.

        :raises InvalidInput: the header is no number.
        """
        text = request.environ.get("CONTENT_LENGTH") or "0"
        if not text.isascii() or not text.isdigit():
            raise errors.InvalidInput("content-length header must be an integer", path="Content-Length")
        return int(text)

    def _error(self, request: Request, error: Exception) -> tuple[int, list[tuple[str, str]], bytes]:
        if isinstance(error, errors.MoorageError):
            known, status = error, self.dialect.status(error)
        else:
            known, status = errors.MoorageError("An internal error.", request_id=request.request_id), 500
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(known, errors.Unavailable):
            LOG.error("Request %s %s failed (%s).", request.method, request.path, request.request_id, exc_info=error)
            known = errors.MoorageError(
                f"An internal error; the log has it in full under the request id {request.request_id}.",
                request_id=request.request_id,
            )
        if isinstance(known, MethodNotAllowed):
            status = 405
        kind, body = self.render_error(request, known, status)
        headers = [("Content-Type", kind)]
        if isinstance(known, MethodNotAllowed):
            headers.append(("Allow", ", ".join(known.details["allow"])))
        if isinstance(known, errors.Unavailable):
            headers.append(("Retry-After", str(max(1, round(known.retry_after)))))
        if status == http.HTTPStatus.UNAUTHORIZED:
            headers += challenge(self.tools.conf)
        if status == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            # What is left of the body is not read: the connection cannot be used again.
            headers.append(("Connection", "close"))
        return status, headers, body


class _Headers(dict[str, str]):
    """The version headers of a request, as microversion_parse wants them."""

    def __init__(self, environ: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in environ.items():
            if name.startswith("HTTP_") and name.endswith("VERSION"):
                self[name[5:].replace("_", "-").lower()] = value
