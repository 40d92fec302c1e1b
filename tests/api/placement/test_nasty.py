# SPDX-License-Identifier: Apache-2.0
"""Every value of every body and query replaced by something nasty: whatever is answered, it is no server error."""

from __future__ import annotations

import copy
import unittest
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

import tests
from tests import servers
from tests.api.live import LiveDialect
from tests.api.placement.wire import Wire, claim, new_uuid

_NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.0, 0.5, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308),
    *("", " ", "x" * 300, "☃", "\0", "\ud800", "' OR 1=1 --", "%s", "../..", [], {}, [[]], {"": ""}),
)
_NASTY_TEXTS = (
    "",
    " ",
    "x" * 5000,
    "☃",
    "\0",
    "0",
    "-1",
    str(2**31),
    str(10**40),
    "1" * 5000,
    "1e5",
    "in:",
    "!",
    "!in:",
    ",",
    ":",
    "VCPU:",
    "%",
)


def _variants(body: Any) -> Iterator[Any]:
    """The body with one value, of any depth, replaced; and with one key, likewise."""
    yield from _NASTY
    for path in _paths(body):
        for value in _NASTY:
            variant = copy.deepcopy(body)
            at = variant
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = value
            yield variant
        if isinstance(path[-1], str):
            for key in ("", "☃", "x" * 300, "VCPU", new_uuid()):
                variant = copy.deepcopy(body)
                at = variant
                for step in path[:-1]:
                    at = at[step]
                at[key] = at.pop(path[-1])
                yield variant


def _paths(data: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield (*before, key)
        yield from _paths(value, (*before, key))


class TestNasty(unittest.TestCase):
    """On SQLite; the subclasses take other databases."""

    server: str | None = None
    wire: Wire
    provider: str

    @classmethod
    def setUpClass(cls) -> None:
        url = servers.fresh_database(servers.shared(cls.server)) if cls.server else None
        live = LiveDialect("placement", url=url, policies='"service_api": "role:admin"\n')
        cls.addClassCleanup(live.close)
        cls.wire = Wire(live.url)
        cls.provider = cls.wire.provider(VCPU=10)

    def bodies(self) -> Iterator[tuple[str, str, Any]]:
        """Method, path, and a body that is right."""
        provider, consumer = self.provider, new_uuid()
        held = claim({provider: {"VCPU": 1}})
        held["mappings"] = {"": [provider]}
        inventories = {"VCPU": {"total": 10, "allocation_ratio": 1.5, "max_unit": 4}}
        generation = self.wire.get(f"/resource_providers/{provider}")["generation"]
        of_generation = {"resource_provider_generation": generation}
        at = f"/resource_providers/{provider}"
        yield "POST", "/resource_providers", {"name": "n", "uuid": new_uuid(), "parent_provider_uuid": provider}
        yield "PUT", at, {"name": "renamed", "parent_provider_uuid": None}
        yield "POST", f"{at}/inventories", {"resource_class": "DISK_GB", "total": 1}
        yield "PUT", f"{at}/inventories", {**of_generation, "inventories": inventories}
        yield "PUT", f"{at}/inventories/VCPU", {**of_generation, **inventories["VCPU"]}
        yield "PUT", f"{at}/aggregates", {**of_generation, "aggregates": [new_uuid()]}
        yield "PUT", f"{at}/traits", {**of_generation, "traits": ["HW_CPU_X86_AVX"]}
        yield "POST", "/resource_classes", {"name": "CUSTOM_NASTY"}
        yield "PUT", f"/allocations/{consumer}", held
        yield "POST", "/allocations", {consumer: held}
        reshaped = {provider: {**of_generation, "inventories": inventories}}
        yield "POST", "/reshaper", {"inventories": reshaped, "allocations": {consumer: held}}

    def fine(self, method: str, path: str, body: Any = None) -> None:
        answer = self.wire.send(method, path, body)
        if answer.status_code >= 500:
            self.fail(f"{method} {path[:200]} {str(body)[:500]}: {answer.status_code} {answer.text}")

    def test_bodies(self) -> None:
        for method, path, body in self.bodies():
            with self.subTest(f"{method} {path}"):
                for variant in _variants(body):
                    self.fine(method, path, variant)

    def test_queries(self) -> None:
        names = (
            "resources",
            "required",
            "member_of",
            "in_tree",
            "limit",
            "group_policy",
            "root_required",
            "same_subtree",
        )
        for text in _NASTY_TEXTS:
            for name in (*names, "resources_A", "required_A", "in_tree_A"):
                query = {"resources": "VCPU:1", name: text}
                self.fine("GET", f"/allocation_candidates?{urlencode(query)}")
            for name in ("name", "uuid", "member_of", "resources", "in_tree", "required"):
                self.fine("GET", f"/resource_providers?{urlencode({name: text})}")
            for name in ("project_id", "user_id", "consumer_type"):
                self.fine("GET", f"/usages?{urlencode({'project_id': 'p', name: text})}")
            for name in ("name", "associated"):
                self.fine("GET", f"/traits?{urlencode({name: text})}")
                self.fine("GET", f"/traits?{urlencode({name: 'in:' + text})}")
            for amount in (2**31, 2**63, 10**40):
                self.fine("GET", f"/allocation_candidates?resources=VCPU:{amount}")
                self.fine("GET", f"/resource_providers?resources=VCPU:{amount}")

    def test_more_than_anybody_can_mean(self) -> None:
        groups = "&".join(f"resources{number}=VCPU:1" for number in range(1, 1500))
        many = {f"CUSTOM_X{number}": 1 for number in range(1200)}
        classes = ",".join(f"{name}:1" for name in many)
        for path in (
            f"/allocation_candidates?group_policy=none&{groups}",
            f"/allocation_candidates?resources={classes}",
            f"/resource_providers?resources={classes}",
        ):
            self.assertEqual(400, self.wire.send("GET", path).status_code)
        body = claim({self.provider: many})
        self.assertEqual(400, self.wire.send("PUT", f"/allocations/{new_uuid()}", body).status_code)
        twice = claim({self.provider: {"VCPU": 1}, self.provider.upper(): {"VCPU": 2}})
        self.assertEqual(400, self.wire.send("PUT", f"/allocations/{new_uuid()}", twice).status_code)

    def test_paths(self) -> None:
        for text in _NASTY_TEXTS:
            part = quote(text, safe="")
            for path in (
                *("/resource_providers/{}", "/resource_providers/{}/inventories", "/resource_providers/{}/traits"),
                *("/resource_providers/{}/usages", "/resource_providers/{}/allocations", "/allocations/{}"),
                *("/resource_classes/{}", "/traits/{}", f"/resource_providers/{self.provider}/inventories/{{}}"),
            ):
                for method in ("GET", "DELETE", "PUT"):
                    self.fine(method, path.format(part))


class PostgresqlNasty(TestNasty):
    server = "postgresql"


@unittest.skipUnless(tests.SOAK, "the third database is tried by 'make soak'")
class MariadbNasty(TestNasty):
    server = "mariadb"
