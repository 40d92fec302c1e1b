# SPDX-License-Identifier: Apache-2.0
"""Where the Placement dialect is served, and that what it says of itself follows."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import tempfile
import threading
import unittest
from unittest import mock

import requests

from moorage import wsgi
from moorage.control_plane import config
from moorage.db import Database, migrations
from moorage.http.routes import Wsgi
from moorage.wsgi import DialectCallable
from tests.api.live import LiveDialect
from tests.forking import Command
from tests.servers import wait_until


class TestMounts(unittest.TestCase):
    def test_the_version_document_follows_the_mount(self) -> None:
        for mount, href in (("/", ""), ("/placement", "/placement"), ("/a/b", "/a/b")):
            with self.subTest(mount):
                live = LiveDialect("placement", mount)
                self.addCleanup(live.close)
                found = requests.get(live.url + "/", timeout=60)
                self.assertEqual(200, found.status_code)
                self.assertEqual("placement 1.0", found.headers["OpenStack-API-Version"])
                version = found.json()["versions"][0]
                self.assertEqual(("1.0", "1.39"), (version["min_version"], version["max_version"]))
                self.assertEqual(href, version["links"][0]["href"])

    def test_errors_have_the_shape_of_placement(self) -> None:
        live = LiveDialect("placement")
        self.addCleanup(live.close)
        headers = {"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"}
        found = requests.get(live.url + "/barnabas", headers=headers, timeout=60)
        self.assertEqual(404, found.status_code)
        error = found.json()["errors"][0]
        self.assertEqual("placement.undefined_code", error["code"])
        self.assertEqual(found.headers["x-openstack-request-id"], error["request_id"])
        self.assertEqual((404, "Not Found"), (error["status"], error["title"]))

    def test_without_who_is_calling_there_is_only_the_version_document(self) -> None:
        live = LiveDialect("placement")
        self.addCleanup(live.close)
        self.assertEqual(401, requests.get(live.url + "/resource_providers", timeout=60).status_code)


class TestControlPlane(unittest.TestCase):
    def test_up_serves_the_dialect_at_the_root_and_the_core_beside_it(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        state = pathlib.Path(folder.name) / "state"
        process = Command(
            [
                *("up", "--state-dir", str(state), "--bind", "127.0.0.1:0", "--schedulers", "1", "--agents", "1"),
                *("--auth-strategy", "noauth", "--mount", "placement=/"),
            ],
            pathlib.Path(folder.name) / "stderr",
        )
        try:
            self.assertIn("moorage is ready at", process.stdout.readline())
            url = json.loads((state / "client.json").read_text())["url"]
            self.assertEqual("1.39", requests.get(url, timeout=60).json()["versions"][0]["max_version"])
            self.assertEqual(200, requests.get(url + "/scheduling/v1/services", timeout=60).status_code)
            self.assertEqual(200, requests.get(url + "/scheduling/v1/openapi.json", timeout=60).status_code)
            self.assertEqual(200, requests.get(url + "/healthcheck", timeout=60).status_code)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        self.assertEqual(0, process.returncode)


class TestCallable(unittest.TestCase):
    def call(self, application: Wsgi) -> str:
        said: list[str] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "SERVER_NAME": "here", "SERVER_PORT": "80"}
        b"".join(application(environ, lambda status, headers: said.append(status)))
        return said[0]

    def test_a_dialect_alone_answers_503_until_its_database_is_there(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        environment = {"MOORAGE_STATE_DIR": folder.name, "MOORAGE_CONFIG_FILES": os.devnull}
        (pathlib.Path(folder.name) / "users").write_text("")
        # How this process logs is the tests' affair.
        with mock.patch.dict(os.environ, environment), mock.patch("moorage.wsgi.logging.setup"):
            application = DialectCallable("placement")
            self.assertTrue(self.call(application).startswith("503 "))
            database = Database.from_config(config.load(files=[os.devnull], state_dir=folder.name))
            migrations.upgrade_all(database)
            database.close()
            self.assertTrue(self.call(application).startswith("200 "))

    def test_what_a_request_could_not_build_on_is_closed(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        conf = pathlib.Path(folder.name) / "moorage.conf"
        conf.write_text("[api]\nauth_strategy = http_basic\nenabled_apis = nosuch\n[observers]\nenabled = log\n")
        (pathlib.Path(folder.name) / "users").write_text("")
        database = Database.from_config(config.load(files=[str(conf)], state_dir=folder.name))
        migrations.upgrade_all(database)
        database.close()
        environment = {"MOORAGE_STATE_DIR": folder.name, "MOORAGE_CONFIG_FILES": str(conf)}
        before = set(threading.enumerate())
        with mock.patch.dict(os.environ, environment), mock.patch("moorage.wsgi.logging.setup"):
            for _ in range(3):
                with self.assertLogs("moorage.wsgi", "ERROR") as said:
                    self.assertTrue(self.call(wsgi.application).startswith("503 "))
                self.assertIn("'nosuch'", said.output[0])
        wait_until(lambda: set(threading.enumerate()) <= before, "the threads of what was opened to end", 60)

    def test_noauth_is_refused_where_nobody_knows_who_reaches_it(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        conf = pathlib.Path(folder.name) / "moorage.conf"
        conf.write_text("[api]\nauth_strategy = noauth\n")
        database = Database.from_config(config.load(files=[str(conf)], state_dir=folder.name))
        migrations.upgrade_all(database)
        database.close()
        environment = {"MOORAGE_STATE_DIR": folder.name, "MOORAGE_CONFIG_FILES": str(conf)}
        with mock.patch.dict(os.environ, environment), mock.patch("moorage.wsgi.logging.setup"):
            for application in (wsgi.application, DialectCallable("placement")):
                with self.assertLogs("moorage.wsgi", "ERROR") as said:
                    self.assertTrue(self.call(application).startswith("503 "))
                self.assertIn("noauth makes everybody an administrator", said.output[0])
            conf.write_text("[api]\nauth_strategy = http_basic\n")
            (pathlib.Path(folder.name) / "users").write_text("")
            self.assertTrue(self.call(DialectCallable("placement")).startswith("200 "))
