# SPDX-License-Identifier: Apache-2.0
"""What can never be right is refused in Placement's shape, and nothing of it is written."""

from __future__ import annotations

import unittest
from typing import Any

import requests

from moorage.allocation.interface import MOST_LEVELS
from tests.api.live import LiveDialect
from tests.api.placement.wire import Wire, claim, code, new_uuid

LARGE = 2**31


class TestInput(unittest.TestCase):
    live: LiveDialect
    wire: Wire
    provider: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.live = LiveDialect("placement")
        cls.addClassCleanup(cls.live.close)
        cls.wire = Wire(cls.live.url)
        cls.provider = cls.wire.provider(VCPU=10)

    def refused(self, method: str, path: str, body: Any = None, status: int = 400) -> requests.Response:
        found = self.wire.send(method, path, body)
        self.assertEqual(status, found.status_code, found.text)
        error = found.json()["errors"][0]
        self.assertEqual({"status", "request_id", "title", "detail", "code"}, set(error) - {"moorage"})
        self.assertEqual(status, error["status"])
        self.assertTrue(error["code"].startswith("placement."), error["code"])
        self.assertTrue(error["detail"])
        self.assertNotIn("Traceback", found.text)
        return found

    def test_claims_that_can_never_be_right(self) -> None:
        consumer = new_uuid()
        path = f"/allocations/{consumer}"
        for name, resources in (
            ("an unknown provider", {new_uuid(): {"VCPU": 1}}),
            ("an unknown class", {self.provider: {"CUSTOM_NOWHERE": 1}}),
            ("nothing of a class", {self.provider: {"VCPU": 0}}),
            ("less than nothing", {self.provider: {"VCPU": -1}}),
            ("half a unit", {self.provider: {"VCPU": 0.5}}),
            ("more than a number holds", {self.provider: {"VCPU": LARGE}}),
            ("far more", {self.provider: {"VCPU": 10**40}}),
            ("a word", {self.provider: {"VCPU": "one"}}),
            ("yes", {self.provider: {"VCPU": True}}),
            ("a class in lower case", {self.provider: {"vcpu": 1}}),
            ("no class", {self.provider: {}}),
            ("a provider that is no uuid", {"host": {"VCPU": 1}}),
        ):
            with self.subTest(name):
                self.refused("PUT", path, claim(resources))  # type: ignore[arg-type]
                both = {self.provider: {"VCPU": 1}, **resources}
                if len(both) > 1:
                    self.refused("PUT", path, claim(both))  # type: ignore[arg-type]
                self.refused("POST", "/allocations", {consumer: claim(resources)})  # type: ignore[arg-type]
        self.assertEqual({"allocations": {}}, self.wire.get(path))
        self.assertEqual({"VCPU": 0}, self.wire.get(f"/resource_providers/{self.provider}/usages")["usages"])

    def test_what_does_not_fit_says_what_was_asked_and_what_is_free(self) -> None:
        found = self.refused("PUT", f"/allocations/{new_uuid()}", claim({self.provider: {"VCPU": 11}}), 409)
        self.assertEqual("placement.allocation.capacity_exceeded", code(found))
        self.assertEqual(
            {"provider": self.provider, "resource_class": "VCPU", "asked": 11, "free": 10},
            found.json()["errors"][0]["moorage"],
        )

    def test_a_provider_below_too_many_levels(self) -> None:
        parent = None
        for _ in range(MOST_LEVELS):
            above, parent = parent, self.wire.provider(parent=parent)
        refused = [
            self.refused("POST", "/resource_providers", {"name": new_uuid(), "parent_provider_uuid": parent}),
            self.refused(
                "PUT", f"/resource_providers/{self.provider}", {"name": "moved", "parent_provider_uuid": parent}
            ),
        ]
        for answer in refused:
            self.assertIn(f"{MOST_LEVELS + 1} levels; the most is {MOST_LEVELS}", answer.text)
        self.assertIsNone(self.wire.get(f"/resource_providers/{self.provider}")["parent_provider_uuid"])
        self.assertTrue(self.wire.provider(parent=above))

    def test_inventories_that_can_never_be_right(self) -> None:
        path = f"/resource_providers/{self.provider}/inventories"
        before = self.wire.get(path)
        for item in (
            {"total": 0},
            {"total": LARGE},
            {"total": 10, "reserved": 11},
            {"total": 10, "reserved": -1},
            {"total": 10, "min_unit": 0},
            {"total": 10, "step_size": 0},
            {"total": 10, "max_unit": LARGE},
            {"total": 10, "allocation_ratio": -1.0},
            {"total": 10, "allocation_ratio": "much"},
            {"total": 10, "colour": "blue"},
        ):
            with self.subTest(item):
                given = {"VCPU": {"total": 99}, "DISK_GB": item}
                generation = before["resource_provider_generation"]
                body = {"resource_provider_generation": generation, "inventories": given}
                self.refused("PUT", path, body)
                self.refused("POST", path, {"resource_class": "DISK_GB", **item})
        self.assertEqual(before, self.wire.get(path))

    def test_names_of_all_scripts_stay_what_they_are(self) -> None:
        for name in ("☃", "機架-7", "Gehäuse №1", "é" * 200, "🗄️", "'; DROP TABLE resource_providers; --"):
            with self.subTest(name):
                uuid = self.wire.provider(name=name, VCPU=1)
                self.assertEqual(name, self.wire.get(f"/resource_providers/{uuid}")["name"])
        self.refused("POST", "/resource_providers", {"name": "x" * 201})
        self.refused("POST", "/resource_providers", {"name": "nul\0"})

    def test_bodies_that_are_no_json(self) -> None:
        for raw in (b"", b"{", b"\xff\xfe", b'{"name": NaN}', b"[" * 100_000, b'{"name": "a", "name": "b"}'):
            with self.subTest(raw[:10]):
                found = requests.post(
                    self.live.url + "/resource_providers",
                    data=raw,
                    headers={
                        "X-Auth-Token": "admin",
                        "OpenStack-System-Scope": "all",
                        "Content-Type": "application/json",
                    },
                    timeout=60,
                )
                self.assertEqual(400, found.status_code, found.text)
                self.assertIn("Malformed JSON", found.json()["errors"][0]["detail"])

    def test_queries_that_can_never_be_right(self) -> None:
        for query in (
            "resources=VCPU",
            "resources=VCPU:-1",
            "resources=VCPU:1:1",
            "resources=VCPU:0x1",
            "resources=NOTHING:1",
            "resources=VCPU:1&limit=0",
            "resources=VCPU:1&required=",
            "resources=VCPU:1&required=CUSTOM_NOWHERE",
            "resources=VCPU:1&member_of=here",
            "resources=VCPU:1&in_tree=there",
            "resources1=VCPU:1&resources2=VCPU:1",
            "resources=VCPU:1&same_subtree=_A",
            "resources=VCPU:1&colour=blue",
            "required=HW_CPU_X86_AVX",
            "",
        ):
            with self.subTest(query):
                self.refused("GET", f"/allocation_candidates?{query}")
        self.refused("GET", "/resource_providers?uuid=me")
        self.refused("GET", "/usages")
        self.refused("GET", "/traits?name=any")
