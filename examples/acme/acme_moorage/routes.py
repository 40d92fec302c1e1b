# SPDX-License-Identifier: Apache-2.0
"""Acme's route in Moorage's own API: ``GET /scheduling/v1/acme/licences``."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from acme_moorage.tables import licences
from moorage.control_plane.interface import ApiTools
from moorage.http.routes import PolicyRule, Request, Response, Route

__all__ = ["POLICIES", "routes"]

POLICIES = (PolicyRule("acme:licences:show", "rule:system_reader", "See each of Acme's licences."),)
_FIELDS = ("uuid", "product", "status", "holder")
_ROWS = sa.select(*(licences.c[name] for name in _FIELDS)).order_by(licences.c.uuid).limit(1000)


def routes(tools: ApiTools) -> Sequence[Route]:
    """The route, over the database of the control plane."""

    def listed(request: Request) -> Response:
        with tools.database.read() as tx:
            found = [dict(row) for row in tx.execute(_ROWS).mappings()]
        return Response(200, {"licences": found})

    return [Route("GET", "/acme/licences", listed, POLICIES[0].name, "List Acme's licences.", tags=("acme",))]
