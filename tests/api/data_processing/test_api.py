# SPDX-License-Identifier: Apache-2.0
"""Clusters and jobs over HTTP: what is answered, what is refused, and by whom it may be asked for."""

from __future__ import annotations

import json
import unittest
import urllib.error
import urllib.request
from typing import Any

from moorage import errors
from moorage.services.interface import ServiceIdentity
from moorage_plugins.data_processing.store import DataStore
from tests.api.live import LiveDialect

_JSON = "application/json"


class ApiTests(unittest.TestCase):
    live: LiveDialect
    store: DataStore

    @classmethod
    def setUpClass(cls) -> None:
        cls.live = LiveDialect("data_processing")
        cls.addClassCleanup(cls.live.close)
        cls.store = DataStore(cls.live.database, cls.live.tools.workers())
        cls.live.registry.enlist("agent", "here", rpc_version="1.0")

    def ask(
        self, method: str, path: str, body: Any = None, *, roles: str = "admin,member,reader", raw: bytes | None = None
    ) -> tuple[int, Any]:
        headers = {"X-Auth-Token": "somebody", "X-Roles": roles, "OpenStack-System-Scope": "all"}
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.live.url}/v1{path}", data, headers, method=method)
        request.add_header("Content-Type", _JSON)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = answer.read()
                return answer.status, json.loads(said) if said else None
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def cluster(self, **given: Any) -> Any:
        status, made = self.ask("POST", "/clusters", {"name": "c", **given})
        self.assertEqual(status, 202, made)
        return made

    def active(self) -> str:
        uuid: str = self.cluster()["uuid"]
        self.assertTrue(self.live.database.run(lambda tx: self.store.set_final_status(tx, uuid, "Active", token=2)))
        with self.live.database.write() as tx:
            self.live.tools.workers().reset(tx, "cluster", uuid)
        return uuid

    def test_a_cluster_is_recorded_with_its_operation_and_goes_the_same_way(self) -> None:
        made = self.cluster(transient=True, host="here")
        self.assertEqual((made["status"], made["host"], made["transient"]), ("Starting", "here", True))
        (worker,) = self.live.tools.workers().waiting("cluster", ["here"], after=made["uuid"][:-1], limit=1)
        self.assertEqual((worker.resource_id, worker.operation), (made["uuid"], "create"))
        self.assertEqual(self.ask("GET", f"/clusters/{made['uuid']}"), (200, made))
        for _ in range(2):
            status, deleted = self.ask("DELETE", f"/clusters/{made['uuid']}")
            self.assertEqual((status, deleted["status"]), (202, "Deleting"))

    def test_a_job_runs_in_an_active_cluster_and_is_forgotten_when_it_has_ended(self) -> None:
        uuid = self.active()
        status, job = self.ask("POST", "/jobs", {"cluster": uuid, "command": ["true", ""]})
        self.assertEqual((status, job["status"], job["command"]), (202, "Pending", ["true", ""]))
        self.assertEqual(self.ask("GET", f"/jobs/{job['uuid']}"), (200, job))
        self.assertEqual(self.ask("DELETE", f"/jobs/{job['uuid']}")[0], 409)
        self.assertEqual(self.ask("POST", f"/jobs/{job['uuid']}/cancel")[1]["status"], "ToBeKilled")
        self.live.database.run(
            lambda tx: self.store.set_job(tx, job["uuid"], "Killed", 1, exit_code=None, expected=("ToBeKilled",))
        )
        self.assertEqual(self.ask("POST", f"/jobs/{job['uuid']}/cancel")[0], 409)
        self.assertEqual(self.ask("DELETE", f"/jobs/{job['uuid']}"), (204, None))
        self.assertEqual(self.ask("GET", f"/jobs/{job['uuid']}")[0], 404)

    def test_a_status_is_reset_and_what_was_being_done_ends(self) -> None:
        uuid = self.cluster()["uuid"]
        identity = ServiceIdentity("an-agent", "here", "agent", None, 1)
        workers = self.live.tools.workers()
        held = workers.take_many("cluster", [uuid], identity)[uuid]
        path = f"/clusters/{uuid}/reset-state"
        self.assertEqual(self.ask("POST", path, {"status": "Deleting"})[0], 400)
        self.assertEqual(self.ask("POST", path, {"status": "Error"}, roles="reader")[0], 403)
        self.assertEqual(self.ask("POST", "/clusters/nowhere/reset-state", {"status": "Error"})[0], 404)
        status, found = self.ask("POST", path, {"status": "Error"})
        self.assertEqual((status, found["status"]), (202, "Error"))
        self.assertIsNone(workers.get("cluster", uuid))
        with self.assertRaises(errors.Fenced):
            held.finish_with(lambda tx: self.store.set_final_status(tx, uuid, "Active", held.token))

    def test_a_cluster_is_written_by_no_operation_with_a_smaller_token(self) -> None:
        uuid = self.cluster()["uuid"]
        workers, run = self.live.tools.workers(), self.live.database.run
        first = workers.take_many("cluster", [uuid], ServiceIdentity("an-agent", "here", "agent", None, 1))[uuid]
        second = workers.take_many("cluster", [uuid], ServiceIdentity("an-agent", "here", "agent", None, 2))[uuid]
        run(lambda tx: self.store.stamp_token(tx, [uuid], second.token))
        self.assertFalse(run(lambda tx: self.store.set_final_status(tx, uuid, "Active", first.token)))
        self.assertTrue(run(lambda tx: self.store.set_final_status(tx, uuid, "Active", second.token)))
        self.assertEqual(self.ask("DELETE", f"/clusters/{uuid}")[0], 202)
        self.assertFalse(run(lambda tx: self.store.remove_cluster(tx, uuid, second.token)))

    def test_pages_give_each_once(self) -> None:
        made = {self.cluster()["uuid"] for _ in range(5)}
        seen: list[str] = []
        while True:
            marker = f"&marker={seen[-1]}" if seen else ""
            status, page = self.ask("GET", f"/clusters?limit=2&status=Starting{marker}")
            self.assertEqual(status, 200)
            seen += [each["uuid"] for each in page["clusters"]]
            if len(page["clusters"]) < 2:
                break
        self.assertEqual(len(seen), len(set(seen)))
        self.assertLessEqual(made, set(seen))

    def test_what_there_is_not_is_not_found_and_what_cannot_be_is_refused_with_a_reason(self) -> None:
        waiting = self.cluster()["uuid"]
        for method, path, body, status in (
            ("GET", "/clusters/nothing", None, 404),
            ("DELETE", "/clusters/nothing", None, 404),
            ("GET", "/jobs/nothing", None, 404),
            ("DELETE", "/jobs/nothing", None, 404),
            ("POST", "/jobs/nothing/cancel", None, 404),
            ("POST", "/jobs", {"cluster": "nothing", "command": ["x"]}, 404),
            ("POST", "/jobs", {"cluster": waiting, "command": ["x"]}, 409),
            ("POST", "/jobs", {"cluster": waiting, "command": []}, 400),
            ("POST", "/jobs", {"cluster": waiting, "command": "x"}, 400),
            ("POST", "/clusters", {"name": ""}, 400),
            ("POST", "/clusters", {"name": "c", "host": "nowhere"}, 400),
            ("POST", "/clusters", {"name": "c", "more": 1}, 400),
            ("POST", "/clusters", [], 400),
            ("GET", "/clusters?limit=0", None, 400),
            ("GET", "/clusters?limit=x", None, 400),
            ("GET", "/clusters?sort=name", None, 400),
            ("GET", "/proxy-users?limit=1&limit=2", None, 400),
            ("PUT", "/clusters", {}, 405),
            ("GET", "/nothing", None, 404),
        ):
            with self.subTest(f"{method} {path} {body}"):
                found, said = self.ask(method, path, body)
                self.assertEqual(found, status, said)
                self.assertTrue(said["error"]["message"])
        self.assertEqual(self.ask("POST", "/clusters", raw=b"{")[0], 400)

    def test_readers_read_and_administrators_alone_run_commands(self) -> None:
        uuid = self.active()
        changes = (
            ("POST", "/clusters", {"name": "c"}),
            ("DELETE", f"/clusters/{uuid}", None),
            ("POST", "/jobs", {"cluster": uuid, "command": ["true"]}),
        )
        for method, path, body in changes:
            for roles in ("reader", "member,reader"):
                self.assertEqual(self.ask(method, path, body, roles=roles)[0], 403, (method, path, roles))
        for path in ("/clusters", f"/clusters/{uuid}", "/jobs", "/proxy-users"):
            self.assertEqual(self.ask("GET", path, roles="reader")[0], 200, path)
            self.assertEqual(self.ask("GET", path, roles="nobody")[0], 403, path)
