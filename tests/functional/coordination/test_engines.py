# SPDX-License-Identifier: Apache-2.0
"""Real engines: one killed, one paused beyond its session and resumed; wrong and unreachable backends."""

from __future__ import annotations

import signal
import time
import unittest

from typing_extensions import override

import tests
from moorage.testing.coordination import SOON, wait_for
from tests import servers
from tests.functional.coordination.engines import Engines

_SOAK = unittest.skipUnless(tests.SOAK, "make soak")


class EngineFaultTests(unittest.TestCase):
    """On ZooKeeper with PostgreSQL: who is stopped in the middle of a write would hold all of SQLite until it goes on."""

    objects, spacing = 300, 2.0
    #: The service outlives the pause, so that the process goes on where it was.
    session, down = 4.0, 600.0
    handover = "immediate"

    def backend(self) -> str:
        return servers.shared("zookeeper").url

    def database_url(self) -> str:
        return servers.fresh_database(servers.shared("postgresql"))

    def make(self) -> Engines:
        return Engines(
            self, self.backend(), database_url=self.database_url(), objects=self.objects, spacing=self.spacing,
            session=self.session, down=self.down, handover=self.handover,
        )  # fmt: skip

    def test_each_object_is_handled_at_most_once_a_tick_whatever_happens_to_engines(self) -> None:
        engines = self.make()
        names = ["engine-1", "engine-2", "engine-3"]
        for name in names:
            engines.start(name)
        pids = {name: engines.processes[name].pid for name in names}

        def all_work() -> bool:
            mark = engines.last()
            wait_for(lambda: engines.last() > mark, "something to be handled", 3 * SOON)
            return engines.pids(max(0, engines.last() - self.objects)) == set(pids.values())

        wait_for(all_work, "three engines to share", 3 * SOON)
        paused, killed = engines.processes["engine-2"], engines.processes["engine-3"]
        killed.kill()
        paused.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: time.monotonic() > stopped + max(self.session, self.down_share()), "the session's end", SOON)
        mark = engines.last()
        engines.wait_all_handled(mark, "everything to be handled by the one that is left")
        self.assertEqual(engines.pids(mark), {pids["engine-1"]})
        token = max(row.token for row in engines.rows(mark))
        # It wakes in the middle of what it did, with what it had claimed.
        mark = engines.last()
        paused.send_signal(signal.SIGCONT)
        wait_for(lambda: pids["engine-2"] in engines.pids(mark), "the woken one to take part again", 3 * SOON)
        late = [row for row in engines.rows(mark) if row.pid == pids["engine-2"] and row.token <= token]
        self.assertEqual(late, [], "the zombie has written with what it had before")
        engines.wait_all_handled(engines.last(), "everything to be handled by the two")
        engines.check()

    def down_share(self) -> float:
        return 0.0


@_SOAK
class DrainFaultTests(EngineFaultTests):
    handover = "drain"


@_SOAK
class DatabaseFaultTests(EngineFaultTests):
    """The database as the backend too: a session is [services] service_down_time."""

    down = 4.0

    @override
    def backend(self) -> str:
        return "database"

    @override
    def down_share(self) -> float:
        return self.down

    @override
    def test_each_object_is_handled_at_most_once_a_tick_whatever_happens_to_engines(self) -> None:
        """A process that slept through its heartbeats stops at once and is restarted by its supervisor."""
        engines = self.make()
        for name in ("engine-1", "engine-2", "engine-3"):
            engines.start(name)
        first = engines.processes["engine-1"]
        wait_for(lambda: len(engines.pids(max(0, engines.last() - self.objects))) == 3, "three to share", 3 * SOON)
        engines.processes["engine-3"].kill()
        engines.processes["engine-2"].send_signal(signal.SIGSTOP)
        wait_for(lambda: engines.pids(engines.last() - 1) == {first.pid}, "the first alone", 3 * SOON)
        engines.wait_all_handled(engines.last(), "everything to be handled by the one that is left")
        mark = engines.last()
        sleeper = engines.processes["engine-2"]
        sleeper.send_signal(signal.SIGCONT)
        self.assertNotEqual(sleeper.wait(SOON), 0)
        engines.start("engine-2")
        engines.wait_all_handled(engines.last(), "everything to be handled by two")
        self.assertNotIn(sleeper.pid, engines.pids(mark))
        engines.check()


@_SOAK
class LargeFaultTests(EngineFaultTests):
    """Ten thousand objects."""

    objects, spacing = 10_000, 30.0


class StartTests(unittest.TestCase):
    def refused(self, backend: str, *options: str) -> str:
        engines = Engines(self, backend, objects=1, spacing=1.0)
        process = engines.start("engine-1", *options)
        self.assertNotEqual(process.wait(2 * SOON), 0)
        said = engines.log("engine-1")
        self.assertNotIn("Traceback", said)
        return said

    def test_a_wrong_backend_keeps_the_engine_from_starting_with_the_reason(self) -> None:
        table = {
            "nonsense": "no installed distribution offers it",
            "memory://here": "would not be seen",
        }
        for backend, reason in table.items():
            with self.subTest(backend=backend):
                self.assertIn(reason, self.refused(backend))

    def test_a_database_that_is_down_keeps_the_engine_from_starting(self) -> None:
        url = f"postgresql://nobody:secret@127.0.0.1:{servers.free_port()}/moorage"
        said = self.refused("database", "--set", f"database.connection={url}")
        self.assertIn("connection refused", said.lower())
        self.assertNotIn("secret", said)

    def test_an_unreachable_backend_keeps_it_from_starting_unless_it_may_wait(self) -> None:
        url = f"zookeeper://127.0.0.1:{servers.free_port()}"
        said = self.refused(url, "--set", "coordination.connect_timeout=2")
        self.assertIn("cannot be reached, so this engine does not start", said)
        engines = Engines(self, url, objects=1, spacing=1.0)
        process = engines.start(
            "engine-1", "--set", "coordination.startup_policy=wait", "--set", "coordination.connect_timeout=1"
        )
        wait_for(lambda: "is ready" in engines.log("engine-1"), "it to start")
        self.assertIn("no periodic task runs until then", engines.log("engine-1"))
        self.assertEqual(engines.rows(), [])
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(SOON), 0)

    def test_without_a_backend_every_engine_handles_everything(self) -> None:
        engines = Engines(self, "", objects=5, spacing=0.5)
        pids = {engines.start(name).pid for name in ("engine-1", "engine-2")}
        for pid in pids:
            wait_for(
                lambda pid=pid: {row.object_id for row in engines.rows() if row.pid == pid} == engines.objects,  # type: ignore[misc]
                "each to handle all",
            )
