# SPDX-License-Identifier: Apache-2.0
"""Ironic's own clients, unchanged: python-ironicclient, its command line, and openstacksdk."""

from __future__ import annotations

import json
import warnings
from typing import Any

import openstack
from ironicclient import client as ironic_client
from ironicclient import exc as ironic_errors
from ironicclient import shell
from keystoneauth1 import noauth, session

from moorage.fleet.importer import from_json
from tests.api.baremetal.ironic import IronicCase, everybody
from tests.commands import in_process


class ClientCase(IronicCase):
    authenticate = staticmethod(everybody)

    def client(self, version: Any = "1.115") -> Any:
        return ironic_client.get_client("1", endpoint=self.live.url, os_ironic_api_version=version, auth_type="none")

    def sdk(self) -> Any:
        # What the SDK says of its own future is none of ours.
        quiet = warnings.catch_warnings()
        quiet.__enter__()
        self.addCleanup(quiet.__exit__, None, None, None)
        warnings.simplefilter("ignore")
        given = session.Session(auth=noauth.NoAuth(endpoint=self.live.url))
        connection = openstack.connection.Connection(session=given, baremetal_endpoint_override=self.live.url)
        self.addCleanup(connection.close)
        return connection.baremetal

    def cli(self, *words: str, fails: bool = False) -> Any:
        """The ``baremetal`` command; JSON where it prints any, else the text."""
        arguments = ["--os-auth-type", "none", "--os-endpoint", self.live.url, *words]
        status, out, err = in_process(shell.main, arguments)
        self.assertEqual(fails, bool(status), err)
        return json.loads(out) if "json" in words else out + err


class TestIronicClient(ClientCase):
    def test_it_negotiates_a_version_when_its_own_is_too_new(self) -> None:
        client = self.client(["1.82", "1.115"])
        self.assertEqual([], client.node.list())
        with self.assertRaises(ironic_errors.UnsupportedVersion):
            self.client("1.116").node.list()

    def test_nodes_by_shard_with_every_option(self) -> None:
        client = self.client()
        for number in range(9):
            client.node.create(driver="fake", name=f"n{number}", **({"shard": f"S{number % 3}"} if number < 6 else {}))
        names = lambda **query: [node.name for node in client.node.list(**query)]  # noqa: E731
        self.assertEqual(["n0", "n3"], names(shards=["S0"]))
        self.assertEqual(["n0", "n1", "n3", "n4"], names(shards=["S0", "S1"]))
        self.assertEqual(["n6", "n7", "n8"], names(sharded=False))
        self.assertEqual(6, len(names(sharded=True)))
        # limit=0 is "all" to the client: it follows the links, each with one node.
        self.assertEqual(["n0", "n1", "n3", "n4"], names(shards=["S0", "S1"], limit=0))
        marker = client.node.get("n1").uuid
        self.assertEqual(["n3", "n4"], names(shards=["S0", "S1"], marker=marker))
        self.assertEqual(["n4"], names(shards=["S1"], marker=marker, limit=1))
        self.assertEqual(["n3", "n0"], names(shards=["S0"], sort_key="name", sort_dir="desc"))
        detailed = client.node.list(shards=["S0"], detail=True)
        self.assertEqual(["S0", "S0"], [node.shard for node in detailed])
        chosen = client.node.list(shards=["S2"], fields=["uuid", "shard"])
        self.assertEqual([{"uuid", "shard"}] * 2, [set(node.to_dict()) for node in chosen])
        shards = [(shard.name, shard.count) for shard in client.shard.list()]
        self.assertEqual([(None, 3), ("S0", 2), ("S1", 2), ("S2", 2)], sorted(shards, key=lambda each: -each[1]))

    def test_a_listing_of_many_pages_has_no_node_of_another_shard(self) -> None:
        client = self.client()
        nodes = [
            {"name": f"n{number:04}", "shard": f"s{number % 50:02}", "inventories": {"VCPU": 1}}
            for number in range(2000)
        ]
        for first in range(0, 2000, 500):
            self.fleet.enrol([from_json(node) for node in nodes[first : first + 500]])
        wanted = [f"s{number:02}" for number in range(10)]
        found = client.node.list(shards=wanted, limit=0)
        self.assertEqual({node["name"] for node in nodes if node["shard"] in wanted}, {node.name for node in found})
        self.assertEqual(400, len(found))
        everything = client.node.list(limit=0)
        self.assertEqual(2000, len({node.uuid for node in everything}))

    def test_ports_and_portgroups(self) -> None:
        client = self.client()
        node = client.node.create(driver="fake", name="n", shard="A")
        other = client.node.create(driver="fake", name="other", shard="B")
        port = client.port.create(node_uuid=node.uuid, address="52:54:00:AA:00:01", physical_network="net")
        client.port.create(node_uuid=other.uuid, address="52:54:00:aa:00:02")
        self.assertEqual("52:54:00:aa:00:01", client.port.get(port.uuid).address)
        self.assertEqual([port.uuid], [each.uuid for each in client.port.list(node="n")])
        self.assertEqual(port.uuid, client.port.get_by_address("52:54:00:aa:00:01").uuid)
        self.assertEqual(2, len(client.port.list(detail=True)))
        group = client.portgroup.create(node_uuid=node.uuid, name="bond")
        client.portgroup.create(node_uuid=other.uuid, name="bond-2")
        self.assertEqual(["bond"], [each.name for each in client.portgroup.list(shards=["A"])])
        self.assertEqual(group.uuid, client.portgroup.get("bond").uuid)
        client.portgroup.delete(group.uuid)
        client.port.delete(port.uuid)
        self.assertEqual(1, len(client.port.list()))
        client.node.delete("other")
        self.assertEqual([], client.port.list())

    def test_refusals_reach_the_user_in_words(self) -> None:
        client = self.client()
        with self.assertRaisesRegex(ironic_errors.BadRequest, "means 'no shard'"):
            client.node.create(driver="fake", shard="None")
        with self.assertRaisesRegex(ironic_errors.NotFound, "Node nobody could not be found"):
            client.node.get("nobody")
        client.node.create(driver="fake", name="n")
        with self.assertRaisesRegex(ironic_errors.Conflict, "belongs to node"):
            client.node.create(driver="fake", name="n")


class TestCommandLine(ClientCase):
    def test_the_commands_of_sharding(self) -> None:
        self.cli("node", "create", "--driver", "fake", "--name", "n1", "--shard", "Rack-A")
        self.cli("node", "create", "--driver", "fake", "--name", "n2")
        self.assertEqual(
            {"Rack-A": 1, None: 1}, {row["name"]: row["count"] for row in self.cli("shard", "list", "-f", "json")}
        )
        self.cli("node", "set", "n2", "--shard", "rack-a")
        listed = self.cli("node", "list", "--shards", "Rack-A", "-f", "json")
        self.assertEqual(["n1"], [row["name"] for row in listed])
        self.assertEqual(["n1", "n2"], [row["name"] for row in self.cli("node", "list", "--sharded", "-f", "json")])
        long = self.cli("node", "list", "--long", "--sort", "name:desc", "-f", "json")
        self.assertEqual(["n2", "n1"], [row["name"] for row in long])
        self.assertEqual(["n1"], [row["name"] for row in self.cli("node", "list", "--limit", "1", "-f", "json")])
        after = self.cli("node", "list", "--marker", long[1]["uuid"], "-f", "json")
        self.assertEqual(["n2"], [row["name"] for row in after])
        for _ in range(2):
            self.cli("node", "unset", "n2", "--shard")
        self.assertEqual(["n2"], [row["name"] for row in self.cli("node", "list", "--unsharded", "-f", "json")])
        shown = self.cli("node", "show", "n1", "-f", "json")
        self.assertEqual("Rack-A", shown["shard"])
        chosen = self.cli("node", "list", "--fields", "uuid", "driver", "-f", "json")
        self.assertEqual({"fake"}, {row["driver"] for row in chosen})
        self.cli("port", "create", "52:54:00:00:00:01", "--node", shown["uuid"])
        self.assertEqual(1, len(self.cli("port", "list", "--node", "n1", "-f", "json")))
        self.cli("port", "group", "create", "--node", shown["uuid"], "--name", "bond")
        groups = self.cli("port", "group", "list", "--shards", "Rack-A", "-f", "json")
        self.assertEqual(["bond"], [row["name"] for row in groups])
        self.cli("node", "delete", "n1")
        self.assertEqual([], self.cli("port", "list", "-f", "json"))
        self.assertIn("could not be found", self.cli("node", "show", "n1", fails=True))


class TestSdk(ClientCase):
    def test_nodes_ports_and_shards(self) -> None:
        metal = self.sdk()
        for number in range(7):
            metal.create_node(driver="fake", name=f"n{number}", shard=f"S{number % 2}")
        names = lambda **query: [node.name for node in metal.nodes(**query)]  # noqa: E731
        self.assertEqual(["n0", "n2", "n4", "n6"], names(shard="S0"))
        self.assertEqual(7, len(names(shard="S0,S1")))
        self.assertEqual(7, len(names(shard=["S0", "S1"])))
        # It asks again with the last node as marker until a page is empty.
        self.assertEqual(["n0", "n2", "n4", "n6"], names(shard="S0", limit=2))
        changed = metal.update_node("n0", shard="S1")
        self.assertEqual("S1", changed.shard)
        self.assertEqual(["n2", "n4", "n6"], names(shard="S0"))
        self.assertEqual("S1", metal.get_node("n0").shard)
        port = metal.create_port(node_id=metal.get_node("n0").id, address="52:54:00:00:00:01")
        self.assertEqual([port.id], [each.id for each in metal.ports(shard="S1")])
        self.assertEqual([], list(metal.ports(shard="S0")))
        counts = metal.get("/shards", microversion="1.82").json()
        self.assertEqual({"shards": [{"name": "S1", "count": 4}, {"name": "S0", "count": 3}]}, counts)
        metal.delete_node("n0")
        self.assertIsNone(metal.find_node("n0"))
