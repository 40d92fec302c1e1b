# SPDX-License-Identifier: Apache-2.0
"""Who may do what: Ironic's own roles, with the counts for project admins and the guard of the shard on POST too."""

from __future__ import annotations

from tests.api.baremetal.ironic import ADMIN, IronicCase, roles

MINE, THEIRS = "project-1", "project-2"
_ADMIN, _MEMBER, _READER = "admin,manager,member,reader", "member,reader", "reader"
#: who -> set the shard, read counts, POST for anybody, POST one's own, POST with a shard, what is listed.
TABLE = {
    "system admin": (ADMIN, 200, 200, 201, 201, 201, {"mine", "lent", "theirs"}),
    "system member": (roles(_MEMBER), 403, 200, 403, 403, 403, {"mine", "lent", "theirs"}),
    "system reader": (roles(_READER), 403, 200, 403, 403, 403, {"mine", "lent", "theirs"}),
    "system service": (roles("service"), 403, 200, 201, 201, 403, {"mine", "lent", "theirs"}),
    "project admin": (roles(_ADMIN, MINE), 403, 200, 403, 201, 403, {"mine", "lent"}),
    "project reader": (roles(_READER, MINE), 403, 403, 403, 403, 403, {"mine", "lent"}),
    "project service": (roles("service", MINE), 403, 403, 403, 201, 403, {"mine", "lent"}),
    "nobody": (roles("nothing", MINE), 403, 403, 403, 403, 403, None),
}


class TestRoles(IronicCase):
    def setUp(self) -> None:
        super().setUp()
        self.enrol("mine", owner=MINE, shard="A")
        self.enrol("lent", owner=THEIRS, lessee=MINE, shard="A")
        self.enrol("theirs", owner=THEIRS, shard="A")
        for number, name in enumerate(("mine", "lent", "theirs")):
            node = self.get(f"/v1/nodes/{name}")["uuid"]
            given = {"node_uuid": node, "address": f"52:54:00:00:00:0{number}"}
            for resource in ("ports", "portgroups"):
                self.assertEqual(201, self.ask("POST", f"/v1/{resource}", given).status)

    def test_the_table(self) -> None:
        for name, (who, update, shards, for_anybody, own, with_shard, listed) in TABLE.items():
            with self.subTest(name):
                patch = [{"op": "replace", "path": "/shard", "value": "B"}]
                self.assertEqual(update, self.ask("PATCH", "/v1/nodes/mine", patch, who=who).status)
                self.assertEqual(shards, self.ask("GET", "/v1/shards", who=who).status)
                given = {"driver": "fake"}
                self.assertEqual(
                    for_anybody, self.ask("POST", "/v1/nodes", given | {"owner": "project-3"}, who=who).status
                )
                created = self.ask("POST", "/v1/nodes", given, who=who)
                self.assertEqual(own, created.status)
                self.assertEqual(with_shard, self.ask("POST", "/v1/nodes", given | {"shard": "A"}, who=who).status)
                self.check_listing(who, listed)
                for node in self.pages("/v1/nodes", "nodes"):
                    if node["name"] is None:
                        self.assertEqual(204, self.ask("DELETE", f"/v1/nodes/{node['uuid']}").status)

    def check_listing(self, who: dict[str, str], listed: set[str] | None) -> None:
        if listed is None:
            self.assertEqual(403, self.ask("GET", "/v1/nodes", who=who).status)
            return
        # Without those that the roles have enrolled just now.
        names = [each["name"] for each in self.get("/v1/nodes?sharded=true", who=who)["nodes"] if each["name"]]
        self.assertEqual((len(listed), listed), (len(names), set(names)))
        for path in ("/v1/ports", "/v1/portgroups", "/v1/ports?shard=A,B", "/v1/portgroups?shard=A,B"):
            key = path.split("/")[2].split("?")[0]
            self.assertEqual(len(listed), len(self.get(path, who=who)[key]), path)
        for name in ("mine", "lent", "theirs"):
            self.assertEqual(200 if name in listed else 404, self.ask("GET", f"/v1/nodes/{name}", who=who).status)

    def test_a_project_cannot_give_itself_what_is_not_its_own(self) -> None:
        mine = roles(_ADMIN, MINE)
        operations = {"/owner": "project-3", "/shard": "stolen-shard"}
        for path, value in operations.items():
            patch = [{"op": "add", "path": path, "value": value}]
            self.assertEqual(403, self.ask("PATCH", "/v1/nodes/mine", patch, who=mine).status, path)
            self.assertEqual(404, self.ask("PATCH", "/v1/nodes/theirs", patch, who=mine).status, path)
        # A harmless field beside the guarded one does not carry it through.
        patch = [{"op": "add", "path": "/description", "value": "x"}, {"op": "remove", "path": "/shard"}]
        self.assertEqual(403, self.ask("PATCH", "/v1/nodes/mine", patch, who=mine).status)
        self.assertEqual((None, "A"), tuple(self.get("/v1/nodes/mine")[key] for key in ("description", "shard")))
        self.assertEqual(200, self.ask("PATCH", "/v1/nodes/mine", patch[:1], who=mine).status)
        # What is lent to it, it sees and does not change.
        self.assertEqual(403, self.ask("PATCH", "/v1/nodes/lent", patch[:1], who=mine).status)
        self.assertEqual(403, self.ask("DELETE", "/v1/nodes/lent", who=mine).status)
        self.assertEqual({"shards": [{"name": "A", "count": 3}]}, self.get("/v1/shards"))

    def test_an_owner_manages_ports_of_its_own_nodes_alone(self) -> None:
        mine = roles(_ADMIN, MINE)
        for name, status in (("mine", 201), ("lent", 403), ("theirs", 403)):
            node = self.get(f"/v1/nodes/{name}")["uuid"]
            given = {"node_uuid": node, "address": "52:54:00:00:01:00"}
            self.assertEqual(status, self.ask("POST", "/v1/ports", given, who=mine).status, name)

    def test_versions_hide_the_shard_from_everybody(self) -> None:
        for name, (who, _, _, _, _, _, listed) in TABLE.items():
            if listed is None:
                continue
            with self.subTest(name):
                self.assertNotIn("shard", self.get("/v1/nodes/mine", who=who, version="1.81"))
                self.assertEqual(404, self.ask("GET", "/v1/shards", who=who, version="1.81").status)
                self.assertEqual(406, self.ask("GET", "/v1/nodes?shard=A", who=who, version="1.81").status)
