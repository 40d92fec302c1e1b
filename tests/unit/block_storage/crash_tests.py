# SPDX-License-Identifier: Apache-2.0
"""Processes that die, or pause, at every numbered statement and commit of every operation and of the cleaner; a mix-in.

A child does the operation and kills itself (SIGKILL) before its k-th statement or commit, for k = 1, 2, ... until it survives. Then
another service of the cluster cleans, and whatever nobody had begun is done. In the end the resource is in its documented state,
no row and no stray file is left.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.orphans import OrphanStore, Target, Unclaimed
from moorage.cleanup.workers import WorkerStore
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.services.interface import ServiceIdentity
from moorage_plugins.block_storage.agent import NotFree
from moorage_plugins.block_storage.cleanup import BackupHandler, SnapshotHandler, VolumeHandler
from tests import SOAK
from tests.servers import wait_until
from tests.unit.block_storage.storages import CLUSTER, SIZE, SOON, Storage, member

FORK = multiprocessing.get_context("fork")
#: Operation -> resource type, what it becomes when it succeeds, and when it was interrupted.
OPERATIONS: Mapping[str, tuple[str, str | None, str | None]] = {
    "create": ("volume", "available", "error"),
    "download": ("volume", "available", "error"),
    "upload": ("volume", "available", "available"),
    "delete": ("volume", None, None),
    "snapshot": ("snapshot", "available", "error"),
    "snapshot-delete": ("snapshot", None, None),
    "backup": ("backup", "available", "error"),
    "restore": ("backup", "available", "available"),
    "backup-delete": ("backup", None, None),
}
#: Those that ``make test`` tries; ``make soak`` tries all.
QUICK = ("download", "delete", "restore")
HANDLERS = {"volume": VolumeHandler, "snapshot": SnapshotHandler, "backup": BackupHandler}


class Points:
    """Counts statements and commits; before the k-th something happens."""

    def __init__(self, at: int, what: Callable[[], None]) -> None:
        self.at, self.what, self.count = at, what, 0

    def __enter__(self) -> Points:
        sa.event.listen(sa.Engine, "before_cursor_execute", self._point)
        sa.event.listen(sa.Engine, "commit", self._point)
        return self

    def __exit__(self, *failure: object) -> None:
        sa.event.remove(sa.Engine, "before_cursor_execute", self._point)
        sa.event.remove(sa.Engine, "commit", self._point)

    def _point(self, *_arguments: object) -> None:
        self.count += 1
        if self.count == self.at:
            self.what()


class Pauses:
    """Counts the writing transactions of a database; before the k-th something happens elsewhere."""

    def __init__(self, database: Database, at: int, what: Callable[[], None]) -> None:
        self.count = 0
        real = database._write_once

        def once(**given: Any) -> Any:
            # Who is paused renews nothing.
            if threading.current_thread().name != "clean-renew":
                self.count += 1
                if self.count == at:
                    what()
            return real(**given)

        self.end = lambda: setattr(database, "_write_once", real)
        database._write_once = once  # type: ignore[method-assign]


def tried() -> tuple[str, ...]:
    """The operations that this run tries."""
    return tuple(OPERATIONS) if SOAK else QUICK


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CrashCase(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        # Leases are short, so that a dead cleaner is cleaned after soon.
        self.storage = Storage(self.url, folder.name, lease_seconds=0.2, chunk=20_000)
        self.addCleanup(self.storage.database.close)
        self.elsewhere = Storage(self.url, folder.name, lease_seconds=0.2, chunk=20_000)
        self.addCleanup(self.elsewhere.database.close)
        self.storage.create_tables()
        self.storage.image("image", os.urandom(SIZE // 2))
        self.volume = self.ready()
        self.dead = member("dead")

    def ready(self) -> str:
        made = self.storage.service.create_volume(SIZE)
        self.do("volume", made.uuid, member("ready"))
        return str(made.uuid)

    def do(self, kind: str, uuid: str, identity: ServiceIdentity, storage: Storage | None = None) -> None:
        """The whole operation, in this thread."""
        storage = storage or self.storage
        agent = storage.agent("x")
        job = storage.start(kind, uuid, identity)
        agent._do(job)

    def request(self, operation: str) -> tuple[str, str]:
        """Ask for it; type and uuid of what it is of."""
        service, kind = self.storage.service, OPERATIONS[operation][0]
        if operation in ("create", "download"):
            return kind, service.create_volume(SIZE, image="image" if operation == "download" else "").uuid
        if operation == "upload":
            service.upload(self.volume, "uploaded")
            return kind, self.volume
        if operation == "delete":
            uuid = self.ready()
            service.delete_volume(uuid)
            return kind, uuid
        make = service.create_snapshot if kind == "snapshot" else service.create_backup
        uuid = make(self.volume).uuid
        if operation in ("snapshot", "backup"):
            return kind, uuid
        self.do(kind, uuid, member("ready"))
        if operation == "restore":
            service.restore(uuid)
        else:
            service.delete(kind, uuid)
        return kind, uuid

    def cleaner(self, name: str, database: Database) -> Cleaner:
        identity = member(name)
        store = OrphanStore(database, WorkerStore(database, lease_seconds=0.2), identity, SystemClock())
        handlers = {kind: handler(self.storage.tools(identity)) for kind, handler in HANDLERS.items()}
        policy = Policy(backoff=0.01, backoff_longest=0.01, max_attempts=100)
        return Cleaner(store, handlers, SystemClock(), random.Random(1), policy)

    def clean_up(self, name: str = "cleaner") -> None:
        """From elsewhere: clean after the dead service and do what nobody has begun, until nothing is left."""
        storage = self.elsewhere
        cleaner, agent = self.cleaner(name, storage.database), storage.agent("after")

        def empty() -> bool:
            cleaner.clean(Target(self.dead.uuid, self.dead.epoch + 1))
            for kind in HANDLERS:
                for worker in storage.workers.waiting(kind, [CLUSTER]):
                    if worker.operation in ("backup", "restore") and kind == "volume":
                        continue
                    with contextlib.suppress(NotFree):
                        self.do(kind, worker.resource_id, member("after"), storage)
            # A volume's row whose backup was cleaned has nobody who would begin it.
            cleaner.clean(Unclaimed((CLUSTER,), 0.0))
            return storage.rows() == 0

        wait_until(empty, "nothing is left to do", SOON)
        cleaner.stop()
        agent._collector.collect()

    def assert_at_rest(self, operation: str, kind: str, uuid: str, at: int) -> None:
        _, succeeded, interrupted = OPERATIONS[operation]
        status = self.storage.status(kind, uuid)
        self.assertIn(status, (succeeded, interrupted), f"{operation}, killed at {at}")
        self.assertEqual(self.storage.strays(), [], f"{operation}, killed at {at}")
        volume = self.storage.status("volume", self.volume)
        wanted = ("available", "error_restoring") if operation == "restore" else ("available",)
        self.assertIn(volume, wanted, f"{operation}, killed at {at}")
        if volume == "error_restoring":
            self.storage.service.reset("volume", self.volume, "available")
        self.assertEqual(self.storage.data("volume", self.volume), bytes(SIZE), f"{operation}, killed at {at}")

    def in_child(self, work: Callable[[], None]) -> int:
        """Run it in a process of its own; the exit code, negative when it was killed."""

        def run() -> None:
            signal.alarm(120)
            try:
                work()
            except BaseException as error:
                print(f"child: {type(error).__name__}: {error}", flush=True)  # noqa: T201
                os._exit(1)
            os._exit(0)

        child = FORK.Process(target=run)
        child.start()
        child.join(SOON * 2)
        assert child.exitcode is not None
        return child.exitcode


class CrashTests(CrashCase):
    """Subclasses give ``url``."""

    def killed_at_every_point(self, operation: str) -> None:
        for at in range(1, 200):
            kind, uuid = self.request(operation)

            def work(at: int = at, kind: str = kind, uuid: str = uuid) -> None:
                with Points(at, die):
                    self.do(kind, uuid, self.dead)

            code = self.in_child(work)
            self.assertIn(code, (0, -signal.SIGKILL), f"{operation} at {at}")
            self.clean_up()
            self.assert_at_rest(operation, kind, uuid, at)
            if code == 0:
                self.assertGreater(at, 5)
                return
        self.fail(f"{operation} has no end")

    def test_the_owner_is_killed(self) -> None:
        for operation in tried():
            with self.subTest(operation):
                self.killed_at_every_point(operation)

    def test_the_cleaner_is_killed_too(self) -> None:
        for operation in tried()[:3]:
            for at in range(1, 200):
                kind, uuid = self.request(operation)
                self.storage.start(kind, uuid, self.dead)

                def work(at: int = at) -> None:
                    database = Database(self.url)
                    with Points(at, die):
                        self.cleaner("killed", database).clean(Target(self.dead.uuid, self.dead.epoch + 1))

                code = self.in_child(work)
                self.assertIn(code, (0, -signal.SIGKILL))
                self.clean_up("second")
                self.assert_at_rest(operation, kind, uuid, at)
                if code == 0:
                    self.assertGreater(at, 5)
                    break


class PauseTests(CrashCase):
    """The owner, and the cleaner, stop before each of their transactions; another one cleans, and they go on."""

    def test_an_owner_that_goes_on_after_it_was_cleaned_writes_nothing(self) -> None:
        for operation in tried():
            _, succeeded, interrupted = OPERATIONS[operation]
            for at in range(1, 20):
                kind, uuid = self.request(operation)
                seen: list[str | None] = []

                def meanwhile(kind: str = kind, uuid: str = uuid, seen: list[str | None] = seen) -> None:
                    self.clean_up()
                    seen.append(self.storage.status(kind, uuid))

                pauses = Pauses(self.storage.database, at, meanwhile)
                with contextlib.suppress(NotFree, errors.MoorageError):
                    self.do(kind, uuid, self.dead)
                pauses.end()
                if seen:
                    self.assertEqual(self.storage.status(kind, uuid), seen[0], f"{operation}, paused at {at}")
                    self.assertIn(seen[0], (succeeded, interrupted), f"{operation}, paused at {at}")
                self.clean_up("last")
                self.assert_at_rest(operation, kind, uuid, at)
                if pauses.count < at:
                    self.assertGreater(at, 2)
                    break

    def test_a_cleaner_that_goes_on_after_another_has_cleaned_writes_nothing(self) -> None:
        for operation in tried():
            for at in range(1, 20):
                kind, uuid = self.request(operation)
                self.storage.start(kind, uuid, self.dead)
                seen: list[str | None] = []

                def meanwhile(kind: str = kind, uuid: str = uuid, seen: list[str | None] = seen) -> None:
                    self.clean_up("second")
                    seen.append(self.storage.status(kind, uuid))

                pauses = Pauses(self.storage.database, at, meanwhile)
                cleaner = self.cleaner("first", self.storage.database)
                cleaner.clean(Target(self.dead.uuid, self.dead.epoch + 1))
                cleaner.stop()
                pauses.end()
                if seen:
                    self.assertEqual(self.storage.status(kind, uuid), seen[0], f"{operation}, paused at {at}")
                self.clean_up("last")
                self.assert_at_rest(operation, kind, uuid, at)
                if pauses.count < at:
                    self.assertGreater(at, 2)
                    break


__all__ = ["CrashCase", "CrashTests", "PauseTests"]
