# SPDX-License-Identifier: Apache-2.0
"""The order of the checks of a request, and the answers that all APIs give alike."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any

from oslo_context import context as oslo_context

from moorage import errors, options
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.control_plane.core_api import CoreApplication
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.routes import Request, Response, Route
from moorage.testing.http import ReceivedResponse, send

BODY = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
QUERY = {
    "type": "object",
    "properties": {"limit": {"type": "integer"}, "tag": {"type": "array", "items": {"type": "string"}}},
    "additionalProperties": False,
}


class ApplicationTests(unittest.TestCase):
    tools: Any

    def setUp(self) -> None:
        self.seen: list[Request] = []
        self.counted: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.tools = SimpleNamespace(
            conf=options.defaults(),
            clock=SystemClock(),
            authenticate=self.authenticate,
            check_policy=self.check_policy,
            count=lambda *counted: self.counted.append(counted[:3]),
        )
        self.routes = [
            Route("GET", "/things", self.handle, "things:get", query=QUERY),
            Route("POST", "/things", self.handle, "things:create", body=BODY),
            Route("GET", "/things/{name}", self.handle, "things:get"),
            Route("DELETE", "/things/{name}", self.handle, "things:delete"),
            Route("GET", "/public", self.handle, public=True),
            Route("PUT", "/public", self.handle, "things:create"),
        ]
        self.application = Application(Dialect("things", (1, 0), (1, 2)), self.routes, self.tools)

    def authenticate(self, environ: dict[str, Any]) -> RequestContext:
        current = oslo_context.get_current()
        self.assertIsNone(current and current.user_id)
        if "HTTP_X_USER" not in environ:
            raise errors.Unauthenticated("Who is calling?")
        return RequestContext(user_id=environ["HTTP_X_USER"], overwrite=False)

    def check_policy(self, rule: str, context: RequestContext, target: Any = None) -> None:
        if context.user_id != "admin":
            raise errors.Forbidden(f"The policy {rule} does not let you do this.", rule=rule)

    def handle(self, request: Request) -> Response:
        self.seen.append(request)
        if self.failure is not None:
            raise self.failure
        return Response(200, {"name": "thing"})

    def send(
        self, method: str, target: str, body: Any = None, user: str | None = "admin", **headers: str
    ) -> ReceivedResponse:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return send(self.application, method, target, body, given | ({"X-User": user} if user else {}))

    def refused(self, status: int, answer: ReceivedResponse) -> str:
        self.assertEqual(status, answer.status, answer.body)
        self.assertEqual([], self.seen)
        return str(answer.json["error"]["message"])

    def test_a_handler_gets_typed_parameters_of_the_query(self) -> None:
        self.assertEqual(200, self.send("GET", "/things?limit=3&tag=a&tag=b").status)
        self.assertEqual({"limit": 3, "tag": ["a", "b"]}, self.seen[0].query)

    def test_a_query_that_no_schema_allows_is_refused_and_named(self) -> None:
        self.assertIn("limit", self.refused(400, self.send("GET", "/things?limit=many")))
        self.assertIn("2 times", self.refused(400, self.send("GET", "/things?limit=1&limit=2")))
        self.assertIn("colour", self.refused(400, self.send("GET", "/things?colour=red")))
        self.assertIn("limit", self.refused(400, self.send("GET", "/things/a?limit=1")))
        self.assertIn("query/tag", self.refused(400, self.send("GET", "/things?tag=%00")))

    def test_a_body_is_json_of_the_schema(self) -> None:
        self.assertEqual(200, self.send("POST", "/things", {"name": "a"}).status)
        self.assertEqual({"name": "a"}, self.seen.pop().body)
        self.assertIn("needed", self.refused(400, self.send("POST", "/things")))
        self.assertIn("colour", self.refused(400, self.send("POST", "/things", {"colour": "red"})))
        self.assertIn("not JSON", self.refused(400, self.send("POST", "/things", b"{")))

    def test_a_body_of_another_type_is_refused_and_its_type_named(self) -> None:
        form = self.send("POST", "/things", b"name=a", Content_Type="application/x-www-form-urlencoded")
        self.assertIn("application/x-www-form-urlencoded", self.refused(415, form))
        self.assertEqual(200, self.send("POST", "/things", {}, Content_Type="application/json; charset=utf-8").status)
        self.assertEqual(200, self.send("POST", "/things", {}, Content_Type="").status)

    def test_a_body_where_none_belongs_is_refused_unless_it_says_nothing(self) -> None:
        self.assertIn("takes no body (it has name)", self.refused(400, self.send("DELETE", "/things/a", {"name": 1})))
        self.refused(400, self.send("DELETE", "/things/a", b"text"))
        for nothing in (None, b"null", b"{}"):
            self.assertEqual(200, self.send("DELETE", "/things/a", nothing).status)

    def test_a_body_above_the_limit_is_refused_unread_and_the_connection_closed(self) -> None:
        limit = self.tools.conf.api.max_body_bytes
        for headers in ({"Content_Length": str(limit + 1)}, {"Transfer_Encoding": "chunked"}):
            with self.subTest(headers=headers):
                body = b"{}" if "Content_Length" in headers else b" " * (limit + 1)
                answer = self.send("POST", "/things", body, **headers)
                self.refused(413, answer)
                self.assertEqual("close", answer.header("Connection"))

    def test_credentials_are_checked_before_path_method_policy_and_body(self) -> None:
        for method, target in (("GET", "/things"), ("PUT", "/things"), ("GET", "/nothing"), ("POST", "/things")):
            with self.subTest(method=method, target=target):
                answer = self.send(method, target, user=None)
                self.refused(401, answer)
                self.assertEqual('Basic realm="moorage"', answer.header("WWW-Authenticate"))
        self.assertIn("things:create", self.refused(403, self.send("POST", "/things", b"{", user="other")))

    def test_a_public_route_needs_no_credentials_and_the_others_of_its_path_do(self) -> None:
        self.assertEqual(200, self.send("GET", "/public", user=None).status)
        self.seen.clear()
        self.refused(401, self.send("PUT", "/public", user=None))

    def test_a_method_that_a_path_does_not_have_is_405_with_those_it_has(self) -> None:
        answer = self.send("PUT", "/things")
        self.refused(405, answer)
        self.assertEqual("GET, POST", answer.header("Allow"))
        self.assertIn("/nothing", self.refused(404, self.send("GET", "/nothing")))
        self.refused(404, self.send("GET", "/things/"))

    def test_head_is_get_without_the_body(self) -> None:
        shown, head = self.send("GET", "/things"), self.send("HEAD", "/things")
        self.assertEqual((200, b""), (head.status, head.body))
        self.assertEqual(shown.header("Content-Length"), head.header("Content-Length"))

    def test_options_is_answered_by_the_core_without_credentials_and_by_no_dialect(self) -> None:
        self.refused(405, self.send("OPTIONS", "/things"))
        core = CoreApplication(self.routes, self.tools)
        answer = send(core, "OPTIONS", "/things")
        self.assertEqual((200, "GET, OPTIONS, POST", b""), (answer.status, answer.header("Allow"), answer.body))
        self.assertEqual(
            "DELETE, GET, OPTIONS", send(core, "PATCH", "/things/a", headers={"X-User": "admin"}).header("Allow")
        )

    def test_every_answer_names_request_and_version(self) -> None:
        for user, method, target in (
            ("admin", "GET", "/things"),
            (None, "GET", "/things"),
            ("admin", "PUT", "/things"),
        ):
            answer = self.send(method, target, user=user, OpenStack_API_Version="things 1.1")
            # Of version 7: ids sort by time.
            self.assertRegex(
                answer.header("X-OpenStack-Request-ID") or "", "^req-[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f-]{21}$"
            )
            self.assertEqual("things 1.1", answer.header("OpenStack-API-Version"))
            self.assertEqual("OpenStack-API-Version", answer.header("Vary"))
        self.seen.clear()
        self.assertIn("1.0 to 1.2", self.refused(406, self.send("GET", "/things", OpenStack_API_Version="things 1.3")))
        self.refused(406, self.send("GET", "/things", OpenStack_API_Version="things one"))

    def test_log_lines_of_a_refused_request_do_not_name_the_request_before_it(self) -> None:
        for user, method, target, caller in (
            ("admin", "GET", "/things", "admin"),
            (None, "GET", "/things", None),
            ("admin", "GET", "/things", "admin"),
            (None, "GET", "/public", None),
        ):
            answer = self.send(method, target, user=user)
            found = oslo_context.get_current()
            assert found is not None
            self.assertEqual(
                (answer.header("X-OpenStack-Request-ID"), caller), (found.request_id, found.user_id), (method, target)
            )

    def test_requests_are_counted_by_the_template_of_their_path(self) -> None:
        self.send("GET", "/things/a")
        self.send("GET", "/nothing")
        self.assertEqual([("GET", "/things/{name}", 200), ("GET", "", 404)], self.counted)

    def test_an_internal_error_is_500_shows_nothing_and_is_in_the_log(self) -> None:
        for failure in (KeyError("secret"), errors.ConfigError("The file /etc/secret cannot be read.")):
            self.failure = failure
            with self.subTest(failure=failure), self.assertLogs("moorage.http.application", "ERROR") as logs:
                answer = self.send("GET", "/things")
                self.assertEqual(500, answer.status)
                self.assertNotIn("secret", answer.body.decode())
                self.assertIn(str(answer.header("X-OpenStack-Request-ID")), answer.json["error"]["message"])
                self.assertIn("secret", logs.output[0])

    def test_a_plugin_that_failed_is_named(self) -> None:
        self.failure = errors.PluginFailed("The filter even raised KeyError.")
        with self.assertLogs("moorage.http.application", "ERROR"):
            answer = self.send("GET", "/things")
        self.assertEqual((500, "moorage.plugin_failed"), (answer.status, answer.json["error"]["code"]))
        self.assertIn("The filter even", answer.json["error"]["message"])

    def test_an_outage_is_503_with_the_time_to_try_again(self) -> None:
        self.failure = errors.Unavailable("The store is away.", retry_after=7)
        answer = self.send("GET", "/things")
        self.assertEqual((503, "7"), (answer.status, answer.header("Retry-After")))
