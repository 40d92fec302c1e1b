# SPDX-License-Identifier: Apache-2.0
"""``moorage plugin new``: what it refuses leaves nothing. What it writes is tried in test_installed."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from packaging.requirements import Requirement

from moorage import errors, options
from moorage.cli.scaffold.distribution import names_of, write
from moorage.cli.scaffold.families import FAMILIES
from tests.functional.scaffold.installed import ROOT


class RefusalTests(unittest.TestCase):
    """Nothing is written, and the message says what to do."""

    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-new-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def test_a_name_that_cannot_be_one(self) -> None:
        for name in ("", "2fast", "Gpu", "gpu-model", "gpu__model", "gpu model", "../up", "a" * 40, "ü", "gpu_model\n"):
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

    def test_a_name_whose_package_is_there_which_would_be_overwritten(self) -> None:
        with self.assertRaisesRegex(
            errors.AlreadyExists, r"package moorage_plugins is installed already \(.*Choose another"
        ):
            write("filter", "plugins", self.folder)
        self.assertEqual([], list(self.folder.iterdir()))

    def test_a_name_whose_distribution_is_there_which_would_be_uninstalled(self) -> None:
        site = Path(tempfile.mkdtemp(prefix="moorage-new-"))
        self.addCleanup(shutil.rmtree, site)
        info = site / "Moorage_GPU.model-3.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Moorage_GPU.model\nVersion: 3.1\n")
        with (
            mock.patch.object(sys, "path", [*sys.path, str(site)]),
            self.assertRaisesRegex(
                errors.AlreadyExists, r"moorage-gpu-model 3\.1 is installed already.*Choose another"
            ),
        ):
            write("filter", "gpu_model", self.folder)
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


class NextTests(unittest.TestCase):
    """What is printed after writing."""

    def test_the_folder_is_installed_and_not_a_distribution_of_that_name_of_an_index(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for into, line in (
                ((), "pip install ./moorage-gpu-model"),
                (("--into", "my plugins"), "pip install './my plugins/moorage-gpu-model'"),
                (("--into", f"{folder}/other"), f"pip install {folder}/other/moorage-gpu-model"),
            ):
                said = subprocess.run(
                    [sys.executable, "-m", "moorage.cli.main", "plugin", "new", "filter", "gpu_model", *into],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout
                with self.subTest(into=into):
                    self.assertIn(f"  {line}\n", said)
                    named = Path(folder, shlex.split(line)[-1], "setup.cfg")
                    self.assertTrue(named.is_file())


class ChooseTests(unittest.TestCase):
    """The lines for the configuration."""

    def test_what_was_on_stays_on(self) -> None:
        defaults = options.defaults()
        lists = 0
        for family in FAMILIES.values():
            with self.subTest(family=family.name):
                lines = configparser.ConfigParser(allow_no_value=True, comment_prefixes="#")
                lines.read_string(names_of(family, "gpu_model")["choose"])
                for section in lines.sections():
                    ((option, value),) = lines.items(section)
                    default = defaults[section][option]
                    self.assertIn("gpu_model", value)
                    if isinstance(default, list):
                        lists += 1
                        self.assertEqual([*default, "gpu_model"], value.split(","))
        self.assertEqual(8, lists)

    def test_the_dialects_are_served_beside_a_new_api(self) -> None:
        said = names_of(FAMILIES["api"], "report")["choose"]
        self.assertEqual("[api]\nenabled_apis = placement,baremetal,volume,report", said)

    def test_the_pages_switch_nothing_off(self) -> None:
        defaults = {option.name: option.default for _, every in options.option_sets() for option in every}
        found = 0
        for page in (ROOT / "doc/source").rglob("*.rst"):
            for option, value in re.findall(r"(?:\b|\\n)(enabled_\w+) = ([\w, .:]+)", page.read_text("utf-8")):
                found += 1
                with self.subTest(page=page.name, option=option):
                    self.assertLessEqual(set(defaults[option]), set(re.split(r", *", value)))
        self.assertGreater(found, 5)


class RequirementTests(unittest.TestCase):
    """What a distribution asks for is met by the Moorage that it was written with, and by none of the next major release."""

    def met(self, written_with: str, *installed: str) -> list[bool]:
        with mock.patch("importlib.metadata.version", lambda name: written_with):
            asked = Requirement(names_of(FAMILIES["filter"], "gpu_model")["requirement"])
        self.assertEqual("moorage", asked.name)
        return [asked.specifier.contains(each, prereleases=True) for each in installed]

    def test_the_one_it_was_written_with_and_later_ones_do(self) -> None:
        for version in (
            "0.0.1.dev142",
            "0.3.0",
            "1.2.0.0rc1",
            "1.2.0.0b2.dev7",
            "1.2.0a1",
            "2.1",
            "1.2.3.post1",
            "0.0.1.dev3+local",
        ):
            with self.subTest(version=version):
                self.assertEqual([True], self.met(version, version))
        self.assertEqual([True, True], self.met("0.0.1.dev142", "0.0.1", "0.9.0"))

    def test_earlier_ones_and_those_of_the_next_major_release_do_not(self) -> None:
        self.assertEqual([False] * 3, self.met("1.2.0", "1.1.9", "2.0.0.dev1", "2.0.0"))
        self.assertEqual([False] * 3, self.met("0.0.1.dev142", "0.0.0", "1.0.0.dev3", "1.0.0"))
