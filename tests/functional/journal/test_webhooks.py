# SPDX-License-Identifier: Apache-2.0
"""Webhooks of a whole control plane: the API and its policy, the commands, and engines that deliver."""

from __future__ import annotations

import base64
import json
import pathlib
import unittest
from typing import Any

import requests
import sqlalchemy as sa

from moorage import errors
from moorage.cli import main
from moorage.control_plane.api_role import ApiRole
from moorage.control_plane.engine_role import Engine
from moorage.journal.tables import subscriptions
from moorage.journal.webhooks import new_secret
from tests.commands import in_process
from tests.functional.scheduling.plane import SOON, Plane
from tests.receivers import Receiver
from tests.servers import wait_until

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 1, "MEMORY_MB": 64}}
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


class WebhookTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = Plane(
            self,
            api__bind="127.0.0.1:0",
            api__auth_strategy="noauth",
            journal__webhook_allowed_networks=["127.0.0.1"],
            journal__webhook_timeout=20.0,
        )
        self.plane.up(("h1",))
        self.url = self.plane.start(ApiRole(), "api-live").url
        self.receiver = Receiver()
        self.addCleanup(self.receiver.close)

    def ask(self, method: str, path: str, token: str = "admin", status: int = 200, **more: Any) -> Any:
        answer = requests.request(
            method, f"{self.url}/scheduling/v1{path}", headers={"X-Auth-Token": token}, timeout=SOON, **more
        )
        self.assertEqual(status, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def hook(self, status: int = 201, **more: Any) -> Any:
        return self.ask("POST", "/webhooks", status=status, json={"name": "w", "url": self.receiver.url, **more})

    def events(self) -> list[dict[str, Any]]:
        """The events that came, each once: a busy store may make the engine send one again."""
        found = [event for got in list(self.receiver.got) for event in json.loads(got.body)["events"]]
        return list({event["number"]: event for event in found}.values())

    def create(self, token: str = "alice:blue") -> str:
        uuid: str = self.ask("POST", "/instances", token, 202, json={"flavor": FLAVOR})["uuid"]
        self.plane.wait_status(uuid, "active")
        return uuid

    def test_an_engine_delivers_what_the_journal_has(self) -> None:
        made = self.hook(kinds=["instance.*"], projects=["blue"], after="oldest")
        self.assertTrue(made["secret"].startswith("whsec_"))
        self.plane.start(Engine(), "engine-1")
        other, uuid = self.create("carol:red"), self.create()
        wait_until(lambda: len(self.events()) == 2, "two events", SOON)
        subject = f"instance/{uuid}"
        page = self.ask("GET", "/events", params={"subject": subject})["events"]
        page = [each for each in page if each["kind"].startswith("instance.")]
        self.assertEqual(page, self.events())
        self.assertNotIn(other, str(self.events()))
        wait_until(lambda: self.ask("GET", "/webhooks/w")["lag"] == 0, "no lag", SOON)
        shown = self.ask("GET", f"/webhooks/{made['uuid']}")
        self.assertEqual(("active", "", 0), (shown["status"], shown["last_error"], shown["failures"]))
        self.assertGreaterEqual(shown["position"], page[-1]["number"])

    def test_what_fails_is_shown_and_set_tries_it_again(self) -> None:
        self.receiver.answer = b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n"
        self.hook(after="oldest")
        self.plane.start(Engine(), "engine-1")
        self.create()
        wait_until(lambda: self.ask("GET", "/webhooks/w")["failures"], "a failure", SOON)
        shown = self.ask("GET", "/webhooks/w")
        self.assertEqual(("retrying", 0), (shown["status"], shown["position"]))
        self.assertIn("answered 500", shown["last_error"])
        self.assertGreater(shown["lag"], 0)
        other = Receiver()
        self.addCleanup(other.close)
        self.ask("PATCH", "/webhooks/w", json={"url": other.url})
        wait_until(lambda: self.ask("GET", "/webhooks/w")["lag"] == 0, "no lag", SOON)
        self.assertEqual(1, json.loads(other.got[0].body)["events"][0]["number"])

    def test_a_webhook_that_is_disabled_keeps_its_place(self) -> None:
        self.hook(enabled=False, kinds=["instance.create"])
        self.plane.start(Engine(), "engine-1")
        watching = self.ask("POST", "/webhooks", status=201, json={"name": "other", "url": self.receiver.url + "/2"})
        uuid = self.create()
        wait_until(lambda: self.ask("GET", f"/webhooks/{watching['uuid']}")["delivered_at"], "the other one", SOON)
        shown = self.ask("GET", "/webhooks/w")
        self.assertEqual(("disabled", None), (shown["status"], shown["delivered_at"]))
        self.ask("PATCH", "/webhooks/w", json={"enabled": True})

        def got() -> list[str]:
            bodies = [json.loads(each.body) for each in list(self.receiver.got)]
            return [event["subject"] for body in bodies if body["webhook"] == "w" for event in body["events"]]

        wait_until(got, "the event of the time before", SOON)
        self.assertEqual({f"instance/{uuid}"}, set(got()))

    def test_addresses_that_are_not_allowed(self) -> None:
        self.plane.start(Engine(), "engine-1", self.plane.load(journal__webhook_allowed_networks=[]))
        self.hook(after="oldest")
        self.create()
        wait_until(lambda: self.ask("GET", "/webhooks/w")["failures"], "a failure", SOON)
        self.assertIn("webhook_allowed_networks", self.ask("GET", "/webhooks/w")["last_error"])
        self.assertEqual(0, self.receiver.connections)
        # A reload takes the new networks.
        self.plane.roles["engine-1"].reload(self.plane.load())
        self.ask("PATCH", "/webhooks/w", json={"enabled": True})
        wait_until(self.events, "events", SOON)
        with self.assertRaisesRegex(errors.ConfigError, "webhook_allowed_networks"):
            self.plane.roles["engine-1"].reload(self.plane.load(journal__webhook_allowed_networks=["10.0.0.1/8"]))

    def test_only_administrators_of_the_system(self) -> None:
        self.hook()
        for token in ("alice:blue", "reader", "member"):
            for method, path, body in (
                ("GET", "/webhooks", None),
                ("GET", "/webhooks/w", None),
                ("POST", "/webhooks", {"name": "x", "url": self.receiver.url}),
                ("PATCH", "/webhooks/w", {"enabled": False}),
                ("DELETE", "/webhooks/w", None),
            ):
                more: dict[str, Any] = {} if body is None else {"json": body}
                answer = requests.request(
                    method, f"{self.url}/scheduling/v1{path}", headers={"X-Auth-Token": token}, timeout=SOON, **more
                )
                self.assertIn(answer.status_code, (401, 403), (token, method, path))

    def test_a_secret_is_shown_once_if_at_all(self) -> None:
        with self.assertLogs("moorage", "DEBUG") as logged:
            self.assertNotIn("secret", self.hook(secret=SECRET))
            new = self.ask("POST", "/webhooks", status=201, json={"name": "n", "url": self.receiver.url})["secret"]
            self.ask("PATCH", "/webhooks/w", json={"kinds": []})
            shown = [self.ask("GET", path) for path in ("/webhooks", "/webhooks/w", "/webhooks/n", "/events")]
            refused = self.ask("PATCH", "/webhooks/w", status=400, json={"secret": SECRET + "!"})
        for text in (str(shown), str(refused), "\n".join(logged.output)):
            self.assertNotIn(SECRET, text)
            self.assertNotIn(new, text)

    def test_what_is_not_understood_is_refused(self) -> None:
        for wrong in (
            {"url": "ftp://a.example"}, {"url": "https://me:word@a.example"}, {"secret": "short"}, {"kinds": ["*"]},
            {"kinds": ["instance"]}, {"kinds": "instance.create"}, {"projects": [""]}, {"after": "yesterday"}, {"name": "a b"},
            {"name": ""}, {"unknown": 1},
        ):  # fmt: skip
            self.hook(400, **wrong)
        self.hook(410, after="999999999")
        self.hook()
        self.hook(409)
        self.ask("PATCH", "/webhooks/w", status=400, json={})
        self.ask("PATCH", "/webhooks/w", status=410, json={"after": "999999999"})
        self.ask("PATCH", "/webhooks/other", status=404, json={"enabled": True})
        self.ask("DELETE", "/webhooks/other", status=404)

    def test_changes_are_in_the_journal_and_a_removed_one_leaves_nothing(self) -> None:
        made = self.hook(kinds=["instance.*"])
        changes: dict[str, Any] = {"enabled": False, "secret": new_secret(), "kinds": ["instance.*"], "after": "oldest"}
        self.ask("PATCH", "/webhooks/w", json=changes)
        self.ask("DELETE", "/webhooks/w", status=204)
        query = {"subject": f"webhook/{made['uuid']}"}

        def found() -> list[dict[str, Any]]:
            return list(self.ask("GET", "/events", params=query)["events"])

        wait_until(lambda: len(found()) == 3, "three events", SOON)
        self.assertEqual(["webhook.create", "webhook.change", "webhook.delete"], [each["kind"] for each in found()])
        self.assertEqual([1, 2, 2], [each["version"] for each in found()])
        self.assertEqual(["enabled", "secret", "position"], found()[1]["state"]["changed"])
        self.assertNotIn("127.0.0.1", str(found()))
        self.assertNotIn(changes["secret"], str(found()))
        with self.plane.database.read() as tx:
            self.assertEqual([], tx.execute(sa.select(subscriptions)).all())

    def test_the_commands(self) -> None:
        words = ["--url", self.url, "--auth-type", "none"]

        def run(*given: str, status: int = 0) -> Any:
            ended, printed, said = in_process(main.main, ["webhook", *given, *words])
            self.assertEqual(status, ended, printed + said)
            return json.loads(printed) if "json" in given else printed + said

        secret = pathlib.Path(self.plane.folder) / "secret"
        secret.write_text(SECRET + "\n")
        made = run("create", "a", self.receiver.url, "--kind", "instance.*", "--project", "blue", "-f", "json")
        self.assertEqual((self.receiver.url, "whsec_"), (made["url"], made["secret"][:6]))
        given = run("create", "b", self.receiver.url, "--secret-file", str(secret), "--disable", "-f", "json")
        self.assertEqual((None, "disabled"), (given.get("secret"), given["status"]))
        self.assertEqual(["a", "b"], [row["name"] for row in run("list", "-f", "json")])
        changed = run(
            "set",
            "a",
            "--all-kinds",
            "--disable",
            "--after",
            "oldest",
            "--target",
            self.receiver.url + "/2",
            "-f",
            "json",
        )
        self.assertEqual(("[]", False, 0), (changed["kinds"], changed["enabled"], changed["position"]))
        self.assertEqual(self.receiver.url + "/2", changed["url"])
        self.assertEqual('["blue"]', run("show", made["uuid"], "-f", "json")["projects"])
        self.assertIn("contradict", run("set", "a", "--kind", "instance.*", "--all-kinds", status=1))
        self.assertIn("Say what", run("set", "a", status=1))
        self.assertIn("cannot be read", run("set", "a", "--secret-file", "/nowhere", status=1))
        run("delete", "a")
        self.assertIn("no webhook a", run("show", "a", status=1))
