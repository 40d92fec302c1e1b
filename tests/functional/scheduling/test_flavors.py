# SPDX-License-Identifier: Apache-2.0
"""Requests by flavorid on the whole way: which version an instance gets, what keeps it, and what is refused."""

from __future__ import annotations

import json
import pathlib
import tempfile
import unittest
import uuid
from typing import Any

import requests

from moorage.cli import main, manage
from moorage.client import connect
from moorage.control_plane.api_role import ApiRole
from tests.commands import in_process
from tests.functional.scheduling.plane import SOON
from tests.functional.scheduling.statements import CountedPlane
from tests.functional.scheduling.test_whole_path import QUIET

FIRST = {"VCPU": 1, "MEMORY_MB": 64}
SECOND = {"VCPU": 2, "MEMORY_MB": 128}
FREE_FORM = "scheduling:instances:create:free_form"


class _Case(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = CountedPlane(
            self, api__bind="127.0.0.1:0", api__auth_strategy="noauth", **{**QUIET, **self.settings()}
        )
        self.plane.up(("h1", "h2"))
        self.url: str = self.plane.start(ApiRole(), "api-live").url
        self.api = connect(self.url)
        self.session = requests.Session()
        self.addCleanup(self.session.close)

    def settings(self) -> dict[str, Any]:
        return {}

    def ask(
        self, method: str, path: str, body: Any = None, *, who: str = "u:p", status: int | None = None, url: str = ""
    ) -> Any:
        address, headers = f"{url or self.url}/scheduling/v1{path}", {"X-Auth-Token": who}
        answer = self.session.request(method, address, json=body, headers=headers, timeout=SOON)
        if status is None:
            self.assertLess(answer.status_code, 300, answer.text)
        else:
            self.assertEqual(status, answer.status_code, answer.text)
        return answer.json() if answer.text else None

    def create(self, **flavor: Any) -> dict[str, Any]:
        made = self.ask("POST", "/instances", {"flavor": {"flavorid": "small", **flavor}})
        return self.settled(made["uuid"], "active")

    def settled(self, instance: str, status: str) -> dict[str, Any]:
        self.plane.wait_status(instance, status)
        found: dict[str, Any] = self.ask("GET", f"/instances/{instance}")
        return found

    def act(self, instance: str, body: Any, becomes: str = "active") -> dict[str, Any]:
        self.ask("POST", f"/instances/{instance}/action", body)
        return self.settled(instance, becomes)

    def refused(self, flavor: Any, pattern: str, path: str = "/instances") -> None:
        body = {"resize": {"flavor": flavor}} if path.endswith("/action") else {"flavor": flavor}
        error = self.ask("POST", path, body, status=400)["error"]
        self.assertRegex(error["message"], pattern)

    def check(self, found: dict[str, Any], version: int, resources: Any, flavorid: str = "small") -> None:
        self.assertEqual((flavorid, version), (found["flavorid"], found["flavor_version"]))
        self.assertEqual(resources, found["resources"])
        self.assertEqual(resources, dict(self.plane.records()[found["uuid"]].resources))


class FlavorPathTests(_Case):
    def setUp(self) -> None:
        super().setUp()
        self.api.create_flavor("small", FIRST, {"trait:CUSTOM_OLD": "forbidden"})

    def second(self) -> None:
        self.api.create_flavor("small", SECOND, expected_version=1)

    def test_an_instance_keeps_its_version_until_it_is_resized(self) -> None:
        first = self.create()
        self.check(first, 1, FIRST)
        self.assertEqual({"trait:CUSTOM_OLD": "forbidden"}, first["request"]["extra_specs"])
        self.second()
        self.check(self.create(), 2, SECOND)
        self.check(self.act(first["uuid"], {"live_migrate": {}}), 1, FIRST)
        self.check(self.act(first["uuid"], {"rebuild": {}}), 1, FIRST)
        self.act(first["uuid"], {"shelve_offload": {}}, "shelved_offloaded")
        self.check(self.act(first["uuid"], {"unshelve": {}}), 1, FIRST)
        resized = self.act(first["uuid"], {"resize": {"flavor": {"flavorid": "small"}}})
        self.check(resized, 2, SECOND)
        self.assertEqual({}, resized["request"]["extra_specs"])
        # An instance that brings its resources along has no version.
        own = {"flavorid": "own", "resources": FIRST}
        self.check(self.act(first["uuid"], {"resize": {"flavor": own}}), 0, FIRST, "own")

    def test_a_repetition_finds_the_instance_whatever_became_of_the_flavor(self) -> None:
        body = {"uuid": str(uuid.uuid4()), "flavor": {"flavorid": "small"}}
        made = self.ask("POST", "/instances", body)
        self.second()
        self.api.deprecate_flavor("small")
        again = self.ask("POST", "/instances", body)
        self.assertEqual((made["uuid"], 1), (again["uuid"], again["flavor_version"]))
        self.ask("POST", "/instances", {**body, "flavor": {"flavorid": "other"}}, status=409)

    def test_several_alike_have_one_version(self) -> None:
        made = self.ask("POST", "/instances", {"flavor": {"flavorid": "small"}, "count": 3})["instances"]
        self.assertEqual(
            [("small", 1, FIRST)] * 3, [(e["flavorid"], e["flavor_version"], e["resources"]) for e in made]
        )

    def test_what_is_deprecated_is_refused_and_changes_nothing_for_instances(self) -> None:
        found = self.create()
        self.api.create_flavor("tiny", FIRST)
        self.api.deprecate_flavor("small", successor="tiny")
        small, path = {"flavorid": "small"}, f"/instances/{found['uuid']}/action"
        self.refused(small, "Version 1 of flavor small is deprecated. Ask for flavor tiny.")
        self.refused(small, "Ask for flavor tiny", "/select")
        self.refused(small, "Ask for flavor tiny", path)
        self.check(self.act(found["uuid"], {"live_migrate": {}}), 1, FIRST)
        self.api.deprecate_flavor("tiny")
        self.refused({"flavorid": "tiny"}, "is deprecated. It has no successor")
        self.api.deprecate_flavor("small", deprecated=False)
        self.check(self.create(), 1, FIRST)

    def test_free_form_requests_mean_what_the_catalogue_says_or_are_refused(self) -> None:
        old = {"resources": FIRST, "extra_specs": {"trait:CUSTOM_OLD": "forbidden"}}
        found = self.create(**old)
        self.check(found, 1, FIRST)
        self.check(self.create(flavorid="own", resources=SECOND), 0, SECOND, "own")
        self.second()
        self.check(self.create(**old), 1, FIRST)
        self.check(self.create(resources=SECOND), 2, SECOND)
        for contents in ({"resources": FIRST}, {**old, "resources": {"VCPU": 3}}, {**old, "resources": SECOND}):
            other = {"flavorid": "small", **contents}
            self.refused(other, "Flavor small of the catalogue has other resources or extra specs")
            self.refused(other, "Flavor small of the catalogue", f"/instances/{found['uuid']}/action")
        self.api.deprecate_flavor("small", 1)
        self.refused({"flavorid": "small", **old}, "Ask for flavor small without resources: that is version 2")

    def test_what_is_not_in_the_catalogue_is_refused(self) -> None:
        self.refused({"flavorid": "none"}, "There is no flavor none in the catalogue; moorage flavor list")
        self.refused({"flavorid": "small", "extra_specs": {}}, "resources")
        self.refused({"flavorid": "small", "version": 1}, "version")
        self.refused({"flavorid": "small", "resources": FIRST, "version": 1}, "version")

    def test_a_trait_of_the_flavor_and_one_of_the_image_count_together(self) -> None:
        image = {"properties": {"trait:CUSTOM_OLD": "required"}}
        body = {"flavor": {"flavorid": "small"}, "image": image}
        error = self.ask("POST", "/instances", body, status=400)["error"]
        self.assertIn("requires and forbids the trait CUSTOM_OLD", error["message"])

    def test_another_api_process_takes_a_new_version_at_once(self) -> None:
        role = ApiRole()
        other = self.plane.start(role, "api-other").url
        body = {"flavor": {"flavorid": "small"}}
        free = {"flavor": {"flavorid": "small", "resources": {"VCPU": 3}}}
        self.ask("POST", "/instances", free, url=other, status=400)
        self.second()
        self.assertEqual(2, self.ask("POST", "/instances", body, url=other)["flavor_version"])
        # It compares free-form requests with its copy of the catalogue.
        again = {"flavor": {"flavorid": "small", "resources": SECOND}}
        self.ask("POST", "/instances", again, url=other, status=400)
        role._assembly.watch()
        self.assertEqual(2, self.ask("POST", "/instances", again, url=other)["flavor_version"])

    def test_members_read_the_catalogue_and_do_not_change_it(self) -> None:
        (found,) = self.ask("GET", "/flavors")["flavors"]
        self.assertEqual(("small", 1), (found["flavorid"], found["version"]))
        self.ask("GET", "/flavors/small")
        self.ask("POST", "/flavors", {"flavorid": "mine", "resources": FIRST}, status=403)
        self.ask("PATCH", "/flavors/small", {"deprecated": True}, status=403)
        self.ask("POST", "/flavors", {"flavorid": "small", "resources": SECOND}, who="admin", status=409)

    def test_the_commands(self) -> None:
        def run(*words: str) -> Any:
            status, out, err = in_process(main.main, [*words, "--url", self.url, "-f", "json"])
            self.assertEqual(0, status, err)
            return json.loads(out)

        created = run("flavor", "create", "tiny", "--resource", "VCPU=1", "--extra-spec", "hw=x")
        self.assertEqual((1, {"hw": "x"}), (created["version"], json.loads(created["extra_specs"])))
        again = run("flavor", "create", "tiny", "--resource", "VCPU=2", "--expected-version", "1")
        self.assertEqual(2, again["version"])
        self.assertEqual(["small", "tiny"], [each["flavorid"] for each in run("flavor", "list")])
        self.assertEqual({"VCPU": 1}, json.loads(run("flavor", "show", "tiny", "--version", "1")["resources"]))
        self.assertEqual({"VCPU": 2}, json.loads(run("flavor", "show", "tiny")["resources"]))
        made = run("instance", "create", "--flavor", "tiny")
        self.assertEqual(("tiny", 2), (made["flavorid"], made["flavor_version"]))
        self.assertEqual("custom", run("instance", "create", "--resource", "VCPU=1")["flavorid"])
        changed = run("flavor", "deprecate", "tiny", "--successor", "small")
        self.assertEqual([(1, True), (2, True)], [(each["version"], each["deprecated"]) for each in changed])
        (changed,) = run("flavor", "deprecate", "tiny", "--version", "2", "--undo")
        self.assertFalse(changed["deprecated"])

    def test_the_command_adopts_sizes_that_requests_brought_along(self) -> None:
        own = {"flavorid": "own", "resources": SECOND}
        found = self.create(**own)
        kept = self.create()
        command = ["--config-file", "/dev/null", "--set", f"database.connection={self.plane.conf.database.connection}"]
        status, said, err = in_process(manage.main, [*command, "flavor", "adopt"])
        self.assertEqual((0, ""), (status, err))
        self.assertEqual(
            "2 instances were read, and 1 got the version of their flavor.\n1 implicit versions are new.\n", said
        )
        self.check(self.ask("GET", f"/instances/{found['uuid']}"), 1, SECOND, "own")
        self.check(self.ask("GET", f"/instances/{kept['uuid']}"), 1, FIRST)
        self.check(self.act(found["uuid"], {"live_migrate": {}}), 1, SECOND, "own")
        # An implicit version is no version of the catalogue.
        self.refused({"flavorid": "own"}, "There is no flavor own in the catalogue")
        self.check(self.create(flavorid="own", resources={"VCPU": 3}), 0, {"VCPU": 3}, "own")
        (shown,) = (each for each in self.api.flavors(implicit=True) if each["flavorid"] == "own")
        self.assertEqual((1, True), (shown["version"], shown["implicit"]))


class FreeFormPolicyTests(_Case):
    def settings(self) -> dict[str, Any]:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        file = pathlib.Path(folder.name) / "policy.yaml"
        file.write_text(f'"{FREE_FORM}": "rule:system_admin"\n')
        return {"api__policy_file": str(file)}

    def test_members_choose_from_the_catalogue_where_the_policy_says_so(self) -> None:
        self.api.create_flavor("small", FIRST)
        found = self.create()
        free = {"flavorid": "own", "resources": SECOND}
        path = f"/instances/{found['uuid']}/action"
        for place, body in (
            ("/instances", {"flavor": free}),
            ("/select", {"flavor": free, "dry_run": True}),
            (path, {"resize": {"flavor": free}}),
        ):
            error = self.ask("POST", place, body, status=403)["error"]
            self.assertIn(FREE_FORM, error["message"])
        self.ask("POST", path, {"resize": {"flavor": free}}, who="admin")
        self.settled(found["uuid"], "active")
        self.ask("POST", "/instances", {"flavor": free}, who="admin")
