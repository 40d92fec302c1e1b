# SPDX-License-Identifier: Apache-2.0
"""Members of projects over HTTP: what they may not choose, see or find out; and requests that nothing could honour."""

from __future__ import annotations

import json
import unittest
import uuid
from typing import Any

import requests
import sqlalchemy as sa

from moorage.control_plane.api_role import ApiRole
from moorage.services.tables import services
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 2}}
MEMBER, OTHER, ADMIN = "ann:lab", "bob:shop", "admin"
MADE_UP = "99999999-9999-4999-8999-999999999999"


class _LivePlane(unittest.TestCase):
    filters: tuple[str, ...] = ("compute", "capacity", "same_host", "different_host")

    def setUp(self) -> None:
        self.plane = Plane(
            self,
            api__bind="127.0.0.1:0",
            api__auth_strategy="noauth",
            scheduling__enabled_filters=list(self.filters),
            scheduling__refresh_interval=0.2,
        ).up(("h1", "h2"))
        self.url: str = self.plane.start(ApiRole(), "api-live").url

    def ask(self, token: str, method: str, path: str, body: Any = None) -> requests.Response:
        return requests.request(
            method, f"{self.url}/scheduling/v1{path}", json=body, headers={"X-Auth-Token": token}, timeout=60
        )

    def create(self, token: str, status: int = 202, **body: Any) -> dict[str, Any]:
        answer = self.ask(token, "POST", "/instances", {"flavor": FLAVOR, **body})
        self.assertEqual(status, answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    def active(self, instance: str) -> dict[str, Any]:
        def shown() -> dict[str, Any]:
            return dict(self.ask(ADMIN, "GET", f"/instances/{instance}").json())

        wait_until(lambda: shown()["status"] == "active", "the instance", SOON)
        return shown()

    def assert_refused(self, answer: requests.Response, rule: str) -> None:
        self.assertEqual(403, answer.status_code, answer.text)
        self.assertEqual(rule, answer.json()["error"]["details"]["rule"])


class ChoiceTests(_LivePlane):
    def test_a_member_may_not_choose_the_host_or_node_of_a_new_instance(self) -> None:
        node = self.ask(ADMIN, "GET", "/hosts/h1").json()["nodes"][0]["node"]
        for field, value, rule in (
            ("force_hosts", ["h1"], "forced_host"),
            ("force_nodes", [node], "forced_host"),
            ("requested_host", "h1", "requested_destination"),
            ("requested_node", node, "requested_destination"),
        ):
            with self.subTest(field=field):
                for path, more in (("/instances", {}), ("/instances", {"count": 2}), ("/select", {})):
                    answer = self.ask(MEMBER, "POST", path, {"flavor": FLAVOR, field: value, **more})
                    self.assert_refused(answer, f"scheduling:instances:create:{rule}")
                self.assertEqual([], self.ask(ADMIN, "GET", "/instances").json()["instances"])
        self.assertEqual("h2", self.create(ADMIN, force_hosts=["h2"])["host"])

    def test_a_member_may_not_say_which_command_an_instance_runs(self) -> None:
        for more in ({}, {"count": 2}):
            answer = self.ask(MEMBER, "POST", "/instances", {"flavor": FLAVOR, "command": ["true"], **more})
            self.assert_refused(answer, "scheduling:instances:create:command")
        for command in ([], "true", ["nul \0"], [1], ["x"] * 65):
            with self.subTest(command=command):
                self.create(ADMIN, 400, command=command)
        self.assertEqual([], self.ask(ADMIN, "GET", "/instances").json()["instances"])

    def test_a_command_that_no_driver_runs_is_refused_and_never_ignored(self) -> None:
        made = self.create(ADMIN, command=["sleep", "60"])["uuid"]

        def shown() -> dict[str, Any]:
            return dict(self.ask(ADMIN, "GET", f"/instances/{made}").json())

        wait_until(lambda: shown()["status"] == "error", "the end of the tries", SOON)
        self.assertIn("the compute driver of this host runs none", shown()["fault"])
        self.assertEqual(["sleep", "60"], shown()["request"]["command"])

    def offer(self, host: str, *offers: str) -> None:
        with self.plane.database.write() as tx:
            tx.execute(sa.update(services).where(services.c.host == host).values(offers=f" {' '.join(offers)} "))

    def test_an_instance_with_a_command_goes_only_where_commands_are_run(self) -> None:
        self.offer("h1", "compute", "compute.live_migrate")
        for _ in range(4):
            made = self.create(ADMIN, command=["sleep", "60"], force_hosts=[])
            self.assertEqual("h2", made["host"])
        self.offer("h2", "compute", "compute.live_migrate")
        for more in ({}, {"count": 2}, {"force_hosts": ["h1"]}):
            refused = self.create(ADMIN, 409, command=["sleep", "60"], **more)["error"]["message"]
            self.assertIn("no agent of the nodes that may be chosen offers compute.commands", refused)
        self.active(self.create(ADMIN)["uuid"])

    def test_a_live_migration_is_refused_where_the_driver_has_no_power_for_it(self) -> None:
        made = self.active(self.create(MEMBER)["uuid"])
        host = self.ask(ADMIN, "GET", f"/instances/{made['uuid']}").json()["host"]
        for lacks, text in (
            (host, "does not have the power compute.live_migrate"),
            ("h2" if host == "h1" else "h1", "offers compute.migrate and compute.live_migrate"),
        ):
            for each in ("h1", "h2"):
                self.offer(each, "compute", "compute.migrate", "compute.live_migrate")
            self.offer(lacks, "compute", "compute.migrate")
            answer = self.ask(MEMBER, "POST", f"/instances/{made['uuid']}/action", {"live_migrate": {}})
            self.assertEqual(409, answer.status_code, answer.text)
            self.assertIn(text, answer.json()["error"]["message"])
        for operation in ("stop", "start", "reboot"):
            answer = self.ask(MEMBER, "POST", f"/instances/{made['uuid']}/action", {operation: {}})
            self.assertEqual(409, answer.status_code, answer.text)
        self.assertIn("does not have the power compute.power", answer.json()["error"]["message"])
        self.assertEqual(host, self.active(made["uuid"])["host"])

    def test_an_agent_that_names_no_power_does_not_stop_instances(self) -> None:
        """Agents of earlier versions name none. They would take the operation and not know it."""
        made = self.active(self.create(MEMBER)["uuid"])
        for host in ("h1", "h2"):
            self.offer(host, "compute")
        answer = self.ask(MEMBER, "POST", f"/instances/{made['uuid']}/action", {"stop": {}})
        self.assertEqual(409, answer.status_code, answer.text)
        self.assertIn("does not have the power compute.power", answer.json()["error"]["message"])
        self.assertEqual("active", self.active(made["uuid"])["status"])

    def test_a_repeated_request_with_another_command_is_refused(self) -> None:
        uuids = [str(uuid.uuid4()) for _ in range(2)]
        for one, more in zip(uuids, ({}, {"count": 2}), strict=True):
            asked: dict[str, Any] = {"uuid": one, "command": ["sleep", "60"], **more}
            made = self.create(ADMIN, **asked)
            self.assertEqual(made.keys(), self.create(ADMIN, **asked).keys())
            for other in ({**asked, "command": ["sleep", "61"]}, {"uuid": one, **more}):
                refused = self.create(ADMIN, 409, **other)["error"]["message"]
                self.assertIn("another command", refused)

    def test_a_rebuild_without_an_image_keeps_the_image(self) -> None:
        made = self.active(self.create(MEMBER, image={"id": "first"})["uuid"])
        for nothing in ("{}", "null"):
            answer = self.ask(MEMBER, "POST", f"/instances/{made['uuid']}/action", {"rebuild": json.loads(nothing)})
            self.assertEqual(202, answer.status_code, answer.text)
            found = self.active(made["uuid"])
            self.assertEqual({"id": "first"}, found["request"]["image"])

    def test_a_member_may_move_an_instance_but_not_choose_where_it_goes(self) -> None:
        made = self.active(self.create(MEMBER)["uuid"])
        path = f"/instances/{made['uuid']}/action"
        target = "h2" if made["host"] == "h1" else "h1"
        for action, body in (
            ("live_migrate", {}),
            ("unshelve", {}),
            ("resize", {"flavor": {"flavorid": "large", "resources": {"VCPU": 3}}}),
        ):
            for field in ("host", "node"):
                answer = self.ask(MEMBER, "POST", path, {action: {**body, field: target}})
                self.assert_refused(answer, f"scheduling:instances:{action}:host")
        self.assertEqual(202, self.ask(MEMBER, "POST", path, {"live_migrate": {}}).status_code)
        self.assertEqual(target, self.active(made["uuid"])["host"])
        # The agent of the source removes what is left there; until then nothing moves back.
        back = {"live_migrate": {"host": made["host"]}}
        moved = lambda: self.ask(ADMIN, "POST", path, back).status_code == 202  # noqa: E731
        wait_until(moved, "the source has let go", SOON)
        self.assertEqual(made["host"], self.active(made["uuid"])["host"])


class SightTests(_LivePlane):
    def test_consoles_and_usage_are_of_the_own_project_alone(self) -> None:
        made = self.active(self.create(MEMBER)["uuid"])
        for path in ("console", "console?lines=5", "usage"):
            answer = self.ask(OTHER, "GET", f"/instances/{made['uuid']}/{path}")
            self.assertEqual(404, answer.status_code, answer.text)
            for token in (MEMBER, ADMIN):
                # The simulated driver has neither.
                answer = self.ask(token, "GET", f"/instances/{made['uuid']}/{path}")
                self.assertEqual(409, answer.status_code, answer.text)
                self.assertIn("does not have the power compute.", answer.json()["error"]["message"])
        for lines in ("0", "10001", "x"):
            answer = self.ask(MEMBER, "GET", f"/instances/{made['uuid']}/console?lines={lines}")
            self.assertEqual(400, answer.status_code, answer.text)
        self.assertEqual(404, self.ask(MEMBER, "GET", f"/instances/{MADE_UP}/usage").status_code)

    def test_select_shows_no_names_of_hosts_and_nodes_to_a_member(self) -> None:
        asked = {"flavor": FLAVOR, "count": 2}
        seen = self.ask(ADMIN, "POST", "/select", asked).json()
        self.assertEqual({"h1", "h2"}, {each["host"] for each in seen["selections"]})
        answer = self.ask(MEMBER, "POST", "/select", asked)
        self.assertEqual((200, 2), (answer.status_code, answer.json()["found"]))
        for name in ("h1", "h2", *(each["node"] for each in seen["selections"])):
            self.assertNotIn(f'"{name}', answer.text)
        answer = self.ask(MEMBER, "POST", "/select", {**asked, "explain": True})
        self.assert_refused(answer, "scheduling:select:hosts")

    def test_a_member_does_not_see_where_instances_are(self) -> None:
        many = self.ask(MEMBER, "POST", "/instances", {"flavor": FLAVOR, "count": 2})
        made = self.create(MEMBER)
        there = self.active(made["uuid"])
        path = f"/instances/{made['uuid']}"
        flavor = {"flavorid": "large", "resources": {"VCPU": 3}}
        answers = [
            many,
            self.ask(MEMBER, "POST", "/instances", {"flavor": FLAVOR, "uuid": made["uuid"]}),
            self.ask(MEMBER, "POST", f"{path}/action", {"resize": {"flavor": flavor}}),
            self.ask(MEMBER, "GET", path),
            self.ask(MEMBER, "GET", "/instances"),
        ]
        self.active(made["uuid"])
        answers.append(self.ask(MEMBER, "POST", f"{path}/action", {"rebuild": {"image": {"id": "new"}}}))
        names = {"host", "node", "node_uuid", "holds"}
        self.assertLessEqual(names, there.keys())
        for answer in answers:
            self.assertIn(answer.status_code, (200, 202), answer.text)
            for found in answer.json().get("instances", [answer.json()]):
                self.assertEqual(there.keys() - names, found.keys())
        self.assertEqual(there.keys() - names, made.keys())
        # What is done, and not where: the request id of an evacuation, for example, names an agent.
        self.assertEqual({"operation": "build"}, made["pending"])
        # The agent may have ended the rebuild before it is read for the answer.
        self.assertIn(answer.json()["pending"], ({"operation": "rebuild"}, {}))
        self.active(made["uuid"])
        self.assert_refused(self.ask(MEMBER, "GET", "/instances?host=h1"), "scheduling:instances:get:host")
        self.assertEqual(200, self.ask(ADMIN, "GET", "/instances?host=h1").status_code)

    def test_an_instance_of_another_project_is_as_if_it_did_not_exist(self) -> None:
        theirs = self.active(self.create(OTHER)["uuid"])
        free = "h2" if theirs["host"] == "h1" else "h1"
        refusals = []
        for hinted in (theirs["uuid"], MADE_UP):
            refused = self.create(MEMBER, 409, uuid=str(uuid.uuid4()), hints={"same_host": [hinted]})["error"]
            for name in ("request_id", "details"):
                found = refused.pop(name)
            refusals.append((refused, {name: found[name] for name in ("reasons", "summary", "considered")}))
        self.assertEqual(refusals[0], refusals[1])
        # The other host is full: a filter that believed the hint would refuse.
        filling = self.create(ADMIN, force_hosts=[free], flavor={"flavorid": "all", "resources": {"VCPU": 16}})
        self.assertEqual(free, self.active(filling["uuid"])["host"])
        made = self.active(self.create(MEMBER, hints={"different_host": theirs["uuid"]})["uuid"])
        self.assertEqual(theirs["host"], made["host"])
        self.create(OTHER, 409, hints={"different_host": theirs["uuid"]})
        self.assertEqual(theirs["host"], self.create(ADMIN, hints={"same_host": theirs["uuid"]})["host"])

    def test_a_later_move_knows_no_more_than_the_request_did(self) -> None:
        theirs = self.active(self.create(OTHER)["uuid"])
        made = self.active(self.create(MEMBER, hints={"different_host": theirs["uuid"]})["uuid"])
        other = {"h1": "h2", "h2": "h1"}
        path = f"/instances/{made['uuid']}/action"
        # The agent of the source removes what is left there; until then nothing moves back.
        moved = lambda: self.ask(ADMIN, "POST", path, {"live_migrate": {}}).status_code == 202  # noqa: E731
        for _ in range(2):
            here = self.active(made["uuid"])["host"]
            wait_until(moved, "the move", SOON)
            self.assertEqual(other[here], self.active(made["uuid"])["host"])


class HoldsTests(_LivePlane):
    def test_an_instance_is_shown_with_what_it_holds_to_those_who_may_see_hosts(self) -> None:
        made = self.active(self.create(MEMBER)["uuid"])
        path = f"/instances/{made['uuid']}"
        seen = self.ask(ADMIN, "GET", path).json()
        self.assertEqual({seen["node_uuid"]: seen["resources"]}, seen["holds"])
        self.assertNotIn("holds", self.ask(MEMBER, "GET", path).json())


class UnsupportedTests(_LivePlane):
    def test_extra_specs_that_nothing_looks_at_are_refused_by_name(self) -> None:
        made = self.active(self.create(MEMBER)["uuid"])
        action = f"/instances/{made['uuid']}/action"
        for key in (
            "trait:hw_cpu_x86_avx2",
            "trait1:CUSTOM_FAST",
            "resources:VCPU",
            "resources1:PGPU",
            "resources_NET:SRIOV_NET_VF",
            "group_policy",
            "same_subtree",
            "same_subtree_1",
        ):
            flavor = {**FLAVOR, "extra_specs": {"capabilities:vcpus_total": ">= 1", key: "required"}}
            for path, body in (
                ("/instances", {"flavor": flavor}),
                ("/instances", {"flavor": flavor, "count": 2}),
                ("/select", {"flavor": flavor}),
                (action, {"resize": {"flavor": flavor}}),
            ):
                with self.subTest(key=key, path=path):
                    answer = self.ask(ADMIN, "POST", path, body)
                    self.assertEqual(400, answer.status_code, answer.text)
                    self.assertIn(key, answer.json()["error"]["message"])
        image = {"id": "i", "properties": {"trait1:HW_CPU_X86_AVX2": "required"}}
        for path, body in (("/instances", {"flavor": FLAVOR, "image": image}), (action, {"rebuild": {"image": image}})):
            answer = self.ask(ADMIN, "POST", path, body)
            self.assertEqual(400, answer.status_code, answer.text)
            self.assertIn("'trait1:HW_CPU_X86_AVX2'", answer.json()["error"]["message"])
        self.assertEqual(
            [made["uuid"]], [each["uuid"] for each in self.ask(ADMIN, "GET", "/instances").json()["instances"]]
        )

    def test_extra_specs_of_filters_and_of_other_scopes_stay_allowed(self) -> None:
        specs = {"capabilities:vcpus_total": ">= 1", "hw:cpu_policy": "shared", "gpu": "many", "quota:trait": "x"}
        answer = self.ask(MEMBER, "POST", "/instances", {"flavor": {**FLAVOR, "extra_specs": specs}})
        self.assertEqual(202, answer.status_code, answer.text)

    def test_traits_are_refused_while_no_enabled_filter_judges_them(self) -> None:
        flavor = {**FLAVOR, "extra_specs": {"trait:HW_CPU_X86_AVX2": "required"}}
        for path in ("/instances", "/select"):
            answer = self.ask(ADMIN, "POST", path, {"flavor": flavor})
            self.assertEqual(400, answer.status_code, answer.text)
            self.assertIn("Add required_traits to [scheduling] enabled_filters", answer.json()["error"]["message"])


class TraitTests(_LivePlane):
    filters = (*_LivePlane.filters, "required_traits")

    def test_an_instance_goes_where_its_traits_are_and_stays_out_where_they_are_forbidden(self) -> None:
        node = self.ask(ADMIN, "GET", "/hosts/h2").json()["nodes"][0]["uuid"]
        asked = {"trait:CUSTOM_FAST": "required"}
        refused = self.create(MEMBER, 409, flavor={**FLAVOR, "extra_specs": asked})["error"]
        self.assertEqual({"required_traits": 2}, refused["details"]["reasons"])
        store: Any = self.plane.store
        store.create_trait("CUSTOM_FAST")
        store.set_traits(node, {"CUSTOM_FAST"})
        body: dict[str, Any] = {"flavor": {**FLAVOR, "extra_specs": asked}}
        wait_until(lambda: self.ask(ADMIN, "POST", "/select", body).json().get("selections"), "the trait", SOON)
        self.assertEqual("h2", self.active(self.create(MEMBER, **body)["uuid"])["host"])
        forbidding = {**FLAVOR, "extra_specs": {"trait:CUSTOM_FAST": "forbidden"}}
        made = self.active(self.create(MEMBER, flavor=forbidding)["uuid"])
        self.assertEqual("h1", made["host"])
        # A move asks for the same traits.
        answer = self.ask(ADMIN, "POST", f"/instances/{made['uuid']}/action", {"live_migrate": {}})
        self.assertEqual(409, answer.status_code, answer.text)
        image = {"id": "i", "properties": {"trait:CUSTOM_FAST": "required"}}
        answer = self.ask(ADMIN, "POST", f"/instances/{made['uuid']}/action", {"rebuild": {"image": image}})
        self.assertEqual(400, answer.status_code, "the flavor forbids what the image requires: " + answer.text)

    def test_resources_of_extra_specs_are_claimed(self) -> None:
        flavor = {**FLAVOR, "extra_specs": {"resources:VCPU": "3"}}
        asked: dict[str, Any] = {"flavor": flavor, "uuid": str(uuid.uuid4())}
        made = self.create(MEMBER, **asked)
        self.assertEqual({"VCPU": 3}, self.active(made["uuid"])["resources"])
        self.assertEqual(made["uuid"], self.create(MEMBER, **asked)["uuid"], "a repetition finds it")
