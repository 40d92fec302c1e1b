# SPDX-License-Identifier: Apache-2.0
"""``moorage plugin new``: what it writes installs, passes its own tests, and is found; what it refuses leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from moorage import errors
from moorage.cli.scaffold.distribution import Written, write
from moorage.cli.scaffold.families import FAMILIES


def run(*command: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command as an author runs it, with what is installed in ``path`` beside what the tests run on."""
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class WrittenDistributionsTests(unittest.TestCase):
    """One distribution of each family, built by pip and installed together beside Moorage."""

    folder: Path
    site: Path
    names: dict[str, str]
    written: dict[str, Written]

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="moorage-new-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.site = cls.folder / "site"
        cls.names = {family: f"made_{family.replace('-', '_')}" for family in FAMILIES}
        cls.written = {family: write(family, name, cls.folder) for family, name in cls.names.items()}
        options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
        folders = [str(each.folder) for each in cls.written.values()]
        done = run("pip", "install", *options, "--target", str(cls.site), *folders, cwd=cls.folder)
        if done.returncode:
            raise AssertionError(done.stderr)

    def test_each_passes_its_own_tests(self) -> None:
        for family, written in self.written.items():
            with self.subTest(family=family):
                done = run("unittest", "discover", "-s", "tests", "-t", ".", cwd=written.folder, path=self.site)
                self.assertEqual(0, done.returncode, done.stderr)
                self.assertRegex(done.stderr, r"Ran [1-9]\d* tests?")

    def test_each_is_found_and_can_be_used(self) -> None:
        listed = run("moorage.cli.main", "plugin", "list", "-f", "csv", cwd=self.folder, path=self.site)
        self.assertEqual(0, listed.returncode, listed.stderr)
        for family, name in self.names.items():
            if family != "command":  # commands are not loaded by a survey: cliff offers them
                self.assertIn(f'"{FAMILIES[family].group}","{name}","ready"', listed.stdout)
        checked = run("moorage.cli.main", "plugin", "check", cwd=self.folder, path=self.site)
        self.assertEqual(0, checked.returncode, checked.stdout)
        self.assertIn(" 0 cannot", checked.stdout)
        ran = run("moorage.cli.main", "made", "command", "2", cwd=self.folder, path=self.site)
        self.assertEqual((0, 2), (ran.returncode, len(ran.stdout.split())), ran.stderr)

    def test_the_code_is_in_good_shape(self) -> None:
        for family, written in self.written.items():
            with self.subTest(family=family):
                options = (
                    "--isolated",
                    "--line-length=120",
                    "--select=E,W,F,B,UP,SIM,RET,D,C4",
                    "--ignore=D203,D213,D107,D102,D401",
                )
                done = run("ruff", "check", *options, str(written.folder), cwd=written.folder)
                self.assertEqual(0, done.returncode, done.stdout)

    def test_no_placeholder_is_left(self) -> None:
        for written in self.written.values():
            for path in written.files:
                self.assertNotIn("$", (written.folder / path).read_text(), path)

    def test_the_lines_for_the_configuration_name_the_plugin(self) -> None:
        for family, written in self.written.items():
            readme = (written.folder / "README.rst").read_text()
            if family != "command":
                self.assertRegex(readme, rf"(?m)^    \w+ = .*{self.names[family]}")


class RefusalTests(unittest.TestCase):
    """Nothing is written, and the message says what to do."""

    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-new-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_a_name_that_cannot_be_one(self) -> None:
        for name in ("", "2fast", "Gpu", "gpu-model", "gpu__model", "gpu model", "../up", "a" * 51, "ü"):
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
