# SPDX-License-Identifier: Apache-2.0
"""The journal of a whole control plane over HTTP: pages, filters, long polls, projects, cursors that are gone."""

from __future__ import annotations

import json
import threading
import unittest
import uuid as uuidlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import requests
import sqlalchemy as sa

from moorage import errors
from moorage.cli import main
from moorage.client import connect
from moorage.control_plane.api_role import ApiRole
from moorage.db import JournalEvent, record
from moorage.db.tables import event_sequence
from moorage.journal import api as journal_api
from tests.commands import in_process
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 1, "MEMORY_MB": 64}}
SECRET = "a name that users chose"


class JournalOverHttpTests(unittest.TestCase):
    def setUp(self) -> None:
        self.enterContext(mock.patch.object(journal_api, "_MOST_OF_PROJECT", 2))
        self.plane = Plane(self, api__bind="127.0.0.1:0", api__auth_strategy="noauth")
        self.plane.up(("h1", "h2"))
        self.url = self.plane.start(ApiRole(), "api-live").url
        # The events of the start would come after a cursor that a test takes before they have numbers.
        self.plane.wait_quiet()

    def ask(self, method: str, path: str, token: str = "admin", status: int = 200, **more: Any) -> Any:
        answer = requests.request(
            method, f"{self.url}/scheduling/v1{path}", headers={"X-Auth-Token": token, **more.pop("headers", {})},
            timeout=SOON, **more,
        )  # fmt: skip
        self.assertEqual(status, answer.status_code, answer.text)
        self.answer = answer
        return answer.json() if answer.content else None

    def events(self, status: int = 200, token: str = "admin", **query: Any) -> Any:
        return self.ask("GET", "/events", token, status, params=query)

    def create(self, token: str = "admin") -> str:
        uuid: str = self.ask("POST", "/instances", token, 202, json={"flavor": FLAVOR, "name": SECRET})["uuid"]
        self.plane.wait_status(uuid, "active")
        return uuid

    def states(self, uuid: str, token: str = "admin") -> list[Any]:
        """The events that say what an instance is, without those of work on it."""
        found = self.events(subject=f"instance/{uuid}", token=token)["events"]
        return [each for each in found if each["kind"].startswith("instance.")]

    def kinds(self, uuid: str, token: str = "admin") -> list[tuple[str, str]]:
        return [(each["kind"], each["state"]["status"]) for each in self.states(uuid, token)]

    def test_the_life_of_an_instance(self) -> None:
        uuid = self.create("alice:blue")
        made = self.answer.headers["X-OpenStack-Request-ID"]
        self.ask("DELETE", f"/instances/{uuid}", "bob:blue", 202)
        deleted = self.answer.headers["X-OpenStack-Request-ID"]
        self.plane.wait_status(uuid, "gone")
        life = [
            ("instance.create", "building"),
            ("instance.change", "active"),
            ("instance.change", "deleting"),
            ("instance.delete", "deleting"),
        ]
        wait_until(lambda: len(self.kinds(uuid)) == len(life), "four events", SOON)
        self.assertEqual(life, self.kinds(uuid))
        found = self.states(uuid)
        self.assertEqual(["alice", "alice", "bob", "bob"], [each["actor"] for each in found])
        self.assertEqual([made, made, deleted, deleted], [each["request_id"] for each in found])
        self.assertEqual([each["number"] for each in found], sorted(each["number"] for each in found))
        self.assertNotIn(SECRET, str(found))
        self.assertIn(found[0]["state"]["host"], ("h1", "h2"))
        self.assertEqual(found[2:3], self.events(request_id=deleted, kind="instance.change")["events"])

    def test_one_command_says_who_deleted_an_instance_and_who_moved_it(self) -> None:
        uuid = self.create("alice:blue")
        self.ask("POST", f"/instances/{uuid}/action", "admin", 202, json={"live_migrate": {}})
        self.plane.wait_status(uuid, "active")
        self.ask("DELETE", f"/instances/{uuid}", "bob:blue", 202)
        self.plane.wait_status(uuid, "gone")
        wait_until(lambda: len(self.kinds(uuid)) == 8, "all events", SOON)
        words = ["--url", self.url, "--auth-type", "none", "--subject", f"instance/{uuid}"]
        status, printed, said = in_process(main.main, ["audit", "-f", "json", "--since", "1h", *words])
        self.assertEqual((0, ""), (status, said))
        rows = json.loads(printed)
        (moved,) = (row for row in rows if "host: h" in row["change"] and " -> " in row["change"])
        self.assertEqual("admin", moved["actor"])
        (ended,) = (row for row in rows if "status: migrating -> active" in row["change"])
        self.assertEqual("admin", ended["actor"])
        (deleting,) = (row for row in rows if "status: active -> deleting" in row["change"])
        self.assertEqual(("bob", f"instance/{uuid}"), (deleting["actor"], deleting["subject"]))
        status, printed, said = in_process(main.main, ["audit", "-f", "json", "--actor", "bob", *words[:4]])
        self.assertEqual(
            {"instance.change", "instance.delete", "claim.delete", "operation.end"},
            {row["kind"] for row in json.loads(printed)},
        )
        status, printed, said = in_process(main.main, ["events", *words])
        self.assertEqual(8, printed.count(" instance."), printed)
        self.assertIn(" instance.delete ", printed.splitlines()[-1])
        self.assertEqual(1, in_process(main.main, ["audit", "--since", "yesterday", *words])[0])

    def traced(self, name: str) -> list[dict[str, Any]]:
        words = ["trace", "-f", "json", name, "--url", self.url, "--auth-type", "none"]
        status, printed, said = in_process(main.main, words)
        self.assertEqual((0, ""), (status, said))
        rows: list[dict[str, Any]] = json.loads(printed)
        return rows

    def test_one_command_shows_the_way_of_a_request(self) -> None:
        given = f"req-{uuidlib.uuid4()}"
        parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        headers = {"X-OpenStack-Request-ID": given, "traceparent": parent}
        made = self.ask("POST", "/instances", "alice:blue", 202, json={"flavor": FLAVOR}, headers=headers)["uuid"]
        request_id = self.answer.headers["X-OpenStack-Request-ID"]
        self.plane.wait_status(made, "active")
        steps = ["received", "decided", "claimed", "instance.create", "begun", "finished", "instance.change"]

        def way(name: str) -> list[dict[str, Any]]:
            rows = [row for row in self.traced(name) if row["subject"] == f"instance/{made}"]
            # A sweep may have found it before its message came.
            return [row for row in rows if row["step"] != "told"]

        wait_until(lambda: len(way(made)) == len(steps), "all steps", SOON)
        rows = way(request_id)
        self.assertEqual(sorted(steps), sorted(row["step"] for row in rows))
        self.assertEqual(steps[:4], [row["step"] for row in rows][:4])
        self.assertEqual(rows, way(made))
        self.assertEqual(rows, way(given))
        by_step = {row["step"]: row for row in rows}
        self.assertRegex(by_step["decided"]["detail"], "^2 of 2 nodes passed the filters")
        self.assertRegex(by_step["claimed"]["detail"], "^build on node h[12]-node-0$")
        # All but the first by the clock of the database.
        times = [by_step[name]["at"] for name in ("decided", "begun", "finished")]
        self.assertEqual(times, sorted(times))
        self.assertEqual({request_id}, {row["request_id"] for row in rows})

    def test_the_way_of_a_request_that_was_refused_says_what_removed_the_nodes(self) -> None:
        flavor = {**FLAVOR, "resources": {"VCPU": 10**6}}
        self.ask("POST", "/instances", "admin", 409, json={"flavor": flavor})
        (row,) = self.traced(self.answer.headers["X-OpenStack-Request-ID"])
        self.assertEqual("refused", row["step"])
        self.assertIn("0 of 2 nodes passed the filters", row["detail"])

    def test_a_project_sees_its_own_instances_without_hosts(self) -> None:
        mine, other = self.create("alice:blue"), self.create("carol:red")
        wait_until(lambda: len(self.kinds(mine)) + len(self.kinds(other)) == 4, "four events", SOON)
        found = self.events(token="alice:blue")["events"]
        self.assertEqual({f"instance/{mine}"}, {each["subject"] for each in found})
        (made,) = (each for each in found if each["kind"] == "instance.create")
        self.assertEqual({"status", "flavorid", "flavor_version", "project_id"}, set(made["state"]))
        (placed,) = (each for each in found if each["kind"] == "operation.place")
        self.assertEqual({"operation", "received_at"}, set(placed["state"]))
        self.assertNotIn("service", found[0])
        self.assertEqual([], self.kinds(other, token="alice:blue"))

    def test_members_see_what_others_have_done_to_their_instances(self) -> None:
        """An administrator moves and deletes an instance; another project sees nothing of that."""
        uuid = self.create("alice:blue")
        self.ask("POST", f"/instances/{uuid}/action", "admin", 202, json={"live_migrate": {}})
        self.plane.wait_status(uuid, "active")
        self.ask("DELETE", f"/instances/{uuid}", "admin", 202)
        request_id = self.answer.headers["X-OpenStack-Request-ID"]
        self.plane.wait_status(uuid, "gone")

        def work(token: str) -> list[tuple[str, str, str]]:
            found = self.events(subject=f"instance/{uuid}", token=token)["events"]
            return [
                (each["kind"], each["state"]["operation"], each["actor"])
                for each in found
                if each["kind"].startswith("operation.")
            ]

        done = [
            ("operation.place", "build", "alice"),
            ("operation.end", "build", "alice"),
            ("operation.place", "live_migrate", "admin"),
            ("operation.end", "prepare_move", "admin"),
            ("operation.end", "transfer_move", "admin"),
            ("operation.end", "activate_move", "admin"),
            ("operation.end", "delete", "admin"),
        ]
        wait_until(lambda: len(work("admin")) == len(done), "the events of all operations", SOON)
        self.assertEqual(done, work("admin"))
        self.assertEqual(done, work("alice:blue"))
        self.assertEqual([], work("carol:red"))
        of, subject = ["--url", self.url, "--auth-type", "none"], ["--subject", f"instance/{uuid}"]
        with mock.patch("keystoneauth1.noauth.NoAuth.get_token", return_value="alice:blue"):
            status, printed, said = in_process(main.main, ["events", *subject, *of])
            self.assertEqual((0, 7), (status, printed.count(" operation.")), said)
            status, printed, said = in_process(main.main, ["audit", "-f", "json", "--actor", "admin", *subject, *of])
            self.assertEqual((0, 5), (status, printed.count("operation.")), said)
            self.assertEqual(
                ["instance.change", "begun", "finished", "instance.delete"],
                [row["step"] for row in self.traced(request_id) if row["step"] != "told"],
            )
        with mock.patch("keystoneauth1.noauth.NoAuth.get_token", return_value="carol:red"):
            status, printed, said = in_process(main.main, ["trace", request_id, *of])
            self.assertEqual((1, ""), (status, printed))
            self.assertIn(f"The journal has no event of {request_id}", said)

    def test_a_page_shows_what_changes_have_changed(self) -> None:
        """One request tells it, without the history of the subject; members see no hosts there either."""
        uuid = self.create("alice:blue")
        self.ask("POST", f"/instances/{uuid}/action", "admin", 202, json={"live_migrate": {}})
        self.plane.wait_status(uuid, "active")
        query: dict[str, Any] = {"subject": f"instance/{uuid}", "kind": "instance.change", "before": "true"}
        wait_until(lambda: len(self.events(**query)["events"]) == 5, "the events of all changes", SOON)
        # It begins, is prepared, is committed, and ends.
        moved, ended = self.events(**query)["events"][-2:]
        self.assertEqual({"host", "node", "node_uuid", "destination_uuid"}, set(moved["before"]))
        self.assertNotEqual(moved["state"]["host"], moved["before"]["host"])
        self.assertEqual({"status": "migrating"}, ended["before"])
        seen = self.events(token="alice:blue", **query)["events"][-1]
        self.assertEqual({"status": "migrating"}, seen["before"])
        self.assertNotIn("before", self.events(subject=f"instance/{uuid}")["events"][-1])
        self.events(400, after="latest", before="true", wait=5)
        self.ask("GET", "/events", status=400, params={"before": "true"}, headers={"Accept": "text/event-stream"})

    def test_members_see_no_service_in_events_of_cleanup(self) -> None:
        subject, state = "instance/cleaned", {"operation": "build", "worker": str(uuidlib.uuid4())}
        self.plane.database.run(lambda tx: record(tx, JournalEvent("cleanup.begin", subject, 1, state, "blue")))
        wait_until(lambda: self.events(subject=subject)["events"], "the event has a number", SOON)
        for token, seen in (("admin", state), ("alice:blue", {"operation": "build"})):
            (found,) = self.events(subject=subject, token=token)["events"]
            self.assertEqual(seen, found["state"])

    def test_a_long_poll_ends_with_the_first_event_and_without_one_at_its_time(self) -> None:
        cursor = self.events(after="latest")["next_after"]
        self.assertEqual({"events": [], "next_after": cursor}, self.events(after=cursor, wait=1))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.events, after=cursor, wait=60, kind="instance.create")
            uuid = self.create()
            found = waiting.result()["events"]
        self.assertEqual([f"instance/{uuid}"], [each["subject"] for each in found])

    def stream(self, count: int, **headers: str) -> list[tuple[int, str, Any]]:
        """The first events of a stream: id, kind, data."""
        found: list[tuple[int, str, Any]] = []
        given = {"X-Auth-Token": "admin", "Accept": "text/event-stream", **headers}
        with requests.get(f"{self.url}/scheduling/v1/events", headers=given, stream=True, timeout=SOON) as answer:
            self.assertEqual(200, answer.status_code)
            self.assertEqual("text/event-stream", answer.headers["Content-Type"])
            fields: dict[str, str] = {}
            for line in answer.iter_lines(chunk_size=1, decode_unicode=True):
                name, _, value = line.partition(": ")
                fields[name] = value
                if not line and "data" in fields:
                    found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
                    if len(found) == count:
                        return found
                if not line:
                    fields = {}
        return found

    def test_server_sent_events_go_on_from_the_last_id(self) -> None:
        uuid = self.create()
        self.plane.wait_quiet()
        everything = self.events()["events"]
        streamed = self.stream(len(everything), **{"Last-Event-ID": "0"})
        self.assertEqual([(each["number"], each["kind"], each) for each in everything], streamed)
        last = str(streamed[-3][0])
        self.assertEqual(streamed[-2:], self.stream(2, **{"Last-Event-ID": last}))
        with ThreadPoolExecutor(1) as pool:
            following = pool.submit(self.stream, 1, **{"Last-Event-ID": str(streamed[-1][0])})
            self.ask("DELETE", f"/instances/{uuid}", status=202)
            self.assertEqual("instance.change", following.result()[0][1])
        stream = {"Accept": "text/event-stream"}
        self.ask("GET", "/events", status=400, headers={**stream, "Last-Event-ID": "x"})
        self.ask("GET", "/events", status=410, headers={**stream, "Last-Event-ID": "999999"})

    def test_nothing_new_is_not_modified(self) -> None:
        page = self.events(after="latest")
        tag = self.answer.headers["ETag"]
        query = {"after": page["next_after"]}
        self.ask("GET", "/events", status=304, params=query, headers={"If-None-Match": tag})
        self.create()
        wait_until(lambda: self.events(**query)["events"], "an event", SOON)
        self.ask("GET", "/events", status=200, params=query, headers={"If-None-Match": tag})

    def test_a_cursor_that_is_gone_names_the_oldest_event(self) -> None:
        self.create()
        self.plane.wait_quiet()
        newest = int(self.events(after="latest")["next_after"])
        with self.plane.database.write() as tx:
            tx.execute(sa.update(event_sequence).values(purged=newest - 1))
        queries: tuple[dict[str, Any], ...] = ({"after": 0}, {"after": 10**9}, {"after": 0, "wait": 5})
        for query in queries:
            self.assertEqual({"oldest": newest, "newest": newest}, self.events(410, **query)["error"]["details"])
        with self.assertRaises(errors.Gone):
            connect(self.url).events(0)
        self.assertEqual([newest], [each["number"] for each in self.events()["events"]])

    def follow(self, token: str) -> requests.Response:
        """A stream, which has begun when its answer is not an error."""
        headers = {"X-Auth-Token": token, "Accept": "text/event-stream"}
        found = requests.get(f"{self.url}/scheduling/v1/events", headers=headers, stream=True, timeout=SOON)
        self.addCleanup(found.close)
        return found

    def test_one_project_leaves_room_for_the_watchers_of_others(self) -> None:
        first, second = self.follow("alice:blue"), self.follow("bob:blue")
        self.assertEqual([200, 200], [first.status_code, second.status_code])
        refused = self.follow("alice:blue")
        self.assertEqual(503, refused.status_code)
        self.assertIn("2 requests of the project blue wait for events", refused.json()["error"]["message"])
        self.events(503, "alice:blue", after="latest", wait=1)
        self.events(200, "alice:blue", after="latest")
        self.assertEqual([200, 200], [self.follow(token).status_code for token in ("carol:red", "admin")])
        second.close()
        wait_until(lambda: self.follow("bob:blue").status_code == 200, "the place of a watcher that has left", SOON)

    def test_watchers_keep_no_request_waiting(self) -> None:
        """300 long polls at once; the API has fewer threads for requests and answers all the same."""
        cursor = self.events(after="latest")["next_after"]
        watchers = 300
        begun = threading.Barrier(watchers + 1)
        found: list[int] = []

        def watch() -> None:
            begun.wait(SOON)
            query = {"after": cursor, "wait": 60, "kind": "instance.create"}
            answer = requests.get(
                f"{self.url}/scheduling/v1/events", params=query, headers={"X-Auth-Token": "admin"}, timeout=SOON
            )
            found.extend(each["number"] for each in answer.json()["events"])

        threads = [threading.Thread(target=watch) for _ in range(watchers)]
        for each in threads:
            each.start()
        begun.wait(SOON)
        self.assertEqual(200, requests.get(f"{self.url}/healthcheck", timeout=SOON).status_code)
        self.create()
        for each in threads:
            each.join(SOON)
        self.assertEqual(watchers, len(found))
        self.assertEqual(1, len(set(found)))
