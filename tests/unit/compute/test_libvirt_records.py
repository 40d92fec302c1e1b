# SPDX-License-Identifier: Apache-2.0
"""The lock of an instance in the records of the driver libvirt."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any
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
        for name in ("mkdir", "open"):
            with self.subTest(removed_at=name):
                real, times = getattr(os, name), iter(range(100))

                def removed(path: Any, *arguments: Any, real: Any = real, times: Any = times, **named: Any) -> Any:
                    """The folder is there when the first call begins, and is gone when it has ended."""
                    if next(times):
                        return real(path, *arguments, **named)
                    if name == "mkdir":  # noqa: B023
                        raise FileExistsError(path)
                    os.rmdir(path)
                    return real(path, *arguments, **named)

                with mock.patch.object(os, name, removed), records.held("one", 0.0) as descriptor:
                    self.assertTrue(os.path.samestat(os.fstat(descriptor), os.stat(self.folder / "one")))
                self.assertEqual([], list(self.folder.iterdir()))


if __name__ == "__main__":
    unittest.main()
