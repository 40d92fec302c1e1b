# SPDX-License-Identifier: Apache-2.0
"""``moorage plugin new``: what it refuses leaves nothing. What it writes is tried in test_installed."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path

from moorage import errors
from moorage.cli.scaffold.distribution import write


class RefusalTests(unittest.TestCase):
    """Nothing is written, and the message says what to do."""

    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-new-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_a_name_that_cannot_be_one(self) -> None:
        for name in ("", "2fast", "Gpu", "gpu-model", "gpu__model", "gpu model", "../up", "a" * 40, "ü"):
            with self.subTest(name=name), self.assertRaisesRegex(errors.InvalidInput, "small letters"):
                write("filter", name, self.folder)
        self.assertEqual([], list(self.folder.iterdir()))

    def test_a_family_that_does_not_exist(self) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, "weigher"):
            write("filters", "gpu_model", self.folder)

    def test_a_name_that_an_installed_plugin_has(self) -> None:
        with self.assertRaisesRegex(errors.AlreadyExists, "moorage_plugins.filters.compute"):
            write("filter", "compute", self.folder)
        self.assertEqual([], list(self.folder.iterdir()))

    def test_a_folder_that_is_there(self) -> None:
        write("filter", "gpu_model", self.folder)
        before = sorted(self.folder.rglob("*"))
        with self.assertRaisesRegex(errors.AlreadyExists, "nothing was written"):
            write("weigher", "gpu_model", self.folder)
        self.assertEqual(before, sorted(self.folder.rglob("*")))

    def test_a_place_where_nothing_can_be_written(self) -> None:
        (self.folder / "file").write_text("")
        with self.assertRaises(errors.ConfigError):
            write("filter", "gpu_model", self.folder / "file")
