# SPDX-License-Identifier: Apache-2.0
"""One WSGI application from tables of routes: authentication, policy, validation, handler, one table of errors."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import falcon
from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, foreign
from moorage.api.auth import Authenticator
from moorage.api.dialect import CORE, Dialect
from moorage.api.openapi import document
from moorage.api.policy import Policy
from moorage.api.validation import Validator, parse_json, refuse_unstorable
from moorage.routes import ApiRequest, Route

__all__ = ["PREFIX", "Application"]

LOG = logging.getLogger(__name__)

PREFIX = "/scheduling/v1"
_REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{8,128}$")
_NO_QUERY = {"type": "object", "additionalProperties": False}
Counter = Callable[[str, str, int, float], None]


class Application:
    """The core's routes as a WSGI callable.

    :param count: told (method, route, status, seconds) of every request.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        authenticate: Authenticator,
        policy: Policy,
        conf: cfg.ConfigOpts,
        *,
        count: Counter,
        monotonic: Callable[[], float],
        dialect: Dialect = CORE,
        prefix: str = PREFIX,
    ) -> None:
        self._authenticate = authenticate
        self._policy = policy
        self._dialect = dialect
        self._max_body = int(conf.api.max_body_bytes)
        self._count = count
        self._monotonic = monotonic
        self._prefix = prefix
        self._app: falcon.App[Any, Any] = falcon.App(media_type="application/json")
        self._app.req_options.auto_parse_form_urlencoded = False
        # Falcon has a handler of its own for its errors, which a handler for Exception does not replace.
        self._app.add_error_handler(Exception, self._on_error)
        self._app.add_error_handler(falcon.HTTPError, self._on_error)
        self._app.set_error_serializer(lambda request, response, error: None)
        self._app.add_sink(self._nowhere, "/")
        by_path: dict[str, list[Route]] = {}
        for route in routes:
            by_path.setdefault(route.path, []).append(route)
        for path, group in by_path.items():
            self._app.add_route(prefix + path, _Resource(self, group))
        described = document(routes, dialect, prefix)
        self._app.add_route(f"{prefix}/openapi.json", _Static(described))
        version = {"id": "v1", "status": "CURRENT", "min_version": "1.0", "version": "1.0"}
        versions = {"versions": [{**version, "links": [{"rel": "self", "href": prefix + "/"}]}]}
        for path in ("/", prefix, prefix + "/"):
            self._app.add_route(path, _Static(versions))

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        return self._app(environ, start_response)

    def handle(
        self, route: Route, query: Validator, body: Validator | None, request: Any, response: Any, path: Any
    ) -> None:
        """One request of a known route."""
        began = self._monotonic()
        request.context.count = lambda status: self._count(route.method, route.path, status, self._monotonic() - began)
        request_id = self.request_id(request, response)
        self._dialect.version(request.headers)
        context = self._authenticate(request.env)
        context.request_id = request_id
        context.update_store()
        self._policy.check(route.policy, context)
        for name, value in path.items():
            refuse_unstorable(value, name)
        given = query.query(request.params)
        data = self._body(request, body)
        with foreign.contained(route.path):
            answer = route.handler(ApiRequest(context, dict(path), given, data, self._prefix))
        response.status = falcon.code_to_http_status(answer.status)
        response.set_headers(dict(answer.headers))
        self._version_header(response)
        if answer.body is not None:
            response.media = answer.body
        request.context.count(answer.status)

    def request_id(self, request: Any, response: Any) -> str:
        """The request's id: what the client sent, when it is one, or a new one."""
        given = request.get_header("X-OpenStack-Request-ID")
        request_id = given if given and _REQUEST_ID.match(given) else f"req-{uuid.uuid4()}"
        request.context.request_id = request_id
        response.set_header("X-OpenStack-Request-ID", request_id)
        return str(request_id)

    def _body(self, request: Any, body: Validator | None) -> Any:
        length = request.content_length
        if length is not None and length > self._max_body:
            raise errors.PayloadTooLarge(f"The body has {length} bytes; {self._max_body} are allowed.")
        chunked = "chunked" in (request.get_header("Transfer-Encoding") or "").lower()
        if not length and not chunked:
            if body is not None:
                raise errors.InvalidInput("A JSON body is needed.", path="body")
            return None
        try:
            raw = request.stream.read(self._max_body + 1) if chunked else request.bounded_stream.read()
        except (OSError, ValueError) as error:
            raise errors.InvalidInput(f"The body cannot be read: {error}.", path="body") from error
        if len(raw) > self._max_body:
            raise errors.PayloadTooLarge(f"The body has more than the {self._max_body} bytes that are allowed.")
        if body is None:
            raise errors.InvalidInput("This request takes no body.", path="body")
        kind = (request.content_type or "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise errors.InvalidInput(f"The body must be application/json, not {kind}.", path="body")
        data = parse_json(raw)
        body.check(data)
        return data

    # -- errors ---------------------------------------------------------------------------------------------------

    def _on_error(self, request: Any, response: Any, error: Exception, params: Any) -> None:
        known = self._known(error)
        request_id = getattr(request.context, "request_id", None) or self.request_id(request, response)
        if known is None:
            LOG.error("Request %s %s failed (%s).", request.method, request.path, request_id, exc_info=error)
            known = errors.MoorageError(
                f"An internal error; the log has it in full under the request id {request_id}.", request_id=request_id
            )
        status = self._dialect.status(known)
        if isinstance(error, falcon.HTTPMethodNotAllowed):
            status = 405
            response.set_header("Allow", (error.headers or {}).get("Allow", ""))  # type: ignore[union-attr]
        response.status = falcon.code_to_http_status(status)
        if status == 401:
            response.set_header("WWW-Authenticate", 'Basic realm="moorage"')
        if isinstance(known, errors.Unavailable):
            response.set_header("Retry-After", str(max(1, round(known.retry_after))))
        if status == 413:
            # What is left of the body is not read: the connection cannot be used again.
            response.set_header("Connection", "close")
        self._version_header(response)
        response.media = self._dialect.shape(known, status, request_id)
        count = getattr(request.context, "count", None)
        if count is not None:
            count(status)

    def _known(self, error: Exception) -> errors.MoorageError | None:
        if isinstance(error, errors.MoorageError):
            return error
        if isinstance(error, falcon.HTTPMethodNotAllowed):
            return errors.InvalidInput("This method is not known here.")
        if isinstance(error, falcon.HTTPError):
            return errors.InvalidInput(str(error.description or error.title))
        return None

    def _nowhere(self, req: Any, resp: Any, **kwargs: Any) -> None:
        raise errors.NotFound(f"There is nothing at {req.path}; {self._prefix}/openapi.json describes what there is.")

    def _version_header(self, response: Any) -> None:
        low = f"{self._dialect.lowest[0]}.{self._dialect.lowest[1]}"
        response.set_header("OpenStack-API-Version", f"{self._dialect.service_type} {low}")
        response.append_header("Vary", "OpenStack-API-Version")


class _Resource:
    """The routes of one path, as Falcon wants them."""

    def __init__(self, application: Application, routes: Sequence[Route]) -> None:
        for route in routes:
            query = Validator(route.query or _NO_QUERY, "query")
            body = Validator(route.body, "body") if route.body is not None else None
            setattr(self, f"on_{route.method.lower()}", self._responder(application, route, query, body))

    @staticmethod
    def _responder(
        application: Application, route: Route, query: Validator, body: Validator | None
    ) -> Callable[..., None]:
        def respond(request: Any, response: Any, **path: str) -> None:
            application.handle(route, query, body, request, response, path)

        return respond


class _Static:
    """A document that needs no authentication."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def on_get(self, request: Any, response: Any) -> None:
        """The document."""
        response.media = self._data
