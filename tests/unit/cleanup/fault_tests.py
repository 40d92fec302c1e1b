# SPDX-License-Identifier: Apache-2.0
"""Faults around cleaning that Cinder does not survive, or not on every database; a mix-in.

What is known of Cinder 29, and where it is tried here:

* filters on services match nothing: ``SupervisorTests.test_filters``
* reset-state leaves rows on PostgreSQL: ``CleanerTests.test_reset_state_ends_whatever_is_in_progress``
* one kept row leaks the next: ``CleanerTests.test_rows_of_resources_that_are_gone_or_changed_end_without_a_write``
* one that fails ends the pass: ``CleanerTests.test_one_that_fails_stops_no_other``
* a cleaner that wakes removes the row of another operation:
  ``CleanerTests.test_a_forced_operation_is_not_ended_by_a_cleaner_that_wakes``
* a service that wakes overwrites what was cleaned:
  ``CleanerTests.test_the_owner_that_was_taken_for_dead_writes_nothing_any_more``
* nobody cleans after a cleaner: ``CleanerTests.test_a_cleaner_that_died_is_cleaned_after_by_another``
* a cleanup in progress is begun again by the next request: :meth:`FaultTests.test_a_request_during_a_cleanup_begins_nothing_twice`
* an owner whose clock is ahead is not cleaned after: :meth:`FaultTests.test_clocks_an_hour_apart_change_nothing`
* what nobody had claimed stays for ever: ``CleanerTests.test_an_operation_that_nobody_came_for_is_cleaned_after_a_time``
* two processes of one name clean each other's work: :meth:`FaultTests.test_two_processes_of_one_name_are_two_incarnations`
* two requests are two passes: ``SupervisorTests.test_repeating_a_request_is_one_request``
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import sqlalchemy as sa
from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage.cleanup import options
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.conditions import OrphansOfService
from moorage.cleanup.dry_run import blocked_reason
from moorage.cleanup.interface import STALE, Outcome
from moorage.cleanup.orphans import OrphanStore
from moorage.cleanup.requests import BATCH
from moorage.cleanup.views import OperationViews
from moorage.clock import SystemClock
from moorage.control_plane import options as control_plane_options
from moorage.control_plane.cleanup_endpoints import AgentCleaning, CleanupEndpoint
from moorage.control_plane.process import Platform
from moorage.services.interface import ServiceIdentity
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.work.interface import Lease
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from tests.servers import wait_until
from tests.unit.cleanup.cleaner_tests import ThingHandler, Tools
from tests.unit.cleanup.coordinator_tests import SupervisorCase
from tests.unit.work.operation_tests import (
    TYPE,
    in_threads,
    things,
    write,
)

HOUR = 3600.0


class SkewedClock(SystemClock):
    """A service whose machine is an hour ahead, or behind."""

    def __init__(self, skew: float) -> None:
        self._skew = skew

    def monotonic(self) -> float:
        return super().monotonic() + self._skew

    def wall(self) -> float:
        return super().wall() + self._skew


class FaultTests(SupervisorCase):
    """Subclasses give ``url``."""

    def cleaning(self, who: ServiceIdentity) -> AgentCleaning:
        """The cleaner of an agent, with no handler of its own: the test's is put in."""
        conf = cfg.ConfigOpts()
        for module in (options, control_plane_options):
            module.register_opts(conf)
        conf([], project="moorage", default_config_files=[])
        conf.set_override("enabled_handlers", [], group="cleanup")
        database: Any = self.open_database()
        clock: Any = SystemClock()
        registry = ServiceRegistry(database, clock)
        nobody: Any = None
        platform = Platform(who.host, clock, database, registry, who, nobody, nobody, lambda reason: None)
        found = AgentCleaning(platform, conf, nobody, SqlOperationStore(database, lease_seconds=60), lambda: False)
        cleaner, self.handler = self.cleaner(who)
        found._cleaner, found._orphans = cleaner, cleaner._orphans
        return found

    def test_a_scheduler_purges_until_nothing_old_is_left_and_ends_when_it_is_stopped(self) -> None:
        conf = cfg.ConfigOpts()
        options.register_opts(conf)
        conf([], project="moorage", default_config_files=[])
        nobody: Any = None
        who, clock = self.who["a"], SystemClock()
        platform = Platform(who.host, clock, self.database, self.registry, who, nobody, nobody, lambda reason: None)
        scheduler = CleanupEndpoint(platform, conf, self.store, LivenessObserver(clock, 60))
        self.lines(BATCH + 1, days=40)
        self.lines(1, days=20)
        scheduler.purge()
        self.assertEqual(len(self.history()), 1)
        self.lines(1, days=40)
        scheduler.stop()
        scheduler.purge()
        self.assertEqual(len(self.history()), 2)

    def test_what_waits_for_an_agent_that_is_behind_is_not_unclaimed(self) -> None:
        self.create("one", "build", "building", host="alone")
        cleaning = self.cleaning(self.who["alone"])
        cleaning._announced_within = 0.0
        cleaning._cleaner.policy = dataclasses.replace(cleaning._cleaner.policy, unclaimed_timeout=0.2)
        cleaning.look()
        behind = mock.patch.object(cleaning, "_is_behind", lambda: True)
        with behind:
            SystemClock().sleep(0.3)
            cleaning.look()
        # It has all its time from then on.
        cleaning.look()
        self.assertEqual({}, self.outcomes())
        SystemClock().sleep(0.3)
        cleaning.look()
        self.assertEqual({"done": 1}, self.outcomes())

    def test_a_type_that_is_slow_holds_up_no_other(self) -> None:
        self.other_type("a", "slow")
        self.left_by("a", "quick")
        self.die("a")
        request = self.requests.get(self.ask()["requests"][0]["uuid"])
        gate, begun = threading.Event(), threading.Event()

        class Slow(ThingHandler):
            @override
            def read(self, transaction: sa.Connection, resource_ids: Sequence[str]) -> Mapping[str, Any]:
                return {uuid: mock.Mock(status="building") for uuid in resource_ids}

            @override
            def stamp_token(self, transaction: sa.Connection, leases: Mapping[str, Lease]) -> None:
                """Nothing writes early."""

            @override
            def cleanup(self, lease: Lease, resource: Any) -> Outcome:
                begun.set()
                assert gate.wait(60)
                return STALE

        agent = self.cleaning(self.who["b"])
        slow = Slow(Tools(self.database, self.who["b"]))
        store = OrphanStore(self.database, self.store, self.who["b"], SystemClock())
        handlers = {"gadget": slow, TYPE: self.handler}
        agent._cleaner = Cleaner(store, handlers, SystemClock(), random.Random(1), Policy())
        agent.start()
        try:
            self.assertTrue(begun.wait(60))
            wait_until(lambda: list(self.rows()) == ["slow"], "the other type is cleaned meanwhile", 60)
            # What comes later is too, while the slow one is at its first.
            self.left_by("b", "later")
            with self.database.write() as tx:
                tx.execute(sa.update(workers).where(workers.c.resource_id == "later").values(worker_epoch=0, epoch=0))
            agent.clean_up(request.uuid)
            wait_until(lambda: list(self.rows()) == ["slow"], "what comes later is not held up either", 60)
            self.assertIsNone(self.requests.get(request.uuid).done_at)
            gate.set()
            wait_until(lambda: self.requests.get(request.uuid).done_at, "the request ends with the last", 60)
        finally:
            gate.set()
            agent.stop()
        self.assertEqual(self.outcomes(), {"done": 2, "stale": 1})

    def test_a_request_whose_message_was_lost_is_found(self) -> None:
        for uuid in ("one", "two"):
            self.left_by("a", uuid)
        self.die("a")
        request = self.ask()["requests"][0]["uuid"]
        other = self.cleaning(self.registry.enlist("agent", "stranger", cluster="two", rpc_version="1.0"))
        other.look()
        self.assertEqual(len(self.rows()), 2, "it is of another cluster")
        self.cleaning(self.who["b"]).look()
        self.assertEqual((self.rows(), self.requests.get(request).done_at is None), ({}, False))

    def test_a_start_cleans_after_itself_without_any_request(self) -> None:
        self.left_by("a")
        self.who["a"] = self.registry.enlist("agent", "a", cluster="one", rpc_version="1.0")
        self.cleaning(self.who["a"]).look()
        self.assertEqual((self.rows(), self.thing().status), ({}, "error"))

    def test_two_processes_of_one_name_are_two_incarnations(self) -> None:
        self.create("one", host="a")
        first = self.taken("one", self.who["a"])
        twin = self.registry.enlist("agent", "a", cluster="one", rpc_version="1.0")
        self.create("two", host="a")
        second = self.taken("two", twin)
        self.assertFalse(self.registry.beat(self.who["a"]))
        self.cleaning(twin).look()
        with self.assertRaises(errors.Fenced):
            first.finish_with(lambda tx: write(tx, "one", "active", first.token))
        second.finish_with(lambda tx: write(tx, "two", "active", second.token))
        self.assertEqual((self.thing("one").status, self.thing("two").status), ("error", "active"))

    def test_two_schedulers_and_three_cleaners_come_to_one_cleanup_of_each(self) -> None:
        for number in range(30):
            self.left_by("a", f"{number:02x}")
        others = [self.another(ServiceRegistry(self.open_database(), self.clock)) for _ in range(2)]
        self.die("a", watching=tuple(others))
        in_threads(*(lambda other=other: self.ask(other) for other in others))
        agents = [self.cleaning(self.who[name]) for name in ("b", "c")]
        handlers = []
        for agent in agents:
            handlers.append(agent._cleaner.handlers[TYPE])
        in_threads(*(agent.look for agent in agents for _ in range(2)))
        calls = [uuid for handler in handlers for uuid, _ in handler.calls]  # type: ignore[attr-defined]
        self.assertEqual(sorted(calls), [f"{number:02x}" for number in range(30)])
        self.assertEqual(self.outcomes(), {"done": 30})

    def test_a_request_during_a_cleanup_begins_nothing_twice(self) -> None:
        self.left_by("a")
        self.die("a")
        target = self.requests.get(self.ask()["requests"][0]["uuid"]).target
        first, handler = self.cleaner(self.who["b"])
        second, _ = self.cleaner(self.who["c"])
        began, go_on = threading.Event(), threading.Event()

        def slow(held: object) -> None:
            began.set()
            assert go_on.wait(60)

        handler.answers["one"] = slow
        thread = threading.Thread(target=first.clean, args=(target,))
        thread.start()
        self.assertTrue(began.wait(60))
        self.ask()
        self.assertEqual(second.clean(target), {})
        go_on.set()
        thread.join(60)
        self.assertEqual((len(handler.calls), self.outcomes()), (1, {"done": 1}))

    def test_clocks_an_hour_apart_change_nothing(self) -> None:
        real = time.time
        for skew in (HOUR, -HOUR):
            with mock.patch("time.time", lambda skew=skew: real() + skew):
                self.left_by("a")
                self.create("waits", host="b")
            self.die("a")
            with mock.patch("time.time", lambda skew=skew: real() - skew):
                self.coordinator.sample()
                (request,) = self.ask()["requests"]
                cleaner, _ = self.cleaner(self.who["b"], clock=SkewedClock(-skew))
                target = self.requests.get(request["uuid"]).target
                self.assertEqual(cleaner.clean(target), {"done": 1})
                living = OrphansOfService(self.who["b"].uuid, self.registry.get(self.who["b"].uuid).epoch)
                self.assertEqual(cleaner.clean(living), {})
            self.assertEqual(list(self.rows()), ["waits"])
            self.database.run(lambda tx: self.store.reset(tx, TYPE, "waits"))
            self.who["a"] = self.registry.enlist("agent", "a", cluster="one", rpc_version="1.0")

    def test_a_store_that_goes_away_for_a_moment_ends_no_pass_for_ever(self) -> None:
        self.left_by("a")
        self.die("a")
        target = self.requests.get(self.ask()["requests"][0]["uuid"]).target
        cleaner, handler = self.cleaner(self.who["b"])
        handler.answers["one"] = errors.StoreUnavailable("away, for this test")
        with self.assertLogs("moorage.cleanup.cleaner", "WARNING"):
            self.assertEqual(cleaner.clean(target), {"retry": 1})
        handler.answers.clear()
        wait_until(lambda: cleaner.clean(target), "it is tried again", 20)
        self.assertEqual(self.rows(), {})

    def test_an_agent_that_stops_does_not_clean_all_of_it_first(self) -> None:
        for number in range(20):
            self.left_by("a", f"{number:02x}")
        self.die("a")
        self.ask()
        agent = self.cleaning(self.who["b"])
        began, go_on = threading.Event(), threading.Event()

        def slow(held: object) -> None:
            began.set()
            assert go_on.wait(60)

        self.handler.answers.update({f"{number:02x}": slow for number in range(20)})
        agent.start()
        self.assertTrue(began.wait(60))
        thread = threading.Thread(target=agent.stop)
        thread.start()
        wait_until(agent._cleaner._stopping.is_set, "it stops", 20)
        go_on.set()
        thread.join(60)
        self.assertLess(len(self.handler.calls), 20)
        self.assertEqual(len(self.rows()) + len(self.handler.calls), 20)
        self.assertEqual(
            {row.attempts for row in self.rows().values()} - {1}, set(), "what was not tried does not count"
        )

    def test_a_look_at_many_services_costs_as_many_reads_as_at_few(self) -> None:
        counts = []
        for _ in range(2):
            statements: list[str] = []

            def count(_connection: object, _cursor: object, statement: str, *_rest: object, into=statements) -> None:
                into.append(statement)

            sa.event.listen(sa.Engine, "before_cursor_execute", count)
            self.coordinator.sample()
            self.coordinator.automatic("me")
            self.ask(dry_run=True)
            sa.event.remove(sa.Engine, "before_cursor_execute", count)
            counts.append(len(statements))
            for number in range(20):
                self.registry.enlist("agent", f"more-{number}", cluster="three", rpc_version="1.0")
        self.assertEqual(counts[0], counts[1])

    def test_what_waited_for_the_dead_service_is_part_of_the_request(self) -> None:
        self.left_by("a", "begun")
        for number in range(3):
            self.create(f"waits-{number}", host="a")
        self.create("of-b", host="b")
        self.die("a")
        would = {row["resource_id"]: row["would"] for row in self.ask(dry_run=True)["would_clean"]}
        self.assertEqual(would, dict.fromkeys(("begun", "waits-0", "waits-1", "waits-2"), "yes"))
        request = self.requests.get(self.ask()["requests"][0]["uuid"])
        self.assertEqual(self.requests.progress(request)["left"], {"working": 1, "waiting": 3})
        self.assertFalse(self.requests.close_if_done(request))
        self.cleaning(self.who["b"]).look()
        self.assertEqual((list(self.rows()), self.requests.progress(request)["outcomes"]), (["of-b"], {"done": 4}))
        self.assertIsNotNone(self.requests.get(request.uuid).done_at)

    def test_a_dry_run_says_what_the_run_then_does(self) -> None:
        for uuid in ("cleaned", "finished", "waits"):
            if uuid == "waits":
                self.create(uuid, host="a")
            else:
                self.left_by("a", uuid)
        with self.database.write() as tx:
            tx.execute(sa.update(things).where(things.c.id == "finished").values(status="active"))
        self.other_type("a", "unhandled")
        self.die("a")
        agent = self.cleaning(self.who["b"])
        ask = self.who["a"].uuid, True, None, None
        would = {row["resource_id"]: row["would"] for row in agent.would_clean_up(*ask)["rows"]}
        self.assertEqual((would.pop("cleaned"), would.pop("waits")), ("yes", "yes"))
        self.assertRegex(would.pop("finished"), "^stale: the resource is active, the operation was of building")
        self.assertRegex(would.pop("unhandled"), "^no: no enabled handler cleans a gadget")
        self.assertEqual(would, {})
        agent._cleaner.policy = Policy(paused=frozenset({TYPE}))
        paused = [row["would"] for row in agent.would_clean_up(*ask)["rows"] if row["resource_type"] == TYPE]
        self.assertEqual(paused, ["no: the cleaning of the type thing is paused ([cleanup] paused)"] * 3)
        # Now the run.
        request = self.requests.get(self.ask()["requests"][0]["uuid"])
        agent.look()
        self.assertEqual(self.outcomes(), {})
        agent._cleaner.policy = Policy()
        agent.look()
        self.assertEqual((self.outcomes(), list(self.rows())), ({"done": 2, "stale": 1}, ["unhandled"]))
        self.assertIsNone(self.requests.get(request.uuid).done_at)

    def other_type(self, name: str, uuid: str) -> None:
        """An operation of a service on something that no handler cleans."""

        def work(tx: sa.Connection) -> None:
            self.store.create(tx, "gadget", uuid, "build", "building", target_host=name)
            self.store.start_many(tx, "gadget", [uuid], self.who[name])

        self.database.run(work)

    def test_a_request_and_its_rows_say_what_they_wait_for(self) -> None:
        self.left_by("a", "one")
        self.other_type("a", "two")
        self.die("a")
        request = self.requests.get(self.ask()["requests"][0]["uuid"])

        def hinders(kind: str) -> str:
            return blocked_reason(kind, ["thing"], ["thing"])

        waits = self.requests.progress(request, hinders)["waits_for"]
        self.assertEqual(
            waits,
            [
                "1 of the type gadget: no enabled handler cleans a gadget ([cleanup] enabled_handlers)",
                "1 of the type thing: the cleaning of the type thing is paused ([cleanup] paused)",
            ],
        )
        self.assertEqual(
            self.requests.progress(request)["waits_for"][1][-40:], "a cleaner of the cluster is to take them"
        )
        why = {row["resource_id"]: row["why"] for row in OperationViews(self.database, self.store, hinders).rows()}
        self.assertRegex(why["one"], r"waits for a cleaner .*; but the cleaning of the type thing is paused")
        self.assertRegex(why["two"], r"waits for a cleaner .*; but no enabled handler cleans a gadget")

    def test_a_dry_run_says_how_many_rows_it_does_not_list(self) -> None:
        for number in range(5):
            self.left_by("a", str(number))
        self.die("a")
        (service,) = [row for row in self.registry.list() if row.uuid == self.who["a"].uuid]
        for limit, left_out in ((2, 3), (5, 0), (9, 0)):
            forecast = self.views.would_clean(service, True, None, None, limit)
            self.assertEqual((len(forecast.rows), forecast.left_out), (5 - left_out, left_out))
        self.assertEqual(self.ask(dry_run=True)["left_out"], 0)

    def test_who_left_nothing_but_a_queue_is_cleaned_after_automatically(self) -> None:
        self.create("waits", host="a")
        self.die("a")
        for _ in range(3):
            self.coordinator.sample()
        (request,) = self.coordinator.automatic("me")["requests"]
        self.cleaning(self.who["b"]).look()
        self.assertEqual((self.rows(), self.requests.get(request["uuid"]).done_at is None), ({}, False))
        self.assertEqual(self.coordinator.automatic("me")["requests"], [])

    def test_a_dry_run_of_a_living_service_says_what_the_request_would_do(self) -> None:
        self.left_by("a")
        (row,) = self.ask(dry_run=True, is_up=True, host="a")["would_clean"]
        self.assertEqual(row["would"], "no: its service lives and works on it")
        self.assertEqual(
            self.cleaner(self.who["b"])[0].clean(
                self.requests.get(self.ask(is_up=True, host="a")["requests"][0]["uuid"]).target
            ),
            {},
        )
