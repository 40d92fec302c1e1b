# SPDX-License-Identifier: Apache-2.0
"""The queue of test classes that the workers of ``make test`` share, run by stestr itself."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter, defaultdict
from pathlib import Path

from tests import queue

ROOT = Path(__file__).parents[3]
CLASSES, TESTS, WORKERS = 9, 3, 3

_PACKAGE = """
import os
from tests import queue

def load_tests(loader, tests, pattern):
    folder = os.path.dirname(__file__)
    return queue.of_worker(os.environ["QUEUE"]) or loader.discover(folder, pattern, os.path.dirname(folder))
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
# What only a worker, or only the listing, finds: the two differ in their arguments.
_CANNOT_BE_IMPORTED = """
import sys
if "--load-list" in sys.argv:
    raise TypeError("not in a worker")

class Test(unittest.TestCase):
    def test_a(self):
        pass
"""
_HAS_ANOTHER = """
import sys
class Test(unittest.TestCase):
    vars()["test_" + ("worker" if "--load-list" in sys.argv else "listing")] = lambda self: None
"""
_SAYS_WHO_IMPORTS = """
with open(os.environ["NOTES"], "a") as notes:
    notes.write(f"import test_more {os.getpid()}\\n")

class Test(unittest.TestCase):
    test_a = lambda self: None
"""


class OrderTests(unittest.TestCase):
    def test_classes_that_take_long_come_before_the_others(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            # Neither module exists: each test fails when its class is run, which shows the order.
            early, late = "tests.a_module.Test.test_it", f"{queue.FIRST[-1]}.test_no_such"
            result = unittest.TestResult()
            queue.Queue(Path(folder)).filter_by_ids({early, late}).run(result)
        self.assertEqual([late, early], [test.id() for test, _ in result.failures])

    def test_every_class_that_comes_first_exists(self) -> None:
        for name in queue.FIRST:
            module, _, last = name.rpartition(".")
            with self.subTest(name):
                self.assertTrue(issubclass(getattr(importlib.import_module(module), last), unittest.TestCase))


class QueueTests(unittest.TestCase):
    def run_workers(self, more: str = "", *arguments: str) -> tuple[int, str, list[list[str]]]:
        """Run the classes with stestr, each worker with all of them: status, output, and who ran what."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        package = folder / "crowd"
        package.mkdir()
        (folder / "queue").mkdir()
        (package / "__init__.py").write_text(_PACKAGE)
        classes = [f"class Test{number}(Base, unittest.TestCase): pass\n" for number in range(CLASSES)]
        (package / "test_crowd.py").write_text(_MODULE + "".join(classes))
        (package / "test_more.py").write_text(_MODULE + more)
        (folder / "workers.yaml").write_text('- worker: ["."]\n' * WORKERS)
        notes = folder / "notes"
        notes.touch()
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

    def test_a_module_that_one_worker_needs_is_imported_by_that_worker_and_by_the_listing(self) -> None:
        status, output, ran = self.run_workers(_SAYS_WHO_IMPORTS)
        self.assertEqual(0, status, output)
        self.assertEqual(2, len({process for what, _, process in ran if what == "import"}), ran)

    def test_a_module_that_only_the_listing_can_import_fails_its_tests_and_is_named(self) -> None:
        status, output, ran = self.run_workers(_CANNOT_BE_IMPORTED)
        self.assertEqual(1, status, output)
        self.assertIn("crowd.test_more.Test.test_a", output)
        self.assertIn("a worker could not import crowd.test_more", output)
        self.assertIn("not in a worker", output)
        self.assert_each_test_ran_once(ran)

    def test_a_module_that_cannot_be_imported_at_all_ends_the_run(self) -> None:
        status, output, ran = self.run_workers("import no_such_module\n")
        self.assertNotEqual(0, status, output)
        self.assertIn("No module named 'no_such_module'", output)
        self.assertEqual([], ran)

    def test_a_test_that_a_worker_does_not_find_fails(self) -> None:
        status, output, ran = self.run_workers(_HAS_ANOTHER)
        self.assertEqual(1, status, output)
        self.assertIn("crowd.test_more.Test.test_listing", output)
        self.assertIn("does not have this test", output)
        self.assert_each_test_ran_once(ran)
