# SPDX-License-Identifier: Apache-2.0
"""What is collected from a backend, and what is not."""

from __future__ import annotations

import os
import tempfile
import unittest
import uuid as uuid_module
from unittest import mock

from moorage_plugins.block_storage.collector import Collector
from tests.unit.block_storage.storages import Storage

LOGGER = "moorage_plugins.block_storage.collector"


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
            self.assertEqual(stranger._collector.collect(), 0)
        self.assertRegex(told.output[0], "are files of 4 resources that this database has not made.* left alone")
        with self.assertNoLogs(LOGGER, "ERROR"):
            # It is not told again and again.
            self.assertEqual(stranger._collector.collect(), 0)
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

    def test_the_names_that_lead_to_what_is_written_are_on_disk_too(self) -> None:
        synced: list[str] = []

        def fsync(descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

        uuid = str(uuid_module.uuid4())
        with (
            mock.patch.object(os, "fsync", fsync),
            self.storage.backend.writing("volume", uuid, 3) as path,
        ):
            path.write_text("data")
        folder = os.path.realpath(self.storage.backend.folder)
        self.assertEqual(synced, [f"{folder}/volume/{uuid}/3", f"{folder}/volume/{uuid}", f"{folder}/volume", folder])
