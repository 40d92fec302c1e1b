# SPDX-License-Identifier: Apache-2.0
"""``moorage --help`` lists every command without importing one."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import subprocess
import sys
import unittest

from moorage.cli import main, overview

_HELP = """
import sys
from moorage.cli import main
try:
    main.main(["--help"])
except SystemExit as ended:
    assert not ended.code, ended.code
commands = {owners[0].module for owners in main._COMMANDS.installed().values()}
print(sorted(commands & sys.modules.keys()))
"""


class OverviewTests(unittest.TestCase):
    def test_no_command_is_imported(self) -> None:
        done = subprocess.run([sys.executable, "-c", _HELP], capture_output=True, text=True, check=True, timeout=120)
        self.assertEqual(done.stdout.splitlines()[-1], "[]")
        self.assertIn("up  ", done.stdout)

    def test_each_line_is_the_first_of_the_docstring(self) -> None:
        installed = main._COMMANDS.installed()
        out = io.StringIO()
        overview.write(out, installed, "moorage")
        lines = {line.strip() for line in out.getvalue().splitlines()}
        self.assertGreater(len(installed), 50)
        for name, (point, *_) in installed.items():
            line = point.load().__doc__.strip().partition("\n")[0].rstrip(".")
            self.assertTrue(any(each.startswith(f"{name} ") and each.endswith(f" {line}") for each in lines), name)

    def test_a_command_that_cannot_be_read_is_listed_all_the_same(self) -> None:
        point = importlib.metadata.EntryPoint("broken", "nowhere.at_all:Broken", "moorage.cli")
        out = io.StringIO()
        overview.write(out, {"broken": [point]}, "moorage")
        self.assertIn("broken  (no description)", out.getvalue())


class OptionsFirstTests(unittest.TestCase):
    def test_an_option_before_the_command_is_refused_with_its_place(self) -> None:
        for argv in (["--state-dir", "/tmp/x", "service", "list"], ["--nonsense"]):
            said = io.StringIO()
            with self.subTest(argv=argv), contextlib.redirect_stderr(said):
                self.assertEqual(2, main.main(argv))
            self.assertIn(f"{argv[0]} stands before the command", said.getvalue())
