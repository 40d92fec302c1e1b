# SPDX-License-Identifier: Apache-2.0
"""One WSGI application from tables of routes: authentication, policy, validation, handler, one table of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import falcon
from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, foreign
from moorage.api.auth import Authenticator, challenge
from moorage.api.dialect import CORE, Dialect
from moorage.api.openapi import document
from moorage.api.policy import Policy
from moorage.api.validation import Validator, parse_json, refuse_unstorable
from moorage.context import global_request_id, new_request_id
from moorage.control_plane.idempotency import IdempotencyKeys, KeptAnswer
from moorage.routes import Request, Response, Route

__all__ = ["PREFIX", "Application"]

LOG = logging.getLogger(__name__)

PREFIX = "/scheduling/v1"
_SERVER_ERROR = 500
_NO_QUERY = {"type": "object", "additionalProperties": False}
Counter = Callable[[str, str, int, float], None]


class Application:
    """The core's routes as a WSGI callable.

    :param count: called with (method, route, status, seconds) for every request.
    :param keys: remembers answers by Idempotency-Key; None refuses the header.
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
        keys: IdempotencyKeys | None = None,
        dialect: Dialect = CORE,
        prefix: str = PREFIX,
    ) -> None:
        self._authenticate = authenticate
        self._policy = policy
        self._keys = keys
        self._dialect = dialect
        self._max_body = int(conf.api.max_body_bytes)
        self._challenge = list(challenge(conf))
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
        level = LOG.debug if route.method == "GET" else LOG.info

        def count(status: int) -> None:
            seconds = self._monotonic() - began
            level("%s %s: %d in %.3f s.", request.method, request.path, status, seconds)
            self._count(route.method, route.path, status, seconds)

        request.context.count = count
        request_id = self.request_id(request, response)
        self._dialect.version(request.headers)
        context = self._authenticate(request.env)
        context.request_id = request_id
        context.global_request_id = global_request_id(request.get_header("X-OpenStack-Request-ID"))
        context.update_store()
        if route.policy is not None:
            self._policy.check(route.policy, context)
        for name, value in path.items():
            refuse_unstorable(value, name)
        given = query.query(request.params)
        data = self._body(request, body)
        made = Request(
            {**request.env, "SCRIPT_NAME": self._prefix},
            route.method,
            request.path,
            request_id,
            context=context,
            path_params=path,
            query=given,
            body=data,
            enforce=self._policy.check,
        )
        key = request.get_header("Idempotency-Key")
        repeatable = key is None or route.method == "GET"
        answer = self._handled(route, made) if repeatable else self._once(route, made, key)
        response.status = falcon.code_to_http_status(answer.status)
        response.set_headers(dict(answer.headers))
        self._version_header(response)
        if answer.body is not None:
            response.media = answer.body
        request.context.count(answer.status)

    def _handled(self, route: Route, request: Request) -> Response:
        with foreign.isolate_plugin_call(route.path):
            return route.handler(request)

    def _once(self, route: Route, request: Request, key: str) -> Response:
        """Handle a request with an Idempotency-Key once; a repetition gets the answer of the first one.

        A conflict is an answer too. After a mistake of the client (4xx) the key is free again. Any other error leaves open whether
        the work was done: an answer of the scheduler or of the store may be lost. The key stays with that work then.
        """
        if self._keys is None:
            raise errors.InvalidInput("Idempotency-Key is not supported here.", path="Idempotency-Key")
        caller = (request.context.project_id or "", request.context.user_id or "")
        begun = self._keys.begin(
            key, caller, f"{route.method} {route.path}", [dict(request.path_params), dict(request.query), request.body]
        )
        if isinstance(begun, KeptAnswer):
            return Response(begun.status, begun.body, begun.headers)
        try:
            answer = self._handled(route, replace(request, idempotency=begun.operation))
        except errors.Conflict as error:
            status = self._dialect.status(error)
            body = self._dialect.shape(error, status, str(request.context.request_id))
            answer = Response(status, body)
        except BaseException as error:
            with _a_store_that_is_away(key):
                (self._keys.forget if self._did_nothing(error) else self._keys.release)(begun)
            raise
        with _a_store_that_is_away(key):
            self._keys.keep(begun, KeptAnswer(answer.status, answer.body, answer.headers))
        return answer

    def _did_nothing(self, error: BaseException) -> bool:
        known = self._known(error)
        return known is not None and (self._dialect.status(known) < _SERVER_ERROR or "undone" in known.details)

    def request_id(self, request: Any, response: Any) -> str:
        """Make the request's id, for the answer and the logs."""
        request_id = new_request_id()
        request.context.request_id = request_id
        response.set_header("X-OpenStack-Request-ID", request_id)
        return request_id

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
            response.set_headers(self._challenge)
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

    def _known(self, error: BaseException) -> errors.MoorageError | None:
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


@contextlib.contextmanager
def _a_store_that_is_away(key: str) -> Iterator[None]:
    """Let a request have its own outcome although its key cannot be written: a later try takes the key over."""
    try:
        yield
    except errors.Unavailable as error:
        LOG.warning("The outcome of the request with Idempotency-Key %s was not kept: %s", key, error.message)


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
