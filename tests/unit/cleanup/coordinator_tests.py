# SPDX-License-Identifier: Apache-2.0
"""Whom schedulers have cleaned after, on any database; a mix-in for the tests of each."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup import totals
from moorage.cleanup.conditions import OrphansOfService
from moorage.cleanup.coordinator import CleanupCoordinator, CleanupFilter
from moorage.cleanup.requests import RequestStore
from moorage.cleanup.tables import cleanup_history
from moorage.cleanup.views import OperationViews
from moorage.db import Database, now
from moorage.db.tables import events
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.testing.clock import ManualClock
from tests.unit.cleanup.cleaner_tests import CleanerCase
from tests.unit.work.operation_tests import TYPE, in_threads

DOWN_TIME = 10.0


class SupervisorCase(CleanerCase):
    """A register of five services, and a coordinator; subclasses give ``url``."""

    def setUp(self) -> None:
        super().setUp()
        self.clock = ManualClock(1000.0)
        self.registry = ServiceRegistry(self.database, self.clock)
        self.told: list[tuple[str, str]] = []
        self.announced: list[tuple[str, int]] = []
        self.requested: list[tuple[str, int, str]] = []
        self.changed: list[tuple[str, bool]] = []
        self.automatic_enabled = False
        self.requests = RequestStore(self.database, self.registry)
        self.views = OperationViews(self.database, self.store)
        self.coordinator = self.another()
        self.who = {
            name: self.registry.enlist("agent", name, cluster=cluster, rpc_version="1.0")
            for name, cluster in (("a", "one"), ("b", "one"), ("c", "one"), ("d@ceph", "two"), ("alone", None))
        }
        self.coordinator.sample()

    def another(self, registry: ServiceRegistry | None = None) -> CleanupCoordinator:
        return CleanupCoordinator(
            registry or self.registry,
            LivenessObserver(self.clock, DOWN_TIME),
            self.requests,
            self.views,
            tell=lambda host, request: self.told.append((host, request)),
            announce=lambda service, epoch: self.announced.append((service, epoch)),
            checks=lambda: 3,
            automatic=lambda: self.automatic_enabled,
            requested=lambda service, request: self.requested.append((service.host, request.epoch, request.kind)),
            changed=lambda service, up: self.changed.append((service.host, up)),
        )

    def lines(self, number: int, *, days: int) -> None:
        """Of two types and two outcomes, that took a quarter of a second each."""
        line = {
            "operation": "build", "status": "building", "reason": "", "worker": None, "worker_epoch": 1, "cleaner": None,
            "cleaner_epoch": 0, "token": 1, "attempts": 2, "seconds": 0.25,
        }  # fmt: skip
        several = [
            {
                **line,
                "resource_type": (TYPE, "gadget")[n % 2],
                "outcome": ("done", "stale")[n % 4 // 2],
                "resource_id": str(n),
            }
            for n in range(number)
        ]
        with self.database.write() as tx:
            tx.execute(sa.insert(cleanup_history).values(at=now() - days * 86_400_000_000), several)

    def die(self, *names: str, watching: tuple[CleanupCoordinator, ...] = ()) -> None:
        """All but these beat on, for longer than it takes to be taken for dead."""
        for coordinator in (self.coordinator, *watching):
            coordinator.sample()
        self.clock.now += DOWN_TIME + 1
        for name, who in self.who.items():
            if name not in names:
                self.assertTrue(self.registry.beat(who))

    def left_by(self, name: str, uuid: str = "one", status: str = "building") -> None:
        self.create(uuid, "build", status, host=name)
        self.taken(uuid, self.who[name])

    def ask(
        self, coordinator: CleanupCoordinator | None = None, *, dry_run: bool = False, **filters: Any
    ) -> dict[str, Any]:
        return (coordinator or self.coordinator).request(CleanupFilter(**filters), "me", dry_run=dry_run)

    def hosts(self, answer: dict[str, Any], kind: str = "cleaning") -> list[str]:
        return [each["host"] for each in answer[kind]]

    def epoch(self, name: str) -> int:
        return self.registry.get(self.who[name].uuid).epoch


class SupervisorTests(SupervisorCase):
    """Subclasses give ``url``."""

    # -- on request -----------------------------------------------------------------------------------------------

    def test_a_dead_service_is_declared_dead_and_a_living_one_of_its_cluster_told(self) -> None:
        self.left_by("a")
        self.assertEqual(self.ask(), {"cleaning": [], "unavailable": [], "requests": []})
        self.die("a", "alone")
        answer = self.ask()
        self.assertEqual((self.hosts(answer), self.hosts(answer, "unavailable")), (["a"], ["alone"]))
        self.assertEqual((self.epoch("a"), self.epoch("alone")), (2, 1))
        (request,) = answer["requests"]
        self.assertEqual(self.told, [("b", request["uuid"])])
        self.assertEqual(self.announced, [(self.who["a"].uuid, 2)])
        self.assertFalse(self.registry.beat(self.who["a"]), "it must stop when it comes back")

    def test_who_looks_on_is_told_of_requests_and_of_services_that_fall_silent_or_come_back(self) -> None:
        self.assertEqual([], self.changed, "of one that is seen for the first time nothing has changed")
        self.left_by("a")
        self.die("a", "alone")
        self.coordinator.sample()
        self.assertEqual([("a", False), ("alone", False)], sorted(self.changed))
        self.coordinator.sample()
        self.ask()
        self.assertEqual([("a", 2, "manual")], self.requested)
        self.registry.enlist("agent", "alone", rpc_version="1.0")
        self.coordinator.sample()
        self.assertEqual([("alone", True)], self.changed[2:])

    def test_only_a_write_makes_it_dead(self) -> None:
        self.left_by("a")
        self.die("a")
        self.assertTrue(self.registry.beat(self.who["a"]), "in the last moment")
        rows = self.registry.list()
        stale = next(row for row in rows if row.host == "a")
        self.assertTrue(self.registry.beat(self.who["a"]))
        self.assertIsNone(self.requests.open(stale, evict=True, kind="manual", requested_by="me"))
        self.assertEqual((self.epoch("a"), self.requests.page()), (1, []))

    def test_repeating_a_request_is_one_request(self) -> None:
        self.left_by("a")
        self.die("a")
        first = self.ask()["requests"]
        self.assertEqual([self.ask()["requests"] for _ in range(3)], [first] * 3)
        self.assertEqual(self.epoch("a"), 2)
        request = self.requests.get(first[0]["uuid"])
        self.cleaner(self.who["b"])[0].clean(request.target)
        self.assertTrue(self.requests.close_if_done(request))
        self.assertFalse(self.requests.close_if_done(request))
        self.assertEqual(self.ask()["requests"], first)
        self.assertIsNone(self.requests.get(request.uuid).done_at, "asked again, it is looked at again")

    def test_schedulers_that_request_at_once_make_one_request(self) -> None:
        self.left_by("a")
        others = [self.another(ServiceRegistry(self.open_database(), self.clock)) for _ in range(4)]
        self.die("a", watching=tuple(others))
        answers = in_threads(*(lambda other=other: self.ask(other) for other in others))
        found = {each["requests"][0]["uuid"] for each in answers if isinstance(each, dict) and each["requests"]}
        self.assertEqual((len(found), self.epoch("a")), (1, 2), answers)
        self.assertEqual([each.uuid for each in self.requests.page()], list(found))

    def test_a_new_incarnation_is_a_new_request(self) -> None:
        self.die("a")
        first = self.ask()["requests"][0]
        self.who["a"] = self.registry.enlist("agent", "a", cluster="one", rpc_version="1.0")
        self.die("a")
        second = self.ask()["requests"][0]
        self.assertNotEqual(first["uuid"], second["uuid"])
        self.assertEqual((first["epoch"], second["epoch"]), (2, 4))

    def test_filters(self) -> None:
        self.left_by("a", "of-a")
        self.left_by("b", "of-b")
        self.die("a", "b", "d@ceph", "alone")
        number = str(self.registry.get(self.who["a"].uuid).id)
        for filters, hosts in (
            ({"service": self.who["a"].uuid}, ["a"]),
            ({"service": number}, ["a"]),
            ({"service": "0"}, []),
            ({"cluster": "one"}, ["a", "b"]),
            ({"cluster": "two"}, []),
            ({"host": "b"}, ["b"]),
            ({"binary": "agent", "host": "a"}, ["a"]),
            ({"binary": "scheduler"}, []),
            ({"disabled": True}, []),
            ({"disabled": False, "host": "a"}, ["a"]),
            ({"resource_id": "of-a"}, ["a"]),
            ({"resource_id": "of-b", "resource_type": TYPE, "binary": "agent"}, ["b"]),
            ({"is_up": True, "cluster": "one"}, ["c"]),
            ({}, ["a", "b"]),
        ):
            with self.subTest(filters):
                self.assertEqual(self.hosts(self.ask(dry_run=True, **filters)), hosts)
        self.assertEqual(self.hosts(self.ask(host="d"), "unavailable"), ["d@ceph"])
        self.assertEqual(self.epoch("a"), 1, "a dry run writes nothing")

    def test_a_resource_without_an_orphan_is_refused(self) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, "no resource with UUID nothing pending"):
            self.ask(resource_id="nothing")
        self.create("waiting", host="a")
        with self.assertRaisesRegex(errors.InvalidInput, "No service has begun"):
            self.ask(resource_id="waiting")

    def test_during_an_upgrade_nothing_can_be_requested(self) -> None:
        self.registry.enlist("agent", "new", cluster="one", rpc_version="2.0")
        for ask in (self.ask, lambda: self.coordinator.automatic("me")):
            with self.assertRaisesRegex(errors.Unavailable, "agent a.*; 2.0: agent new"):
                ask()
        self.die("new")
        self.assertEqual(self.hosts(self.ask()), ["new"])

    def test_what_a_living_service_left_before_it_started_again(self) -> None:
        self.left_by("a")
        self.who["a"] = self.registry.enlist("agent", "a", cluster="one", rpc_version="1.0")
        answer = self.ask(is_up=True, host="a")
        self.assertEqual((self.hosts(answer), self.epoch("a"), self.told[0][0]), (["a"], 2, "a"))
        request = self.requests.get(answer["requests"][0]["uuid"])
        self.assertEqual(self.cleaner(self.who["a"])[0].clean(request.target), {"done": 1})

    def test_one_forced_down_is_dead_at_once(self) -> None:
        self.registry.set(self.who["a"].uuid, forced_down=True)
        self.assertEqual(self.hosts(self.ask()), ["a"])
        self.assertFalse(self.registry.beat(self.who["a"]))

    def test_progress_is_counted_from_the_tables(self) -> None:
        for uuid in ("one", "two", "three"):
            self.left_by("a", uuid)
        self.die("a")
        request = self.requests.get(self.ask()["requests"][0]["uuid"])
        waits = ["3 of the type thing: a cleaner of the cluster is to take them"]
        progress: dict[str, Any] = {"left": {"working": 3}, "outcomes": {}, "waits_for": waits}
        self.assertEqual(self.requests.progress(request), progress)
        cleaner, handler = self.cleaner(self.who["b"], max_attempts=1)
        handler.answers["two"] = ValueError("broken")
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            cleaner.clean(request.target)
        progress = {"left": {"quarantined": 1}, "outcomes": {"done": 2, "quarantined": 1}, "waits_for": []}
        self.assertEqual(self.requests.progress(request), progress)
        self.assertTrue(self.requests.close_if_done(request))
        self.assertEqual(self.requests.open_for("b", "one"), [])

    def test_open_requests_are_seen_by_their_cluster(self) -> None:
        self.left_by("a")
        self.die("a")
        self.ask()
        for host, cluster, seen in (("b", "one", 1), ("x", "two", 0), ("x", None, 0), ("a", None, 1)):
            self.assertEqual(len(self.requests.open_for(host, cluster)), seen)

    def test_what_is_old_is_removed(self) -> None:
        self.left_by("a")
        self.die("a")
        request = self.requests.get(self.ask()["requests"][0]["uuid"])
        self.cleaner(self.who["b"])[0].clean(request.target)
        self.requests.close_if_done(request)
        self.assertEqual(self.requests.purge(1), 0)
        self.assertEqual(self.requests.purge(-1), 2)
        self.assertEqual(self.requests.purge(-1), 0)

    def counted(self) -> dict[tuple[str, str], totals.Sum]:
        with self.database.read() as tx:
            return totals.outcomes(tx)

    def test_old_lines_go_a_few_at_a_time_and_stay_in_the_totals(self) -> None:
        self.lines(24, days=40)
        self.lines(4, days=20)
        before = self.counted()
        self.assertEqual(before, dict.fromkeys(itertools.product((TYPE, "gadget"), ("done", "stale")), (7, 1.75)))
        found = []
        while removed := self.requests.purge(30, batch=10):
            found.append(removed)
            self.assertEqual(self.counted(), before)
        self.assertEqual(found, [10, 10, 4])
        self.assertEqual(len(self.history()), 4)
        self.requests.purge(10)
        self.assertEqual((self.counted(), self.history()), (before, []))

    def test_several_who_purge_count_each_line_once(self) -> None:
        self.lines(400, days=40)

        def purge_all(database: Database) -> int:
            requests = RequestStore(database, self.registry)
            while self.history():
                requests.purge(30, batch=20)
            return 0

        databases = [self.open_database() for _ in range(4)]
        in_threads(*(functools.partial(purge_all, database) for database in databases))
        self.assertEqual(
            self.counted(), dict.fromkeys(itertools.product((TYPE, "gadget"), ("done", "stale")), (100, 25.0))
        )

    # -- automatically --------------------------------------------------------------------------------------------

    def test_one_that_stays_dead_is_cleaned_after_by_itself(self) -> None:
        self.automatic_enabled = True
        self.left_by("a")
        self.die("a")
        for number in range(3):
            self.assertEqual(self.requests.page(), [], number)
            self.coordinator.sample()
        (request,) = self.requests.page()
        self.assertEqual((request.kind, request.service, request.epoch), ("automatic", self.who["a"].uuid, 2))
        self.cleaner(self.who["b"])[0].clean(request.target)
        self.requests.close_if_done(request)
        for _ in range(5):
            self.coordinator.sample()
        self.assertEqual([each.done_at is not None for each in self.requests.page()], [True])
        self.assertEqual(self.epoch("a"), 2)

    def test_what_is_not_enabled_can_be_asked_for(self) -> None:
        self.left_by("a")
        self.die("a")
        self.assertEqual(self.hosts(self.coordinator.automatic("me")), [])
        for _ in range(3):
            self.coordinator.sample()
        self.assertEqual(self.requests.page(), [])
        self.assertEqual(self.hosts(self.coordinator.automatic("me", dry_run=True)), ["a"])
        self.assertEqual(self.hosts(self.coordinator.automatic("me")), ["a"])

    def test_one_that_comes_back_is_counted_anew(self) -> None:
        self.automatic_enabled = True
        self.left_by("a")
        self.die("a")
        for _ in range(2):
            self.coordinator.sample()
        self.assertTrue(self.registry.beat(self.who["a"]))
        self.coordinator.sample()
        self.die("a")
        self.coordinator.sample()
        self.assertEqual(self.requests.page(), [])

    def test_what_another_scheduler_has_requested_is_counted_anew(self) -> None:
        self.left_by("a")
        self.die("a")
        for _ in range(3):
            self.coordinator.sample()
        self.coordinator.heard(self.who["a"].uuid, 2)
        self.assertEqual(self.hosts(self.coordinator.automatic("me")), [])

    # -- what people see ------------------------------------------------------------------------------------------

    def test_each_row_says_why_it_does_not_go_on(self) -> None:
        self.create("waits", host="a")
        self.left_by("a", "works")
        self.left_by("c", "fails")
        self.die("c")
        self.ask()
        cleaner, handler = self.cleaner(self.who["b"], max_attempts=2, backoff=100, backoff_longest=100)
        handler.answers["fails"] = ValueError("broken")
        why = {row["resource_id"]: row["why"] for row in self.views.rows()}
        self.assertRegex(why["waits"], r"^waits for a to take it, since \d+ s")
        self.assertRegex(why["works"], "^agent a works on it, its lease ends in")
        self.assertRegex(why["fails"], "^agent c began it and has ended since; it waits for a cleaner")
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            cleaner.clean(OrphansOfService(self.who["c"].uuid, 2))
        self.assertRegex(self.views.get(TYPE, "fails")["why"], r"ValueError: broken\); tried again in \d+ s")
        (would,) = self.ask(host="c", dry_run=True)["would_clean"]
        self.assertEqual((would["resource_id"], would["would"]), ("fails", "later: ValueError: broken"))

    def test_pages_and_filters_of_rows(self) -> None:
        for number in range(5):
            self.create(f"{number}", host="a" if number % 2 else "b")
        first = self.views.rows(limit=2)
        self.assertEqual([each["resource_id"] for each in first], ["0", "1"])
        second = self.views.rows(after=(TYPE, "1"), limit=9)
        self.assertEqual([each["resource_id"] for each in second], ["2", "3", "4"])
        self.assertEqual([each["resource_id"] for each in self.views.rows(host="a")], ["1", "3"])
        self.assertEqual(self.views.rows(phase="quarantined"), [])

    def test_quarantine_ends_by_a_persons_word(self) -> None:
        self.service = self.database.service = "test"
        for uuid in ("again", "never"):
            self.left_by("a", uuid)
            self.put(uuid, project_id="blue")
        self.die("a")
        request = self.requests.get(self.ask()["requests"][0]["uuid"])
        cleaner, handler = self.cleaner(self.who["b"], max_attempts=1)
        handler.answers = dict.fromkeys(("again", "never"), ValueError("broken"))
        with self.assertRaisesRegex(errors.Conflict, "is not in quarantine: agent a began it"):
            self.views.retry(TYPE, "again")
        with self.assertLogs("moorage.cleanup.cleaner", "ERROR"):
            cleaner.clean(request.target)
        self.assertTrue(self.requests.close_if_done(request))
        self.views.discard(TYPE, "never")
        with self.assertRaisesRegex(errors.NotFound, "No operation on thing never"):
            self.views.discard(TYPE, "never")
        self.assertEqual(self.thing("never").status, "building")
        handler.answers.clear()
        self.assertEqual(self.views.retry(TYPE, "again")["phase"], "retrying")
        self.assertEqual([each.uuid for each in self.requests.open_for("b", "one")], [request.uuid])
        self.assertEqual(cleaner.clean(request.target), {"done": 1})
        outcomes = [(row["resource_id"], row["outcome"]) for row in self.views.history()]
        self.assertEqual(outcomes[-2:], [("never", "discarded"), ("again", "done")])
        self.assertEqual(len(self.views.history(resource_id="again", limit=1)), 1)
        with self.database.read() as tx:
            columns = (events.c.kind, events.c.subject, events.c.project_id)
            found = tx.execute(sa.select(*columns).order_by(events.c.id)).all()
        # The two are cleaned at the same time: only the order within a subject is promised.
        told: dict[str, list[str]] = {}
        for kind, subject, project in found:
            if kind.startswith("cleanup."):
                self.assertEqual("blue", project, "members see what cleaners do to what is theirs")
                told.setdefault(subject, []).append(kind.removeprefix("cleanup."))
        self.assertEqual(
            {
                "thing/again": ["take", "quarantined", "requeued", "take", "done"],
                "thing/never": ["take", "quarantined", "discarded"],
            },
            told,
        )
        self.assertIn(("service.dead", f"service/{self.who['a'].uuid}", ""), [tuple(row) for row in found])
