# SPDX-License-Identifier: Apache-2.0
"""Serves a table of routes over WSGI.

What all APIs share is here: request ids, microversions, authentication, policy, queries and bodies against compiled schemas,
errors, counting. An API that speaks in another way overrides what differs.
"""

from __future__ import annotations

import http
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl

from moorage import errors, plugin_isolation
from moorage.clock import Clock
from moorage.context import RequestContext, anonymous, global_request_id, new_request_id, trace_parent
from moorage.http.authentication import Authenticator, challenge
from moorage.http.dialect import Dialect
from moorage.http.error_statuses import MethodNotAllowed, UnsupportedMediaType
from moorage.http.route_table import PathRoutes, RouteTable
from moorage.http.routes import PolicyCheck, Request, Response, Route, Schema, Version
from moorage.http.validation import Validator, parse_json, refuse_unstorable
from moorage.json_text import writer
from moorage.read_only import EMPTY

__all__ = ["Application", "ApplicationTools"]

#: The adapter of oslo.log would take a fifth of the time of a line, and each request has one.
LOG = logging.getLogger(__name__)

_JSON = "application/json"
_JSON_TEXT = writer()
_NO_QUERY: Schema = {"type": "object", "additionalProperties": False}


class ApplicationTools(Protocol):
    """What an application needs of the process that it runs in."""

    @property
    def conf(self) -> Any:
        """The configuration."""

    @property
    def clock(self) -> Clock:
        """Measures how long requests take."""

    @property
    def authenticate(self) -> Authenticator:
        """Returns who is calling."""

    @property
    def check_policy(self) -> PolicyCheck:
        """Refuses what the caller may not do."""

    @property
    def count(self) -> Callable[[str, str, int, float], None]:
        """Called with (method, route, status, seconds) for every request."""


class Application:
    """A table of routes as a WSGI callable.

    :param dialect: range of versions, statuses of errors, and (unless :meth:`render_error` is overridden) their shape.
    """

    #: OPTIONS is answered with the methods of the path.
    answers_options = False
    content_type = _JSON
    request_id_header = "X-OpenStack-Request-ID"

    def __init__(self, dialect: Dialect, routes: Sequence[Route], tools: ApplicationTools) -> None:
        self.dialect = dialect
        self.tools = tools
        #: The table, for what describes it.
        self.routes = tuple(routes)
        self._table = RouteTable(self.routes)
        self._max_body = int(tools.conf.api.max_body_bytes)
        self._challenge = dict(challenge(tools.conf))
        # Compiled now, each once: a schema with a mistake must not wait for the first request. By identity, because schemas are no
        # keys; self.routes keeps them.
        self._validators: dict[int, Validator] = {id(_NO_QUERY): self.compile_schema(_NO_QUERY, "query")}
        for route in self.routes:
            for schema, where in ((route.body, "body"), (route.query, "query")):
                if schema is not None and id(schema) not in self._validators:
                    self._validators[id(schema)] = self.compile_schema(schema, where)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """WSGI."""
        monotonic = self.tools.clock.monotonic
        began, received = monotonic(), self.tools.clock.wall()
        request = Request(
            environ,
            environ["REQUEST_METHOD"],
            # WSGI hands paths over as bytes that are decoded as latin-1.
            environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "replace"),
            new_request_id(received),
            self.dialect.lowest,
            enforce=self.tools.check_policy,
            received_at=int(received * 1_000_000),
        )
        # Until the caller is known, log lines of the thread must not name the request before this one.
        request.context.update_store()
        path: PathRoutes | None = None
        if found := self._table.find(request.path):
            path, request.path_params = found
        try:
            with plugin_isolation.isolate_plugin_call(self.dialect.service_type):
                request.version = self.read_version(request)
                response = self._respond(request, path)
                body = self._encode(response.body)
        except Exception as error:  # noqa: BLE001  (the last resort: every error has the dialect's shape)
            if not request.context.request_id:
                self._enter(request, anonymous())
            response = self._error(request, error)
            body = response.body
        headers = [*response.headers.items(), *self.version_headers(request)]
        headers.append((self.request_id_header, request.request_id))
        if body is not None and "Content-Type" not in response.headers:
            headers.append(("Content-Type", self.content_type))
        stream = body is not None and not isinstance(body, bytes)
        if response.status != http.HTTPStatus.NO_CONTENT and not stream:
            headers.append(("Content-Length", str(len(body or b""))))
        seconds = monotonic() - began
        level = LOG.debug if request.method in ("GET", "HEAD") else LOG.info
        where = environ.get("SCRIPT_NAME", "") + request.path
        level("%s %s: %d in %.3f s.", request.method, where, response.status, seconds)
        self.tools.count(request.method, path.template if path else "", response.status, seconds)
        start_response(f"{response.status} {http.HTTPStatus(response.status).phrase}", headers)
        if request.method == "HEAD" or body is None:
            return []
        return body if stream else [body]

    # -- what an API may do in its own way ------------------------------------------------------------------------

    def read_version(self, request: Request) -> Version:
        """Returns the microversion that the request asks for."""
        return self.dialect.version(request.header("OpenStack-API-Version"))

    def version_headers(self, request: Request) -> Iterable[tuple[str, str]]:
        """What every answer says of versions."""
        major, minor = request.version
        return (
            ("OpenStack-API-Version", f"{self.dialect.service_type} {major}.{minor}"),
            ("Vary", "OpenStack-API-Version"),
        )

    def check_request(self, request: Request) -> None:
        """Refuse a request for what is wrong with it before its path is looked at. Nothing by itself."""

    def check_route(self, request: Request, route: Route) -> None:
        """Refuse a request before its body is read, after authentication and policy. Nothing by itself."""

    def check_content_type(self, given: str) -> None:
        """Refuse a body of another type than JSON. A body without a type is taken for JSON."""
        kind = given.partition(";")[0].strip().lower()
        if kind and kind != _JSON:
            raise UnsupportedMediaType(f"The body must be {_JSON}, not {kind}.", path="Content-Type")

    def no_such_version(self, request: Request, routes: Sequence[Route]) -> errors.MoorageError:
        """Returns the error for a route that exists, though not in the version asked for."""
        return errors.NotFound(
            f"{request.method} {request.path} does not exist in version {request.version[0]}.{request.version[1]}."
        )

    def wrong_body(self, request: Request, error: errors.InvalidInput) -> errors.MoorageError:
        """Returns the error for a body that its schema refuses."""
        return error

    def no_such_path(self, request: Request) -> errors.MoorageError:
        """Returns the error for a path that no route has."""
        return errors.NotFound(f"There is nothing at {request.path}.")

    def compile_schema(self, schema: Schema, where: str) -> Validator:
        """Returns the validator of a schema; ``where`` is ``body`` or ``query``."""
        return Validator(schema, where)

    def read_json(self, raw: bytes) -> Any:
        """Returns the data of a body."""
        return parse_json(raw)

    def run_handler(self, request: Request, route: Route) -> Response:
        """Run the handler of a checked request."""
        return route.handler(request)

    def render_error(self, request: Request, error: errors.MoorageError, status: int) -> tuple[str, bytes]:
        """Content type and body of an error."""
        return self.content_type, json.dumps(self.dialect.shape(error, status, request.request_id)).encode()

    # -- the steps ------------------------------------------------------------------------------------------------

    def _respond(self, request: Request, path: PathRoutes | None) -> Response:
        if self.answers_options and path is not None and request.method == "OPTIONS":
            # Without authentication: it says no more than the public description of the API.
            return Response(200, headers={"Allow": ", ".join(self._allowed(path))})
        route = self._route(request, path) if path is not None and path.public else None
        public = route is not None and route.public
        self._enter(request, anonymous() if public else self.tools.authenticate(request.environ))
        self.check_request(request)
        if route is None:
            route = self._route(request, path)
        if request.path_params:
            refuse_unstorable(request.path_params, "path")
        if route.policy is not None:
            self.tools.check_policy(route.policy, request.context)
        self.check_route(request, route)
        request.query = self._query(request, route)
        request.body = self._body(request, route)
        return self.run_handler(request, route)

    def _enter(self, request: Request, context: RequestContext) -> None:
        """Make a context that of the request, and of the thread."""
        context.request_id = request.request_id
        context.global_request_id = global_request_id(request.header("X-OpenStack-Request-ID"))
        context.traceparent = trace_parent(request.header("traceparent"))
        context.received_at = request.received_at
        context.update_store()
        request.context = context

    def _route(self, request: Request, path: PathRoutes | None) -> Route:
        if path is None:
            raise self.no_such_path(request)
        routes = path.of(request.method)
        if not routes:
            allow = self._allowed(path)
            raise MethodNotAllowed(
                f"The method {request.method} is not allowed for this resource. Allowed: {', '.join(allow)}.",
                allow=allow,
            )
        for route in routes:
            if route.serves(request.version):
                return route
        raise self.no_such_version(request, routes)

    def _allowed(self, path: PathRoutes) -> list[str]:
        return sorted([*path.methods, "OPTIONS"] if self.answers_options else path.methods)

    def _query(self, request: Request, route: Route) -> Mapping[str, Any]:
        text = request.environ.get("QUERY_STRING", "")
        if not text and route.query is None:
            return EMPTY
        found: dict[str, list[str]] = {}
        if text:
            for name, value in parse_qsl(text, keep_blank_values=True):
                found.setdefault(name, []).append(value)
            refuse_unstorable(found, "query")
        return self._validators[id(_NO_QUERY if route.query is None else route.query)].read_query(found)

    def _body(self, request: Request, route: Route) -> Any:
        raw = self._raw(request)
        if raw:
            self.check_content_type(request.header("Content-Type") or "")
        if route.body is None:
            self._refuse_body(request, raw)
            return None
        data = self.read_json(raw)
        try:
            self._validators[id(route.body)].check(data)
        except errors.InvalidInput as error:
            raise self.wrong_body(request, error) from error
        return data

    def _refuse_body(self, request: Request, raw: bytes) -> None:
        """Refuse a body that says something; clients send null or an empty object where they have nothing to say."""
        if raw and (data := self.read_json(raw)):
            names = f" (it has {', '.join(sorted(data)[:10])})" if isinstance(data, dict) else ""
            raise errors.InvalidInput(
                f"{request.method} {request.path} takes no body{names}. Leave it out.", path="body"
            )

    def _raw(self, request: Request) -> bytes:
        environ = request.environ
        chunked = "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower()
        length = self._max_body + 1 if chunked else self.length(request)
        if length > self._max_body and not chunked:
            raise errors.PayloadTooLarge(f"The body has {length} bytes; {self._max_body} are allowed.")
        try:
            raw: bytes = environ["wsgi.input"].read(length) if length else b""
        except (OSError, ValueError) as error:
            raise errors.InvalidInput(f"The body cannot be read: {error}.", path="body") from error
        if len(raw) > self._max_body:
            raise errors.PayloadTooLarge(f"The body has more than the {self._max_body} bytes that are allowed.")
        return raw

    def length(self, request: Request) -> int:
        """Returns the length of the body in bytes.

        :raises InvalidInput: the header is no number.
        """
        text = request.environ.get("CONTENT_LENGTH") or "0"
        if not text.isascii() or not text.isdigit():
            raise errors.InvalidInput("content-length header must be an integer", path="Content-Length")
        return int(text)

    def _encode(self, body: Any) -> Any:
        # Most bodies are plain data; to look for an iterator takes longer than for all other types.
        if body is None or (not isinstance(body, dict | list) and isinstance(body, bytes | Iterator)):
            return body
        return _JSON_TEXT(body).encode()

    def _error(self, request: Request, error: Exception) -> Response:
        status = self.dialect.status(error)
        if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, errors.Unavailable):
            LOG.error("Request %s %s failed (%s).", request.method, request.path, request.request_id, exc_info=error)
        known = error if isinstance(error, errors.MoorageError) and self.dialect.shows(error) else None
        if known is None:
            known = errors.MoorageError(
                f"An internal error; the log has it in full under the request id {request.request_id}.",
                request_id=request.request_id,
            )
        kind, body = self.render_error(request, known, status)
        headers = {"Content-Type": kind}
        if isinstance(known, MethodNotAllowed):
            headers["Allow"] = ", ".join(known.details["allow"])
        if isinstance(known, errors.Unavailable):
            headers["Retry-After"] = str(max(1, round(known.retry_after)))
        if status == http.HTTPStatus.UNAUTHORIZED:
            headers |= self._challenge
        if status == http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            # What is left of the body is not read: the connection cannot be used again.
            headers["Connection"] = "close"
        return Response(status, body, headers)
