# SPDX-License-Identifier: Apache-2.0
"""Limits of projects as the API shows and sets them."""

from __future__ import annotations

import unittest
from typing import Any

import jsonschema

from moorage import context, errors
from moorage.allocation import quotas_api
from moorage.allocation.interface import ClaimRequest
from moorage.context import RequestContext
from moorage.http.routes import Request, Route
from moorage.testing.allocation import new_uuid, provider
from moorage_plugins.api.placement import resource_classes
from tests.conformance.allocation.stores import SqlCase, memory_store, sql_store

SYSTEM = context.internal("test")
MEMBER = RequestContext(user_id="u", project_id="p", roles=["member"], overwrite=False)


class QuotaApiTests(SqlCase, unittest.TestCase):
    def setUp(self) -> None:
        self.empty()
        self.store = sql_store(self.database)
        self.routes: dict[str, Route] = {each.method: each for each in quotas_api.routes(self.store)}

    def ask(self, method: str, who: RequestContext = SYSTEM, **values: Any) -> Any:
        route = self.routes[method]
        for given, schema in (("query", route.query), ("body", route.body)):
            if given in values and schema is not None:
                jsonschema.validate(values[given], dict(schema))
        answer = route.handler(Request(context=who, **values))
        shown = route.responses[answer.status]
        if shown is not None:
            jsonschema.validate(answer.body, dict(shown))
        return answer.body

    def set(self, project: str, name: str, limit: int) -> Any:
        path = {"project": project, "resource_class": name}
        return self.ask("PUT", path_params=path, body={"limit": limit})

    def test_sets_shows_and_removes_limits(self) -> None:
        node = provider(VCPU=10)
        self.store.ensure_providers([node])
        self.store.claim(ClaimRequest(new_uuid(), {node.uuid: {"VCPU": 3}}, "r", "p"))
        expected = {"project": "p", "resource_class": "VCPU", "limit": 5, "used": 3}
        self.assertEqual(expected, self.set("p", "VCPU", 5))
        other = self.set("q", "VCPU", 0)
        self.assertEqual({"quotas": [expected, other]}, self.ask("GET"))
        self.assertEqual({"quotas": [other]}, self.ask("GET", query={"project": "q"}))
        path = {"project": "q", "resource_class": "VCPU"}
        self.ask("DELETE", path_params=path)
        self.assertEqual({"quotas": [expected]}, self.ask("GET"))
        with self.assertRaisesRegex(errors.NotFound, "Project q has no limit of VCPU"):
            self.ask("DELETE", path_params=path)

    def test_members_see_the_limits_of_their_project_only(self) -> None:
        own = self.set("p", "VCPU", 5)
        self.set("q", "VCPU", 5)
        for query in ({}, {"project": "p"}):
            self.assertEqual({"quotas": [own]}, self.ask("GET", MEMBER, query=query))
        with self.assertRaises(errors.Forbidden):
            self.ask("GET", MEMBER, query={"project": "q"})

    def test_a_project_whose_events_would_have_no_room_is_refused_by_the_schema(self) -> None:
        for method in ("PUT", "DELETE"):
            schema = dict(self.routes[method].path_schemas["project"])
            jsonschema.validate("p" * 244, schema)
            with self.assertRaises(jsonschema.ValidationError):
                jsonschema.validate("p" * 245, schema)
        self.set("p" * 244, "VCPU", 1)

    def test_placement_says_that_a_limit_keeps_a_class(self) -> None:
        self.store.create_resource_class("CUSTOM_LICENSE")
        self.set("p", "CUSTOM_LICENSE", 5)
        (delete,) = (each for each in resource_classes.routes(self.store) if each.method == "DELETE")
        with self.assertRaisesRegex(errors.InUse, "Class is in use in limits of projects"):
            delete.handler(Request(context=SYSTEM, path_params={"name": "CUSTOM_LICENSE"}))

    def test_a_store_without_limits_refuses_with_the_remedy(self) -> None:
        (show, *_) = quotas_api.routes(memory_store())
        with self.assertRaisesRegex(errors.InvalidInput, "store = sql"):
            show.handler(Request(context=SYSTEM))
