# SPDX-License-Identifier: Apache-2.0
"""20 writers and 50 watchers of a whole control plane, while every role is killed and the database is restarted."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa

from moorage import client, errors
from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.factories import load_store
from moorage.db import Database
from moorage.db.tables import events
from moorage.work.tables import workers
from tests import SOAK, folding, servers
from tests.functional.control_plane.test_slice import Plane

FLAVOR = {"flavorid": "small", "resources": {"VCPU": 1}}
WRITERS, WATCHERS, NODES = 20, 50, 8
ROLES = ("scheduler-1", "agent-1", "engine-1", "api-1", "scheduler-2", "agent-2")
EXTRA = """
[control_plane]
create_timeout = 5
[cleanup]
lease_seconds = 5
[agent]
sweep_interval = 1
[database]
connection = {url}
"""


class KillTests(unittest.TestCase):
    def run_under_fire(self, url: str, restart: Any = None) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.plane = Plane(pathlib.Path(folder.name), EXTRA.format(url=url), schedulers=2, agents=2)
        self.addCleanup(self.plane.end)
        self.assertIn("ready", self.plane.wait_ready(), self.plane.said())
        self.api = self.plane.connect()
        self.api.import_nodes([{"name": f"node-{number}", "inventories": {"VCPU": 40}} for number in range(NODES)])
        servers.wait_until(lambda: sum(host["up"] for host in self.api.hosts()) == NODES, "the nodes", 90)
        self.database = Database(url)
        self.addCleanup(self.database.close)
        self.writing, self.settled = threading.Event(), threading.Event()
        with ThreadPoolExecutor(WRITERS + WATCHERS) as pool:
            watchers = [pool.submit(self.watch) for _ in range(WATCHERS)]
            writers = [pool.submit(self.write, seed) for seed in range(WRITERS)]
            try:
                for name in ROLES:
                    time.sleep(1)
                    self.kill(name)
                if restart is not None:
                    restart()
                time.sleep(2)
                self.writing.set()
                made = sum(each.result() for each in writers)
                self.settle()
                # Before the watchers end: what is written later, they need not have seen.
                rows = self.numbered()
            finally:
                self.writing.set()
                self.settled.set()
            seen = [each.result() for each in watchers]
        store = load_store(config.load(files=["/dev/null"], state_dir=folder.name), self.database, SystemClock())
        self.assertEqual([], folding.differences(self.database, store))
        self.assertGreater(made, WRITERS)
        numbers = sorted(row.number for row in rows)
        self.assertEqual(list(range(1, len(rows) + 1)), numbers, "no gap and nothing doubled")
        for each in seen:
            self.assertEqual(numbers, each[: len(numbers)], "every watcher saw every event once and in order")
        versions: dict[str, int] = {}
        for row in sorted(rows):
            if row.kind in ("instance.change", "instance.delete"):
                self.assertGreaterEqual(row.version, versions.get(row.subject, 0))
                versions[row.subject] = row.version

    def numbered(self) -> list[Any]:
        columns = (events.c.number, events.c.subject, events.c.version, events.c.kind)
        with self.database.read() as tx:
            return list(tx.execute(sa.select(*columns).where(events.c.number.is_not(None))))

    def connect(self) -> client.Client:
        return client.connect(**self.plane.data)

    def write(self, seed: int) -> int:
        api, chance, mine, made = self.connect(), random.Random(seed), [], 0  # type: client.Client, random.Random, list[str], int
        while not self.writing.is_set():
            with contextlib.suppress(errors.MoorageError):
                mine.append(api.create_instance({"flavor": FLAVOR})["uuid"])
                made += 1
            if mine:
                with contextlib.suppress(errors.MoorageError):
                    if chance.random() < 0.5:
                        api.act_on_instance(chance.choice(mine), "live_migrate")
                    else:
                        api.delete_instance(mine.pop(chance.randrange(len(mine))))
            time.sleep(0.2)
        return made

    def watch(self) -> list[int]:
        """Follow the journal until nothing is written any more, and one reading later."""
        api, cursor, found = self.connect(), "0", []  # type: client.Client, str, list[int]
        while True:
            last = self.settled.is_set()
            try:
                page = api.events(cursor, wait=None if last else 10)
            except errors.MoorageError:
                time.sleep(0.5)
                continue
            found += [each["number"] for each in page["events"]]
            cursor = page["next_after"]
            if last and not page["events"]:
                return found

    def kill(self, name: str) -> None:
        before = self.plane.processes()[name]["pid"]
        os.kill(before, signal.SIGKILL)
        servers.wait_until(lambda: self.plane.processes()[name]["pid"] not in (None, before), f"{name} to start", 90)

    def settle(self) -> None:
        """No operation is in progress, and every event has its number."""

        def settled() -> bool:
            with self.database.read() as tx:
                open_ones = tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one()
                waiting = tx.execute(sa.select(sa.func.count()).where(events.c.number.is_(None))).scalar_one()
            return not open_ones and not waiting

        servers.wait_until(settled, "the last operations", 180)

    def test_on_sqlite(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.run_under_fire(f"sqlite:///{folder.name}/moorage.sqlite")

    def test_on_postgresql_that_is_restarted(self) -> None:
        if not SOAK:
            self.skipTest("takes two minutes; make soak runs it")
        servers.require("postgresql")
        with servers.postgresql() as server:
            self.run_under_fire(servers.fresh_database(server), server.restart)
            self.plane.end()
