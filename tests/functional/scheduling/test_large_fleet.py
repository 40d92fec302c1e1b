# SPDX-License-Identifier: Apache-2.0
"""Lists of hosts and nodes of a fleet that is larger than one message."""

from __future__ import annotations

import json
import unittest
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import sqlalchemy as sa

from moorage import context, errors
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.db import now
from moorage.fleet import api as fleet_api
from moorage.fleet.interface import uuid_of_name
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.fleet.view import NodeView
from moorage.http.routes import Request, Route
from moorage.scheduling import api as scheduling_api
from moorage_plugins.compute.tables import instances
from moorage_plugins.stores.tables import inventories, resource_providers
from tests.functional.scheduling.plane import Plane

COUNT = 60_000
LONG = "node-with-a-name-of-some-length.row-17.hall-3.site-north-"


class Schedulers:
    """Reaches the scheduler by a message, as the API does."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self.largest = 0

    def ask(self, method: str, args: Mapping[str, Any]) -> Any:
        answer = self._plane.ask(method, args)
        self.largest = max(self.largest, len(json.dumps(answer)))
        return answer

    def find(self, method: str, args: Mapping[str, Any]) -> Any:
        raise errors.NotFound(method)


class LargeFleetTests(unittest.TestCase):
    def test_pages_hold_every_node_and_instance_of_one_host_once(self) -> None:
        plane = Plane(self, scheduling__refresh_interval=600)
        self.fill(plane, 6000)
        expected = {f"{number:036}" for number in range(30_000)}
        with plane.database.write() as tx:
            tx.execute(sa.update(nodes).values(host="big").where(nodes.c.host != "h1"))
            tx.execute(
                sa.insert(instances).values(
                    name="", status="active", host="big", flavorid="f", resources={}, project_id="", user_id="", fault="",
                    fence=0, request={}, server_group="", created_at=now(), updated_at=now(),
                ),
                [
                    {"uuid": uuid, "node": f"{LONG}{place}", "node_uuid": uuid_of_name(f"{LONG}{place}")}
                    for number, uuid in enumerate(sorted(expected))
                    # One node has more than a page; many have six or so.
                    for place in (0 if number < 12_000 else 2 + number % 3000 // 100 * 100,)
                ],
            )  # fmt: skip
        plane.start(SchedulerRole(), "scheduler-1")
        schedulers = Schedulers(plane)
        route = next(
            route
            for route in scheduling_api.routes(schedulers, lambda body, _: body)
            if (route.method, route.path) == ("GET", "/hosts/{host}")
        )
        query: dict[str, Any] = {}
        found, placed = [], []
        while True:
            jsonschema.validate(query, dict(route.query or {}))
            request = Request(context=context.internal("test"), path_params={"host": "big"}, query=query)
            page: Any = route.handler(request).body
            found += [each["uuid"] for each in page["nodes"]]
            placed += page["instances"]
            if page["next_after"] is None:
                break
            query = {"after": page["next_after"]}
        self.assertEqual(5940, len(found))
        self.assertEqual(sorted(set(found)), found)
        self.assertEqual((len(expected), expected), (len(placed), set(placed)))
        self.assertLess(schedulers.largest, 1024 * 1024)
        with self.assertRaises(errors.NotFound):
            route.handler(Request(context=context.internal("test"), path_params={"host": "none"}, query={}))

    def test_pages_hold_every_node_once_where_one_message_cannot(self) -> None:
        plane = Plane(self, scheduling__refresh_interval=600)
        self.fill(plane)
        plane.start(SchedulerRole(), "scheduler-1")
        schedulers = Schedulers(plane)
        with self.assertRaisesRegex(errors.MoorageError, "max_message_bytes"):
            plane.ask("list_hosts", {})
        hosts = next(
            route for route in scheduling_api.routes(schedulers, lambda body, _: body) if route.path == "/hosts"
        )
        found = list(self.pages(hosts, "hosts"))
        self.assertEqual(COUNT, len(found))
        uuids = [each["uuid"] for each in found]
        self.assertEqual(sorted({uuid_of_name(f"{LONG}{number}") for number in range(COUNT)}), uuids)
        self.assertEqual({"VCPU": 4.0, "MEMORY_MB": 8192.0}, found[0]["capacity"])
        self.assertLess(schedulers.largest, 1024 * 1024)
        few = list(self.pages(hosts, "hosts", host="h1", fields="node,up", limit=999))
        self.assertEqual(COUNT // 100, len(few))
        self.assertEqual({("uuid", "node", "up")}, {tuple(sorted(each, key="uuid node up".find)) for each in few})
        self.assertEqual([], list(self.pages(hosts, "hosts", up=True)))
        with self.assertRaisesRegex(errors.InvalidInput, "no field 'colour'"):
            self.get(hosts, fields="node,colour")

        nodes = NodeStore(plane.database)
        view = NodeView(nodes, lambda hosts: frozenset(), lambda node: {})
        listed = next(
            route
            for route in fleet_api.routes(nodes, _NoEnroller(), view)
            if (route.method, route.path) == ("GET", "/nodes")
        )
        named = list(self.pages(listed, "nodes", fields="name", limit=1000))
        self.assertEqual(uuids, [each["uuid"] for each in named])
        self.assertEqual({"uuid", "name"}, set(named[0]))
        self.assertEqual(COUNT // 2, sum(1 for _ in self.pages(listed, "nodes", resource_class="gold", fields="uuid")))
        self.assertEqual(3, sum(1 for _ in self.pages(listed, "nodes", disabled=True)))
        self.assertEqual([], list(self.pages(listed, "nodes", maintenance=True)))
        with self.assertRaisesRegex(errors.InvalidInput, "no field 'secret'"):
            self.get(listed, fields="secret")

    def fill(self, plane: Plane, count: int = COUNT) -> None:
        """Write nodes with their providers and inventories, as an import of them would."""
        plane.store.ensure_providers([])
        times = {"created_at": now(), "updated_at": now()}
        names = [f"{LONG}{number}" for number in range(count)]
        with plane.database.write() as tx:
            tx.execute(
                sa.insert(nodes).values(generation=0, properties={}, **times),
                [
                    {
                        "uuid": uuid_of_name(name), "name": name, "host": f"h{number % 100}",
                        "resource_class": "gold" if number % 2 else "iron", "disabled": number < 3,
                    }
                    for number, name in enumerate(names)
                ],
            )  # fmt: skip
            tx.execute(
                sa.insert(resource_providers).values(generation=0, updated_at=now()),
                [
                    {"id": number + 1, "uuid": uuid_of_name(name), "name": name, "can_host": True,
                     "root_uuid": uuid_of_name(name)}
                    for number, name in enumerate(names)
                ],
            )  # fmt: skip
            tx.execute(
                sa.insert(inventories).values(reserved=0, min_unit=1, step_size=1, allocation_ratio=1.0, used=0),
                [
                    {
                        "resource_provider_id": number + 1,
                        "resource_class_id": of_class,
                        "total": total,
                        "max_unit": total,
                    }
                    for number in range(count)
                    for of_class, total in ((0, 4), (1, 8192))
                ],
            )

    def get(self, route: Route, **query: Any) -> dict[str, Any]:
        assert route.query is not None
        jsonschema.validate(query, dict(route.query))
        return dict(route.handler(Request(context=context.internal("test"), query=query)).body)

    def pages(self, route: Route, key: str, **query: Any) -> Iterator[dict[str, Any]]:
        while True:
            page = self.get(route, **query)
            yield from page[key]
            if page["next_after"] is None:
                return
            query["after"] = page["next_after"]


class _NoEnroller:
    """Nothing is enrolled here."""

    def enrol(self, specs: Sequence[Any]) -> Mapping[str, int]:
        raise AssertionError("nothing is enrolled here")

    def remove(self, uuid: str) -> None:
        raise AssertionError("nothing is removed here")
