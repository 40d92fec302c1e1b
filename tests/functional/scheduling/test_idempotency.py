# SPDX-License-Identifier: Apache-2.0
"""Three ids over HTTP: the request id, the caller's global request id and the Idempotency-Key; on three databases."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import unittest
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import requests
import sqlalchemy as sa
from oslo_context import context as oslo_context

from moorage import errors
from moorage.cli import main
from moorage.control_plane.api_role import ApiRole
from moorage.control_plane.factories import open_workers
from moorage.control_plane.idempotency import KEPT, IdempotencyKeys
from moorage.control_plane.tables import idempotency_keys
from moorage.db import MICROSECONDS, now
from moorage.instances.interface import DEPARTURE
from tests import servers
from tests.commands import in_process
from tests.functional.scheduling.plane import SOON, OneByOne, Plane
from tests.servers import wait_until

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 2}}
TOO_LARGE = {"flavorid": "huge", "resources": {"VCPU": 99}}


class _LivePlane(unittest.TestCase):
    url_of_database = ""
    overrides: ClassVar[Mapping[str, Any]] = {}

    def setUp(self) -> None:
        self.plane = Plane(
            self, url=self.url_of_database, api__bind="127.0.0.1:0", api__auth_strategy="noauth", **self.overrides
        ).up(("h1", "h2"), schedulers=2)
        self.workers = open_workers(self.plane.client, self.plane.conf)
        self.url: str = self.plane.start(ApiRole(), "api-live").url

    def ask(
        self, method: str, path: str, body: Any = None, key: str | None = None, token: str = "admin", **headers: str
    ) -> requests.Response:
        given = {"X-Auth-Token": token, **headers, **({"Idempotency-Key": key} if key is not None else {})}
        return requests.request(method, f"{self.url}/scheduling/v1{path}", json=body, headers=given, timeout=60)

    def created(self, key: str | None = None, status: int = 202, **more: Any) -> dict[str, Any]:
        answer = self.ask("POST", "/instances", {"flavor": FLAVOR, **more}, key)
        self.assertEqual(status, answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    def settled(self, instance: str) -> dict[str, Any]:
        def shown() -> dict[str, Any]:
            return dict(self.ask("GET", f"/instances/{instance}").json())

        wait_until(lambda: shown()["status"] in {"active", "shelved_offloaded"}, "the instance", SOON)
        # What has moved cannot move again before its source has let go.
        wait_until(lambda: self.workers.get(DEPARTURE, instance) is None, "the source of the move", SOON)
        return shown()

    def instances(self) -> list[str]:
        return [each["uuid"] for each in self.ask("GET", "/instances").json()["instances"]]

    def change_keys(self, **values: Any) -> None:
        with self.plane.database.write() as tx:
            tx.execute(sa.update(idempotency_keys).values(**values))

    def count_keys(self) -> int:
        with self.plane.database.read() as tx:
            return int(tx.execute(sa.select(sa.func.count()).select_from(idempotency_keys)).scalar_one())


class IdempotencyTests(_LivePlane):
    def test_a_repeated_create_gets_the_first_answer_and_makes_nothing(self) -> None:
        first = self.created("one")
        self.settled(first["uuid"])
        self.assertEqual(first, self.created("one"))
        self.assertEqual([first["uuid"]], self.instances())
        many = self.created("many", count=2)
        self.assertEqual(many, self.created("many", count=2))
        self.assertEqual(3, len(self.instances()))

    def test_the_key_with_another_request_is_refused(self) -> None:
        made = self.created("one")
        refused = self.created("one", 409, name="another")["error"]
        self.assertIn("Idempotency-Key one was used for another request", refused["message"])
        self.settled(made["uuid"])
        path = f"/instances/{made['uuid']}/action"
        self.assertEqual(202, self.ask("POST", path, {"shelve_offload": {}}, "two").status_code)
        other = self.settled(self.created()["uuid"])
        answer = self.ask("POST", f"/instances/{other['uuid']}/action", {"shelve_offload": {}}, "two")
        self.assertEqual(409, answer.status_code, answer.text)
        self.assertEqual("active", self.settled(other["uuid"])["status"])

    def test_a_key_belongs_to_a_user_a_project_and_a_route(self) -> None:
        body = {"flavor": FLAVOR}
        made = set()
        for token in ("admin", "ann:lab", "bob:lab", "ann:shop"):
            made |= {self.ask("POST", "/instances", body, "k", token=token).json()["uuid"] for _ in range(2)}
        self.assertEqual(4, len(made))
        group = {"name": "g", "policy": "affinity"}
        answers = [self.ask("POST", "/server-groups", group, "k") for _ in range(2)]
        self.assertEqual([201, 201], [each.status_code for each in answers])
        self.assertEqual(answers[0].json(), answers[1].json())
        self.assertEqual(answers[0].headers["Location"], answers[1].headers["Location"])

    def test_a_key_that_cannot_be_one_is_refused(self) -> None:
        for key in ("", "k" * 256):
            answer = self.ask("POST", "/instances", {"flavor": FLAVOR}, key)
            self.assertEqual((400, []), (answer.status_code, self.instances()), answer.text)

    def test_a_repeated_live_migration_moves_the_instance_once(self) -> None:
        made = self.settled(self.created()["uuid"])
        path = f"/instances/{made['uuid']}/action"
        first = self.ask("POST", path, {"live_migrate": {}}, "move")
        self.assertEqual(202, first.status_code, first.text)
        moved = self.settled(made["uuid"])
        self.assertNotEqual(made["host"], moved["host"])
        again = self.ask("POST", path, {"live_migrate": {}}, "move")
        self.assertEqual((202, first.json()), (again.status_code, again.json()))
        self.assertEqual(moved["host"], self.settled(made["uuid"])["host"])
        self.assertEqual(202, self.ask("POST", path, {"live_migrate": {}}, "back").status_code)
        self.assertEqual(made["host"], self.settled(made["uuid"])["host"])

    def test_what_a_process_did_before_it_died_without_an_answer_is_not_done_again(self) -> None:
        def dies() -> None:
            """The rows as a process leaves them that dies between the operation and its answer."""
            self.change_keys(status=None, answer=None, busy_until=0)

        made = self.created("create")
        dies()
        self.assertEqual(made["uuid"], self.created("create")["uuid"])
        many = [each["uuid"] for each in self.created("many", count=2)["instances"]]
        dies()
        self.assertEqual(many, [each["uuid"] for each in self.created("many", count=2)["instances"]])
        self.assertEqual({made["uuid"], *many}, set(self.instances()))
        here = self.settled(made["uuid"])
        path = f"/instances/{made['uuid']}/action"
        for action in ("live_migrate", "shelve_offload"):
            self.assertEqual(202, self.ask("POST", path, {action: {}}, action).status_code)
            after = self.settled(made["uuid"])
            dies()
            again = self.ask("POST", path, {action: {}}, action)
            self.assertEqual(202, again.status_code, again.text)
            self.assertEqual(after["status"], self.settled(made["uuid"])["status"])
            if action == "live_migrate":
                self.assertNotEqual(here["host"], after["host"])
                self.assertEqual(after["host"], self.settled(made["uuid"])["host"])

    def test_what_was_done_before_all_answers_were_lost_is_not_done_again(self) -> None:
        made = self.settled(self.created()["uuid"])
        path = f"/instances/{made['uuid']}/action"
        flavor = {"flavorid": "tiny", "resources": {"VCPU": 1}}
        for called, below, body, status in (
            # The API looks whether the instance was made before it answers that the schedulers are away.
            ("create_instance", "/instances", {"flavor": FLAVOR}, 202),
            ("create_instances", "/instances", {"flavor": FLAVOR, "count": 2}, 503),
            ("move_instance", path, {"resize": {"flavor": flavor}}, 503),
        ):
            before = len(self.instances())
            self.plane.lose_answer = lambda method, lost=called: method == lost  # type: ignore[method-assign,misc]
            answer = self.ask("POST", below, body, called)
            self.assertEqual(status, answer.status_code, answer.text)
            after = self.instances()
            self.assertEqual(before + {"create_instance": 1, "create_instances": 2}.get(called, 0), len(after))
            changed = self.ask("POST", below, {**body, "uuid": str(uuid.uuid4())}, called)
            self.assertIn(changed.status_code, (400, 409), changed.text)
            self.plane.lose_answer = lambda method: False  # type: ignore[method-assign]
            again = self.ask("POST", below, body, called)
            self.assertEqual(202, again.status_code, again.text)
            self.assertEqual(after, self.instances())
        self.assertEqual("tiny", self.settled(made["uuid"])["flavorid"])

    def test_what_was_undone_after_an_error_is_done_by_the_next_request_with_the_key(self) -> None:
        self.assert_undone_and_done_again(before=errors.StoreUnavailable("away, for a moment"))

    def test_a_claim_that_may_have_been_made_is_given_back_with_the_others(self) -> None:
        self.assert_undone_and_done_again(after=errors.StoreUnavailable("away at the commit", outcome="unknown"))

    def assert_undone_and_done_again(self, *, before: Exception | None = None, after: Exception | None = None) -> None:
        """Of two instances alike the second claim fails: ``before`` it was made, or ``after``."""
        claims = itertools.count(1)

        class SecondClaimFails(OneByOne):
            def __init__(self, real: Any) -> None:
                self.real = real

            def __getattr__(self, name: str) -> Any:
                return getattr(self.real, name)

            def claim(self, *arguments: Any) -> Any:
                second = next(claims) == 2
                if second and before is not None:
                    raise before
                made = self.real.claim(*arguments)
                if second and after is not None:
                    raise after
                return made

        for name in ("scheduler-1", "scheduler-2"):
            scheduler = self.plane.roles[name]._scheduler
            scheduler._claimer = scheduler._set_claimer = SecondClaimFails(scheduler._claimer)
        body = {"flavor": FLAVOR, "count": 2}
        self.assertEqual((503, []), (self.ask("POST", "/instances", body, "many").status_code, self.instances()))
        made = self.ask("POST", "/instances", body, "many")
        self.assertEqual(202, made.status_code, made.text)
        self.assertEqual(2, len(self.instances()))

    def test_several_are_answered_as_they_were_made_although_one_is_deleted_meanwhile(self) -> None:
        def delete_one(method: str) -> bool:
            if method == "create_instances":
                gone = self.instances()[0]
                self.plane.wait_status(gone, "active")
                self.ask("DELETE", f"/instances/{gone}")
                self.plane.wait_status(gone, "gone")
            return False

        self.plane.lose_answer = delete_one  # type: ignore[method-assign]
        answer = self.ask("POST", "/instances", {"flavor": FLAVOR, "count": 2})
        self.assertEqual(202, answer.status_code, answer.text)
        uuids = [each["uuid"] for each in answer.json()["instances"]]
        self.assertEqual(["building"] * 2, [each["status"] for each in answer.json()["instances"]])
        self.assertEqual(1, len(set(uuids) - set(self.instances())))

    def test_concurrent_repetitions_make_one_instance(self) -> None:
        for number in range(5):
            answers: list[requests.Response] = []

            def ask(key: str = f"race-{number}", found: list[requests.Response] = answers) -> None:
                found.append(self.ask("POST", "/instances", {"flavor": {**FLAVOR, "resources": {"VCPU": 1}}}, key))

            threads = [threading.Thread(target=ask) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            made = {each.json()["uuid"] for each in answers if each.status_code == 202}
            self.assertEqual(1, len(made))
            for each in answers:
                if each.status_code != 202:
                    self.assertEqual(409, each.status_code, each.text)
                    self.assertIn("in progress", each.json()["error"]["message"])
            self.assertEqual(number + 1, len(self.instances()))

    def test_a_refusal_is_an_answer_and_a_mistake_is_not(self) -> None:
        refused = self.created("k", 409, flavor=TOO_LARGE)
        self.assertEqual(refused, self.created("k", 409, flavor=TOO_LARGE))
        wrong = {"flavor": FLAVOR, "force_hosts": ["nowhere"]}
        self.assertEqual(400, self.ask("POST", "/instances", wrong, "m").status_code)
        self.created("m")

    def test_keys_are_free_after_24_hours_of_the_database_and_are_removed(self) -> None:
        first = self.created("old")
        # Instances of a busy moment lie beside each other.
        self.assertEqual(7, uuid.UUID(first["uuid"]).version)
        keys = IdempotencyKeys(self.plane.database, busy_seconds=60)
        self.change_keys(created_at=now() - (KEPT - 60) * MICROSECONDS)
        self.assertEqual((first, 0), (self.created("old"), keys.purge()))
        self.change_keys(created_at=now() - (KEPT + 60) * MICROSECONDS)
        second = self.created("old", name="another")
        self.assertNotEqual(first["uuid"], second["uuid"])
        self.created("other")
        self.change_keys(created_at=now() - (KEPT + 60) * MICROSECONDS)
        self.created("new")
        self.assertEqual((2, 0, 1), (keys.purge(), keys.purge(), self.count_keys()))


class RequestIdTests(_LivePlane):
    #: Agents learn of operations from messages alone: what a sweep finds has no ids of a request.
    overrides: ClassVar[Mapping[str, Any]] = {"agent__sweep_interval": 3600}

    def test_one_global_request_id_for_many_calls_makes_many_instances(self) -> None:
        given = f"req-{uuid.uuid4()}"
        headers = {"X-OpenStack-Request-ID": given}
        answers = [self.ask("POST", "/instances", {"flavor": FLAVOR}, **headers) for _ in range(2)]
        self.assertEqual(2, len({each.json()["uuid"] for each in answers}))
        path = f"/instances/{self.settled(answers[0].json()['uuid'])['uuid']}/action"
        hosts = []
        for _ in range(2):
            self.assertEqual(202, self.ask("POST", path, {"live_migrate": {}}, **headers).status_code)
            hosts.append(self.settled(answers[0].json()["uuid"])["host"])
        self.assertEqual({"h1", "h2"}, set(hosts))
        for each in answers:
            self.assertRegex(each.headers["X-OpenStack-Request-ID"], "^req-[0-9a-f-]{36}$")
            self.assertNotEqual(given, each.headers["X-OpenStack-Request-ID"])

    def test_the_id_of_a_refusal_finds_its_decision(self) -> None:
        for path, body in (("/instances", {"flavor": TOO_LARGE}), ("/instances", {"flavor": TOO_LARGE, "count": 2})):
            for key in (None, "k" + str("count" in body)):
                answer = self.ask("POST", path, {**body, "uuid": str(uuid.uuid4())}, key)
                error = answer.json()["error"]
                shown = {answer.headers["X-OpenStack-Request-ID"], error["request_id"], error["details"]["request_id"]}
                self.assertEqual(1, len(shown), answer.text)
                decision = self.ask("GET", f"/decisions/{shown.pop()}")
                self.assertEqual(200, decision.status_code, decision.text)
                self.assertTrue(decision.json()["outcome"].startswith("refused"))

    def moorage(self, *words: str) -> tuple[int, str, str]:
        status, out, err = in_process(main.main, [*words, "--url", self.url, "--auth-type", "none"])
        # The roles of this process write their logs there too.
        return status, out, err[err.rfind("moorage: ") :] if "moorage: " in err else err.splitlines()[-1] if err else ""

    def test_the_commands_show_the_id_and_find_the_decision_by_it_and_by_the_instance(self) -> None:
        wanted = str(uuid.uuid4())
        create = ("instance", "create", "--uuid", wanted, "--resource", "VCPU=99")
        status, _, err = self.moorage(*create)
        self.assertEqual(1, status)
        self.assertRegex(err, r"request id: req-[0-9a-f-]{36}\n")
        status, _, err = self.moorage(*create, "-f", "json")
        self.assertEqual(1, status)
        error = json.loads(err)["error"]
        self.assertEqual("moorage.no_valid_host", error["code"])
        for name in (error["request_id"], wanted):
            status, out, err = self.moorage("decision", "show", name, "-f", "json")
            self.assertEqual(0, status, err)
            self.assertEqual(
                (error["request_id"], wanted), (json.loads(out)["request_id"], json.loads(out)["instance_uuid"])
            )
        status, _, err = self.moorage("instance", "show", wanted, "-f", "json")
        self.assertEqual(1, status)
        self.assertRegex(json.loads(err)["error"]["request_id"], "^req-")
        status, out, err = self.moorage("instance", "create", "--uuid", wanted, "--resource", "VCPU=1", "-f", "json")
        self.assertEqual((0, wanted), (status, json.loads(out)["uuid"]), err)

    def test_every_role_that_touches_a_request_logs_its_id(self) -> None:
        lines: list[tuple[str, str | None, str | None]] = []

        class Lines(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                context = oslo_context.get_current()
                ids = (context.request_id, context.global_request_id) if context is not None else (None, None)
                lines.append((record.name, *ids))

        logger, handler = logging.getLogger("moorage"), Lines()
        plugins = logging.getLogger("moorage_plugins")
        for each in (logger, plugins):
            self.addCleanup(each.setLevel, each.level)
            self.addCleanup(each.removeHandler, handler)
            each.setLevel(logging.INFO)
            each.addHandler(handler)
        given = f"req-{uuid.uuid4()}"
        answer = self.ask("POST", "/instances", {"flavor": FLAVOR}, **{"X-OpenStack-Request-ID": given})
        instance = answer.json()["uuid"]
        self.settled(instance)
        path = f"/instances/{instance}"
        for method, below, body in (
            ("POST", "/action", {"live_migrate": {}}),
            ("POST", "/action", {"shelve_offload": {}}),
            ("POST", "/action", {"unshelve": {}}),
            ("DELETE", "", None),
        ):
            done = self.ask(method, path + below, body, **{"X-OpenStack-Request-ID": given})
            self.assertEqual(202, done.status_code, done.text)
            wanted = (done.headers["X-OpenStack-Request-ID"], given)
            if method == "DELETE":
                self.plane.wait_status(instance, "gone")
            else:
                self.settled(instance)
            names = {"moorage.http.application", "moorage.work.work_loop"}
            if body and "shelve_offload" not in body:
                names.add("moorage.instances.move_requests")
            wait_until(lambda ids=wanted, of=names: of <= {name for name, *found in lines if tuple(found) == ids},  # type: ignore[misc]
                       f"lines of {names}", SOON)  # fmt: skip
        first = {name for name, request_id, _ in lines if request_id == answer.headers["X-OpenStack-Request-ID"]}
        self.assertLessEqual({"moorage.http.application", "moorage.scheduling.rpc", "moorage.work.work_loop"}, first)


class PostgresqlIdempotencyTests(IdempotencyTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url_of_database = servers.fresh_database(servers.shared("postgresql"))


class MariadbIdempotencyTests(IdempotencyTests):
    @classmethod
    def setUpClass(cls) -> None:
        cls.url_of_database = servers.fresh_database(servers.shared("mariadb"))
