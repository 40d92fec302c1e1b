# SPDX-License-Identifier: Apache-2.0
"""The quota source keystone, over HTTP: what it makes of answers, and what it says of answers that it cannot use.

``tests/functional/keystone`` asks a real Keystone.
"""

from __future__ import annotations

import http.server
import json
import threading
import unittest
from typing import Any, ClassVar
from urllib.parse import urlsplit

from typing_extensions import override

from moorage import errors, options
from moorage_plugins.quota_sources import keystone
from moorage_plugins.quota_sources.keystone import KeystoneQuotaSource


def registered(name: str, limit: int, region: str | None = None) -> dict[str, Any]:
    return {"resource_name": name, "default_limit": limit, "region_id": region}


def own(project: str | None, name: str, limit: int, region: str | None = None) -> dict[str, Any]:
    return {"project_id": project, "resource_name": name, "resource_limit": limit, "region_id": region}


class KeystoneLimitTests(unittest.TestCase):
    #: path -> status and answer; what Keystone answers to a user with the role reader on the system.
    answers: ClassVar[dict[str, tuple[int, Any]]]

    def setUp(self) -> None:
        case = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                case.asked.append(self.path)
                self.answer(*case.answers.get(urlsplit(self.path).path, (404, {"error": {"message": "No."}})))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(*case.answers["/v3/auth/tokens"])

            def answer(self, status: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("X-Subject-Token", "token")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            @override
            def log_message(self, format: str, *args: Any) -> None:
                """Tests print nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{server.server_port}/v3"
        version = {"id": "v3.14", "status": "stable", "links": [{"rel": "self", "href": self.url}]}
        token = {"methods": ["password"], "expires_at": "2999-01-01T00:00:00.000000Z", "user": {}, "catalog": []}
        type(self).answers = {
            "/v3": (200, {"version": version}),
            "/v3/auth/tokens": (201, {"token": token}),
            "/v3/limits/model": (200, {"model": {"name": "flat", "description": ""}}),
            "/v3/services": (200, {"services": [{"id": "s1"}]}),
            "/v3/registered_limits": (200, {"registered_limits": [registered("class:VCPU", 10)]}),
            "/v3/limits": (200, {"limits": [own("p", "class:VCPU", 20)]}),
            "/v3/projects": (200, {"projects": [{"id": "p"}, {"id": "q"}]}),
        }

    def source(self, **values: Any) -> KeystoneQuotaSource:
        section = {"auth_url": self.url, "password": "secret", "timeout": 5.0, **values}
        return KeystoneQuotaSource(conf=options.defaults(quota_keystone=section))

    def test_a_limit_of_a_project_goes_before_the_registered_default(self) -> None:
        self.assertEqual({"p": {"VCPU": 20}, "q": {"VCPU": 10}}, self.source().limits())
        self.assertIn("/v3/services?name=moorage", self.asked)
        self.assertIn("/v3/limits?service_id=s1", self.asked)

    def test_limits_of_the_region_go_before_those_without_one_and_others_have_no_effect(self) -> None:
        self.answers["/v3/registered_limits"] = (
            200,
            {
                "registered_limits": [
                    registered("class:VCPU", 11, "one"),
                    registered("class:VCPU", 10),
                    registered("class:VCPU", 12, "two"),
                ]
            },
        )
        self.answers["/v3/limits"] = (200, {"limits": [own("p", "class:VCPU", 22, "two"), own("p", "class:VCPU", 20)]})
        for region, p, q in (("", 20, 10), ("one", 20, 11), ("two", 22, 12)):
            self.assertEqual({"p": {"VCPU": p}, "q": {"VCPU": q}}, self.source(region=region).limits(), region)

    def test_unlimited_classes_domains_and_other_resources_limit_no_project(self) -> None:
        several = [registered("class:VCPU", 10), registered("class:DISK_GB", -1), registered("servers", 3)]
        self.answers["/v3/registered_limits"] = (200, {"registered_limits": several})
        limits = [own("p", "class:VCPU", -1), own(None, "class:VCPU", 1), own("deleted", "class:VCPU", 1)]
        self.answers["/v3/limits"] = (200, {"limits": limits})
        source = self.source()
        with self.assertLogs(keystone.__name__, "WARNING") as logs:
            self.assertEqual({"p": {}, "q": {"VCPU": 10}}, source.limits())
            source.limits()
        self.assertEqual(1, len(logs.output))
        self.assertIn("servers have no effect", logs.output[0])

    def test_answers_that_do_not_say_all_limits_are_refused_with_the_remedy(self) -> None:
        no = {"error": {"code": 403, "message": "You are not authorized", "title": "Forbidden"}}
        for path, status, body, sentence in (
            ("/v3/limits/model", 200, {"model": {"name": "strict_two_level"}}, "the model strict_two_level"),
            ("/v3/services", 200, {"services": []}, "has 0 services named moorage"),
            ("/v3/projects", 200, {"projects": [], "truncated": True}, "only a part of /projects"),
            ("/v3/projects", 403, no, "GET /projects: Forbidden.* role reader on the system"),
            ("/v3/auth/tokens", 401, no, "Unauthorized.* role reader on the system"),
            ("/v3/limits", 500, no, "GET /limits: InternalServerError"),
            ("/v3/limits", 200, {"answer": 1}, "is not Keystone: GET /limits has no limits"),
            ("/v3/limits", 200, [1], "is not Keystone: GET /limits has no limits"),
            ("/v3/limits", 200, b"<html>", "is not Keystone"),
            ("/v3/limits", 200, {"limits": [{"project_id": "p"}]}, "is not Keystone"),
        ):
            with self.subTest(path=path, status=status, body=body):
                before = self.answers[path]
                self.answers[path] = (status, body)
                with self.assertRaisesRegex(errors.Unavailable, sentence) as refused:
                    self.source().limits()
                self.assertIn("keeps the limits that it has", refused.exception.message)
                self.assertNotIn("secret", refused.exception.message)
                self.answers[path] = before

    def test_a_keystone_that_is_away_is_unavailable(self) -> None:
        with self.assertRaisesRegex(errors.Unavailable, "does not say what the limits of projects are"):
            self.source(auth_url="http://127.0.0.1:1/v3").limits()
