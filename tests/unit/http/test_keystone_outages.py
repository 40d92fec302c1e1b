# SPDX-License-Identifier: Apache-2.0
"""Keystone that does not answer or has a broken catalog: 503 in the mount's own shape; a 401 advertises Keystone."""

from __future__ import annotations

import datetime
import json
import tempfile
import threading
import unittest
from http import server
from typing import Any

from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.core_api import CoreApplication
from moorage.control_plane.interface import ApiTools
from moorage.http import authentication
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.middleware import with_middleware
from moorage.http.policy import AccessPolicy
from moorage.http.routes import PolicyRule, Response, Route
from moorage.testing.http import ReceivedResponse, send
from tests.servers import free_port

RULE = PolicyRule("test:get", "role:reader", "Read.")


class Keystone(server.BaseHTTPRequestHandler):
    """Issues a token to the service user, with a catalog that the test chooses; knows no other token."""

    catalog: tuple[Any, ...] = ()

    def do_GET(self) -> None:
        url = f"http://{self.headers['Host']}/v3/"
        version = {"id": "v3.14", "status": "stable", "links": [{"rel": "self", "href": url}], "media-types": []}
        if self.path.rstrip("/") == "/v3":
            self._answer(200, {"version": version})
        else:
            self._answer(404, {"error": {"message": "no such token", "code": 404, "title": "Not Found"}})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        now = datetime.datetime.now(tz=datetime.UTC)
        token = {
            "issued_at": now.isoformat(),
            "expires_at": (now + datetime.timedelta(hours=1)).isoformat(),
            "methods": ["password"],
            "user": {"id": "u", "name": "moorage", "domain": {"id": "default", "name": "Default"}},
            "roles": [{"id": "r", "name": "service"}],
            "project": {"id": "p", "name": "service", "domain": {"id": "default", "name": "Default"}},
            "catalog": list(self.catalog),
        }
        self._answer(201, {"token": token}, {"X-Subject-Token": "of-the-service"})

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


class KeystoneOutageTests(unittest.TestCase):
    def applications(self, auth_url: str) -> dict[str, Any]:
        """A mount of the core's kind and one of a dialect's, behind the middleware."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        settings = {
            "auth_type": "password", "auth_url": auth_url, "username": "moorage", "password": "secret",
            "project_name": "service", "user_domain_id": "default", "project_domain_id": "default",
            "http_request_max_retries": "0",
        }  # fmt: skip
        path = f"{folder.name}/moorage.conf"
        with open(path, "w", encoding="utf-8") as file:
            file.write("[keystone_authtoken]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        conf = config.load(files=[path], state_dir=folder.name, overrides={("api", "auth_strategy"): "keystone"})
        policy = AccessPolicy([RULE], None)
        route = Route("GET", "/things", lambda request: Response(200, {}), RULE.name)
        clock = SystemClock()
        unused: Any = None
        tools = ApiTools(
            conf=conf,
            clock=clock,
            database=unused,
            authenticate=authentication.authenticator(conf),
            check_policy=policy.check,
            count=lambda *_: None,
            store=unused,
            fleet=unused,
            sender=unused,
            workers=unused,
            services=unused,
        )
        core = CoreApplication([route], tools)
        other = Application(Dialect("things", (1, 0), (1, 0)), [route], tools)
        return {"core": with_middleware(core, conf), "dialect": with_middleware(other, conf)}

    def get(self, application: Any, token: str | None) -> ReceivedResponse:
        return send(application, "GET", "/things", headers={"X-Auth-Token": token} if token else {})

    def keystone(self, *catalog: Any) -> str:
        handler = type("Handler", (Keystone,), {"catalog": catalog})
        running = server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        self.addCleanup(running.server_close)
        self.addCleanup(thread.join)
        self.addCleanup(running.shutdown)
        return f"http://127.0.0.1:{running.server_port}/v3"

    def test_a_keystone_that_does_not_answer_is_503_and_to_be_tried_again(self) -> None:
        for name, application in self.applications(f"http://127.0.0.1:{free_port()}/v3").items():
            with self.subTest(name=name):
                answer = self.get(application, "any")
                self.assertEqual((503, "5"), (answer.status, answer.header("retry-after")))
                self.assertIn("Keystone does not answer", answer.json["error"]["message"])
                self.assertIsNone(answer.header("www-authenticate"))

    def test_a_broken_catalog_is_an_error_that_names_it(self) -> None:
        nova = {"type": "compute", "id": "c", "name": "nova", "endpoints": []}
        for name, application in self.applications(self.keystone(nova)).items():
            with self.subTest(name=name):
                answer = self.get(application, "any")
                self.assertEqual((503, "5"), (answer.status, answer.header("retry-after")))
                self.assertIn("catalog", answer.json["error"]["message"])
                self.assertIn("[keystone_authtoken]", answer.json["error"]["message"])

    def test_a_401_advertises_keystone_and_nothing_else(self) -> None:
        url = self.keystone()
        endpoint = {"id": "e", "interface": "internal", "region": "one", "region_id": "one", "url": url}
        identity = {"type": "identity", "id": "i", "name": "keystone", "endpoints": [endpoint]}
        url = self.keystone(identity)
        for name, application in self.applications(url).items():
            for token in ("made-up", None):
                with self.subTest(name=name, token=token):
                    answer = self.get(application, token)
                    self.assertEqual((401, f'Keystone uri="{url}"'), (answer.status, answer.header("www-authenticate")))
                    self.assertEqual("moorage.unauthenticated", answer.json["error"]["code"])

    def test_without_a_token_a_dead_keystone_is_not_asked(self) -> None:
        url = f"http://127.0.0.1:{free_port()}/v3"
        for name, application in self.applications(url).items():
            with self.subTest(name=name):
                answer = self.get(application, None)
                self.assertEqual((401, f'Keystone uri="{url}"'), (answer.status, answer.header("www-authenticate")))
