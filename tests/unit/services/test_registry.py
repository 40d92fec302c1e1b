# SPDX-License-Identifier: Apache-2.0
"""Who is alive: epochs, beats, evictions, and what an observer makes of them."""

from __future__ import annotations

import pathlib
import tempfile
import threading
import unittest
from concurrent import futures
from typing import Any
from unittest import mock

import sqlalchemy as sa

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.db.tables import events
from moorage.services.heartbeat import Heartbeat
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import offering, services
from moorage.testing.clock import ManualClock


class RegistryCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{pathlib.Path(folder.name) / 'x.sqlite'}")
        self.addCleanup(self.database.close)
        with self.database.write() as tx:
            core_metadata.create_all(tx)
        self.registry = ServiceRegistry(self.database, SystemClock())


class TestRegistry(RegistryCase):
    def test_a_second_start_takes_the_rights_of_the_first(self) -> None:
        first = self.registry.enlist("agent", "a", rpc_version="1.0")
        second = self.registry.enlist("agent", "a", rpc_version="1.0")
        self.assertEqual((first.uuid, first.epoch + 1), (second.uuid, second.epoch))
        self.assertFalse(self.registry.beat(first))
        self.assertTrue(self.registry.beat(second))

    def test_a_replaced_incarnation_records_no_reload(self) -> None:
        database = Database(self.database.url_safe, service="api:test")
        self.addCleanup(database.close)
        registry = ServiceRegistry(database, SystemClock())
        first = registry.enlist("api", "a", rpc_version="1.0")
        registry.record_reload(first)
        second = registry.enlist("api", "a", rpc_version="1.0")
        # The first one stood still since it took the configuration.
        registry.record_reload(first)
        registry.record_reload(second)
        with database.read() as tx:
            found = tx.execute(sa.select(events.c.kind, events.c.version).order_by(events.c.id)).all()
        expected = [("start", 1), ("reload", 1), ("start", 2), ("reload", 2)]
        self.assertEqual([(f"service.{what}", epoch) for what, epoch in expected], [tuple(row) for row in found])

    def test_agents_say_what_they_offer_with_every_start(self) -> None:
        for offers, seen in ((None, None), (("b", "a"), {"a", "b"}), ((), set()), (("compute",), {"compute"})):
            uuid = self.registry.enlist("agent", "a", rpc_version="1.0", offers=offers).uuid
            found = self.registry.get(uuid)
            self.assertEqual(found.offers, seen)
            for name in ("a", "compute", "omput"):
                can = seen is None or name in seen
                self.assertEqual(found.can(name), can)
                with self.database.read() as tx:
                    self.assertEqual(
                        tx.execute(sa.select(services.c.uuid).where(offering(name))).scalar(), uuid if can else None
                    )
        self.registry.enlist("scheduler", "s", rpc_version="1.0")
        self.assertFalse(self.registry.list(binary="scheduler")[0].can("compute"))

    def test_starts_at_the_same_moment_get_epochs_of_their_own(self) -> None:
        with futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: self.registry.enlist("agent", "a", rpc_version="1.0").epoch, range(24)))
        self.assertEqual(list(range(1, 25)), sorted(found))

    def test_an_eviction_needs_the_very_beat_that_was_seen(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        seen = self.registry.get(agent.uuid)
        self.assertTrue(self.registry.beat(agent))
        self.assertFalse(self.registry.evict(agent.uuid, seen.epoch, seen.beat), "it had beaten meanwhile")
        seen = self.registry.get(agent.uuid)
        self.assertTrue(self.registry.evict(agent.uuid, seen.epoch, seen.beat))
        self.assertFalse(self.registry.evict(agent.uuid, seen.epoch, seen.beat), "it was evicted twice")
        self.assertFalse(self.registry.beat(agent), "a dead service went on")

    def test_of_a_beat_and_many_evictions_that_race_exactly_one_wins(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        for _ in range(20):
            seen = self.registry.get(agent.uuid)
            with futures.ThreadPoolExecutor(4) as pool:
                beat = pool.submit(self.registry.beat, agent)
                evictions = [pool.submit(self.registry.evict, agent.uuid, seen.epoch, seen.beat) for _ in range(3)]
                won = [beat.result(), *(each.result() for each in evictions)]
            self.assertEqual(1, sum(won), won)
            if not won[0]:
                agent = self.registry.enlist("agent", "a", rpc_version="1.0")

    def test_an_operators_words_outlive_a_restart(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        self.registry.set(agent.uuid, disabled=True, disabled_reason="fan", forced_down=True)
        self.registry.enlist("agent", "a", rpc_version="1.1")
        row = self.registry.get(agent.uuid)
        self.assertEqual(
            (True, "fan", True, "1.1"), (row.disabled, row.disabled_reason, row.forced_down, row.rpc_version)
        )
        with self.assertRaises(errors.NotFound):
            self.registry.set("nobody", disabled=True)


class TestHeartbeat(RegistryCase):
    def test_a_replaced_service_is_told_to_stop(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        lost: list[str] = []
        told = threading.Event()

        def on_lost(reason: str) -> None:
            lost.append(reason)
            told.set()

        heartbeat = Heartbeat(self.registry, agent, SystemClock(), interval=0.05, service_down_time=30, on_lost=on_lost)
        heartbeat.start()
        self.addCleanup(heartbeat.stop)
        self.registry.enlist("agent", "a", rpc_version="1.0")
        self.assertTrue(told.wait(60))
        self.assertIn("epoch 1", lost[0])

    def test_a_service_that_cannot_beat_stops_before_others_take_over(self) -> None:
        class Clock(ManualClock):
            """Its waits end early: the test moves it in no time."""

            def wait(self, event: threads.Event, seconds: float | None) -> bool:
                return event.wait(min(seconds or 0.0, 0.05))

        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        clock = Clock(100.0)
        told = threading.Event()
        heartbeat = Heartbeat(
            self.registry, agent, clock, interval=0.05, service_down_time=30, on_lost=lambda reason: told.set()
        )
        self.assertLess(heartbeat.valid_until, clock.now + 30)
        heartbeat.start()
        self.addCleanup(heartbeat.stop)
        self.database.run = self._hangs  # type: ignore[method-assign,assignment]
        clock.now += 29
        self.assertTrue(told.wait(60))

    def test_services_that_start_together_do_not_beat_together(self) -> None:
        waits: list[float] = []

        class Clock(SystemClock):
            def wait(self, event: object, seconds: float | None) -> bool:
                waits.append(seconds or 0.0)
                return True

        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        for _ in range(20):
            heartbeat = Heartbeat(
                self.registry, agent, Clock(), interval=10.0, service_down_time=60, on_lost=self.fail, owns_work=False
            )
            heartbeat.start()
            heartbeat.stop()
        self.assertEqual(20, len(waits))
        self.assertTrue(all(0 <= each <= 10 for each in waits), waits)
        self.assertGreater(max(waits) - min(waits), 1.0)

    @staticmethod
    def _hangs(*arguments: object, **more: object) -> None:
        raise errors.StoreUnavailable("The database is away.")

    def test_an_impatient_configuration_is_refused(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        with self.assertRaises(errors.ConfigError):
            Heartbeat(
                self.registry, agent, SystemClock(), interval=10, service_down_time=20, on_lost=lambda reason: None
            )


class _Lease:
    def __init__(self, seconds: float | None = 60.0) -> None:
        self.seconds = seconds
        self.moments: list[float] = []
        self.told = threading.Event()
        self.over = threading.Event()

    def promised(self) -> float | None:
        return self.seconds

    def renewed(self, moment: float) -> None:
        self.moments.append(moment)
        self.told.set()

    def ended(self) -> None:
        self.over.set()


class TestLease(RegistryCase):
    """What heartbeats tell of a host that fences itself."""

    def setUp(self) -> None:
        super().setUp()
        self.agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        self.clock = ManualClock(100.0)
        self.lease = _Lease()
        self.heartbeat = Heartbeat(
            self.registry, self.agent, self.clock, interval=0.02, service_down_time=1e6, on_lost=lambda reason: None
        )
        self.heartbeat.renew(self.lease)
        self.lease.moments.clear()

    def test_the_moment_is_from_before_the_heartbeat_is_sent(self) -> None:
        beat = self.registry.beat_promising

        def slow(*given: Any) -> bool:
            self.clock.advance(40.0)
            done = beat(*given)
            self.clock.advance(40.0)
            return done

        with mock.patch.object(self.registry, "beat_promising", slow):
            self.assertTrue(self.heartbeat._beat())
        self.assertEqual([100.0], self.lease.moments)
        self.assertEqual(60_000_000, self.registry.get(self.agent.uuid).self_fence)

    def test_a_lease_begins_with_the_last_heartbeat_that_was_confirmed_and_ends_with_the_last(self) -> None:
        for since in (0.0, 50.0):
            self.clock.advance(since)
            self.assertTrue(self.heartbeat._beat())
            self.clock.advance(7.0)
        lease = _Lease()
        self.heartbeat.renew(lease)
        self.assertEqual([157.0], lease.moments)
        self.assertFalse(lease.over.is_set())
        self.heartbeat.stop()
        self.assertTrue(lease.over.is_set())

    def test_a_heartbeat_of_unknown_outcome_renews_nothing(self) -> None:
        def lost(*given: Any) -> bool:
            raise errors.StoreUnavailable("The connection ended after COMMIT.", outcome="unknown")

        with mock.patch.object(self.registry, "beat_promising", lost), self.assertRaises(errors.Unavailable):
            self.heartbeat._beat()
        self.assertEqual([], self.lease.moments)

    def test_an_agent_that_was_replaced_renews_nothing(self) -> None:
        self.registry.enlist("agent", "a", rpc_version="1.0")
        self.assertFalse(self.heartbeat._beat())
        self.assertEqual([], self.lease.moments)
        self.assertIsNone(self.registry.get(self.agent.uuid).self_fence)

    def test_each_heartbeat_renews_and_says_what_the_host_promises_now(self) -> None:
        self.lease.seconds = None
        self.heartbeat.start()
        self.addCleanup(self.heartbeat.stop)
        self.assertTrue(self.lease.told.wait(60))
        self.assertIsNone(self.registry.get(self.agent.uuid).self_fence)
        self.lease.seconds = 30.0
        # One may have been under way.
        for _ in range(2):
            self.lease.told.clear()
            self.assertTrue(self.lease.told.wait(60))
        self.assertEqual(30_000_000, self.registry.get(self.agent.uuid).self_fence)


class TestObserver(RegistryCase):
    def test_only_an_unchanged_beat_makes_a_service_down_and_only_after_the_whole_time(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        clock = ManualClock(100.0)
        observer = LivenessObserver(clock, 60)

        def up() -> bool:
            return observer.observe(self.registry.list())[agent.uuid]

        self.assertTrue(up())
        clock.now += 59
        self.assertTrue(up())
        self.registry.beat(agent)
        self.assertTrue(up())
        clock.now += 61
        self.assertFalse(up())
        self.registry.beat(agent)
        self.assertTrue(up())

    def test_an_eviction_is_no_sign_of_life(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        clock = ManualClock(100.0)
        observer = LivenessObserver(clock, 60)
        observer.observe(self.registry.list())
        clock.now += 61
        (row,) = self.registry.list()
        self.assertTrue(self.registry.evict(agent.uuid, row.epoch, row.beat))
        self.assertFalse(observer.observe(self.registry.list())[agent.uuid])
        self.registry.enlist("agent", "a", rpc_version="1.0")
        self.assertTrue(observer.observe(self.registry.list())[agent.uuid])

    def test_a_stopped_or_forced_down_service_is_down_at_once(self) -> None:
        agent = self.registry.enlist("agent", "a", rpc_version="1.0")
        observer = LivenessObserver(ManualClock(100.0), 60)
        self.registry.set(agent.uuid, forced_down=True)
        self.assertFalse(observer.observe(self.registry.list())[agent.uuid])
        self.registry.set(agent.uuid, forced_down=False)
        self.assertTrue(observer.observe(self.registry.list())[agent.uuid])
        self.registry.retire(agent)
        self.assertFalse(observer.observe(self.registry.list())[agent.uuid])
