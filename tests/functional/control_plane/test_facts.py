# SPDX-License-Identifier: Apache-2.0
"""What deployers say of nodes by API and command line decides where instances go, in a control plane of real processes."""

from __future__ import annotations

import json
from typing import Any

from moorage import errors
from moorage.cli import main
from tests import servers
from tests.commands import in_process
from tests.functional.control_plane.test_slice import SliceCase, flavor


class TestFacts(SliceCase):
    extra = """
[scheduling]
enabled_filters = compute,capacity,availability_zone,aggregate_instance_extra_specs,compute_capabilities,json,\
aggregate_multitenancy_isolation,image_properties,server_group_affinity,\
server_group_anti_affinity
enabled_weighers = ram,metrics
[weigher_metrics]
settings = heat=-1.0
required = false
"""

    def moorage(self, *words: str) -> Any:
        status, said, error = in_process(main.main, [*words, "--state-dir", str(self.plane.state)])
        self.assertEqual(0, status, said + error)
        return json.loads(said) if "json" in words else None

    def candidates(self, **request: Any) -> set[str]:
        """The nodes that take one instance each."""
        body = {**flavor(VCPU=4), **request, "count": 8}
        return {each["node"] for each in self.api.select(body)["selections"]}

    def until(self, wanted: set[str], what: str, **request: Any) -> None:
        servers.wait_until(lambda: self.candidates(**request) == wanted, what, 60)

    def test_zones_and_extra_specs_by_aggregates(self) -> None:
        made = self.moorage("aggregate", "create", "fast", "--zone", "north", "--metadata", "ssd=true", "-f", "json")
        self.assertEqual({"availability_zone": "north", "ssd": "true"}, json.loads(made["metadata"]))
        self.moorage("aggregate", "add", "fast", "--node", "node-1")
        self.moorage("aggregate", "add", "fast", "--node", "node-2")
        self.until({"node-1", "node-2"}, "the zone", availability_zone="north")
        asked = {"flavor": {**flavor(VCPU=4)["flavor"], "extra_specs": {"aggregate_instance_extra_specs:ssd": "true"}}}
        self.until({"node-1", "node-2"}, "the extra spec", **asked)
        self.assertEqual(set(), self.candidates(availability_zone="south"))
        self.moorage("aggregate", "remove", "fast", "--node", "node-2")
        self.until({"node-1"}, "the zone without one", availability_zone="north")
        self.moorage("aggregate", "set", "fast", "--zone", "south")
        self.until({"node-1"}, "the other zone", availability_zone="south")
        self.moorage("aggregate", "delete", "fast")
        self.until({f"node-{number}" for number in range(8)}, "the zone of all", availability_zone="nova")
        with self.assertRaisesRegex(errors.NotFound, "There is no aggregate fast"):
            self.api.aggregate("fast")

    def test_a_host_brings_all_its_nodes_into_an_aggregate(self) -> None:
        host = self.api.node("node-0")["host"]
        own = {node["name"] for node in self.api.nodes(host=host)}
        self.api.create_aggregate("tenant", {"filter_tenant_id": "somebody"})
        self.api.change_member("PUT", "tenant", "host", host)
        self.until({f"node-{number}" for number in range(8)} - own, "the nodes that are left")
        self.api.delete_aggregate("tenant")
        self.until({f"node-{number}" for number in range(8)}, "all nodes")

    def test_properties_and_queries(self) -> None:
        self.moorage("node", "set", "node-3", "--property", "rack=a", "--property", 'cpu_info={"arch": "x86_64"}')
        query = json.dumps(["=", "$rack", "a"])
        self.until({"node-3"}, "the query", hints={"query": query})
        asked = {"flavor": {**flavor(VCPU=4)["flavor"], "extra_specs": {"capabilities:cpu_info:arch": "x86_64"}}}
        self.until({"node-3"}, "the capability", **asked)
        supported = '[["x86_64", "qemu", "hvm"]]'
        self.moorage("node", "set", "node-3", "--property", f"supported_instances={supported}", "--unset", "rack")
        image = {"properties": {"hw_architecture": "x86_64", "hw_vm_mode": "hvm"}}
        self.until({"node-3"}, "the image", image=image)
        self.until(set(), "the query without the property", hints={"query": query})

    def test_metrics_rank_the_nodes(self) -> None:
        for number in range(8):
            self.api.change_node(f"node-{number}", {"metrics": {"heat": abs(number - 5)}})
        self.addCleanup(lambda: [self.api.change_node(f"node-{number}", {"metrics": None}) for number in range(8)])

        def first() -> bool:
            (found,) = self.api.select({**flavor(VCPU=1), "count": 1})["selections"]
            return bool(found["node"] == "node-5")

        servers.wait_until(first, "the coolest node is first", 60)

    def test_server_groups_keep_their_members_apart_or_together(self) -> None:
        made = self.moorage("server", "group", "create", "apart", "--policy", "anti-affinity", "-f", "json")
        body = {**flavor(VCPU=1), "server_group": "apart"}
        members = [self.create(body) for _ in range(3)]
        self.assertEqual(3, len({each["node"] for each in members}))
        shown = self.moorage("server", "group", "show", "apart", "-f", "json")
        self.assertEqual(sorted(each["uuid"] for each in members), json.loads(shown["members"]))
        answer = self.api.select({**body, "count": 6})
        self.assertEqual(5, len(answer["selections"]), answer)
        self.assertFalse({each["node"] for each in answer["selections"]} & {each["node"] for each in members})
        self.api.create_server_group("together", "affinity")
        first = self.create({**flavor(VCPU=1), "server_group": "together"})
        second = self.create({**flavor(VCPU=1), "hints": {"group": [self.api.server_group("together")["uuid"]]}})
        self.assertEqual(first["node"], second["node"])
        for each in (*members, first, second):
            self.delete(each["uuid"])
        self.assertEqual([], self.api.server_group(made["uuid"])["members"])
        self.moorage("server", "group", "delete", "apart")
        self.assertEqual(["together"], [each["name"] for each in self.api.server_groups()])
        with self.assertRaisesRegex(errors.InvalidInput, "There is no server group apart"):
            self.api.select(body)

    def test_what_is_wrong_is_told_in_words(self) -> None:
        for body, text in (
            ({"hints": {"query": '["like", 1]'}}, '"like" is no command'),
            ({"flavor": {**flavor()["flavor"], "extra_specs": {"capabilities:a": ">= b"}}}, "'b' is not a number"),
        ):
            with self.assertRaisesRegex(errors.InvalidInput, text):
                self.api.select({**flavor(), **body})
        with self.assertRaisesRegex(errors.NotFound, "There is no node nothing"):
            self.api.change_node("nothing", {"a": 1})
        with self.assertRaises(errors.InvalidInput):
            self.api.create_aggregate("x", {"a": 1})  # type: ignore[dict-item]
