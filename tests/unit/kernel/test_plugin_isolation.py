# SPDX-License-Identifier: Apache-2.0
"""Code that is not ours ends no process, answers from no copy of one, and prints where nobody reads an answer."""

from __future__ import annotations

import contextlib
import io
import signal
import subprocess
import sys
import threading
import unittest

from moorage.plugin_isolation import (
    PluginExit,
    escape_unprintable,
    format_exception,
    isolate_plugin_call,
    printing_aside,
)


def run(error: BaseException) -> BaseException | None:
    """What comes of code that raises it."""
    try:
        with isolate_plugin_call():
            raise error
    except BaseException as raised:
        return raised


class ContainedTests(unittest.TestCase):
    def test_what_would_end_the_process_becomes_an_ordinary_error_that_says_what_it_was(self) -> None:
        for error in (SystemExit(4), GeneratorExit(), BaseException("of its own kind")):
            found = run(error)
            self.assertIsInstance(found, PluginExit)
            self.assertIsInstance(found, Exception)
            self.assertEqual(f"{error!r} would have ended the process", str(found))

    def test_ordinary_errors_pass_as_they_are(self) -> None:
        error = KeyError("x")
        self.assertIs(error, run(error))

    def test_ctrl_c_is_the_users_in_the_main_thread_where_nobody_handles_it_and_only_there(self) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        pressed = KeyboardInterrupt()
        self.assertIs(pressed, run(pressed))
        found: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: found.append(run(KeyboardInterrupt())))
        thread.start()
        thread.join()
        self.assertIsInstance(found[0], PluginExit)
        signal.signal(signal.SIGINT, lambda *_: None)
        self.assertIsInstance(run(KeyboardInterrupt()), PluginExit)

    def test_a_copy_ends_as_it_returns_or_raises_and_the_process_goes_on(self) -> None:
        for ending in ("pass", "sys.exit(0)", "raise KeyError"):
            code = (
                "import os, sys\nfrom moorage.plugin_isolation import isolate_plugin_call\nmain = os.getpid()\nchild = 0\n"
                f"with isolate_plugin_call('the plugin x'):\n    child = os.fork()\n    if not child:\n        {ending}\n"
                "print('answered by', 'itself' if os.getpid() == main else 'a copy', flush=True)\n"
                "print('status', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else '')\n"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
            self.assertEqual("answered by itself\nstatus 70\n", done.stdout)
            self.assertRegex(
                done.stderr, "is a copy that the plugin x made by os.fork, and ends. Plugins must not fork"
            )


class TextTests(unittest.TestCase):
    def test_what_cannot_be_sent_or_shown_is_escaped_and_all_else_stays(self) -> None:
        for text, wanted in (
            ("Größe 3 µm, 日本, '\\d'", "Größe 3 µm, 日本, '\\d'"),
            ("\ud800 \x1b[31m\r\n\x00\u202e", r"\ud800 \x1b[31m\r\n\x00\u202e"),
        ):
            self.assertEqual(wanted, escape_unprintable(text))
            escape_unprintable(text).encode()

    def test_what_was_raised_is_told_even_if_it_cannot_tell_itself(self) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise LookupError

        self.assertEqual("ValueError: \\ud800", format_exception(ValueError("\ud800")))
        self.assertEqual("Mute: its text cannot be had, LookupError", format_exception(Mute()))


class PrintingTests(unittest.TestCase):
    def setUp(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.enterContext(contextlib.redirect_stdout(self.out))
        self.enterContext(contextlib.redirect_stderr(self.err))

    def test_what_is_printed_within_goes_to_stderr_and_afterwards_to_stdout(self) -> None:
        with contextlib.suppress(ZeroDivisionError), printing_aside():
            sys.stdout.write("aside")
            raise ZeroDivisionError
        sys.stdout.write("again")
        self.assertEqual(("again", "aside"), (self.out.getvalue(), self.err.getvalue()))

    def test_of_two_that_overlap_the_last_to_end_brings_stdout_back(self) -> None:
        first, second = printing_aside(), printing_aside()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        sys.stdout.write("aside")
        second.__exit__(None, None, None)
        sys.stdout.write("again")
        self.assertEqual(("again", "aside"), (self.out.getvalue(), self.err.getvalue()))
