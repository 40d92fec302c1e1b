# SPDX-License-Identifier: Apache-2.0
"""What the commands print beside what they were asked for: nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

from moorage import errors
from moorage.cli import base
from moorage.cli.up import ControlPlane, LaunchPlan
from moorage.http.server import Server


class NoiseTests(unittest.TestCase):
    def test_listing_plugins_prints_the_plugins_alone(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "moorage.cli.main", "plugin", "list", "-f", "csv"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertIn('"moorage.transports","oslo","ready"', done.stdout)


class TimesTests(unittest.TestCase):
    def test_times_are_dates_at_every_depth_and_nothing_else_is(self) -> None:
        micros = 1_700_000_000_123_456
        given = {
            "created_at": micros,
            "never_at": 0,
            "unknown_at": None,
            "token": micros,
            "operation": {"begun_at": micros},
        }
        shown = dict(zip(*base.one(given), strict=True))
        moment = "2023-11-14T22:13:20.123+00:00"
        self.assertEqual((moment, "", "", micros), tuple(shown.values())[:4])
        self.assertEqual({"begun_at": moment}, json.loads(shown["operation"]))
        columns, rows = base.table(("uuid", "updated_at"), [{"uuid": "a", "updated_at": micros}])
        self.assertEqual((("uuid", "updated_at"), [("a", moment)]), (columns, rows))


class PrintingTests(unittest.TestCase):
    """A distribution whose modules print when they are imported, as one that somebody is still working at does."""

    def test_what_plugins_print_is_not_mixed_with_what_was_asked_for(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        site = Path(folder.name)
        info = site / "chatty-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chatty\nVersion: 1.0\n")
        modules = ("chatty_filter:Chatty", "chatty_part:PART")
        groups = ("moorage.filters", "moorage.parts")
        points = "".join(f"[{group}]\nchatty = {module}\n" for group, module in zip(groups, modules, strict=True))
        (info / "entry_points.txt").write_text(points)
        for module in modules:
            name, _, attribute = module.partition(":")
            (site / f"{name}.py").write_text(f"print('{name} says hello')\n{attribute} = list\n")
        moorage = (sys.executable, "-m", "moorage.cli.main")
        status = (sys.executable, "-m", "moorage.cli.status", "--state-dir", folder.name)
        validate = (*moorage, "config", "validate", "--state-dir", folder.name)
        for command, heard in (
            ((*moorage, "plugin", "list", "-f", "json"), {"chatty_filter"}),
            (validate, {"chatty_part"}),
            ((*status, "upgrade", "check"), {"chatty_filter", "chatty_part"}),
        ):
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": folder.name}
            )
            with self.subTest(command=command[3:]):
                self.assertNotIn("says hello", done.stdout)
                if "json" in command[-1]:
                    json.loads(done.stdout)
                for name in heard:
                    self.assertIn(f"{name} says hello", done.stderr)


class CommandTests(unittest.TestCase):
    """Commands of other distributions, found in a folder as pip would leave it."""

    #: Runs the command, and tells in its last line which modules that took.
    PROGRAM = textwrap.dedent("""
        import sys
        from moorage.cli import main
        try:
            status = main.main()
        except SystemExit as end:
            status = end.code or 0
        print(*sys.modules, file=sys.stderr)
        sys.exit(status)
    """)

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.site = Path(folder.name)
        for distribution in ("one", "other"):
            info = self.site / f"{distribution}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[moorage.cli]\nsail = sailing_{distribution}:Sail\n")
            (self.site / f"sailing_{distribution}.py").write_text("raise RuntimeError('the mast is broken')\n")

    def run_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", self.PROGRAM, *words],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(self.site)},
        )

    def test_a_command_imports_itself_alone(self) -> None:
        done = self.run_command("node", "list", "--help")
        self.assertEqual(0, done.returncode, done.stderr[-1000:])
        imported = set(done.stderr.splitlines()[-1].split())
        self.assertIn("moorage.cli.commands.node", imported)
        self.assertEqual(set(), imported & {"sqlalchemy", "moorage.cli.commands.aggregate", "sailing_one"})

    def test_a_command_that_two_distributions_bring_is_refused_by_name(self) -> None:
        done = self.run_command("sail")
        self.assertEqual(1, done.returncode)
        self.assertRegex(done.stderr, "(?s)one 1.0.*other 1.0")
        self.assertNotIn("Traceback", done.stderr)

    def test_a_command_that_cannot_be_imported_names_its_distribution(self) -> None:
        shutil.rmtree(self.site / "other-1.0.dist-info")
        done = self.run_command("sail")
        self.assertEqual(1, done.returncode)
        self.assertIn("the mast is broken", done.stderr)
        self.assertIn("one 1.0", done.stderr)
        self.assertNotIn("Traceback", done.stderr)


class BindTests(unittest.TestCase):
    def test_what_is_no_port_is_refused_before_anything_starts(self) -> None:
        for bind in ("127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:²", "8780", ":8780"):
            with self.subTest(bind=bind), self.assertRaisesRegex(errors.ConfigError, "port from 0 to 65535"):
                ControlPlane(LaunchPlan(Path("nowhere"), bind))

    def test_the_server_refuses_it_too(self) -> None:
        for bind in ("127.0.0.1:99999", "127.0.0.1:http", "127.0.0.1"):
            with self.subTest(bind=bind), self.assertRaisesRegex(errors.ConfigError, "port from 0 to 65535"):
                Server(bind, lambda *_: [], threads=1, drain_seconds=1)
