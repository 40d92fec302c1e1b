# SPDX-License-Identifier: Apache-2.0
"""Placement's clients, unchanged, against a control plane as ``moorage up`` starts it.

keystoneauth as Nova and Ironic use it, openstacksdk, and the commands of osc-placement.
"""

from __future__ import annotations

import json
import pathlib
import signal
import tempfile
import unittest
import warnings
from typing import Any

import openstack
from keystoneauth1 import adapter, discover, session
from keystoneauth1.loading import get_plugin_loader
from openstackclient import shell
from typing_extensions import override

from tests.api.placement.wire import new_uuid
from tests.commands import in_process
from tests.forking import Command


class _Running:
    """The control plane of this module."""

    url = user = password = ""


def setUpModule() -> None:
    """``moorage up`` with a generated password; the dialect where it is by default."""
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    state = pathlib.Path(folder.name) / "state"
    process = Command(
        ["up", "--state-dir", str(state), "--bind", "127.0.0.1:0", "--schedulers", "1", "--agents", "1"],
        pathlib.Path(folder.name) / "stderr",
    )
    unittest.addModuleCleanup(_stop, process)
    line = process.stdout.readline()
    assert "moorage is ready at" in line, line
    client = json.loads((state / "client.json").read_text())
    _Running.url = client["url"] + "/placement"
    _Running.user, _Running.password = client["username"], client["password"]


def _stop(process: Command) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)


def _auth(password: str = "") -> Any:
    return get_plugin_loader("http_basic").load_from_options(
        endpoint=_Running.url, username=_Running.user, password=password or _Running.password
    )


class TestKeystoneauth(unittest.TestCase):
    """What Nova's report client and Ironic do: an Adapter, a microversion with each request, refusals as answers."""

    @override
    def setUp(self) -> None:
        self.client = adapter.Adapter(session=session.Session(auth=_auth()), service_type="placement", raise_exc=False)
        self.client.additional_headers = {"accept": "application/json"}

    def put(self, path: str, body: Any, version: str) -> Any:
        return self.client.put(path, json=body, microversion=version, global_request_id=f"req-{new_uuid()}")

    def test_the_version_is_discovered(self) -> None:
        found = discover.get_discovery(self.client.session, _Running.url)
        (data,) = found.version_data()
        self.assertEqual(((1, 0), (1, 39)), (data["min_microversion"], data["max_microversion"]))
        self.assertEqual(_Running.url, data["url"].rstrip("/"))

    def test_the_life_of_an_instance_as_nova_reports_it(self) -> None:
        host, instance, migration = new_uuid(), new_uuid(), new_uuid()
        target = new_uuid()
        for uuid in (host, target):
            body = {"uuid": uuid, "name": f"compute-{uuid}"}
            made = self.client.post("/resource_providers", json=body, microversion="1.20")
            self.assertEqual((200, 0), (made.status_code, made.json()["generation"]))
            inventories = {
                "resource_provider_generation": 0,
                "inventories": {"VCPU": {"total": 8}, "MEMORY_MB": {"total": 4096, "reserved": 512}},
            }
            self.assertEqual(200, self.put(f"/resource_providers/{uuid}/inventories", inventories, "1.26").status_code)
        traits = {"resource_provider_generation": 1, "traits": ["HW_CPU_X86_AVX", "COMPUTE_VOLUME_ATTACH"]}
        self.assertEqual(200, self.put(f"/resource_providers/{host}/traits", traits, "1.6").status_code)
        query = (
            f"/allocation_candidates?resources=VCPU:2,MEMORY_MB:512&required=HW_CPU_X86_AVX&in_tree={host}&limit=1000"
        )
        candidates = self.client.get(query, microversion="1.36").json()
        (request,) = candidates["allocation_requests"]
        self.assertEqual([host], list(request["allocations"]))
        claim = {
            "allocations": request["allocations"],
            "mappings": request["mappings"],
            "project_id": "project",
            "user_id": "user",
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        }
        self.assertEqual(204, self.put(f"/allocations/{instance}", claim, "1.38").status_code)
        again = self.put(f"/allocations/{instance}", claim, "1.38")
        self.assertEqual((409, "placement.concurrent_update"), (again.status_code, again.json()["errors"][0]["code"]))
        # A live migration: the old host goes to the migration's own consumer, the new one to the instance.
        held = self.client.get(f"/allocations/{instance}", microversion="1.28").json()
        new = {target: {"resources": {"VCPU": 2, "MEMORY_MB": 512}}}
        moved = self.client.post(
            "/allocations",
            json={
                migration: {**claim, "allocations": {host: {"resources": held["allocations"][host]["resources"]}}},
                instance: {**claim, "allocations": new, "consumer_generation": held["consumer_generation"]},
            },
            microversion="1.38",
        )
        self.assertEqual(204, moved.status_code, moved.text)
        usages = self.client.get("/usages?project_id=project&user_id=user", microversion="1.38").json()["usages"]
        self.assertEqual({"INSTANCE": {"consumer_count": 2, "VCPU": 4, "MEMORY_MB": 1024}}, usages)
        self.assertEqual(204, self.client.delete(f"/allocations/{migration}").status_code)
        empty = {**claim, "allocations": {}, "consumer_generation": 2}
        empty.pop("mappings")
        self.assertEqual(204, self.put(f"/allocations/{instance}", empty, "1.38").status_code)
        self.assertEqual({}, self.client.get("/usages?project_id=project", microversion="1.38").json()["usages"])

    def test_a_node_of_ironic_is_one_unit_of_a_class_of_its_own(self) -> None:
        node = new_uuid()
        self.assertEqual(
            201, self.client.put("/resource_classes/CUSTOM_BAREMETAL_GOLD", microversion="1.7").status_code
        )
        self.client.post("/resource_providers", json={"uuid": node, "name": node}, microversion="1.14")
        inventory = {"CUSTOM_BAREMETAL_GOLD": {"total": 1, "reserved": 1, "max_unit": 1}}
        body = {"resource_provider_generation": 0, "inventories": inventory}
        path = f"/resource_providers/{node}/inventories"
        self.assertEqual(400, self.put(path, body, "1.25").status_code)
        self.assertEqual(200, self.put(path, body, "1.26").status_code)
        query = "/allocation_candidates?resources=CUSTOM_BAREMETAL_GOLD:1"
        self.assertEqual([], self.client.get(query, microversion="1.36").json()["allocation_requests"])

    def test_an_unknown_version_is_refused_before_anything_else(self) -> None:
        self.assertEqual(406, self.client.get("/resource_providers", microversion="1.40").status_code)

    def test_a_wrong_password_is_refused(self) -> None:
        self.assertEqual(401, self.client.get("/resource_providers", auth=_auth("wrong")).status_code)


class TestSdk(unittest.TestCase):
    def test_openstacksdk_edits_providers(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cloud = openstack.connect(
                auth_type="http_basic",
                auth={"endpoint": _Running.url, "username": _Running.user, "password": _Running.password},
                placement_endpoint_override=_Running.url,
                placement_default_microversion="1.39",
            )
            self.addCleanup(cloud.close)
            placement = cloud.placement
        made = placement.create_resource_provider(name="sdk")
        self.assertIn(made.id, [each.id for each in placement.resource_providers()])
        placement.create_resource_provider_inventory(made, "VCPU", total=8)
        (inventory,) = placement.resource_provider_inventories(made)
        self.assertEqual(("VCPU", 8), (inventory.resource_class, inventory.total))
        self.assertIn("VCPU", [each.name for each in placement.resource_classes()])
        placement.create_trait("CUSTOM_SDK")
        self.assertIn("CUSTOM_SDK", [each.name for each in placement.traits(name="startswith:CUSTOM_")])
        placement.set_resource_provider_aggregates(placement.get_resource_provider(made), new_uuid())
        self.assertEqual(1, len(placement.fetch_resource_provider_aggregates(made).aggregates))
        placement.delete_resource_provider(made)
        self.assertNotIn(made.id, [each.id for each in placement.resource_providers()])


class TestCommands(unittest.TestCase):
    """osc-placement, in this process; each command logs in again, as on a command line."""

    def run_command(self, *words: str, status: int = 0) -> str:
        given = [
            *("--os-auth-type", "http_basic", "--os-endpoint", _Running.url),
            *("--os-username", _Running.user, "--os-password", _Running.password, "--os-placement-api-version", "1.39"),
            *words,
        ]
        code, out, told = in_process(shell.main, given)
        self.assertEqual(status, code, f"{words}: {out} {told}")
        return out if status == 0 else told

    def json(self, *words: str) -> Any:
        return json.loads(self.run_command(*words, "-f", "json"))

    def test_providers_from_the_cradle_to_the_grave(self) -> None:
        host = self.json("resource", "provider", "create", "host")["uuid"]
        cell = self.json("resource", "provider", "create", "cell", "--parent-provider", host)["uuid"]
        self.assertEqual(host, self.json("resource", "provider", "show", cell)["root_provider_uuid"])
        self.assertEqual("rack-1", self.json("resource", "provider", "set", host, "--name", "rack-1")["name"])
        inventory = self.json(
            *("resource", "provider", "inventory", "set", cell),
            *("--resource", "VCPU=8", "--resource", "VCPU:allocation_ratio=4.0", "--resource", "MEMORY_MB=1024"),
        )
        self.assertEqual({"VCPU", "MEMORY_MB"}, {each["resource_class"] for each in inventory})
        changed = self.json("resource", "provider", "inventory", "class", "set", cell, "VCPU", "--total", "16")
        self.assertEqual(16, changed["total"])
        self.run_command("resource", "provider", "inventory", "delete", cell, "--resource-class", "MEMORY_MB")
        (left,) = self.json("resource", "provider", "inventory", "list", cell)
        self.assertEqual(("VCPU", 0), (left["resource_class"], left["used"]))
        self.run_command("trait", "create", "CUSTOM_GOLD")
        self.json("resource", "provider", "trait", "set", cell, "--trait", "CUSTOM_GOLD")
        found = self.json("resource", "provider", "list", "--required", "CUSTOM_GOLD", "--resource", "VCPU=1")
        self.assertEqual([cell], [each["uuid"] for each in found])
        generation = str(self.json("resource", "provider", "show", cell)["generation"])
        aggregate = new_uuid()
        self.run_command(
            *("resource", "provider", "aggregate", "set", cell, "--aggregate", aggregate, "--generation", generation)
        )
        (one,) = self.json("resource", "provider", "aggregate", "list", cell)
        self.assertEqual(aggregate, one["uuid"])
        refused = self.run_command("resource", "provider", "delete", host, status=1)
        self.assertIn("It has child resource providers", refused)
        for uuid in (cell, host):
            self.run_command("resource", "provider", "delete", uuid)
        self.assertEqual([], self.json("resource", "provider", "list", "--in-tree", host))

    def test_allocations_and_candidates(self) -> None:
        host = self.json("resource", "provider", "create", "compute")["uuid"]
        self.run_command("resource", "provider", "inventory", "set", host, "--resource", "VCPU=4")
        (candidate,) = self.json("allocation", "candidate", "list", "--resource", "VCPU=2", "--limit", "1")
        self.assertEqual(host, candidate["resource provider"])
        consumer = new_uuid()
        owner = ("--project-id", "p", "--user-id", "u", "--consumer-type", "INSTANCE")
        claim = ("resource", "provider", "allocation", "set", consumer, "--allocation")
        self.json(*claim, f"rp={host},VCPU=2", *owner)
        (shown,) = self.json("resource", "provider", "allocation", "show", consumer)
        self.assertEqual((host, {"VCPU": 2}), (shown["resource_provider"], shown["resources"]))
        (used,) = self.json("resource", "provider", "usage", "show", host)
        self.assertEqual(("VCPU", 2), (used["resource_class"], used["usage"]))
        refused = self.run_command(
            *("resource", "provider", "allocation", "set", new_uuid(), "--allocation", f"rp={host},VCPU=3", *owner),
            status=1,
        )
        self.assertIn("The requested amount would exceed the capacity", refused)
        (total,) = self.json("resource", "usage", "show", "p")
        self.assertEqual({"VCPU": 2, "consumer_count": 1}, total["usage"])
        self.run_command("resource", "provider", "allocation", "delete", consumer)
        self.assertEqual([], self.json("resource", "provider", "allocation", "show", consumer))

    def test_classes_and_traits(self) -> None:
        self.run_command("resource", "class", "create", "CUSTOM_LICENCE")
        self.assertIn("CUSTOM_LICENCE", [each["name"] for each in self.json("resource", "class", "list")])
        self.run_command("resource", "class", "delete", "CUSTOM_LICENCE")
        self.run_command("resource", "class", "show", "CUSTOM_LICENCE", status=1)
        self.run_command("trait", "create", "CUSTOM_SILVER")
        self.assertEqual("CUSTOM_SILVER", self.json("trait", "show", "CUSTOM_SILVER")["name"])
        self.run_command("trait", "delete", "CUSTOM_SILVER")
        self.assertNotIn("CUSTOM_SILVER", [each["name"] for each in self.json("trait", "list")])
