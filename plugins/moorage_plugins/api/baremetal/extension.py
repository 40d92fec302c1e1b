# SPDX-License-Identifier: Apache-2.0
"""The plugin ``baremetal`` of the group moorage.api."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage.control_plane.interface import ApiExtension, ApiTools
from moorage.fleet.tables import nodes
from moorage.http.routes import ANY_QUERY, PolicyRule, Request, Response, Route, Wsgi
from moorage_plugins.api.baremetal.application import (
    DIALECT,
    PORTGROUPS,
    SHARDS,
    BaremetalApplication,
    root,
    v1,
    with_slash,
)
from moorage_plugins.api.baremetal.nodes import Nodes
from moorage_plugins.api.baremetal.policies import POLICIES
from moorage_plugins.api.baremetal.ports import Portgroups, Ports

__all__ = ["BaremetalApi"]

#: Any JSON: the fields have checks of their own, with Ironic's words.
_BODY: dict[str, object] = {}
_COUNTS = sa.select(nodes.c.shard, sa.func.count()).group_by(nodes.c.shard)


class BaremetalApi(ApiExtension):
    """What clients of OpenStack Ironic use of nodes, ports, portgroups and shards, microversions 1.1 to 1.115."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/baremetal"
    policies: ClassVar[Sequence[PolicyRule]] = POLICIES

    @override
    def application(self) -> Wsgi:
        return BaremetalApplication(DIALECT, routes(self.tools), self.tools)


def routes(tools: ApiTools) -> list[Route]:
    """Returns the routes of the dialect."""
    things, ports, groups = Nodes(tools), Ports(tools), Portgroups(tools)
    one = "/v1/nodes/{ident}"
    found = [Route("GET", path, root, public=True) for path in ("", "/")]
    found += with_slash("GET", "/v1", v1, public=True)
    found += with_slash("GET", "/v1/nodes", things.list, query=ANY_QUERY)
    found += with_slash("GET", "/v1/nodes/detail", things.detail, query=ANY_QUERY)
    found += with_slash("POST", "/v1/nodes", things.create, body=_BODY)
    found += with_slash("GET", one, things.show, query=ANY_QUERY)
    found += with_slash("PATCH", one, things.patch, body=_BODY)
    found += with_slash("DELETE", one, things.delete)
    found += with_slash("PUT", f"{one}/maintenance", things.set_maintenance, body=_BODY)
    found += with_slash("DELETE", f"{one}/maintenance", things.clear_maintenance)
    found += with_slash("GET", f"{one}/ports", ports.of_node, query=ANY_QUERY)
    found += with_slash("GET", f"{one}/portgroups", groups.of_node, since=(1, 24), query=ANY_QUERY)
    for attached, since in ((ports, DIALECT.lowest), (groups, PORTGROUPS)):
        path = f"/v1/{attached.resource.name}"
        found += with_slash("GET", path, attached.list, since=since, query=ANY_QUERY)
        found += with_slash("GET", f"{path}/detail", attached.detail, since=since, query=ANY_QUERY)
        found += with_slash("POST", path, attached.create, since=since, body=_BODY)
        found += with_slash("GET", f"{path}/{{ident}}", attached.show, since=since, query=ANY_QUERY)
        found += with_slash("PATCH", f"{path}/{{ident}}", attached.patch, since=since, body=_BODY)
        found += with_slash("DELETE", f"{path}/{{ident}}", attached.delete, since=since)
    found += with_slash(
        "GET", "/v1/shards", lambda request: _shards(tools, request), since=SHARDS, policy="baremetal:shards:get"
    )
    return found


def _shards(tools: ApiTools, request: Request) -> Response:
    """``GET /v1/shards``: one statement, which the index on the column answers alone."""
    with tools.database.read() as tx:
        rows = [(row[0], row[1]) for row in tx.execute(_COUNTS)]
    rows.sort(key=lambda row: (-row[1], row[0] is None, row[0] or ""))
    return Response(200, json.dumps({"shards": [{"name": name, "count": count} for name, count in rows]}).encode())
