# SPDX-License-Identifier: Apache-2.0
"""Cleanup as the API shows it, with the schemas that it publishes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from typing import Any

import jsonschema

from moorage import context, errors
from moorage.cleanup import api
from moorage.cleanup.coordinator import CleanupFilter
from moorage.http.routes import Request, Response, Route
from tests.unit.cleanup import coordinator_tests
from tests.unit.work.operation_tests import TYPE


class CleanupApiTests(coordinator_tests.SupervisorCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
        self.routes: dict[tuple[str, str], Route] = {
            (each.method, each.path): each for each in api.routes(self.views, self.requests, self, [TYPE, "gadget"])
        }

    def ask(self, method: Any = None, args: Any = None, **more: Any) -> Any:  # type: ignore[override]
        """What a scheduler answers, through the messages' JSON."""
        if not isinstance(method, str):
            return super().ask(method, **more)
        given: Mapping[str, Any] = json.loads(json.dumps(args))
        if method == "request_cleanup":
            filters = CleanupFilter(**given["filters"])
            return self.coordinator.request(filters, given["requested_by"], dry_run=given["dry_run"])
        return self.coordinator.automatic(given["requested_by"], dry_run=given["dry_run"])

    def call(self, method: str, path: str, body: Any = None, query: Any = None, **parts: str) -> Response:
        route = self.routes[method, path]
        if route.query is not None:
            jsonschema.validate(query or {}, dict(route.query))
        if route.body is not None:
            jsonschema.validate(body, dict(route.body))
        answer = route.handler(
            Request(context=context.internal("test"), path_params=parts, query=query or {}, body=body)
        )
        schema = route.responses[answer.status]
        if schema is not None:
            jsonschema.validate(json.loads(json.dumps(answer.body)), dict(schema))
        return answer

    def test_from_a_dead_service_to_the_history(self) -> None:
        for uuid in ("one", "two"):
            self.left_by("a", uuid)
        self.die("a")
        dry = self.call("POST", "/cleanup", {"dry_run": True})
        self.assertEqual((dry.status, [row["would"] for row in dry.body["would_clean"]]), (200, ["yes", "yes"]))
        asked = self.call("POST", "/cleanup", {"host": "a", "is_up": False})
        self.assertEqual((asked.status, len(asked.body["cleaning"])), (202, 1))
        uuid = asked.body["requests"][0]["uuid"]
        shown = self.call("GET", "/cleanup/requests/{uuid}", uuid=uuid).body
        self.assertEqual((shown["state"], shown["left"], shown["requested_by"]), ("open", {"working": 2}, "test"))
        cleaner, handler = self.cleaner(self.who["b"], max_attempts=1)
        handler.answers["two"] = ValueError("broken")
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            cleaner.clean(self.requests.get(uuid).target)
        key = {"resource_type": TYPE, "resource_id": "two"}
        rows = self.call("GET", "/workers", query={"phase": "quarantined"}).body
        self.assertEqual(([row["resource_id"] for row in rows["workers"]], rows["next_after"]), (["two"], None))
        self.assertEqual(self.call("POST", "/workers/{resource_type}/{resource_id}/retry", **key).status, 200)
        with self.assertRaises(errors.Conflict):
            self.call("DELETE", "/workers/{resource_type}/{resource_id}", **key)
        with self.assertRaises(errors.NotFound):
            self.call("GET", "/workers/{resource_type}/{resource_id}", resource_type=TYPE, resource_id="x" * 300)
        told = self.call("GET", "/cleanup/history", query={"limit": 1}).body
        rest = self.call("GET", "/cleanup/history", query={"after": told["next_after"]}).body
        self.assertEqual(
            sorted(row["outcome"] for row in (*told["history"], *rest["history"])), ["done", "quarantined"]
        )

    def test_automatic_cleanup_by_a_persons_word(self) -> None:
        self.left_by("a")
        self.die("a")
        for _ in range(3):
            self.coordinator.sample()
        self.assertEqual(self.call("POST", "/cleanup/auto", {"dry_run": True}).status, 200)
        answer = self.call("POST", "/cleanup/auto", {})
        self.assertEqual((answer.status, len(answer.body["requests"])), (202, 1))
        self.assertEqual(len(self.call("GET", "/cleanup/requests", query={"open": True}).body["requests"]), 1)
        self.assertEqual(self.call("GET", "/cleanup/requests", query={"open": False}).body["requests"], [])

    def test_pages_of_rows(self) -> None:
        for number in range(3):
            self.create(str(number))
        page = self.call("GET", "/workers", query={"limit": 2}).body
        rest = self.call("GET", "/workers", query={"limit": 2, "after": page["next_after"]}).body
        self.assertEqual([row["resource_id"] for row in (*page["workers"], *rest["workers"])], ["0", "1", "2"])
        self.assertIsNone(rest["next_after"])

    def test_a_type_that_nothing_cleans_is_refused_with_those_that_are(self) -> None:
        of_row = "/workers/{resource_type}/{resource_id}"
        key = {"resource_type": "nonsense", "resource_id": "one"}
        for call in (
            lambda: self.call("POST", "/cleanup", {"resource_type": "nonsense"}),
            lambda: self.call("POST", "/cleanup", {"resource_type": "Thing", "dry_run": True}),
            lambda: self.call("POST", f"{of_row}/retry", **key),
            lambda: self.call("DELETE", of_row, **key),
            lambda: self.call("GET", "/cleanup/history", query={"resource_type": "nonsense"}),
            lambda: self.call("GET", "/workers", query={"resource_type": "nonsense"}),
        ):
            with self.assertRaisesRegex(errors.InvalidInput, "enabled_handlers has gadget, thing") as caught:
                call()
            self.assertEqual(caught.exception.details["path"], "resource_type")
        self.assertEqual(self.requests.page(), [])
        self.assertEqual(self.call("POST", "/cleanup", {"resource_type": "gadget"}).status, 202)
        self.assertEqual(self.call("GET", "/cleanup/history", query={"resource_type": "gadget"}).body["history"], [])

    def test_what_was_written_of_a_type_while_it_was_cleaned_can_be_seen_and_discarded(self) -> None:
        self.left_by("a")
        self.die("a")
        asked = self.call("POST", "/cleanup", {}).body["requests"][0]["uuid"]
        cleaner, handler = self.cleaner(self.who["b"], max_attempts=1)
        handler.answers["one"] = ValueError("broken")
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            cleaner.clean(self.requests.get(asked).target)
        self.routes = {
            (each.method, each.path): each for each in api.routes(self.views, self.requests, self, ["gadget"])
        }
        key, query = {"resource_type": TYPE, "resource_id": "one"}, {"resource_type": TYPE}
        self.assertEqual(len(self.call("GET", "/workers", query=query).body["workers"]), 1)
        (told,) = self.call("GET", "/cleanup/history", query=query).body["history"]
        rest = self.call("GET", "/cleanup/history", query={**query, "after": told["id"]})
        self.assertEqual(rest.body["history"], [], "the page after the last one")
        with self.assertRaisesRegex(errors.InvalidInput, "gadget"):
            self.call("POST", "/workers/{resource_type}/{resource_id}/retry", **key)
        self.assertEqual(self.call("DELETE", "/workers/{resource_type}/{resource_id}", **key).status, 204)
