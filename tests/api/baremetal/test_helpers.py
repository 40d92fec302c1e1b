# SPDX-License-Identifier: Apache-2.0
"""What our own client adds: shards() for openstacksdk, and a consumer that keeps to its shard."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import openstack
from keystoneauth1 import noauth, session

from moorage import errors
from moorage.client.baremetal import Baremetal, ShardConsumer, add_shards
from tests.api.baremetal.ironic import IronicCase, everybody


class TestSdkHelper(IronicCase):
    authenticate = staticmethod(everybody)

    def test_it_gives_a_connection_what_the_sdk_lacks(self) -> None:
        for number in range(5):
            node = self.enrol(f"n{number}", **({"shard": "A"} if number < 2 else {}))
            given = {"node_uuid": node["uuid"], "address": f"52:54:00:00:00:0{number}"}
            self.assertEqual(201, self.ask("POST", "/v1/portgroups", given).status)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given_session = session.Session(auth=noauth.NoAuth(endpoint=self.live.url))
            connection = openstack.connection.Connection(
                session=given_session, baremetal_endpoint_override=self.live.url
            )
            self.addCleanup(connection.close)
            metal = add_shards(connection).baremetal
            self.assertEqual([{"name": None, "count": 3}, {"name": "A", "count": 2}], metal.shards())
            # The SDK itself drops these filters and lists everything.
            self.assertEqual(5, len(list(metal.nodes(sharded=True))))
            self.assertEqual(["n0", "n1"], [node["name"] for node in metal.sharded_nodes(sharded=True)])
            self.assertEqual(["n2", "n3", "n4"], [node["name"] for node in metal.sharded_nodes(shard="none", limit=1)])
            self.assertEqual(2, len(list(metal.sharded_port_groups(shard=["A", "B"], limit=1))))
            with self.assertRaisesRegex(errors.InvalidInput, "neither true nor false"):
                list(metal.sharded_nodes(maintenance="maybe"))


class TestConsumer(IronicCase):
    def request(self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
        found = self.session.request(
            method, self.live.url + path, params=list(query), headers={**self.who, **headers}, timeout=60
        )
        self.assertEqual(200, found.status_code, found.text)
        return found.json()

    who: Mapping[str, str] = {"X-Auth-Token": "c", "X-Roles": "service", "OpenStack-System-Scope": "all"}

    def test_it_lists_its_own_nodes_and_ports_page_after_page(self) -> None:
        for number in range(7):
            node = self.enrol(f"n{number}", shard="AB"[number % 2])
            given = {"node_uuid": node["uuid"], "address": f"52:54:00:00:00:0{number}"}
            self.assertEqual(201, self.ask("POST", "/v1/ports", given).status)
        consumer = ShardConsumer(Baremetal(self.request), "A")
        self.assertEqual(["n0", "n2", "n4", "n6"], [node["name"] for node in consumer.nodes()])
        self.assertEqual([f"52:54:00:00:00:0{n}" for n in (0, 2, 4, 6)], [port["address"] for port in consumer.ports()])
        self.assertEqual([], list(ShardConsumer(Baremetal(self.request), "empty").nodes()))

    def test_it_refuses_the_whole_fleet(self) -> None:
        for name in ("", "none", "Null", "a,b", " a", None):
            with self.subTest(name=name), self.assertRaises(errors.InvalidInput):
                ShardConsumer(Baremetal(self.request), name)  # type: ignore[arg-type]

    def test_a_server_that_ignores_the_filter_is_noticed_at_once(self) -> None:
        self.enrol("n0", shard="A")
        self.enrol("n1", shard="B")

        def forgetful(method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
            return self.request(method, path, [pair for pair in query if pair[0] != "shard"], headers)

        seen: list[str] = []
        with self.assertRaisesRegex(errors.Conflict, "ignores the filter"):
            seen.extend(node["name"] for node in ShardConsumer(Baremetal(forgetful), "A").nodes())
        self.assertNotIn("n1", seen)

    def test_links_of_a_server_that_forget_filters_are_completed(self) -> None:
        for number in range(6):
            self.enrol(f"n{number}", shard="AB"[number % 2])

        def forgets(method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
            page = self.request(method, path, query, headers)
            if "next" in page:
                page["next"] = page["next"].replace("shard=A&", "")
            return page

        found = Baremetal(forgets).nodes(shard="A", limit=1)
        self.assertEqual(["n0", "n2", "n4"], [node["name"] for node in found])
