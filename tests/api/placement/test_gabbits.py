# SPDX-License-Identifier: Apache-2.0
"""Placement's own suite, file by file, on SQLite; ``make gabbi`` runs it on the other databases."""

from __future__ import annotations

import pathlib
import unittest

from tests.api.placement import gabbits


class TestGabbits(unittest.TestCase):
    """One test for each file of the suite; the methods are added below."""

    databases: gabbits.Databases

    @classmethod
    def setUpClass(cls) -> None:
        cls.databases = gabbits.Databases()
        cls.addClassCleanup(cls.databases.close)

    def run_file(self, path: pathlib.Path) -> None:
        outcome = gabbits.run_file(path, self.databases)
        self.assertEqual({}, outcome.failed)
        self.assertEqual(0, outcome.skipped)
        self.assertGreater(outcome.passed, 0)


class TestSuite(unittest.TestCase):
    def test_the_whole_suite_is_there(self) -> None:
        self.assertEqual(79, len(gabbits.files()))

    def test_every_known_deviation_is_a_request_of_the_suite(self) -> None:
        text = {path.stem: path.read_text(encoding="utf-8") for path in gabbits.files()}
        for file, name in gabbits.DEVIATIONS:
            self.assertIn(f"- name: {name}\n", text[file])


def _test(path: pathlib.Path) -> object:
    def test(self: TestGabbits) -> None:
        self.run_file(path)

    return test


for _path in gabbits.files():
    setattr(TestGabbits, "test_" + _path.stem.replace("-", "_").replace(".", "_"), _test(_path))
