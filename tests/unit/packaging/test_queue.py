# SPDX-License-Identifier: Apache-2.0
"""The queue of test classes that the workers of ``make test`` share, run by stestr itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter, defaultdict
from pathlib import Path

from tests.queue import Queue

ROOT = Path(__file__).parents[3]
CLASSES, TESTS, WORKERS = 9, 3, 3

_PACKAGE = """
import os, pathlib, unittest
from tests.queue import Queue

def load_tests(loader, tests, pattern):
    found = loader.discover(os.path.dirname(__file__), pattern, os.path.dirname(os.path.dirname(__file__)))
    return Queue(pathlib.Path(os.environ["QUEUE"]), found)
"""
_MODULE = """
import os, unittest

class Base:
    def note(self):
        with open(os.environ["NOTES"], "a") as notes:
            notes.write(f"{type(self).__name__} {self._testMethodName} {os.getpid()}\\n")

    def test_0(self):
        self.note()

    test_1 = test_2 = test_0
"""
_DIES = """
class Test(unittest.TestCase):
    def test_dies(self):
        os._exit(0)
"""


class OrderTests(unittest.TestCase):
    def test_classes_that_take_long_come_before_the_others(self) -> None:
        early = type("AOrdinary", (unittest.TestCase,), {"test_it": lambda self: None})
        late = type("ZLong", (unittest.TestCase,), {"RUNS_FIRST": True, "test_it": lambda self: None})
        found = Queue(Path(), unittest.TestSuite([early("test_it"), late("test_it")]))
        names = [[type(test).__name__ for test in each] for each in found if isinstance(each, unittest.TestSuite)]
        self.assertEqual([["ZLong"], ["AOrdinary"]], names)


class QueueTests(unittest.TestCase):
    def run_workers(self, more: str = "", *arguments: str) -> tuple[int, str, list[list[str]]]:
        """Run the classes with stestr, each worker with all of them: status, output, and who ran what."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        package = folder / "crowd"
        package.mkdir()
        (folder / "queue").mkdir()
        (package / "__init__.py").write_text(_PACKAGE)
        classes = [f"class Test{number}(Base, unittest.TestCase): pass\n" for number in range(CLASSES)]
        (package / "test_crowd.py").write_text(_MODULE + "".join(classes) + more)
        (folder / "workers.yaml").write_text('- worker: ["."]\n' * WORKERS)
        notes = folder / "notes"
        done = subprocess.run(
            [
                *(sys.executable, "-m", "stestr.cli", "--test-path", str(package), "--top-dir", str(folder)),
                *("--repo-url", str(folder), "run", "--concurrency", str(WORKERS)),
                *("--worker-file", str(folder / "workers.yaml"), *arguments),
            ],
            cwd=folder,
            env={
                **os.environ,
                **{"PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "NOTES": str(notes), "QUEUE": f"{folder}/queue"},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout, [line.split() for line in notes.read_text().splitlines()]

    def assert_each_test_ran_once(self, ran: list[list[str]], classes: int = CLASSES) -> None:
        self.assertEqual({1}, set(Counter((name, test) for name, test, _ in ran).values()), ran)
        workers = defaultdict(set)
        for name, _, worker in ran:
            workers[name].add(worker)
        self.assertEqual({1}, {len(each) for each in workers.values()}, "a class was divided")
        self.assertEqual(classes * TESTS, len(ran))

    def test_each_test_is_run_by_one_worker_and_a_class_is_not_divided(self) -> None:
        status, output, ran = self.run_workers()
        self.assertEqual(0, status, output)
        self.assert_each_test_ran_once(ran)
        self.assertIn(f"Passed: {CLASSES * TESTS}\n", output)

    def test_a_selection_runs_what_it_selects(self) -> None:
        status, output, ran = self.run_workers("", r"Test[0-3]\.")
        self.assertEqual(0, status, output)
        self.assert_each_test_ran_once(ran, 4)

    def test_a_worker_that_dies_fails_the_run_and_the_other_workers_run_the_rest(self) -> None:
        status, output, ran = self.run_workers(_DIES)
        self.assertEqual(1, status, output)
        self.assertIn("Test.test_dies", output)
        self.assert_each_test_ran_once(ran)
