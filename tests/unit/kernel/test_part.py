# SPDX-License-Identifier: Apache-2.0
"""Parts of distributions that are written into a folder on sys.path."""

from __future__ import annotations

import importlib
import sys
import tempfile
import unittest
from pathlib import Path

from moorage import errors, part


class PartsTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = Path(folder.name)
        self.own = [each.name for each in part.parts()]
        self.assertIn("allocation", self.own)
        sys.path.insert(0, folder.name)
        self.addCleanup(importlib.invalidate_caches)
        self.addCleanup(sys.path.remove, folder.name)

    def install(self, distribution: str, name: str, code: str) -> None:
        info = self.site / f"{distribution}-6.6.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 6.6\n")
        (info / "entry_points.txt").write_text(f"[moorage.parts]\n{name} = {distribution}_part:PART\n")
        (self.site / f"{distribution}_part.py").write_text(code)
        importlib.invalidate_caches()
        self.addCleanup(sys.modules.pop, f"{distribution}_part", None)

    def names(self) -> list[str]:
        return [each.name for each in part.parts()]

    def test_a_part_of_another_distribution_comes_after_those_of_moorage(self) -> None:
        self.install("acme", "a_first_name", "from moorage.part import Part\nPART = Part(options='acme_options')\n")
        self.assertEqual([*self.own, "a_first_name"], self.names())
        (found,) = (each for each in part.parts() if each.name == "a_first_name")
        self.assertEqual(("acme", "6.6"), found.distribution)
        with self.assertRaisesRegex(
            errors.PluginLoadError, "acme_options:list_opts of the part 'a_first_name' of acme 6.6"
        ):
            found.load("acme_options:list_opts")

    def test_a_part_that_cannot_be_used_is_told_and_left_out(self) -> None:
        self.install("broken", "broken", "raise SystemExit(3)\n")
        self.install("strange", "strange", "PART = object()\n")
        self.install("one", "shared", "from moorage.part import Part\nPART = Part()\n")
        self.install("other", "shared", "from moorage.part import Part\nPART = Part()\n")
        with self.assertLogs("moorage.part", "WARNING") as logs:
            self.assertEqual(self.own, self.names())
            self.assertEqual(self.own, self.names())
        self.assertEqual(3, len(logs.records))
        said = " ".join(part.problems())
        for sentence in ("SystemExit: 3", "strange_part:PART is no moorage.part.Part", "one 6.6", "other 6.6"):
            self.assertIn(sentence, said)

    def test_a_name_that_moorage_has_itself_is_refused(self) -> None:
        self.install("acme", "allocation", "from moorage.part import Part\nPART = Part()\n")
        with self.assertRaisesRegex(errors.PluginLoadError, "(?s)'allocation'.*acme 6.6"):
            part.parts()
