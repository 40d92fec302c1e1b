# SPDX-License-Identifier: Apache-2.0
"""The dialect behind a socket, and a way to ask it."""

from __future__ import annotations

import json
import unittest
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import requests
import sqlalchemy as sa

from moorage.context import RequestContext
from moorage.control_plane.enrolment import Enrolment
from moorage.fleet.tables import nodes
from moorage.http.authentication import Authenticator
from moorage_plugins.api.baremetal.tables import portgroups, ports
from moorage_plugins.stores import tables as stored
from tests.api.live import LiveDialect, token_is_role

__all__ = ["ADMIN", "NEWEST", "PROJECT_ADMIN", "Answer", "IronicCase", "everybody", "roles"]

NEWEST = "1.115"
_TABLES = (
    nodes,
    ports,
    portgroups,
    *(getattr(stored, name) for name in ("allocations", "consumers", "inventories", "resource_providers")),
)


def everybody(environ: Mapping[str, Any]) -> RequestContext:
    """Every caller is the system's administrator, as with noauth."""
    return RequestContext(
        user_id="admin", roles=["admin", "manager", "member", "reader"], system_scope="all", overwrite=False
    )


def roles(names: str, project: str | None = None) -> dict[str, str]:
    """Headers of a caller; without a project it is of the system scope."""
    given = {"X-Auth-Token": "somebody", "X-Roles": names}
    return given | ({"OpenStack-System-Scope": "all"} if project is None else {"X-Project-Id": project})


ADMIN = roles("admin,manager,member,reader")
PROJECT_ADMIN = roles("admin,manager,member,reader", "project-1")


class Answer:
    """What the server said."""

    def __init__(self, answer: requests.Response) -> None:
        self.status = answer.status_code
        self.headers = answer.headers
        self.text = answer.text
        self.body: Any = answer.json() if answer.content else None

    @property
    def fault(self) -> str:
        """The message of an error, taken out of its two layers of JSON."""
        return str(json.loads(self.body["error_message"])["faultstring"])


class IronicCase(unittest.TestCase):
    """One dialect for the class, and its tables empty for each test; on SQLite unless ``make_url`` says otherwise."""

    authenticate: Authenticator = staticmethod(token_is_role)
    live: ClassVar[LiveDialect]
    session: ClassVar[requests.Session]

    @classmethod
    def make_url(cls) -> str | None:
        """The URL of an empty database; None: a file."""
        return None

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.live = LiveDialect("baremetal", "/baremetal", url=cls.make_url(), authenticate=cls.authenticate)
        cls.addClassCleanup(cls.live.close)
        cls.session = requests.Session()
        cls.addClassCleanup(cls.session.close)

    def setUp(self) -> None:
        with self.live.database.write() as tx:
            for table in _TABLES:
                tx.execute(sa.delete(table))

    @property
    def fleet(self) -> Enrolment:
        """What writes nodes."""
        found = self.live.tools.fleet()
        assert isinstance(found, Enrolment)
        return found

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        version: str | None = NEWEST,
        who: Mapping[str, str] = ADMIN,
    ) -> Answer:
        headers = dict(who)
        if version is not None:
            headers["X-OpenStack-Ironic-API-Version"] = version
        where = path if path.startswith("http") else self.live.url + path
        return Answer(self.session.request(method, where, json=body, headers=headers, timeout=60))

    def get(self, path: str, **more: Any) -> Any:
        found = self.ask("GET", path, **more)
        self.assertEqual(200, found.status, found.text)
        return found.body

    def enrol(self, name: str | None = None, **fields: Any) -> dict[str, Any]:
        given = {"driver": "fake", **({} if name is None else {"name": name}), **fields}
        found = self.ask("POST", "/v1/nodes", given)
        self.assertEqual(201, found.status, found.text)
        return dict(found.body)

    def names(self, query: str, **more: Any) -> list[str]:
        """The names of the nodes of a listing."""
        return [node["name"] for node in self.get("/v1/nodes" + query, **more)["nodes"]]

    def patch(self, node: str, *operations: tuple[str, str, Any], **more: Any) -> Answer:
        patch: Sequence[dict[str, Any]] = [
            {"op": op, "path": path} | ({} if op == "remove" else {"value": value}) for op, path, value in operations
        ]
        return self.ask("PATCH", f"/v1/nodes/{node}", patch, **more)

    def pages(self, path: str, key: str, **more: Any) -> list[dict[str, Any]]:
        """All of a listing, by its links."""
        found = []
        following: str | None = path
        while following:
            page = self.get(following, **more)
            found += page[key]
            following = page.get("next")
        return found
