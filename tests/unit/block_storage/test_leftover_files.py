# SPDX-License-Identifier: Apache-2.0
"""What is collected from a backend, and what is not."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import unittest
import uuid as uuid_module
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from moorage.cleanup.conditions import NeverStarted
from moorage_plugins.block_storage.leftover_files import Collector
from tests.unit.block_storage.storages import CLUSTER, SIZE, Storage

LOGGER = "moorage_plugins.block_storage.leftover_files"


class CollectorTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.storage = self.another("one")
        self.collector = self.of(self.storage)

    def another(self, name: str) -> Storage:
        """A database of that name, and the same backend."""
        storage = Storage(f"sqlite:///{self.folder}/{name}.sqlite", self.folder)
        self.addCleanup(storage.database.close)
        storage.create_tables()
        return storage

    def of(self, storage: Storage) -> Collector:
        return Collector(storage.backend, storage.database, storage.workers)

    def write(self, kind: str, uuid: str, name: str) -> None:
        path = self.storage.backend.path(kind, uuid, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("data")

    def kinds(self) -> tuple[str, str, str, str]:
        """One of each."""
        volume = self.storage.volume()
        snapshot, backup = self.storage.service.create_snapshot(volume), None
        self.storage.run_all()
        backup = self.storage.service.create_backup(volume)
        self.storage.run_all()
        image = self.storage.service.upload(volume, "image")
        self.storage.run_all()
        return volume, snapshot.uuid, backup.uuid, image.uuid

    def test_an_agent_with_another_database_removes_nothing(self) -> None:
        made = self.kinds()
        other = self.another("two")
        stranger = other.agent("stranger")
        with self.assertLogs(LOGGER, "ERROR") as told:
            # Its sweeps collect, too.
            self.assertEqual(stranger.work.collector.collect(), 0)
        self.assertRegex(told.output[0], "are files of 4 resources that this database has not made.* left alone")
        with self.assertNoLogs(LOGGER, "ERROR"):
            # It is not told again and again.
            self.assertEqual(stranger.work.collector.collect(), 0)
        for kind, uuid in zip(("volume", "snapshot", "backup", "image"), made, strict=True):
            self.assertTrue(self.storage.data(kind, uuid))
        with self.assertNoLogs(LOGGER):
            self.assertEqual(self.collector.collect(), 0)

    def test_what_was_made_after_the_copy_that_a_database_was_restored_from_stays(self) -> None:
        volume = self.storage.volume()
        token = int(self.storage.get("volume", volume).path)
        # Tokens that this database has not given yet, of a resource that it has and of one whose row is gone.
        deleted = self.storage.volume()
        self.storage.service.delete_volume(deleted)
        self.storage.run_all()
        for uuid in (volume, deleted):
            self.write("volume", uuid, str(token + 40))
        with self.assertLogs(LOGGER, "ERROR"):
            self.assertEqual(self.collector.collect(), 0)
        self.assertEqual(self.storage.backend.tokens("volume", deleted), [str(token + 40)])

    def older_copy(self, since: Callable[[], None]) -> Storage:
        """The storage with a database that was copied before that, and restored after it."""
        path = Path(self.folder) / "one.sqlite"
        with (
            contextlib.closing(sqlite3.connect(path)) as now,
            contextlib.closing(sqlite3.connect(f"{path}.copy")) as copy,
        ):
            now.backup(copy)
        since()
        self.storage.database.close()
        for end in ("", "-wal", "-shm"):
            Path(f"{path}{end}").unlink(missing_ok=True)
        Path(f"{path}.copy").rename(path)
        restored = Storage(f"sqlite:///{path}", self.folder)
        self.addCleanup(restored.database.close)
        return restored

    def test_no_operation_costs_the_data_that_a_database_from_an_older_copy_does_not_know(self) -> None:
        volume, other = self.storage.volume(), self.storage.volume(image=b"later")
        backup = self.storage.service.create_backup(other).uuid
        self.storage.run_all()

        def since() -> None:
            self.storage.service.restore(backup, volume)
            self.storage.run_all()

        restored = self.older_copy(since)
        # No sweep sets the files aside before the operation begins.
        restored.conf.set_override("collect_interval", 3600, group="block_storage")
        (only,) = self.storage.backend.tokens("volume", volume)
        data = self.storage.backend.path("volume", volume, only).read_bytes()
        self.assertEqual(data[:5], b"later")
        # The APIs may raise the fence beyond the token before an agent looks.
        for _ in range(3):
            restored.service.reset("volume", volume, "available")
        row = restored.get("volume", volume)
        self.assertGreater(row.fence, int(only))
        with (
            self.assertLogs(LOGGER, "ERROR") as told,
            self.assertLogs("moorage.work.work_loop", "WARNING"),
        ):
            failed = restored.service.create_backup(volume).uuid
            restored.run_all()
        self.assertRegex("\n".join(told.output), f"files {only} of volume {volume} were not made by this database")
        self.assertRegex(restored.get("backup", failed).fault, "are not there.*restored from an older copy")
        # Another volume's data would be live in the end, and what was there before would be old.
        restored.service.restore(backup, volume)
        restored.run_all()
        self.of(restored).collect()
        folder = self.storage.backend.folder / "volume" / volume
        self.assertEqual(sorted(os.listdir(folder)), sorted([restored.get("volume", volume).path, f"{only}.set-aside"]))
        self.assertEqual((folder / f"{only}.set-aside").read_bytes(), data)

    def test_a_try_does_not_write_over_what_another_database_has_made_with_its_token(self) -> None:
        made = self.storage.service.create_volume(SIZE, image=self.storage.image("image", b"first")).uuid
        restored = self.older_copy(self.storage.run_all)
        (token,) = self.storage.backend.tokens("volume", made)
        restored.image("image", b"second")
        with self.assertLogs(LOGGER, "ERROR"):
            restored.run_all()
        self.assertEqual((restored.get("volume", made).path, restored.data("volume", made)[:6]), (token, b"second"))
        aside = self.storage.backend.path("volume", made, f"{token}.set-aside")
        self.assertEqual(aside.read_bytes()[:5], b"first")

    def test_a_cleaner_sets_aside_what_another_database_has_made(self) -> None:
        made = self.storage.service.create_volume(SIZE).uuid
        restored = self.older_copy(self.storage.run_all)
        (token,) = self.storage.backend.tokens("volume", made)
        with self.assertLogs(LOGGER, "ERROR"):
            restored.cleaner("c").clean(NeverStarted((CLUSTER,), 0.0))
        self.of(restored).collect()
        self.assertEqual(restored.status("volume", made), "error")
        self.assertTrue(self.storage.backend.path("volume", made, f"{token}.set-aside").exists())

    def test_a_file_is_set_aside_once_and_stays(self) -> None:
        volume = self.storage.volume()
        self.write("volume", volume, "90")
        backend = self.storage.backend
        with self.assertLogs(LOGGER, "ERROR"):
            self.assertEqual((self.collector.collect(), self.collector.collect()), (0, 0))
        self.assertFalse(backend.set_aside("volume", volume, "90"))
        self.assertFalse(backend.set_aside("volume", volume, "91"))
        backend.remove("volume", volume, "90")
        self.write("volume", volume, "90")
        self.assertTrue(backend.set_aside("volume", volume, "90"))
        self.storage.service.delete_volume(volume)
        self.storage.run_all()
        self.collector.collect()
        names = os.listdir(backend.folder / "volume" / volume)
        self.assertEqual(sorted(names), ["90", "90.set-aside", "90.set-aside-2"])

    def test_late_files_of_what_was_deleted_are_collected(self) -> None:
        volume = self.storage.volume()
        path = self.storage.get("volume", volume).path
        self.storage.service.delete_volume(volume)
        self.storage.run_all()
        self.write("volume", volume, path)
        self.assertEqual((self.collector.collect(), self.storage.backend.uuids("volume")), (1, []))

    def test_odd_entries_are_left_alone_and_stop_nothing(self) -> None:
        volume = self.storage.volume()
        folder = self.storage.backend.folder / "volume"
        (folder / "00-README").write_text("by hand")
        for odd in ("lost+found", os.fsdecode(b"\xff")):
            (folder / odd).mkdir()
            (folder / odd / "1").write_text("no try")
        (folder / str(uuid_module.UUID(int=0))).write_text("a file where a folder should be")
        self.write("volume", volume, ".nfs0001")
        self.write("volume", volume, "\u00b2")
        # A folder where a file should be, before one that is to be collected.
        (folder / volume / "0").mkdir()
        self.write("volume", volume, "00")
        with self.assertLogs(LOGGER, "WARNING") as told:
            self.assertEqual(self.collector.collect(), 1)
        # That is all there is to tell.
        self.assertEqual(len(told.output), 1)
        self.assertRegex(told.output[0], "1 files could not be collected")
        self.assertEqual(
            sorted(os.listdir(folder / volume)), sorted([".nfs0001", "0", self.storage.get("volume", volume).path, "²"])
        )

    def test_it_reads_the_store_once_for_hundreds_of_resources(self) -> None:
        for _ in range(120):
            self.write("volume", str(uuid_module.uuid4()), "1")
        with (
            mock.patch.object(self.storage.database, "read", wraps=self.storage.database.read) as read,
            self.assertLogs(LOGGER, "ERROR"),
        ):
            self.collector.collect()
        self.assertEqual(read.call_count, 1)

    def test_a_folder_that_is_removed_while_it_is_empty_is_made_again(self) -> None:
        """Another's collector does that, between the making of the folder and of the file."""
        self.storage.agent()
        backend, uuid = self.storage.backend, str(uuid_module.uuid4())
        backend.identity = backend.marker()
        removals = iter((True, True))

        class Contended(type(backend.folder)):  # type: ignore[misc]
            def mkdir(self, *arguments: Any, **options: Any) -> None:
                super().mkdir(*arguments, **options)
                if next(removals, False):
                    backend.remove("volume", uuid, "1")

        backend.folder = Contended(backend.folder)
        with backend.writing("volume", uuid, 3) as path:
            path.write_text("data")
        self.assertEqual((backend.tokens("volume", uuid), list(removals)), (["3"], []))

    def test_the_names_that_lead_to_what_is_written_are_on_disk_too(self) -> None:
        synced: list[str] = []

        def fsync(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

        uuid = str(uuid_module.uuid4())
        self.storage.agent()
        self.storage.backend.identity = self.storage.backend.marker()
        with (
            mock.patch.object(os, "fsync", fsync),
            self.storage.backend.writing("volume", uuid, 3) as path,
        ):
            path.write_text("data")
        folder = os.path.realpath(self.storage.backend.folder)
        self.assertEqual(synced, [f"{folder}/volume/{uuid}/3", f"{folder}/volume/{uuid}", f"{folder}/volume", folder])
