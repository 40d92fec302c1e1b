# SPDX-License-Identifier: Apache-2.0
"""What block storage promises, on any database; a mix-in for the tests of each. Files are real, messages lost."""

from __future__ import annotations

import dataclasses
import os
import struct
import tempfile
import threading
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.cleanup.conditions import NeverStarted
from moorage.clock import SystemClock
from moorage.work.interface import Lease
from moorage.work.tables import workers
from moorage_plugins.block_storage import backup_format
from moorage_plugins.block_storage.agent import BlockStorageAgent
from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.outcomes import ROWS
from moorage_plugins.block_storage.rows import Rows
from moorage_plugins.block_storage.service import BlockStorage
from moorage_plugins.block_storage.tables import volumes
from tests.servers import wait_until
from tests.unit.block_storage.storages import CLUSTER, SIZE, SOON, Storage, member


class HeldClock(SystemClock):
    """Sleeps until the test lets it go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    @override
    def sleep(self, seconds: float) -> None:
        self.go_on.wait(SOON)


class StorageCase(unittest.TestCase):
    """Subclasses give ``url``."""

    url: str

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.storage = Storage(self.url, folder.name)
        self.addCleanup(self.storage.database.close)
        self.storage.create_tables()
        self.service = self.storage.service

    def status(self, kind: str, uuid: str) -> str | None:
        return self.storage.status(kind, uuid)


class StorageTests(StorageCase):
    """Subclasses give ``url``."""

    # -- operations -----------------------------------------------------------------------------------------------

    def test_a_volume_is_made_and_deleted(self) -> None:
        uuid = self.storage.volume()
        self.assertEqual(self.storage.data("volume", uuid), bytes(SIZE))
        self.service.delete_volume(uuid)
        self.assertEqual(self.status("volume", uuid), "deleting")
        self.storage.run_all()
        self.assertEqual((self.status("volume", uuid), self.storage.backend.uuids("volume")), (None, []))

    def test_a_volume_is_downloaded_uploaded_and_made_again(self) -> None:
        data = os.urandom(SIZE - 7)
        uuid = self.storage.volume(image=data)
        whole = data + bytes(7)
        self.assertEqual(self.storage.data("volume", uuid), whole)
        image = self.service.upload(uuid, "mine")
        self.assertEqual(self.status("volume", uuid), "uploading")
        self.storage.run_all()
        self.assertEqual((self.status("volume", uuid), self.status("image", image.uuid)), ("available", "active"))
        again = self.service.create_volume(SIZE, image=image.uuid)
        self.storage.run_all()
        self.assertEqual(self.storage.data("volume", again.uuid), whole)
        self.assertEqual(self.storage.strays(), [])

    def test_an_image_that_was_uploaded_can_be_deleted_and_its_file_goes(self) -> None:
        uuid = self.storage.volume()
        image = self.service.upload(uuid, "mine").uuid
        with self.assertRaisesRegex(errors.Conflict, "image .* is saving; an operation on it is in progress"):
            self.service.delete_image(image)
        self.storage.run_all()
        kept = self.service.upload(uuid, "kept").uuid
        self.storage.run_all()
        before = self.storage.backend.path("image", image, self.storage.get("image", image).path)
        self.assertTrue(before.is_file())
        self.service.delete_image(image)
        self.assertEqual([row.uuid for row in self.service.page("image", None)], [kept])
        for call in (lambda: self.service.get("image", image, None), lambda: self.service.delete_image(image)):
            with self.assertRaisesRegex(errors.NotFound, f"There is no image {image}"):
                call()
        with self.assertRaisesRegex(errors.InvalidInput, f"There is no image {image}"):
            self.service.create_volume(SIZE, image=image)
        agent = self.storage.agent()
        agent.work.collector.collect()
        self.assertEqual(self.storage.backend.uuids("image"), [kept])
        # A try that was paused all the while writes it once more.
        before.parent.mkdir()
        before.write_bytes(b"late")
        with self.assertNoLogs("moorage_plugins.block_storage.leftover_files", "ERROR"):
            agent.work.collector.collect()
        self.assertEqual(self.storage.backend.uuids("image"), [kept])

    def test_a_volume_that_is_being_made_from_an_image_that_is_deleted_says_so(self) -> None:
        image = self.service.upload(self.storage.volume(), "mine").uuid
        self.storage.run_all()
        made = self.service.create_volume(SIZE, image=image).uuid
        self.service.delete_image(image)
        self.storage.run_all()
        self.assertEqual(self.status("volume", made), "error")
        self.assertEqual(self.storage.get("volume", made).fault, f"There is no image {image}.")

    def test_a_volume_larger_than_is_allowed_is_refused(self) -> None:
        self.storage.conf.set_override("max_volume_gb", 3, group="block_storage")
        self.storage.conf.set_override("gigabyte_bytes", 1000, group="block_storage")
        self.service.create_volume(3000)
        with self.assertRaisesRegex(errors.PayloadTooLarge, "size 4G is larger than .* limit 3G .*max_volume_gb"):
            self.service.create_volume(3001)
        self.assertEqual(self.storage.rows(), 1)

    def test_snapshots_keep_what_was_and_their_volume(self) -> None:
        data = os.urandom(SIZE)
        uuid = self.storage.volume(image=data)
        snapshot = self.service.create_snapshot(uuid)
        self.storage.run_all()
        self.assertEqual(self.storage.data("snapshot", snapshot.uuid), data)
        for force in (False, True):
            with self.assertRaisesRegex(errors.Conflict, "has 1 snapshots"):
                self.service.delete_volume(uuid, force=force)
        self.assertEqual((self.status("volume", uuid), self.storage.rows()), ("available", 0))
        self.service.delete("snapshot", snapshot.uuid)
        self.storage.run_all()
        self.service.delete_volume(uuid)
        self.storage.run_all()
        self.assertEqual((self.storage.strays(), self.storage.backend.uuids("snapshot")), ([], []))

    def test_a_backup_restores_what_was_in_it(self) -> None:
        data = os.urandom(SIZE // 2) + bytes(SIZE // 2)
        uuid = self.storage.volume(image=data)
        backup = self.service.create_backup(uuid)
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup.uuid)), ("backing-up", "creating"))
        self.storage.run_all()
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup.uuid)), ("available", "available"))
        other = self.storage.volume()
        self.service.restore(backup.uuid, other)
        self.assertEqual((self.status("volume", other), self.status("backup", backup.uuid)),
                         ("restoring-backup", "restoring"))  # fmt: skip
        self.storage.run_all()
        self.assertEqual(self.storage.data("volume", other), data)
        self.assertEqual((self.status("volume", other), self.status("backup", backup.uuid)), ("available",) * 2)
        self.service.delete("backup", backup.uuid)
        self.storage.run_all()
        self.assertEqual((self.storage.strays(), self.storage.backend.uuids("backup")), ([], []))

    def test_a_restore_without_a_volume_makes_a_new_one_and_leaves_the_original_alone(self) -> None:
        before = os.urandom(SIZE)
        uuid = self.storage.volume(image=before)
        backup = self.service.create_backup(uuid, project_id="p").uuid
        self.storage.run_all()
        original = self.storage.get("volume", uuid)
        for name, shown in (("", f"restore_backup_{backup}"), ("mine", "mine")):
            made = self.service.restore(backup, name=name)
            self.assertNotEqual(made.uuid, uuid)
            self.assertEqual((made.name, made.status, made.size_bytes), (shown, "restoring-backup", SIZE))
            self.assertEqual((made.project_id, made.location), ("p", original.location))
            self.assertEqual(self.storage.told[-1], (original.location, "backup", backup))
            self.storage.run_all()
            self.assertEqual((self.status("volume", made.uuid), self.status("backup", backup)), ("available",) * 2)
            self.assertEqual(self.storage.data("volume", made.uuid), before)
        self.assertEqual(self.storage.get("volume", uuid), original)
        self.assertEqual(self.storage.strays(), [])

    def test_a_new_volume_is_made_where_the_backup_lies_even_when_its_volume_is_gone(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        self.storage.run_all()
        self.service.delete_volume(uuid)
        self.storage.run_all()
        self.storage.place = "another cluster"
        made = self.service.restore(backup)
        self.assertEqual(made.location, CLUSTER)
        self.storage.run_all()
        self.assertEqual(self.status("volume", made.uuid), "available")

    def test_a_restore_to_a_new_volume_that_fails_leaves_a_volume_without_data(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        self.storage.run_all()
        path = self.storage.backend.path("backup", backup, self.storage.get("backup", backup).path)
        path.write_bytes(path.read_bytes()[:-1])
        made = self.service.restore(backup).uuid
        self.storage.run_all()
        self.assertEqual((self.status("volume", made), self.storage.get("volume", made).path), ("error_restoring", ""))
        self.assertEqual((self.status("backup", backup), self.storage.strays()), ("available", []))
        with self.assertRaisesRegex(errors.Conflict, "has no data"):
            self.service.reset("volume", made, "available")
        self.service.delete_volume(made)
        self.storage.run_all()
        self.assertIsNone(self.status("volume", made))

    def test_a_restore_of_a_busy_backup_makes_no_volume(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        with self.assertRaises(errors.InUse):
            self.service.restore(backup)
        self.storage.run_all()
        self.service.reset("backup", backup, "error")
        with self.assertRaisesRegex(errors.Conflict, "is error"):
            self.service.restore(backup)
        self.storage.conf.set_override("max_volume_gb", 1, group="block_storage")
        self.storage.conf.set_override("gigabyte_bytes", SIZE - 1, group="block_storage")
        with self.assertRaises(errors.PayloadTooLarge):
            self.service.restore(backup)
        self.assertEqual([row.uuid for row in self.service.page("volume", None)], [uuid])
        self.assertEqual(self.storage.rows(), 0)

    def test_a_damaged_backup_is_not_restored_and_the_volume_keeps_its_data(self) -> None:
        data = os.urandom(SIZE)
        uuid = self.storage.volume(image=data)
        backup = self.service.create_backup(uuid)
        self.storage.run_all()
        path = self.storage.backend.path("backup", backup.uuid, self.storage.get("backup", backup.uuid).path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        self.service.restore(backup.uuid, uuid)
        self.storage.run_all()
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup.uuid)),
                         ("error_restoring", "available"))  # fmt: skip
        self.assertRegex(self.storage.get("volume", uuid).fault, "damaged at byte")
        self.assertEqual((self.storage.data("volume", uuid), self.storage.strays()), (data, []))

    def test_what_fails_ends_in_its_documented_state(self) -> None:
        image = self.storage.image("goes", b"x")
        volume = self.service.create_volume(SIZE, image=image)
        (self.storage.folder / "images" / image).unlink()
        self.storage.run_all()
        self.assertEqual(self.status("volume", volume.uuid), "error")
        self.assertIn("There is no image goes", self.storage.get("volume", volume.uuid).fault)
        self.assertEqual(self.storage.strays(), [])

    def test_an_image_that_is_changed_while_it_is_downloaded_makes_no_volume(self) -> None:
        changes = {
            "rewritten": lambda path: path.write_bytes(b"2" * SIZE),
            "cut": lambda path: os.truncate(path, SIZE // 2),
            "longer": lambda path: os.truncate(path, SIZE + 1),
            "touched": lambda path: os.utime(path, ns=(0, 0)),
        }
        for what, change in changes.items():
            with self.subTest(what=what):
                path = self.storage.folder / "images" / self.storage.image(what, b"1" * SIZE)
                # Long ago, since clocks of file systems are coarse.
                os.utime(path, ns=(1, 1))
                made = self.service.create_volume(SIZE, image=what).uuid
                job = self.storage.start("volume", made, member("a"))
                ticks = iter((lambda path=path, change=change: change(path), lambda: None, lambda: None, lambda: None))
                agent = self.storage.agent()
                with (
                    mock.patch.object(agent.work, "_tick", lambda job, ticks=ticks: next(ticks)()),
                    self.assertLogs("moorage.work.work_loop", "WARNING"),
                ):
                    agent.loop.run(job)
                self.assertEqual((self.status("volume", made), self.storage.strays()), ("error", []))
                self.assertRegex(self.storage.get("volume", made).fault, f"{what} was changed while it was copied")

    def test_an_image_that_is_replaced_by_renaming_is_downloaded_as_it_was(self) -> None:
        path = self.storage.folder / "images" / self.storage.image("image", b"1" * SIZE)
        made = self.service.create_volume(SIZE, image="image").uuid
        job = self.storage.start("volume", made, member("a"))
        new = path.with_name("new")

        def replace(_job: object) -> None:
            new.write_bytes(b"2" * SIZE)
            new.rename(path)

        agent = self.storage.agent()
        with mock.patch.object(agent.work, "_tick", replace):
            agent.loop.run(job)
        self.assertEqual(self.storage.data("volume", made), b"1" * SIZE)

    def test_backups_and_images_are_worked_on_where_their_data_are(self) -> None:
        """Though their volume is gone, and new volumes are elsewhere."""
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        self.storage.run_all()
        image = self.service.upload(uuid, "mine").uuid
        self.storage.run_all()
        self.service.delete_volume(uuid)
        self.storage.run_all()
        self.storage.place = "elsewhere"
        self.assertEqual(self.service.create_volume(SIZE, image=image).location, CLUSTER)
        elsewhere = self.service.create_volume(SIZE)
        self.assertEqual(elsewhere.location, "elsewhere")
        with self.assertRaisesRegex(errors.Conflict, "lies at cluster, the volume at elsewhere"):
            self.service.restore(backup, elsewhere.uuid)
        self.service.delete("backup", backup)
        self.assertEqual(self.storage.told[-1], (CLUSTER, "backup", backup))
        row = self.storage.workers.get("backup", backup)
        assert row is not None
        self.assertEqual(row.target_host, CLUSTER)

    def test_a_backup_of_which_nobody_knows_where_it_lies_goes_where_there_is_somebody(self) -> None:
        """Its volume was deleted before this was kept."""
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        self.storage.run_all()
        with self.storage.database.write() as tx:
            ROWS["backup"].change(tx, backup, location="")
        self.service.delete_volume(uuid)
        self.storage.run_all()
        self.service.delete("backup", backup)
        self.storage.run_all()
        self.assertEqual((self.status("backup", backup), self.storage.strays()), (None, []))

    # -- what is refused ------------------------------------------------------------------------------------------

    def test_a_second_operation_is_refused_and_the_first_named(self) -> None:
        uuid = self.storage.volume()
        self.service.upload(uuid, "mine")
        for ask in (lambda: self.service.delete_volume(uuid), lambda: self.service.create_backup(uuid)):
            with self.assertRaisesRegex(errors.InUse, f"its operation upload waits for {CLUSTER}"):
                ask()
        with self.assertRaisesRegex(errors.Conflict, "is uploading; an operation on it is in progress"):
            self.service.attach(uuid, "server")
        with self.assertRaises(errors.Conflict):
            self.service.create_snapshot(uuid)
        self.assertEqual(self.storage.get("volume", uuid).snapshots, 0)

    def test_a_restore_that_is_requested_in_the_transaction_of_a_snapshot_is_refused(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        self.storage.run_all()
        moving, refused = threading.Event(), list[str]()
        insert, move = Rows.insert, BlockStorage._move

        def restore() -> None:
            try:
                self.service.restore(backup, uuid)
            except errors.Conflict as error:
                refused.append(error.message)

        thread = threading.Thread(target=restore)

        def inserting(rows: Rows, *arguments: Any, **values: Any) -> None:
            # The volume is written, and nothing committed. SQLite lets nobody else begin meanwhile.
            if not thread.ident:
                thread.start()
                moving.wait(0.5 if self.url.startswith("sqlite") else SOON)
            insert(rows, *arguments, **values)

        def moves(*arguments: Any, **values: Any) -> None:
            moving.set()
            move(*arguments, **values)

        with mock.patch.object(Rows, "insert", inserting), mock.patch.object(BlockStorage, "_move", moves):
            snapshot = self.service.create_snapshot(uuid).uuid
            thread.join()
        self.assertRegex(str(refused), f"The snapshot {snapshot} of the volume {uuid} is being made")
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup)), ("available", "available"))

    def test_bad_images_write_nothing(self) -> None:
        self.storage.image("large", bytes(SIZE + 1))
        for image, said in (("none", "no image none"), ("../etc", "no plain name"), ("large", "has 40001 bytes")):
            with self.assertRaisesRegex(errors.InvalidInput, said):
                self.service.create_volume(SIZE, image=image)
        self.assertEqual((self.service.page("volume", None), self.storage.rows()), ([], 0))

    def test_a_volume_in_use_is_not_deleted_and_a_deleted_one_not_brought_back(self) -> None:
        uuid = self.storage.volume()
        self.service.attach(uuid, "server")
        with self.assertRaisesRegex(errors.Conflict, "is in-use. It must be"):
            self.service.delete_volume(uuid)
        # LP 1937084: a forced deletion, and the detachment that comes late, at each moment.
        self.service.delete_volume(uuid, force=True)
        with self.assertRaisesRegex(errors.Conflict, "is deleting"):
            self.service.detach(uuid)
        self.storage.run_all()
        with self.assertRaises(errors.NotFound):
            self.service.detach(uuid)
        self.assertIsNone(self.status("volume", uuid))

    def test_uploading_ends_by_what_the_volume_is_attached_to(self) -> None:
        uuid = self.storage.volume()
        self.service.attach(uuid, "server")
        self.service.upload(uuid, "mine")
        self.storage.run_all()
        self.assertEqual(self.status("volume", uuid), "in-use")
        self.service.detach(uuid)
        self.assertEqual(self.status("volume", uuid), "available")

    # -- ownership ------------------------------------------------------------------------------------------------

    def test_an_operation_is_started_once(self) -> None:
        made = self.service.create_volume(SIZE)
        job = self.storage.start("volume", made.uuid, member("a"))
        for who in (member("a", 2), member("b")):
            with self.assertRaises(Exception):  # noqa: B017  (the agent's own sign that it is not free)
                self.storage.start("volume", made.uuid, who)
        job.lease.check()

    def test_who_was_forced_out_writes_nothing_and_its_files_go(self) -> None:
        made = self.service.create_volume(SIZE)
        zombie = self.storage.start("volume", made.uuid, member("a"))
        self.service.delete_volume(made.uuid, force=True)
        agent = self.storage.agent("zombie")
        with self.assertLogs("moorage.work.work_loop", "WARNING"):
            agent.loop.run(zombie)
        self.assertEqual(self.status("volume", made.uuid), "deleting")
        self.storage.run_all()
        agent.work.collector.collect()
        self.assertEqual((self.status("volume", made.uuid), self.storage.strays()), (None, []))

    def test_a_reason_of_an_earlier_failure_does_not_stay(self) -> None:
        uuid = self.storage.volume()

        def fail() -> None:
            with mock.patch.object(DirectoryBackend, "copy", side_effect=OSError("broken, for this test")):
                self.service.upload(uuid, "image")
                self.storage.run_all()
            self.assertRegex(self.storage.get("volume", uuid).fault, "broken, for this test")

        ends: tuple[Callable[[], Any], ...] = (
            lambda: self.service.reset("volume", uuid, "available"),
            lambda: self.service.attach(uuid, "server"),
            lambda: self.service.detach(uuid),
            lambda: self.service.create_backup(uuid),
        )
        for end in ends:
            fail()
            end()
            self.assertEqual(self.storage.get("volume", uuid).fault, "")
            self.storage.run_all()
        fail()
        self.service.reset("volume", uuid, "error")
        self.assertRegex(self.storage.get("volume", uuid).fault, "broken, for this test")

    def test_what_is_in_progress_refuses_as_in_use_and_names_it(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        requests: dict[str, Callable[[], Any]] = {
            "snapshot": lambda: self.service.create_snapshot(uuid),
            "upload": lambda: self.service.upload(uuid, "image"),
            "delete": lambda: self.service.delete_volume(uuid),
            "attach": lambda: self.service.attach(uuid, "server"),
            "detach": lambda: self.service.detach(uuid),
            "restore": lambda: self.service.restore(backup, uuid),
        }
        for name, request in requests.items():
            with self.subTest(name), self.assertRaisesRegex(errors.InUse, uuid):
                request()
        self.storage.run_all()
        snapshot = self.service.create_snapshot(uuid).uuid
        with self.assertRaisesRegex(errors.InUse, snapshot):
            self.service.restore(backup, uuid)
        self.storage.run_all()
        self.service.reset("volume", uuid, "error")
        with self.assertRaises(errors.Conflict) as refused:
            self.service.create_backup(uuid)
        self.assertNotIsInstance(refused.exception, errors.InUse)

    def test_reset_state_fences_off_whoever_works(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid)
        zombie = self.storage.start("backup", backup.uuid, member("a"))
        self.service.reset("volume", uuid, "available")
        with self.assertLogs("moorage.work.work_loop", "WARNING"):
            self.storage.agent("a").loop.run(zombie)
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup.uuid)), ("available", "error"))
        self.storage.agent("a").work.collector.collect()
        self.assertEqual((self.storage.rows(), self.storage.strays()), (0, []))

    def test_of_two_that_are_worked_on_the_one_that_is_not_forced_away_ends_too(self) -> None:
        for operation in ("backup", "restore"):
            for forced in ("volume", "backup"):
                with self.subTest(operation=operation, forced=forced):
                    uuid = self.storage.volume()
                    backup = self.service.create_backup(uuid).uuid
                    if operation == "restore":
                        self.storage.run_all()
                        self.service.restore(backup, uuid)
                    job = self.storage.start("backup", backup, member("a"))
                    if forced == "volume":
                        self.service.delete_volume(uuid, force=True)
                    else:
                        self.service.delete("backup", backup, force=True)
                    with self.assertLogs("moorage.work.work_loop", "WARNING"):
                        self.storage.agent("a").loop.run(job)
                    self.storage.run_all()
                    found = self.status("volume", uuid), self.status("backup", backup)
                    kept = {"backup": ("available", "error"), "restore": ("error_restoring", "available")}[operation]
                    self.assertEqual(found, (None, kept[1]) if forced == "volume" else (kept[0], None))
                    self.assertEqual(self.storage.strays(), [])

    def test_a_deletion_that_is_forced_upon_the_volume_of_a_waiting_backup_is_done(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid)
        self.service.delete_volume(uuid, force=True)
        self.assertIsNone(self.storage.start("backup", backup.uuid, member("a")))
        self.storage.do("volume", uuid)
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup.uuid)), (None, "error"))
        self.assertRegex(self.storage.get("backup", backup.uuid).fault, "the volume was taken away")
        self.assertEqual(self.storage.rows(), 0)

    def test_what_waits_of_an_operation_whose_other_half_was_taken_away_is_ended_without_a_cleaner(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid).uuid
        self.storage.run_all()
        for half, kept in (("volume", ("available", "available")), ("backup", ("error_restoring", "available"))):
            self.service.restore(backup, uuid)
            self.service.reset(half, {"volume": uuid, "backup": backup}[half], "available")
            self.storage.run_all()
            self.assertEqual((self.status("volume", uuid), self.status("backup", backup)), kept)

    def test_what_was_not_foreseen_is_a_failure_of_the_operation(self) -> None:
        uuid = self.storage.volume()
        backup = self.service.create_backup(uuid)
        with (
            mock.patch.object(backup_format, "write_backup", side_effect=struct.error("for this test")),
            self.assertLogs("moorage.work.work_loop", "ERROR"),
        ):
            self.storage.run_all()
        self.assertEqual((self.status("volume", uuid), self.status("backup", backup.uuid)), ("available", "error"))
        self.assertIn("for this test", self.storage.get("backup", backup.uuid).fault)

    def test_what_waits_for_a_busy_agent_is_not_unclaimed_until_that_is_gone(self) -> None:
        ready, gone = self.storage.volume(), self.service.create_volume(SIZE).uuid
        backup = self.service.create_backup(ready)
        with self.storage.database.write() as tx:
            tx.execute(sa.delete(volumes).where(volumes.c.uuid == gone))
        self.storage.conf.set_override("chunk_delay", 0.01, group="block_storage")
        self.storage.conf.set_override("operations", 1, group="block_storage")
        agent = self.storage.agent("a")
        # It can never be begun, and nobody shall say that he will.
        agent.loop.ask("volume", gone)
        endless = self.service.create_volume(10**12).uuid
        agent.loop.ask("volume", endless)
        agent.start()
        wait_until(lambda: agent.loop._renewer.keeps("volume", endless), "the only thread is at work for ever", SOON)
        made = [self.service.create_volume(SIZE).uuid for _ in range(2)]
        for _ in range(2):
            agent.sweep()
        cleaner = self.storage.cleaner("a")
        unclaimed = NeverStarted((CLUSTER, "a"), 0.0)
        self.assertEqual(cleaner.clean(unclaimed), {"stale": 1})
        statuses = [self.status("volume", uuid) for uuid in (*made, ready)]
        self.assertEqual(statuses, ["creating", "creating", "backing-up"])
        self.assertEqual(self.status("backup", backup.uuid), "creating")
        agent.stop()
        # Nobody says any more that it has them, and time passes.
        self.storage.database.run(lambda tx: tx.execute(sa.update(workers).values(next_try_at=1)) and None)
        self.assertEqual(sum(cleaner.clean(unclaimed).values()), 5)
        self.assertEqual([self.status("volume", uuid) for uuid in made], ["error", "error"])
        self.assertEqual(self.storage.get("volume", made[0]).fault, "No service has begun it within 0 seconds.")

    def test_an_operation_whose_lease_is_lost_ends_at_the_next_chunk(self) -> None:
        self.storage.conf.set_override("chunk_delay", 0.01, group="block_storage")
        self.storage.workers.lease_seconds = 0.3
        made = self.service.create_volume(10**12)
        agent = self.storage.agent("a")
        agent.start()
        wait_until(lambda: self.storage.backend.uuids("volume"), "the first chunk is written", SOON)
        self.service.delete_volume(made.uuid, force=True)
        wait_until(lambda: not agent.loop._renewer.keeps("volume", made.uuid), "it has ended", SOON)
        agent.sweep()
        wait_until(lambda: self.storage.rows() == 0, "the deletion is done", SOON)
        agent.stop()
        agent.work.collector.collect()
        self.assertEqual((self.status("volume", made.uuid), self.storage.strays()), (None, []))

    def test_a_message_counts_while_an_earlier_operation_on_the_resource_goes_on(self) -> None:
        self.storage.conf.set_override("chunk_delay", 0.01, group="block_storage")
        made = self.service.create_volume(10**12)
        agent = self.storage.agent("a")
        agent.start()
        wait_until(lambda: self.storage.backend.uuids("volume"), "the first chunk is written", SOON)
        self.service.delete_volume(made.uuid, force=True)
        agent.block_storage_operation("volume", made.uuid)
        wait_until(lambda: self.storage.rows() == 0, "the deletion is done", SOON)
        agent.stop()
        agent.work.collector.collect()
        self.assertEqual((self.status("volume", made.uuid), self.storage.strays()), (None, []))

    def test_an_upload_that_is_forced_away_kills_its_image(self) -> None:
        for end in (
            lambda uuid: self.service.delete_volume(uuid, force=True),
            lambda uuid: self.service.reset("volume", uuid, "available"),
        ):
            uuid = self.storage.volume()
            image = self.service.upload(uuid, "mine")
            job = self.storage.start("volume", uuid, member("a"))
            end(uuid)
            with self.assertLogs("moorage.work.work_loop", "WARNING"):
                self.storage.agent("a").loop.run(job)
            self.assertEqual(
                (self.status("image", image.uuid), self.storage.get("volume", uuid).upload_to), ("killed", "")
            )
            self.storage.agent("a").work.collector.collect()
            self.assertEqual(self.storage.strays(), [])

    def test_the_image_of_another_project_is_none(self) -> None:
        uuid = self.storage.volume(image=b"secret")
        with self.storage.database.write() as tx:
            ROWS["volume"].change(tx, uuid, project_id="one")
        image = self.service.upload(uuid, "mine")
        self.storage.run_all()
        with self.assertRaisesRegex(errors.InvalidInput, "There is no image"):
            self.service.create_volume(SIZE, image=image.uuid, project_id="two")
        self.service.create_volume(SIZE, image=image.uuid, project_id="one")

    def test_what_a_status_that_is_set_says_of_the_attachment_holds_after_the_next_operation(self) -> None:
        uuid = self.storage.volume()
        self.service.attach(uuid, "server")
        for status, attached in (("error", "server"), ("in-use", "server"), ("available", ""), ("in-use", "unknown")):
            self.service.reset("volume", uuid, status)
            self.assertEqual(self.storage.get("volume", uuid).attached_to, attached)
            if status != "error":
                self.service.upload(uuid, "mine")
                self.storage.run_all()
            self.assertEqual(self.status("volume", uuid), status)

    def test_only_some_statuses_can_be_set(self) -> None:
        uuid = self.storage.volume()
        with self.assertRaisesRegex(errors.InvalidInput, "can be reset to available, in-use"):
            self.service.reset("volume", uuid, "deleting")
        made = self.service.create_volume(SIZE)
        with self.assertRaisesRegex(errors.Conflict, "has no data"):
            self.service.reset("volume", made.uuid, "available")
        self.assertEqual((self.status("volume", made.uuid), self.storage.rows()), ("creating", 1))

    def test_what_is_stopped_in_the_middle_is_begun_anew_by_another(self) -> None:
        self.storage.conf.set_override("chunk_delay", 60.0, group="block_storage")
        made = self.service.create_volume(SIZE)
        clock = HeldClock()
        first = BlockStorageAgent(dataclasses.replace(self.storage.tools(member("a")), clock=clock))
        first.start()
        wait_until(lambda: self.storage.backend.uuids("volume"), "the first chunk is written", SOON)
        with self.assertLogs("moorage.work.operations", "WARNING"):
            stopping = threading.Thread(target=first.stop)
            stopping.start()
            wait_until(first.loop._stopping.is_set, "the agent stops", SOON)
            clock.go_on.set()
            stopping.join()
        self.storage.conf.clear_override("chunk_delay", group="block_storage")
        self.storage.run_all("b")
        self.assertEqual((self.status("volume", made.uuid), self.storage.strays()), ("available", []))

    # -- tracked --------------------------------------------------------------------------------------------------

    def test_an_operation_that_is_done_where_it_is_asked_for(self) -> None:
        uuid = self.storage.volume()

        def begin(tx: object, token: int) -> None:
            ROWS["volume"].must_write(tx, uuid, token, status="creating")  # type: ignore[arg-type]

        def end(tx: object, lease: Lease) -> None:
            ROWS["volume"].must_write(tx, uuid, lease.token, status="available")  # type: ignore[arg-type]

        tracked = self.storage.workers.tracked
        with tracked("volume", uuid, "extend", "creating", member("a"), begin) as lease:
            with self.assertRaises(errors.InUse):
                self.service.delete_volume(uuid)
            lease.finish_with(lambda tx: end(tx, lease))
        self.assertEqual((self.status("volume", uuid), self.storage.rows()), ("available", 0))
        with tracked("volume", uuid, "extend", "creating", member("a")):
            self.assertEqual(self.storage.rows(), 1)
        self.assertEqual(self.storage.rows(), 0)
        with (
            self.assertRaises(ZeroDivisionError),
            self.assertLogs("moorage.work.operations", "WARNING"),
            tracked("volume", uuid, "extend", "creating", member("a")),
        ):
            raise ZeroDivisionError
        row = self.storage.workers.get("volume", uuid)
        assert row is not None
        self.assertEqual((row.phase, row.owner, row.last_error), ("waiting", None, "ZeroDivisionError: "))
        # Nobody looks for such rows, so that it is cleaned after a time.
        cleaner = self.storage.cleaner("cleaner")
        self.assertEqual(cleaner.clean(NeverStarted(("a",), 3600.0)), {})
        self.assertEqual(cleaner.clean(NeverStarted(("a",), 0.0)), {"stale": 1})
        self.assertEqual(self.storage.rows(), 0)

    def test_a_tracked_operation_that_was_overtaken_does_not_end_as_if_it_had_succeeded(self) -> None:
        uuid = self.storage.volume()
        with self.assertRaises(errors.Fenced), self.storage.workers.tracked("volume", uuid, "extend", "x", member("a")):
            self.service.reset("volume", uuid, "available")
