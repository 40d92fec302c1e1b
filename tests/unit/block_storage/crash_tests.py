# SPDX-License-Identifier: Apache-2.0
"""Processes that die, or pause, at every numbered statement and commit of every operation and of the cleaner; a mix-in.

A child does the operation and kills itself (SIGKILL) before its k-th statement or commit, for k = 1, 2, ... until it survives. Then
another service of the cluster cleans, and whatever nobody had begun is done. In the end the resource is in its documented state,
no row and no stray file is left. Who pauses stops before its k-th transaction, statement or commit; another one cleans as far as
the locks of who is paused allow; and the paused one goes on.

Nobody waits for a lease to expire: what the passing of time does to rows is done to them by a statement.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import unittest
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup.conditions import NeverStarted, OrphansOfService
from moorage.db import Database
from moorage.services.interface import ServiceIdentity
from moorage.work.tables import workers
from moorage_plugins.block_storage.agent import NotFree
from tests import SOAK
from tests.servers import wait_until
from tests.unit.block_storage.storages import CLUSTER, HANDLERS, SIZE, SOON, Storage, member

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
    "restore-new": ("backup", "available", "available"),
    "backup-delete": ("backup", None, None),
}
#: Those that ``make test`` tries; ``make soak`` tries all.
QUICK = ("download", "restore", "restore-new")
_OWNED = workers.c.owner.is_not(None)


class Points:
    """Counts the writing transactions of a database, and the statements and commits of all; before the k-th something happens.

    :param inside: statements and commits count too.
    """

    def __init__(self, at: int, what: Callable[[], None], database: Database, *, inside: bool = True) -> None:
        self.at, self.what, self.database, self.inside = at, what, database, inside
        self.kinds: list[str] = []
        self._busy = False

    @property
    def count(self) -> int:
        return len(self.kinds)

    def next_transaction(self, after: int) -> int:
        """The first point behind that one at which no transaction is open."""
        later = (number for number, kind in enumerate(self.kinds, 1) if number > after and kind == "begin")
        return next(later, self.count + 1)

    def __enter__(self) -> Points:
        if self.inside:
            sa.event.listen(sa.Engine, "before_cursor_execute", self._statement)
            sa.event.listen(sa.Engine, "commit", self._commit)
        real = self.database._write_once

        def once(**given: Any) -> Any:
            self._point("begin")
            return real(**given)

        self.database._write_once = once  # type: ignore[method-assign]
        return self

    def __exit__(self, *failure: object) -> None:
        del self.database._write_once
        if self.inside:
            sa.event.remove(sa.Engine, "before_cursor_execute", self._statement)
            sa.event.remove(sa.Engine, "commit", self._commit)

    def _statement(self, *_arguments: object) -> None:
        self._point("statement")

    def _commit(self, *_arguments: object) -> None:
        self._point("commit")

    def _point(self, kind: str) -> None:
        # What others do meanwhile, and the thread that renews, does not count.
        if self._busy or threading.current_thread().name == "clean-renew":
            return
        self.kinds.append(kind)
        if self.count == self.at:
            self._busy = True
            self.what()
            self._busy = False


def tried() -> tuple[str, ...]:
    """The operations that this run tries."""
    return tuple(OPERATIONS) if SOAK else QUICK


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class CrashCase(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str
    #: The new volume of a restore that names none.
    restored: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.storage = Storage(self.url, folder.name, chunk=20_000)
        self.addCleanup(self.storage.database.close)
        # Who cleans waits for nobody long, and tries once.
        self.elsewhere = Storage(self.url, folder.name, chunk=20_000, lock_timeout=1, attempts=1)
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
        agent.loop.run(job)

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
            service.restore(uuid, self.volume)
        elif operation == "restore-new":
            self.restored = service.restore(uuid).uuid
        else:
            service.delete(kind, uuid)
        return kind, uuid

    def clean(self, name: str) -> None:
        """A pass of a cleaner that dies, or pauses."""
        cleaner, after = self.storage.cleaner(name), OrphansOfService(self.dead.uuid, self.dead.epoch + 1)
        cleaner.clean(after, types=cleaner._orphans.types(after))
        cleaner.stop()

    def clean_once(self, name: str) -> bool:
        """From elsewhere: clean after the dead and do what nobody has begun, as far as others let; whether nothing is left."""
        storage = self.elsewhere
        cleaner = storage.cleaner(name)
        try:
            # Time passes: every lease that is not renewed ends, and what is to be tried later is tried now.
            storage.database.run(
                lambda tx: tx.execute(
                    sa.update(workers).values(expires_at=sa.case((_OWNED, 1), else_=0), next_try_at=0)
                )
            )
            after = OrphansOfService(self.dead.uuid, self.dead.epoch + 1)
            cleaner.clean(after, types=cleaner._orphans.types(after))
            for kind in HANDLERS:
                for worker in storage.workers.waiting(kind, [CLUSTER]):
                    if worker.operation in ("backup", "restore") and kind == "volume":
                        continue
                    with contextlib.suppress(NotFree):
                        self.do(kind, worker.resource_id, member("after"), storage)
            # A volume's row whose backup was cleaned has nobody who would begin it.
            unclaimed = NeverStarted((CLUSTER,), 0.0)
            cleaner.clean(unclaimed, types=cleaner._orphans.types(unclaimed))
            return storage.rows() == 0
        except errors.Unavailable:
            return False
        finally:
            cleaner.stop()

    def clean_up(self, name: str = "cleaner") -> None:
        """The same, until nothing is left."""
        wait_until(lambda: self.clean_once(name), "nothing is left to do", SOON)
        self.elsewhere.agent("after").work.collector.collect()

    def meanwhile(self, kind: str, uuid: str) -> list[str | None]:
        """What others do while this thread is paused, perhaps inside a transaction: the status, once all is cleaned."""
        found: list[str | None] = []

        def others() -> None:
            if self.clean_once("second"):
                found.append(self.elsewhere.status(kind, uuid))

        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        return found

    def assert_at_rest(self, operation: str, kind: str, uuid: str, at: int) -> None:
        _, succeeded, interrupted = OPERATIONS[operation]
        status = self.storage.status(kind, uuid)
        self.assertIn(status, (succeeded, interrupted), f"{operation}, killed at {at}")
        self.assertEqual(self.storage.strays(), [], f"{operation}, killed at {at}")
        if operation == "restore-new":
            new = self.storage.get("volume", self.restored)
            data = self.storage.data("volume", self.restored) if new.path else b""
            found = new.status, data
            self.assertIn(found, (("available", bytes(SIZE)), ("error_restoring", b"")), f"killed at {at}")
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

    def killed_at_every_point(
        self, operation: str, begin: Callable[[str, str], None], work: Callable[..., None]
    ) -> None:
        """``work`` in children that are killed earlier or later, until one survives."""
        for at in range(1, 200):
            kind, uuid = self.request(operation)
            begin(kind, uuid)

            def whole(at: int = at, kind: str = kind, uuid: str = uuid) -> None:
                with Points(at, die, self.storage.database):
                    work(kind, uuid)

            code = self.in_child(whole)
            self.assertIn(code, (0, -signal.SIGKILL), f"{operation} at {at}")
            self.clean_up("second")
            self.assert_at_rest(operation, kind, uuid, at)
            if code == 0:
                self.assertGreater(at, 5)
                return
        self.fail(f"{operation} has no end")

    def test_the_owner_is_killed(self) -> None:
        for operation in tried():
            with self.subTest(operation):
                self.killed_at_every_point(
                    operation, lambda *_: None, lambda kind, uuid: self.do(kind, uuid, self.dead)
                )

    def test_the_cleaner_is_killed_too(self) -> None:
        for operation in tried():
            with self.subTest(operation):
                self.killed_at_every_point(
                    operation,
                    lambda kind, uuid: self.storage.start(kind, uuid, self.dead),
                    lambda *_: self.clean("killed"),
                )


class PauseTests(CrashCase):
    """The owner, and the cleaner, stop; another one cleans, and they go on."""

    def paused_at_every_point(
        self, operation: str, begin: Callable[[str, str], None], work: Callable[..., None]
    ) -> None:
        """``work``, interrupted by a whole cleanup elsewhere, earlier or later."""
        # Inside of a transaction that writes, SQLite lets nobody else write.
        inside = self.storage.database.dialect != "sqlite"
        _, succeeded, interrupted = OPERATIONS[operation]
        at, cleaned = 1, 0
        while at < 200:
            kind, uuid = self.request(operation)
            begin(kind, uuid)
            seen: list[str | None] = []

            def meanwhile(kind: str = kind, uuid: str = uuid, seen: list[str | None] = seen) -> None:
                seen.extend(self.meanwhile(kind, uuid))

            refused = contextlib.suppress(NotFree, errors.MoorageError)
            with Points(at, meanwhile, self.storage.database, inside=inside) as points, refused:
                work(kind, uuid)
            where = f"{operation}, paused at {at}"
            if seen:
                cleaned += 1
                self.assertEqual(self.storage.status(kind, uuid), seen[0], where)
                self.assertIn(seen[0], (succeeded, interrupted), where)
            self.clean_up("last")
            self.assert_at_rest(operation, kind, uuid, at)
            if points.count < at:
                self.assertGreater(cleaned, 0)
                return
            # Who could not clean because of locks cannot while they are held.
            at = at + 1 if seen else points.next_transaction(at)
        self.fail(f"{operation} has no end")

    def test_an_owner_that_goes_on_after_it_was_cleaned_writes_nothing(self) -> None:
        for operation in tried():
            with self.subTest(operation):
                self.paused_at_every_point(
                    operation, lambda *_: None, lambda kind, uuid: self.do(kind, uuid, self.dead)
                )

    def test_a_cleaner_that_goes_on_after_another_has_cleaned_writes_nothing(self) -> None:
        for operation in tried():
            with self.subTest(operation):
                self.paused_at_every_point(
                    operation,
                    lambda kind, uuid: self.storage.start(kind, uuid, self.dead),
                    lambda *_: self.clean("first"),
                )


__all__ = ["CrashCase", "CrashTests", "PauseTests"]
