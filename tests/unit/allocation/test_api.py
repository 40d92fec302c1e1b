# SPDX-License-Identifier: Apache-2.0
"""Allocations and usages as the API shows them, with the schemas that it publishes."""

from __future__ import annotations

import unittest
from typing import Any

import jsonschema

from moorage import context, errors
from moorage.allocation import api
from moorage.allocation.interface import ClaimRequest, InventoryItem
from moorage.http.routes import Request, Route
from moorage.testing.allocation import new_uuid, provider
from tests.conformance.allocation.stores import memory_store


class AllocationApiTests(unittest.TestCase):
    def setUp(self) -> None:
        self.store = memory_store()
        self.routes: dict[str, Route] = {each.path: each for each in api.routes(self.store)}
        self.given = [
            provider(f"größe-{number}", VCPU=InventoryItem("VCPU", 10, 2, allocation_ratio=1.5), DISK_GB=5)
            for number in range(3)
        ]
        self.store.ensure_providers(self.given)
        self.consumers = sorted(new_uuid() for _ in range(4))
        for number, consumer in enumerate(self.consumers):
            chosen = self.given[number % 3].uuid
            self.store.claim(ClaimRequest(consumer, {chosen: {"VCPU": 2, "DISK_GB": 1}}))

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        route = self.routes[path]
        assert route.query is not None
        jsonschema.validate(query, dict(route.query))
        answer = route.handler(Request(context=context.internal("test"), query=query))
        self.assertEqual(200, answer.status)
        schema = route.responses[200]
        assert schema is not None
        jsonschema.validate(answer.body, dict(schema))
        return dict(answer.body)

    def pages(self, path: str, key: str, limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": limit}
        while True:
            page = self.get(path, **query)
            self.assertLessEqual(len(page[key]), limit)
            found += page[key]
            if page["next_after"] is None:
                return found
            query["after"] = page["next_after"]

    def test_pages_hold_every_allocation_once(self) -> None:
        whole = self.get("/allocations")["allocations"]
        self.assertEqual(8, len(whole))
        for limit in (1, 3, 4, 8):
            self.assertEqual(whole, self.pages("/allocations", "allocations", limit))

    def test_pages_hold_every_provider_once_with_what_is_used(self) -> None:
        whole = self.get("/usages")["usages"]
        self.assertEqual(sorted(each.uuid for each in self.given), [each["uuid"] for each in whole])
        for limit in (1, 2, 3):
            self.assertEqual(whole, self.pages("/usages", "usages", limit))
        (shown,) = self.get("/usages", provider=self.given[0].uuid)["usages"]
        self.assertEqual(
            {
                "VCPU": {"total": 10, "reserved": 2, "capacity": 12.0, "used": 4},
                "DISK_GB": {"total": 5, "reserved": 0, "capacity": 5.0, "used": 2},
            },
            {
                item["resource_class"]: {name: item[name] for name in ("total", "reserved", "capacity", "used")}
                for item in shown["inventories"]
            },
        )

    def test_allocations_are_chosen_by_consumer_and_provider(self) -> None:
        found = self.get("/allocations", consumer=self.consumers[1])["allocations"]
        self.assertEqual({self.given[1].uuid}, {each["provider"] for each in found})
        found = self.get("/allocations", provider=self.given[0].uuid)["allocations"]
        self.assertEqual({self.consumers[0], self.consumers[3]}, {each["consumer"] for each in found})

    def test_what_is_no_key_is_refused(self) -> None:
        handler = self.routes["/allocations"].handler
        for after in ("x", "a,b", "a,b,c,d", ",b,VCPU"):
            with self.subTest(after=after), self.assertRaises(errors.InvalidInput):
                handler(Request(context=context.internal("test"), query={"after": after}))

    def test_every_route_is_guarded_by_a_rule_of_this_family(self) -> None:
        names = {rule.name for rule in api.POLICIES}
        self.assertEqual(names, {route.policy for route in self.routes.values()})
