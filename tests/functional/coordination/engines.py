# SPDX-License-Identifier: Apache-2.0
"""Real engines as processes, with a task that writes down what it does."""

from __future__ import annotations

import signal
import tempfile
import unittest
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from moorage.cli import roles
from moorage.db import Database, migrations
from moorage.testing.coordination import SOON, wait_for
from tests.forking import Command

__all__ = ["LOG", "Engines"]

ROOT = Path(__file__).resolve().parents[3]
METADATA = sa.MetaData()
#: What was handled, only ever added to.
LOG = sa.Table(
    "handled_log",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("object_id", sa.String(40), nullable=False),
    sa.Column("tick", sa.BigInteger, nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("pid", sa.BigInteger, nullable=False),
)
#: What is handled; ``fence`` is what a real object has.
OBJECTS = sa.Table(
    "handled_objects",
    METADATA,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("fence", sa.BigInteger, nullable=False),
)

PLUGIN = '''
import os
import sqlalchemy as sa
from moorage import errors
from moorage.work import lease as leases
from moorage.coordination.interface import PeriodicTask
from tests.functional.coordination.engines import LOG, OBJECTS

class Logged(PeriodicTask):
    """Writes down each handling, under the fence of its object."""
    api_version = (1, 0)

    def list_objects(self):
        with self.tools.database.read() as tx:
            return list(tx.execute(sa.select(OBJECTS.c.id)).scalars())

    def handle(self, object_id, lease):
        def work(tx):
            row = {"object_id": object_id, "tick": lease.tick, "token": lease.token, "pid": os.getpid()}
            tx.execute(sa.insert(LOG).values(row))
            statement = leases.WRITE.update(OBJECTS, OBJECTS.c.id == object_id, {"token": lease.token})
            if tx.execute(statement).rowcount != 1:
                raise errors.Fenced(f"{object_id} was written by a later owner")
        lease.finish_with(work)
        return True
'''
CONF = """
[coordination]
periodic_coordination_backend = {backend}
heartbeat_timeout = 0.5
session_timeout = {session}
lease_margin = 0.5
poll_interval = 0.3
settle = 0.5
handover = {handover}
[periodic]
enabled_tasks = logged
spacing = logged:{spacing}
concurrency = logged:{concurrency}
poll = 0.3
[services]
report_interval = 0.5
service_down_time = {down}
[rpc]
transport_url = local://
"""


class Engines:
    """Engines over one database; they are ended with the test."""

    def __init__(
        self, test: unittest.TestCase, backend: str, *, database_url: str = "", objects: int, spacing: float,
        session: float = 4.0, down: float = 60.0, handover: str = "immediate", concurrency: int = 2,
    ) -> None:  # fmt: skip
        folder = tempfile.TemporaryDirectory(prefix="moorage-test-")
        test.addCleanup(folder.cleanup)
        self._test = test
        self.folder = Path(folder.name)
        self.url = database_url or f"sqlite:///{self.folder}/moorage.sqlite"
        self.database = Database(self.url, lock_timeout=30)
        test.addCleanup(self.database.close)
        migrations.upgrade_all(self.database)
        with self.database.write() as tx:
            METADATA.create_all(tx)
            rows = [{"id": f"object-{number}", "fence": 0} for number in range(objects)]
            tx.execute(sa.insert(OBJECTS), rows)
        self.objects = {row["id"] for row in rows}
        values = {
            "backend": backend, "session": session, "spacing": spacing, "down": down, "handover": handover,
            "concurrency": concurrency,
        }  # fmt: skip
        self.conf = self.folder / "moorage.conf"
        self.conf.write_text(CONF.format(**values) + f"[database]\nconnection = {self.url}\n")
        self._write_plugin()
        self.processes: dict[str, Command] = {}

    def _write_plugin(self) -> None:
        """A distribution beside the installed ones, as somebody else's would be."""
        info = self.folder / "logged-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: logged\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[moorage.periodic_tasks]\nlogged = logged_task:Logged\n")
        (self.folder / "logged_task.py").write_text(PLUGIN)

    def start(self, name: str, *options: str) -> Command:
        words = ["engine", "--name", name, "--config-file", str(self.conf), "--state-dir", str(self.folder / "state")]
        log = self.folder / f"{name}.log"
        process = Command([*words, *options], log, program=roles.main, path=[str(self.folder)])
        self.processes[name] = process
        self._test.addCleanup(self._end, process)
        return process

    @staticmethod
    def _end(process: Command) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait(SOON)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    # -- what was handled -----------------------------------------------------------------------------------------

    def rows(self, after: int = 0) -> list[Any]:
        with self.database.read() as tx:
            return list(tx.execute(sa.select(LOG).where(LOG.c.id > after).order_by(LOG.c.id)))

    def last(self) -> int:
        with self.database.read() as tx:
            return tx.execute(sa.select(sa.func.coalesce(sa.func.max(LOG.c.id), 0))).scalar_one()

    def wait_all_handled(self, after: int, what: str) -> None:
        """Every object was handled since."""
        wait_for(lambda: self._count(after) == len(self.objects), what, 5 * SOON)

    def _count(self, after: int) -> int:
        """How many objects were handled since."""
        query = sa.select(sa.func.count(LOG.c.object_id.distinct())).where(LOG.c.id > after)
        with self.database.read() as tx:
            return tx.execute(query).scalar_one()

    def pids(self, after: int) -> set[int]:
        with self.database.read() as tx:
            return set(tx.execute(sa.select(LOG.c.pid.distinct()).where(LOG.c.id > after)).scalars())

    def check(self) -> None:
        """At most once for each object and tick; tokens of an object never fall."""
        rows = self.rows()
        seen = {(row.object_id, row.tick) for row in rows}
        self._test.assertEqual(len(rows), len(seen), "something was handled twice at a tick")
        tokens: dict[str, int] = {}
        for row in sorted(rows, key=lambda each: (each.object_id, each.tick)):
            self._test.assertGreaterEqual(row.token, tokens.get(row.object_id, 0))
            tokens[row.object_id] = row.token
