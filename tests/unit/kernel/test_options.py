# SPDX-License-Identifier: Apache-2.0
"""The options of distributions that are written into a folder on sys.path."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from moorage import options


class BrokenTests(unittest.TestCase):
    """A distribution of plugins whose options cannot be read."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = Path(folder.name)

    def install(self, name: str, code: str) -> str:
        """The sentence's beginning for a distribution whose module of options has that code."""
        info = self.site / f"{name}-6.6.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 6.6\n")
        (info / "entry_points.txt").write_text(f"[moorage.parts]\n{name} = {name}_part:PART\n")
        (self.site / f"{name}_part.py").write_text(
            f"from moorage.part import Part\nPART = Part(options='{name}_options')\n"
        )
        (self.site / f"{name}_options.py").write_text(code)
        return f"The options of {name} 6.6 ({name}_options) cannot be read"

    def use(self) -> None:
        sys.path.insert(0, str(self.site))
        self.addCleanup(importlib.invalidate_caches)
        self.addCleanup(sys.path.remove, str(self.site))
        importlib.invalidate_caches()

    def test_it_is_told_once_with_what_was_raised_and_what_to_do_and_the_others_are_read(self) -> None:
        wanted = {
            self.install(
                "raises", "def list_opts(): raise ValueError('options broken')\n"
            ): "(ValueError: options broken)",
            self.install(
                "absent", "import no_such_library\n"
            ): "ModuleNotFoundError: No module named 'no_such_library'",
            self.install("leaves", "raise SystemExit(3)\n"): "SystemExit: 3",
            self.install("quits", "def list_opts(): raise SystemExit(5)\n"): "(PluginExit: SystemExit(5)",
            self.install(
                "shapeless", "def list_opts(): return [('paint', ['red'])]\n"
            ): "(TypeError: it must return pairs",
        }
        self.use()
        with self.assertLogs("moorage.options", "WARNING") as logged:
            for _ in range(3):
                self.assertIn("scheduling", dict(options.option_sets()))
        self.assertEqual(len(wanted), len(logged.records))
        self.assertEqual({record.getMessage() for record in logged.records}, set(options.problems()))
        for sentence in options.problems():
            start = next(start for start in wanted if sentence.startswith(start))
            self.assertIn(wanted[start], sentence)
            self.assertIn(f"Repair or uninstall {start.split()[3]}", sentence)

    def test_plugin_check_lists_it_and_fails(self) -> None:
        start = self.install("raises", "def list_opts(): raise ValueError('options broken')\n")
        done = subprocess.run(
            [sys.executable, "-m", "moorage.cli.main", "plugin", "check"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(self.site)},
        )
        self.assertEqual((1, ""), (done.returncode, done.stderr))
        self.assertEqual(1, done.stdout.count(f"broken: {start} (ValueError: options broken). Repair"), done.stdout)
