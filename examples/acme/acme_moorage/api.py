# SPDX-License-Identifier: Apache-2.0
"""The API ``/licences``."""

from __future__ import annotations

from typing import ClassVar

import sqlalchemy as sa

from acme_moorage.tables import licences
from moorage.control_plane.interface import ApiExtension
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.routes import PolicyRule, Request, Response, Route, Wsgi

__all__ = ["LicencesApi"]

MAY_READ = "acme:licences:list"
_DIALECT = Dialect("licences", (1, 0), (1, 0))
_COLUMNS = (licences.c.product, licences.c.status)
_COUNTS = sa.select(*_COLUMNS, sa.func.count()).group_by(*_COLUMNS)


class LicencesApi(ApiExtension):
    """Answers ``GET /licences/`` with how many licences of each product there are, by status."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/licences"
    policies = (PolicyRule(MAY_READ, "rule:system_reader", "See Acme's licences."),)

    def application(self) -> Wsgi:
        """Built once for each configuration; called by several threads at once."""
        return Application(_DIALECT, [Route("GET", "/", self.count, MAY_READ)], self.tools)

    def count(self, request: Request) -> Response:
        """Counts the licences. The application has checked who is calling, the policy, the query and the body."""
        found: dict[str, dict[str, int]] = {}
        with self.tools.database.read() as tx:
            for product, status, number in tx.execute(_COUNTS):
                found.setdefault(product, {})[status] = number
        return Response(200, {"licences": found})
