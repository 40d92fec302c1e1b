# SPDX-License-Identifier: Apache-2.0
"""A control plane behind a real Keystone, which is installed from PyPI for the occasion (``make soak`` only: it takes minutes)."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any

import requests

import tests
from tests import servers

PASSWORD = "keystone-test"
#: Seconds that a token lives. Long enough for a busy machine.
LIFETIME = 20

KEYSTONE_CONF = """
[database]
connection = sqlite:///{folder}/keystone.sqlite
[fernet_tokens]
key_repository = {folder}/fernet
[fernet_receipts]
key_repository = {folder}/receipts
[credential]
key_repository = {folder}/credential
[token]
expiration = {lifetime}
allow_expired_window = 0
[identity]
password_hash_rounds = 4
"""

MOORAGE_CONF = """
[keystone_authtoken]
auth_type = password
auth_url = {url}
www_authenticate_uri = {url}
username = admin
password = {password}
project_name = admin
user_domain_id = default
project_domain_id = default
[quota]
source = keystone
interval = 2
[quota_keystone]
auth_url = {url}
username = admin
password = {password}
service = keystone
timeout = 60
"""

SERVE = """
import sys
sys.argv = ["keystone", "--config-file", {conf!r}]
import os
os.environ["OS_KEYSTONE_CONFIG_FILES"] = {conf!r}
from wsgiref import simple_server
from keystone.wsgi.api import application
simple_server.make_server("127.0.0.1", {port}, application).serve_forever()
"""


@unittest.skipUnless(tests.SOAK, "Keystone is installed and tried by 'make soak' only.")
class TestKeystone(unittest.TestCase):
    folder: pathlib.Path
    keystone: str
    moorage: str
    ready: str

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.keystone = cls._start_keystone()
        cls.moorage = cls._start_moorage()

    @classmethod
    def _start_keystone(cls) -> str:
        python = cls.folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(cls.folder / "venv")], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "keystone>=30,<31"], check=True)
        conf = cls.folder / "keystone.conf"
        conf.write_text(KEYSTONE_CONF.format(folder=cls.folder, lifetime=LIFETIME))
        port = servers.free_port()
        url = f"http://127.0.0.1:{port}/v3"
        for name in ("fernet", "receipts", "credential"):
            (cls.folder / name).mkdir(mode=0o700)
        manage = [str(python.parent / "keystone-manage"), "--config-file", str(conf)]
        endpoints = [f"--bootstrap-{kind}-url={url}" for kind in ("admin", "public", "internal")]
        for arguments in (
            ["db_sync"],
            ["fernet_setup", "--keystone-user", "root", "--keystone-group", "root"],
            ["credential_setup", "--keystone-user", "root", "--keystone-group", "root"],
            ["bootstrap", "--bootstrap-password", PASSWORD, "--bootstrap-region-id", "one", *endpoints],
        ):
            subprocess.run([*manage, *arguments], check=True, capture_output=True)
        code = SERVE.format(conf=str(conf), port=port)
        with open(cls.folder / "keystone.log", "wb") as log:
            server = subprocess.Popen([python, "-c", code], stdout=log, stderr=log)
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.kill)
        servers.wait_until(lambda: _answers(url), "Keystone", 120)
        return url

    @classmethod
    def _start_moorage(cls) -> str:
        conf = cls.folder / "moorage.conf"
        conf.write_text(MOORAGE_CONF.format(url=cls.keystone, password=PASSWORD))
        state = cls.folder / "state"
        up = subprocess.Popen(
            [
                *(sys.executable, "-m", "moorage.cli.main", "up", "--state-dir", state, "--bind", "127.0.0.1:0"),
                *("--auth-strategy", "keystone", "--config-file", conf),
            ],
            stdout=subprocess.PIPE,
        )
        assert up.stdout is not None
        cls.addClassCleanup(up.stdout.close)
        cls.addClassCleanup(up.wait)
        cls.addClassCleanup(up.send_signal, signal.SIGTERM)
        cls.ready = up.stdout.readline().decode()
        return str(json.loads((state / "client.json").read_text())["url"])

    def token(self, scope: dict[str, Any]) -> str:
        user = {"name": "admin", "domain": {"id": "default"}, "password": PASSWORD}
        identity = {"methods": ["password"], "password": {"user": user}}
        answer = requests.post(
            f"{self.keystone}/auth/tokens", json={"auth": {"identity": identity, "scope": scope}}, timeout=60
        )
        self.assertEqual(201, answer.status_code, answer.text)
        return answer.headers["X-Subject-Token"]

    def ask(self, path: str, token: str | None, mount: str = "/scheduling/v1") -> requests.Response:
        headers = {"X-Auth-Token": token} if token else {}
        return requests.get(f"{self.moorage}{mount}{path}", headers=headers, timeout=60)

    def test_a_good_token_passes_and_an_expired_one_gets_401(self) -> None:
        token = self.token({"system": {"all": True}})
        began = time.monotonic()
        good = self.ask("/nodes", token)
        self.assertEqual(200, good.status_code, good.text)
        servers.wait_until(lambda: time.monotonic() - began > LIFETIME + 1, "the token's end", LIFETIME + 10)
        self.assertEqual(401, self.ask("/nodes", token).status_code)

    def tell(self, method: str, path: str, body: Any = None, status: int = 201) -> Any:
        """Ask Keystone as an administrator of the system."""
        headers = {"X-Auth-Token": self.token({"system": {"all": True}})}
        answer = requests.request(method, f"{self.keystone}{path}", json=body, headers=headers, timeout=60)
        self.assertEqual(status, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def quotas(self, project: str) -> dict[str, int]:
        for _ in range(3):
            answer = self.ask(f"/quotas?project={project}", self.token({"system": {"all": True}}))
            # The service's own token may have ended on its way: tokens live for seconds here.
            if answer.status_code != 401:
                break
        self.assertEqual(200, answer.status_code, answer.text)
        return {each["resource_class"]: each["limit"] for each in answer.json()["quotas"]}

    def wait_quotas(self, project: str, limits: dict[str, int]) -> None:
        servers.wait_until(lambda: self.quotas(project) == limits, f"project {project} has the limits {limits}", 120)

    def test_unified_limits_become_limits_of_projects_and_are_not_set_by_hand(self) -> None:
        first, second = (
            self.tell("POST", "/projects", {"project": {"name": name, "domain_id": "default"}})["project"]["id"]
            for name in ("first", "second")
        )
        service = self.tell("GET", "/services?name=keystone", status=200)["services"][0]["id"]
        defaults = [
            {"service_id": service, "resource_name": name, "default_limit": limit}
            for name, limit in (("class:VCPU", 10), ("class:DISK_GB", -1))
        ]
        made = self.tell("POST", "/registered_limits", {"registered_limits": defaults})["registered_limits"]
        self.wait_quotas(second, {"VCPU": 10})
        more = [
            {"service_id": service, "project_id": first, "resource_name": name, "resource_limit": 30}
            for name in ("class:VCPU", "class:DISK_GB")
        ]
        own = self.tell("POST", "/limits", {"limits": more})["limits"]
        self.wait_quotas(first, {"VCPU": 30, "DISK_GB": 30})
        self.assertEqual({"VCPU": 10}, self.quotas(second))
        headers = {"X-Auth-Token": self.token({"system": {"all": True}})}
        path = f"{self.moorage}/scheduling/v1/quotas/{first}/VCPU"
        refused = requests.put(path, json={"limit": 1}, headers=headers, timeout=60)
        self.assertEqual(409, refused.status_code, refused.text)
        self.assertIn("quota source keystone says the limits", refused.text)
        self.tell("PATCH", f"/limits/{own[0]['id']}", {"limit": {"resource_limit": 5}}, 200)
        self.wait_quotas(first, {"VCPU": 5, "DISK_GB": 30})
        for each in own:
            self.tell("DELETE", f"/limits/{each['id']}", status=204)
        self.wait_quotas(first, {"VCPU": 10})
        for each in made:
            self.tell("DELETE", f"/registered_limits/{each['id']}", status=204)
        self.wait_quotas(second, {})

    def test_no_token_and_a_made_up_one_get_401(self) -> None:
        self.assertEqual(401, self.ask("/nodes", None).status_code)
        self.assertEqual(401, self.ask("/nodes", "made-up").status_code)

    def test_a_token_of_a_project_may_not_see_the_system_on_any_mount(self) -> None:
        token = self.token({"project": {"name": "admin", "domain": {"id": "default"}}})
        self.assertEqual(403, self.ask("/nodes", token).status_code)
        self.assertEqual(200, self.ask("/instances", token).status_code)
        self.assertEqual(403, self.ask("/resource_providers", token, "/placement").status_code)
        system = self.token({"system": {"all": True}})
        self.assertEqual(200, self.ask("/resource_providers", system, "/placement").status_code)


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=2).status_code == 200
    except requests.RequestException:
        return False
