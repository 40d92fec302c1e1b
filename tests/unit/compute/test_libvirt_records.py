# SPDX-License-Identifier: Apache-2.0
"""The lock of an instance in the records of the driver libvirt."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from moorage.clock import SystemClock
from moorage_plugins.drivers.libvirt.records import Records


class HeldTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def test_the_folder_may_be_removed_by_another_call_at_any_moment(self) -> None:
        """The call before this one has nothing left of the instance, and removes the folder when it lets go of it."""
        records = Records(self.folder, SystemClock())
        for name, seen in (("mkdir", FileExistsError("it is there")), ("open", FileNotFoundError("it was removed"))):
            # The first call meets the other one; the second one does what it should.
            meets = mock.patch.object(os, name, wraps=getattr(os, name), side_effect=[seen, mock.DEFAULT])
            with self.subTest(name), meets, records.held("one", 0.0) as descriptor:
                self.assertTrue(os.path.samestat(os.fstat(descriptor), os.stat(self.folder / "one")))
            self.assertEqual([], list(self.folder.iterdir()))


if __name__ == "__main__":
    unittest.main()
