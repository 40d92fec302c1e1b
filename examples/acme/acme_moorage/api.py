# SPDX-License-Identifier: Apache-2.0
"""The API ``/licences``."""

from __future__ import annotations

from typing import Any, ClassVar

import falcon
import sqlalchemy as sa

from acme_moorage.tables import licences
from moorage import errors
from moorage.control_plane.interface import ApiExtension, ApiTools, Wsgi
from moorage.routes import PolicyRule

__all__ = ["LicencesApi"]

MAY_READ = "acme:licences:list"
_STATUSES = {errors.Unauthenticated: 401, errors.Forbidden: 403, errors.Unavailable: 503}


class LicencesApi(ApiExtension):
    """Answers ``GET /licences/`` with how many licences of each product there are, by status."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/licences"
    policies = (PolicyRule(MAY_READ, "rule:system_reader", "See Acme's licences."),)

    def application(self) -> Wsgi:
        """Built once for each configuration; called by several threads at once."""
        application: Any = falcon.App()
        application.add_error_handler(errors.MoorageError, _answer)
        application.add_route("/", _Licences(self.tools))
        wsgi: Wsgi = application
        return wsgi


class _Licences:
    def __init__(self, tools: ApiTools) -> None:
        self._tools = tools

    def on_get(self, request: Any, response: Any) -> None:
        """Who is it, may they, and the answer."""
        context = self._tools.authenticate(request.env)
        self._tools.check_policy(MAY_READ, context)
        columns = (licences.c.product, licences.c.status)
        query = sa.select(*columns, sa.func.count()).group_by(*columns)
        found: dict[str, dict[str, int]] = {}
        with self._tools.database.read() as tx:
            for product, status, count in tx.execute(query):
                found.setdefault(product, {})[status] = count
        response.media = {"licences": found}


def _answer(request: Any, response: Any, error: errors.MoorageError, params: Any) -> None:
    """Errors in this API's own shape."""
    found = next((status for kind, status in _STATUSES.items() if isinstance(error, kind)), 400)
    response.status = falcon.code_to_http_status(found)
    response.media = {"error": {"code": error.code, "message": error.message}}
