# SPDX-License-Identifier: Apache-2.0
"""The backend's folder, and the empty one that its file system is mounted on."""

from __future__ import annotations

import os
import tempfile
import threading
import unittest

from moorage import errors
from moorage_plugins.block_storage.backend import MARKER
from tests.servers import wait_until
from tests.unit.block_storage.storages import SIZE, SOON, Storage, member

_LOGGER = "moorage_plugins.block_storage.agent"


class MountTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.storage = Storage(f"sqlite:///{folder.name}/test.sqlite", folder.name)
        self.addCleanup(self.storage.database.close)
        self.storage.create_tables()
        self.backend = self.storage.folder / "backend"
        self.elsewhere = self.storage.folder / "elsewhere"

    def unmount(self) -> None:
        self.backend.rename(self.elsewhere)
        self.backend.mkdir()

    def mount(self) -> None:
        self.backend.rmdir()
        self.elsewhere.rename(self.backend)

    def test_what_is_asked_for_meanwhile_is_done_when_it_is_mounted_again(self) -> None:
        first = self.storage.volume()
        agent = self.storage.agent()
        agent.start()
        self.addCleanup(agent.stop)
        self.unmount()
        with self.assertLogs("moorage.work.work_loop", "WARNING") as told:
            second = self.storage.service.create_volume(SIZE).uuid
            self.storage.service.delete_volume(first)
            agent.sweep()
            wait_until(lambda: len(told.output) >= 2, "both are put off", SOON)
        self.assertRegex(told.output[0], f"put off.*no {MARKER}.*mount the file system")
        self.assertEqual((os.listdir(self.backend), self.storage.status("volume", first)), ([], "deleting"))
        self.mount()
        agent.sweep()
        wait_until(lambda: self.storage.rows() == 0, "both are done", SOON)
        self.assertEqual(self.storage.data("volume", second), bytes(SIZE))
        wait_until(lambda: self.storage.backend.uuids("volume") == [second], "the files of the first are removed", SOON)

    def test_an_agent_that_starts_before_it_is_mounted_writes_nothing(self) -> None:
        self.storage.volume()
        self.unmount()
        with self.assertLogs(_LOGGER, "ERROR") as told:
            agent = self.storage.agent()
        self.assertRegex(told.output[0], "No operation is begun until this is mended: .* mount the file system")
        with self.assertRaises(errors.Unavailable):
            agent.work.mount.check()
        self.assertEqual(os.listdir(self.backend), [])
        self.mount()
        agent.work.mount.check()

    def test_an_operation_that_has_begun_writes_nothing_once_it_is_unmounted(self) -> None:
        self.storage.volume()
        agent = self.storage.agent()
        made = self.storage.service.create_volume(SIZE).uuid
        job = self.storage.start("volume", made, member("a"))
        self.unmount()
        with self.assertLogs("moorage.work.work_loop", "WARNING"):
            agent.loop.run(job)
        self.assertEqual((self.storage.status("volume", made), os.listdir(self.backend)), ("error", []))
        self.assertRegex(self.storage.get("volume", made).fault, "Mount the file system")

    def test_another_file_system_is_not_written_to(self) -> None:
        self.storage.volume()
        agent = self.storage.agent()
        self.unmount()
        self.storage.backend.mark("another")
        with self.assertRaisesRegex(errors.Unavailable, f"there is another {MARKER}"):
            agent.work.mount.check()

    def test_where_nothing_can_be_missing_a_folder_is_taken(self) -> None:
        """It was mounted only after the first start; and the data of another location are not to be found here."""
        agent = self.storage.agent()
        self.unmount()
        agent.work.mount.check()
        self.assertTrue(self.storage.backend.marker())
        self.storage.place = "elsewhere"
        self.storage.service.create_volume(SIZE)
        self.storage.agent("b").work.mount.check()

    def test_the_folder_of_a_version_without_markers_is_known_by_its_data(self) -> None:
        self.storage.volume()
        (self.backend / MARKER).unlink()
        self.storage.agent()
        self.assertTrue(self.storage.backend.marker())

    def test_of_several_that_begin_at_once_one_makes_the_marker(self) -> None:
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda name=name: found.append(self.storage.backend.mark(name)))
            for name in "abcdef"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, [self.storage.backend.marker()] * len(threads))
        self.assertEqual(os.listdir(self.backend), [MARKER])
