# SPDX-License-Identifier: Apache-2.0
"""What Ironic gets wrong and is right here, refusals, and one inventory for all doors."""

from __future__ import annotations

import itertools
import json
import uuid
from typing import Any

from moorage.fleet.importer import from_json
from tests.api.baremetal.ironic import NEWEST, IronicCase


def shown(data: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(data[name] for name in names)


class TestShards(IronicCase):
    def test_shards_are_compared_letter_by_letter_however_they_are_listed(self) -> None:
        self.enrol("upper", shard="Rack-A")
        self.enrol("lower", shard="rack-a")
        self.enrol("other", shard="B")
        self.assertEqual(["upper"], self.names("?shard=Rack-A"))
        self.assertEqual(["lower"], self.names("?shard=rack-a"))
        self.assertEqual([], self.names("?shard=RACK-A"))
        for query in ("?shard=Rack-A,B", "?shard=Rack-A&shard=B", "?shard=Rack-A%2CB", "/?shard=B,%20Rack-A"):
            self.assertEqual(["upper", "other"], self.names(query), query)
        self.assertEqual([], self.names("?shard=unknown"))

    def test_nodes_without_a_shard_are_asked_for_in_three_words(self) -> None:
        self.enrol("with", shard="A")
        self.enrol("without")
        for word in ("none", "None", "null", "NULL"):
            self.assertEqual(["without"], self.names(f"?shard={word}"))
            self.assertEqual(["with", "without"], self.names(f"?shard=A,{word}"))
        self.assertEqual(["without"], self.names("?sharded=false"))
        self.assertEqual(["with"], self.names("?sharded=True"))
        self.assertEqual([], self.names("?sharded=false&shard=A"))
        self.assertEqual(400, self.ask("GET", "/v1/nodes?sharded=maybe").status)

    def test_whoever_names_no_shard_gets_no_node(self) -> None:
        self.enrol("n", shard="A")
        for query in ("?shard=", "?shard=,", "?shard=%20"):
            self.assertEqual([], self.names(query))

    def test_the_counts_say_null_once_for_nodes_without_a_shard(self) -> None:
        self.assertEqual({"shards": []}, self.get("/v1/shards"))
        for name, shard in (("a", "B"), ("b", "A"), ("c", "Z"), ("d", "Z"), ("e", None), ("f", None), ("g", None)):
            self.enrol(name, shard=shard)
        wanted = [(None, 3), ("Z", 2), ("A", 1), ("B", 1)]
        self.assertEqual(wanted, [(each["name"], each["count"]) for each in self.get("/v1/shards/")["shards"]])
        for method, path, status in (
            ("GET", "/v1/shards?limit=1", 400),
            ("GET", "/v1/shards/Z", 404),
            ("POST", "/v1/shards", 405),
            ("PUT", "/v1/shards", 405),
        ):
            self.assertEqual(status, self.ask(method, path, {} if method != "GET" else None).status, (method, path))

    def test_names_that_no_query_could_find_are_refused_at_every_door(self) -> None:
        self.enrol("n")
        for shard in ("none", "None", "NULL", "", " a", "a ", "a,b", "x" * 256):
            with self.subTest(shard=shard):
                self.assertEqual(400, self.ask("POST", "/v1/nodes", {"driver": "fake", "shard": shard}).status)
                self.assertEqual(400, self.patch("n", ("replace", "/shard", shard)).status)
                with self.assertRaises(ValueError):
                    from_json({"name": "x", "shard": shard} if shard else {"name": "x", "shard": " "})
        strange: list[Any] = [5, True, {}, []]
        for value in strange:
            self.assertEqual(400, self.patch("n", ("add", "/shard", value)).status)
        self.assertEqual(["n"], self.names("?sharded=false"))
        for shard in ("x" * 255, "größe/1", "a b", "nones"):
            self.assertEqual(200, self.patch("n", ("replace", "/shard", shard)).status)
            self.assertEqual(shard, self.get("/v1/nodes/n")["shard"])

    def test_a_patch_of_the_shard(self) -> None:
        self.enrol("n")
        for operation, value, found in (
            ("add", "A", "A"),
            ("replace", "B", "B"),
            ("remove", None, None),
            ("remove", None, None),
            ("replace", "C", "C"),
            ("replace", None, None),
        ):
            answer = self.patch("n", (operation, "/shard", value))
            self.assertEqual((200, found), (answer.status, answer.body["shard"]))
        self.assertEqual(200, self.ask("PATCH", "/v1/nodes/n", []).status)
        for operation, path in (
            ("test", "/shard"),
            ("move", "/shard"),
            ("add", "/shard/x"),
            ("add", "/shards"),
            ("add", ""),
        ):
            answer = self.patch("n", (operation, path, "A"))
            self.assertEqual(400, answer.status, (operation, path))
        self.assertEqual(404, self.patch("nobody", ("add", "/shard", "A")).status)
        self.assertEqual(400, self.ask("PATCH", "/v1/nodes/n", {"shard": "A"}).status)

    def test_a_node_that_is_reserved_is_left_alone(self) -> None:
        node = self.enrol("n", shard="A")
        row = self.get("/v1/nodes/n")
        self.assertIsNone(row["reservation"])
        self.assertTrue(self.fleet.change(node["uuid"], 0, {"reservation": "agent-1"}))
        answer = self.patch("n", ("replace", "/shard", "B"))
        self.assertEqual(409, answer.status)
        self.assertIn("agent-1", answer.fault)
        self.assertEqual(409, self.ask("DELETE", "/v1/nodes/n").status)


class TestFilters(IronicCase):
    def test_all_filters_of_nodes_combine(self) -> None:
        """Every pair of filters gives what both give, counted by hand from the nodes themselves."""
        for number, (shard, group, owner, driver) in enumerate(
            itertools.product(("A", "B", None), ("", "eu"), ("p1", None), ("d1", "d2"))
        ):
            self.enrol(
                f"n{number:02}", shard=shard, conductor_group=group, owner=owner, driver=driver,
                resource_class="gold" if number % 2 else "silver", maintenance=number % 3 == 0,
                description=f"number {number}",
            )  # fmt: skip
        nodes = self.get("/v1/nodes/detail")["nodes"]
        filters: dict[str, Any] = {
            "shard=A": lambda n: n["shard"] == "A",
            "shard=A,none": lambda n: n["shard"] in ("A", None),
            "sharded=true": lambda n: n["shard"] is not None,
            "conductor_group=eu": lambda n: n["conductor_group"] == "eu",
            "conductor_group=": lambda n: n["conductor_group"] == "",
            "owner=p1": lambda n: n["owner"] == "p1",
            "project=p1": lambda n: n["owner"] == "p1",
            "driver=d1": lambda n: n["driver"] == "d1",
            "resource_class=gold": lambda n: n["resource_class"] == "gold",
            "maintenance=true": lambda n: n["maintenance"],
            "maintenance=no": lambda n: not n["maintenance"],
            "description_contains=number%201": lambda n: "number 1" in n["description"],
            "provision_state=enroll": lambda n: True,
            "associated=true": lambda n: False,
            "retired=false": lambda n: True,
            "include_children=true": lambda n: True,
            "parent_node=x": lambda n: False,
        }
        for (one, first), (two, second) in itertools.combinations(filters.items(), 2):
            if one.partition("=")[0] == two.partition("=")[0]:
                continue
            wanted = [node["name"] for node in nodes if first(node) and second(node)]
            self.assertEqual(wanted, self.names(f"?{one}&{two}"), (one, two))

    def test_all_filters_of_ports_combine(self) -> None:
        addresses = {}
        for number, (shard, group) in enumerate(itertools.product(("A", "B"), ("eu", "us"))):
            node = self.enrol(f"n{number}", shard=shard, conductor_group=group)
            address = addresses[shard, group] = f"52:54:00:00:00:0{number}"
            for resource in ("ports", "portgroups"):
                given = {"node_uuid": node["uuid"], "address": address}
                self.assertEqual(201, self.ask("POST", f"/v1/{resource}", given).status)
        for resource in ("ports", "portgroups"):
            for query, wanted in (
                ("shard=A", [("A", "eu"), ("A", "us")]),
                ("shard=A&conductor_groups=us", [("A", "us")]),
                ("shard=A&node=n1", [("A", "us")]),
                ("shard=A&node=n2", []),
                (f"shard=A&address={addresses['B', 'eu']}", []),
                (f"shard=B&address={addresses['B', 'eu'].upper()}&node=n2", [("B", "eu")]),
                ("conductor_groups=eu,us&shard=B", [("B", "eu"), ("B", "us")]),
                ("shard=none", []),
            ):
                for where in (
                    f"/v1/{resource}?{query}",
                    f"/v1/{resource}/detail?{query}",
                    f"/v1/{resource}?detail=True&{query}",
                ):
                    with self.subTest(where):
                        found = self.get(where)[resource]
                        self.assertEqual([addresses[each] for each in wanted], [each["address"] for each in found])

    def test_what_is_unknown_is_a_mistake_of_the_caller(self) -> None:
        self.enrol("n")
        for path in (
            "/v1/nodes?fields=uuid,nonsense",
            "/v1/nodes?nonsense=1",
            "/v1/nodes/n?fields=nonsense",
            "/v1/nodes/n?nonsense=1",
            "/v1/nodes?sort_key=nonsense",
            "/v1/nodes?sort_key=properties",
            "/v1/nodes?sort_dir=up",
            "/v1/nodes?limit=0",
            "/v1/nodes?limit=-1",
            "/v1/nodes?limit=many",
            "/v1/nodes?fields=uuid&detail=true",
            "/v1/nodes/detail?fields=uuid",
            "/v1/nodes?maintenance=maybe",
            "/v1/ports?nonsense=1",
            "/v1/ports?address=nonsense",
            "/v1/portgroups?fields=nonsense",
        ):
            with self.subTest(path):
                answer = self.ask("GET", path)
                self.assertEqual(400, answer.status, answer.text)
                self.assertTrue(answer.fault)
        marker = str(uuid.uuid4())
        answer = self.ask("GET", f"/v1/nodes?marker={marker}")
        self.assertEqual((404, f"Node {marker} could not be found."), (answer.status, answer.fault))

    def test_links_to_the_next_page_keep_every_filter(self) -> None:
        for number in range(12):
            node = self.enrol(f"n{number:02}", shard="AB"[number % 2], driver=f"d{number % 3}")
            given = {"node_uuid": node["uuid"], "address": f"52:54:00:00:00:{number:02x}"}
            self.assertEqual(201, self.ask("POST", "/v1/ports", given).status)
            self.assertEqual(201, self.ask("POST", "/v1/portgroups", given).status)
        found = self.pages("/v1/nodes?shard=A&driver=d0,d1&driver=d0&limit=1&sort_key=name&sort_dir=desc", "nodes")
        self.assertEqual(["n06", "n00"], [node["name"] for node in found])
        found = self.pages("/v1/nodes/detail?shard=A&limit=2", "nodes")
        self.assertEqual(["A"] * 6, [node["shard"] for node in found])
        for resource in ("ports", "portgroups"):
            found = self.pages(f"/v1/{resource}?shard=B&limit=1", resource)
            self.assertEqual([f"52:54:00:00:00:{n:02x}" for n in range(1, 12, 2)], [each["address"] for each in found])

    def test_pages_by_any_key_have_everything_once_also_where_values_repeat_or_are_missing(self) -> None:
        for number in range(11):
            self.enrol(f"n{number:02}", shard=(None, "A", "B", "A")[number % 4], resource_class=(None, "x")[number % 2])
        names = {f"n{number:02}" for number in range(11)}
        for key, direction, limit in itertools.product(
            ("shard", "resource_class", "maintenance", "name", "created_at", "uuid", "id"), ("asc", "desc"), (1, 3)
        ):
            query = f"?sort_key={key}&sort_dir={direction}&limit={limit}"
            found = [node["name"] for node in self.pages("/v1/nodes" + query, "nodes")]
            self.assertEqual((11, names), (len(found), set(found)), query)


class TestVersions(IronicCase):
    def test_the_shard_is_hidden_from_older_versions(self) -> None:
        self.enrol("n", shard="A")
        self.assertNotIn("shard", self.get("/v1/nodes/n", version="1.81"))
        self.assertNotIn("shard", self.get("/v1/nodes/detail", version="1.81")["nodes"][0])
        self.assertEqual("A", self.get("/v1/nodes/n", version="1.82")["shard"])
        for query in ("shard=A", "sharded=true", "fields=shard", "sort_key=shard"):
            answer = self.ask("GET", f"/v1/nodes?{query}", version="1.81")
            self.assertEqual(406, answer.status, query)
            self.assertIn("The minimal required API version should be 1.82", answer.fault)
            self.assertEqual(200, self.ask("GET", f"/v1/nodes?{query}", version="1.82").status)
        self.assertEqual(406, self.ask("GET", "/v1/ports?shard=A", version="1.81").status)
        self.assertEqual(406, self.ask("GET", "/v1/portgroups?shard=A", version="1.105").status)
        self.assertEqual(200, self.ask("GET", "/v1/portgroups?shard=A", version="1.106").status)
        self.assertEqual(406, self.patch("n", ("add", "/shard", "B"), version="1.81").status)
        self.assertEqual(406, self.ask("POST", "/v1/nodes", {"driver": "f", "shard": "B"}, version="1.81").status)
        answer = self.ask("GET", "/v1/shards", version="1.81")
        self.assertEqual((404, "The API version does not allow shards"), (answer.status, answer.fault))
        self.assertNotIn("shards", self.get("/v1/", version="1.81"))
        self.assertIn("shards", self.get("/v1", version="1.82"))

    def test_versions_are_negotiated_as_the_clients_do(self) -> None:
        headers = "X-OpenStack-Ironic-API-Minimum-Version", "X-OpenStack-Ironic-API-Maximum-Version"
        answer = self.ask("GET", "/v1/nodes", version="1.116")
        self.assertEqual((406, "1.1", NEWEST), (answer.status, *(answer.headers[name] for name in headers)))
        answer = self.ask("GET", "/v1/nodes", version=None)
        self.assertEqual((200, "1.1"), (answer.status, answer.headers["X-OpenStack-Ironic-API-Version"]))
        answer = self.ask("GET", "/v1/nodes", version="latest")
        self.assertEqual((200, NEWEST), (answer.status, answer.headers["X-OpenStack-Ironic-API-Version"]))
        self.assertEqual(400, self.ask("GET", "/v1/nodes", version="new").status)
        other = {"OpenStack-API-Version": "baremetal 1.82", "X-Auth-Token": "a", "X-Roles": "admin,reader"}
        other["OpenStack-System-Scope"] = "all"
        answer = self.ask("GET", "/v1/shards", version=None, who=other)
        self.assertEqual((200, "1.82"), (answer.status, answer.headers["X-OpenStack-Ironic-API-Version"]))

    def test_discovery_needs_no_credentials(self) -> None:
        for path in ("", "/", "/v1", "/v1/"):
            answer = self.ask("GET", path, version=None, who={})
            self.assertEqual(200, answer.status)
            version = answer.body["versions"][0] if "versions" in answer.body else answer.body["version"]
            self.assertEqual(("v1", "1.1", NEWEST), (version["id"], version["min_version"], version["version"]))
            self.assertEqual(self.live.url + "/v1/", version["links"][0]["href"])
        self.assertEqual(401, self.ask("GET", "/v1/nodes", who={}).status)

    def test_fields_of_older_versions(self) -> None:
        self.enrol("n", resource_class="gold")
        self.assertEqual(
            {"uuid", "instance_uuid", "maintenance", "power_state", "provision_state", "links"},
            set(self.get("/v1/nodes", version="1.1")["nodes"][0]),
        )
        self.assertNotIn("resource_class", self.get("/v1/nodes/n", version="1.20"))
        self.assertIn("resource_class", self.get("/v1/nodes/n", version="1.21"))
        self.assertEqual(404, self.ask("GET", "/v1/portgroups", version="1.22").status)


class TestOneInventory(IronicCase):
    def provider(self, node: str) -> Any:
        return self.live.store.usages(providers=[node])[0].provider

    def test_a_node_of_this_dialect_is_the_fleets_with_its_provider(self) -> None:
        node = self.enrol("n", resource_class="Gold-2", shard="A", properties={"cpus": 4})
        provider = self.provider(node["uuid"])
        self.assertEqual("n", provider.name)
        self.assertEqual([("CUSTOM_GOLD_2", 1)], [(each.resource_class, each.total) for each in provider.inventories])
        self.patch("n", ("replace", "/name", "m"), ("replace", "/resource_class", "silver"))
        provider = self.provider(node["uuid"])
        self.assertEqual(("m", ["CUSTOM_SILVER"]), (provider.name, [e.resource_class for e in provider.inventories]))
        self.patch("m", ("remove", "/name", None))
        self.assertIsNone(self.get(f"/v1/nodes/{node['uuid']}")["name"])
        self.assertEqual(node["uuid"], self.provider(node["uuid"]).name)
        self.assertEqual(204, self.ask("DELETE", f"/v1/nodes/{node['uuid']}").status)
        self.assertEqual([], self.live.store.usages(providers=[node["uuid"]]))

    def test_an_imported_node_is_here_and_keeps_its_inventories(self) -> None:
        spec = from_json({"name": "i", "shard": "A", "inventories": {"VCPU": 8}, "owner": "p", "extra": {"row": 1}})
        self.fleet.enrol([spec])
        found = self.get("/v1/nodes/i")
        self.assertEqual(
            ("A", "p", {"row": 1}, "available"), shown(found, "shard", "owner", "extra", "provision_state")
        )
        self.assertEqual(200, self.patch("i", ("add", "/resource_class", "gold"), ("add", "/extra/rack", 7)).status)
        classes = [each.resource_class for each in self.provider(found["uuid"]).inventories]
        self.assertEqual(["CUSTOM_GOLD", "VCPU"], sorted(classes))
        self.assertEqual({"row": 1, "rack": 7}, self.get("/v1/nodes/i")["extra"])
        # Imported again, it keeps what only this dialect has said of it.
        self.fleet.enrol([from_json({"name": "i", "inventories": {"VCPU": 8, "CUSTOM_GOLD": 1}})])
        found = self.get("/v1/nodes/i")
        self.assertEqual(("A", "gold", {"row": 1, "rack": 7}), shown(found, "shard", "resource_class", "extra"))

    def test_uuids_names_and_instances_are_of_one_node(self) -> None:
        node = self.enrol("n", instance_uuid="00000000-0000-4000-8000-000000000001")
        self.enrol("m")
        for given in ({"name": "n"}, {"uuid": node["uuid"]}, {"instance_uuid": node["instance_uuid"]}):
            answer = self.ask("POST", "/v1/nodes", {"driver": "fake", **given})
            self.assertEqual(409, answer.status, answer.text)
        self.assertEqual(409, self.patch("m", ("replace", "/name", "n")).status)
        self.assertEqual(409, self.patch("m", ("replace", "/instance_uuid", node["instance_uuid"])).status)
        self.assertEqual(409, self.ask("DELETE", "/v1/nodes/n").status)
        self.assertEqual(202, self.ask("PUT", "/v1/nodes/n/maintenance", {"reason": "broken"}).status)
        self.assertEqual("broken", self.get("/v1/nodes/n")["maintenance_reason"])
        self.assertEqual(204, self.ask("DELETE", "/v1/nodes/n").status)

    def test_secrets_are_kept_and_not_shown(self) -> None:
        info = {"ipmi_address": "h", "ipmi_password": "pw", "deep": {"auth_token": "t", "port": 6}}
        node = self.enrol("n", driver_info=info)
        self.assertEqual(
            {"ipmi_address": "h", "ipmi_password": "******", "deep": {"auth_token": "******", "port": 6}},
            node["driver_info"],
        )
        self.patch("n", ("add", "/driver_info/ipmi_address", "other"))
        with self.live.database.read() as tx:
            kept = tx.exec_driver_sql("SELECT driver_info FROM nodes").scalar_one()
        self.assertEqual({**info, "ipmi_address": "other"}, json.loads(kept))

    def test_any_text_comes_back_as_it_was(self) -> None:
        for text in ('quo"te', "back\\slash", "per%cent %s", "größe", "line\nbreak", "\U0001f680"):
            node = self.enrol(description=text, extra={text: [text, None, 1.5]})
            found = self.get(f"/v1/nodes/{node['uuid']}")
            self.assertEqual((text, {text: [text, None, 1.5]}), (found["description"], found["extra"]))

    def test_what_is_left_of_a_removed_node_stands_in_nobodys_way(self) -> None:
        node = self.enrol("n", shard="A")
        given = {"node_uuid": node["uuid"], "address": "52:54:00:00:00:01"}
        self.assertEqual(201, self.ask("POST", "/v1/ports", given).status)
        self.fleet.remove(node["uuid"])
        self.assertEqual([], self.get("/v1/ports")["ports"])
        other = self.enrol("o", shard="A")
        self.assertEqual([], self.get("/v1/ports?shard=A")["ports"])
        self.assertEqual(201, self.ask("POST", "/v1/ports", {**given, "node_uuid": other["uuid"]}).status)
        self.assertEqual(409, self.ask("POST", "/v1/ports", {**given, "node_uuid": other["uuid"]}).status)

    def test_a_body_that_is_wrong_writes_nothing(self) -> None:
        wanting: list[Any] = [None, [], {}, {"driver": 5}]
        for field in ({"nonsense": 1}, {"uuid": "x"}, {"name": "a b"}, {"extra": 1}, {"owner": "x" * 256}):
            wanting.append({"driver": "f", **field})
        for body in wanting:
            self.assertEqual(400, self.ask("POST", "/v1/nodes", body).status, body)
        self.enrol("n")
        answer = self.patch("n", ("add", "/extra/a", 1), ("add", "/shard", "none"))
        self.assertEqual((400, {}), (answer.status, self.get("/v1/nodes/n")["extra"]))
        bodies: list[dict[str, str]] = [
            {},
            {"address": "52:54:00:00:00:01"},
            {"address": "x", "node_uuid": "n"},
            {"node_uuid": "n"},
        ]
        for given in bodies:
            self.assertEqual(400, self.ask("POST", "/v1/ports", given).status, given)
