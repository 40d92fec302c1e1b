# SPDX-License-Identifier: Apache-2.0
"""The YAML files beside this module, each against an empty dialect."""

from __future__ import annotations

import pathlib
import unittest

import yaml
from gabbi import handlers, suitemaker

from tests.api.baremetal.ironic import IronicCase

FOLDER = pathlib.Path(__file__).parent / "gabbits"


class TestGabbits(IronicCase):
    def test_every_file_holds(self) -> None:
        files = sorted(FOLDER.glob("*.yaml"))
        self.assertTrue(files)
        for file in files:
            with self.subTest(file.name):
                self.setUp()
                self.run_file(file)

    def run_file(self, file: pathlib.Path) -> None:
        given = yaml.safe_load(file.read_text())
        host, _, port = self.live.url.removeprefix("http://").partition("/")[0].partition(":")
        suite = suitemaker.test_suite_from_dict(
            unittest.TestLoader(), file.stem, given, str(FOLDER), host, int(port), None, None, prefix="/baremetal",
            handlers=[handler() for handler in handlers.RESPONSE_HANDLERS],
        )  # fmt: skip
        found = unittest.TestResult()
        suite.run(found)
        self.assertEqual([], [f"{test}: {text}" for test, text in (*found.failures, *found.errors)])
        self.assertEqual(len(given["tests"]), found.testsRun)
        self.assertEqual([], found.skipped)
