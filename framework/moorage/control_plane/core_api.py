# SPDX-License-Identifier: Apache-2.0
"""The core's API: the families' routes at ``/scheduling/v1``, their OpenAPI document, and the versions at the root."""

from __future__ import annotations

import contextlib
import http
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, randomness
from moorage.control_plane.idempotency import IdempotencyKeys, KeptAnswer
from moorage.control_plane.interface import ApiTools
from moorage.db import MICROSECONDS
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.openapi import document
from moorage.http.routes import Request, Response, Route

__all__ = ["DIALECT", "PREFIX", "CoreApplication", "root_application"]

LOG = logging.getLogger(__name__)

PREFIX = "/scheduling/v1"
DIALECT = Dialect("scheduling", (1, 0), (1, 0))
_VERSION = {
    "id": "v1",
    "status": "CURRENT",
    "min_version": "1.0",
    "version": "1.0",
    "links": [{"rel": "self", "href": f"{PREFIX}/"}],
}


def _show_versions(request: Request) -> Response:
    return Response(200, {"versions": [_VERSION]})


_VERSIONS = tuple(Route("GET", path, _show_versions, public=True) for path in ("", "/"))


def root_application(tools: ApiTools) -> Application:
    """Builds what is served at the root when no dialect is mounted there: the versions of the core's API."""
    return Application(DIALECT, _VERSIONS, tools)


class CoreApplication(Application):
    """The core's API.

    :param keys: remembers answers by Idempotency-Key; None refuses the header.
    """

    answers_options = True

    def __init__(self, routes: Sequence[Route], tools: ApiTools, keys: IdempotencyKeys | None = None) -> None:
        described = json.dumps(document(routes, DIALECT, PREFIX)).encode()
        openapi = Route("GET", "/openapi.json", lambda request: Response(200, described), public=True)
        super().__init__(DIALECT, (*routes, *_VERSIONS, openapi), tools)
        self._keys = keys

    @override
    def no_such_path(self, request: Request) -> errors.MoorageError:
        return errors.NotFound(
            f"There is nothing at {request.prefix}{request.path}; {request.prefix}/openapi.json describes what there is."
        )

    @override
    def run_handler(self, request: Request, route: Route) -> Response:
        """Run the handler. With an Idempotency-Key it runs once; a repetition gets the answer of the first request.

        A conflict is an answer too. After a mistake of the client (4xx) the key is free again. Any other error leaves open whether
        the work was done: an answer of the scheduler or of the store may be lost. The key stays with that work then.
        """
        key = request.header("Idempotency-Key")
        if key is None or route.method == "GET":
            return route.handler(request)
        if self._keys is None:
            raise errors.InvalidInput("Idempotency-Key is not supported here.", path="Idempotency-Key")
        caller = (request.context.project_id or "", request.context.user_id or "")
        asked = [request.path_params, request.query, request.body]
        # It becomes the uuid of what is made. The rows of a busy moment shall lie beside each other.
        operation = randomness.new_ordered_uuid(request.received_at / MICROSECONDS)
        begun = self._keys.begin(key, caller, f"{route.method} {route.path}", asked, operation)
        if isinstance(begun, KeptAnswer):
            return Response(begun.status, begun.body, begun.headers)
        try:
            answer = route.handler(replace(request, idempotency=begun.operation))
        except errors.Conflict as error:
            status = self.dialect.status(error)
            answer = Response(status, self.dialect.shape(error, status, request.request_id))
        except BaseException as error:
            with _ignore_store_outage(key):
                (self._keys.forget if self._did_nothing(error) else self._keys.release)(begun)
            raise
        with _ignore_store_outage(key):
            self._keys.keep(begun, KeptAnswer(answer.status, answer.body, answer.headers))
        return answer

    def _did_nothing(self, error: BaseException) -> bool:
        if not isinstance(error, errors.MoorageError):
            return False
        return self.dialect.status(error) < http.HTTPStatus.INTERNAL_SERVER_ERROR or "undone" in error.details


@contextlib.contextmanager
def _ignore_store_outage(key: str) -> Iterator[None]:
    """Let a request have its own outcome although its key cannot be written: a later try takes the key over."""
    try:
        yield
    except errors.Unavailable as error:
        LOG.warning("The outcome of the request with Idempotency-Key %s was not kept: %s", key, error.message)
