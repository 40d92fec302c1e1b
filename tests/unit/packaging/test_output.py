# SPDX-License-Identifier: Apache-2.0
"""What a run of the tests prints: dots, failures with their own log, totals."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

from tests.commands import in_process

ROOT = Path(__file__).parents[3]

_NOISY = """
import logging, os, subprocess, sys, unittest, warnings
import tests

class Noisy(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        logging.warning("noise of the class")

    def make_noise(self, text):
        logging.getLogger().addHandler(logging.StreamHandler(sys.__stderr__))
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger("acme").warning("%s logged", text)
        warnings.warn(f"{text} warned")
        print(f"{text} printed")
        sys.stderr.write(f"{text} written\\n")
        os.write(2, f"{text} by number\\n".encode())
        subprocess.run([sys.executable, "-c", f"import sys; sys.exit('{text} by a child')"])

    def test_1_passes(self):
        self.make_noise("passing")

    def test_2_fails(self):
        self.make_noise("failing")
        self.assertEqual(1, FAILS)

    def test_3_has_only_its_own_handlers(self):
        self.assertEqual(1, len(logging.getLogger().handlers))
"""


def run_suite(source: str) -> tuple[int, list[str]]:
    """Run a test module with stestr as ``make test`` does; its status and the lines of both outputs."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "noisy")
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "test_noisy.py").write_text(source)
        command = [sys.executable, "-m", "stestr.cli", "--test-path", str(package), "--top-dir", folder]
        command += ["--repo-url", folder, "run", "--abbreviate", "--concurrency", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "MOORAGE_TEST_LOG": ""}
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        return done.returncode, done.stdout.splitlines()


class OutputTests(unittest.TestCase):
    def test_prints_dots_and_totals_when_all_tests_pass(self) -> None:
        status, lines = run_suite(_NOISY.replace("FAILS", "1"))
        self.assertEqual(0, status, lines)
        self.assertEqual("...", lines[0])
        self.assertEqual("Totals", lines[2])
        self.assertNotRegex("\n".join(lines), "noise|logged|warned|printed|written|by number|by a child")

    def test_shows_each_failure_with_the_log_of_its_own_test(self) -> None:
        status, lines = run_suite(_NOISY.replace("FAILS", "2"))
        self.assertEqual(1, status, lines)
        self.assertEqual(".F.", lines[0])
        said = "\n".join(lines)
        for expected in ("logged", "warned", "printed", "written", "by number", "by a child"):
            self.assertIn(f"failing {expected}\n", said)
        self.assertIn("AssertionError: 1 != 2", said)
        self.assertNotIn("passing", said)

    def test_shows_a_class_that_cannot_start_with_its_log(self) -> None:
        broken = _NOISY.replace(
            'logging.warning("noise of the class")', 'logging.warning("why"); raise OSError("broken")'
        )
        status, lines = run_suite(broken)
        self.assertEqual(1, status, lines)
        self.assertRegex("\n".join(lines), r"OSError: broken[^=]*WARNING root why")


class InProcessTests(unittest.TestCase):
    def test_a_program_leaves_no_log_handler_behind(self) -> None:
        def program(words: list[str]) -> int:
            logging.getLogger().addHandler(logging.StreamHandler(io.StringIO()))
            logging.getLogger().setLevel(logging.DEBUG)
            sys.stderr.write("said")
            return 3

        root = logging.getLogger()
        before = root.handlers[:], root.level
        with contextlib.redirect_stderr(io.StringIO()) as terminal:
            told = in_process(program, [])
        self.assertEqual((3, "", "said"), told)
        self.assertEqual("", terminal.getvalue())
        self.assertEqual(before, (root.handlers[:], root.level))

    def test_what_a_server_in_this_process_logs_is_not_the_programs_output(self) -> None:
        def program(words: list[str]) -> int:
            logging.getLogger().addHandler(logging.StreamHandler())
            server = threading.Thread(target=logging.getLogger().warning, args=("of a server",))
            server.start()
            server.join()
            logging.getLogger().warning("of the program")
            return 0

        with contextlib.redirect_stderr(io.StringIO()) as terminal:
            told = in_process(program, [])
        self.assertEqual((0, "", "of the program\n"), told)
        self.assertEqual("of a server\n", terminal.getvalue())
