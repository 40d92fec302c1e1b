# SPDX-License-Identifier: Apache-2.0
"""Keeps what tests print and log out of the terminal; a failure's report ends with what its own test printed and logged.

The capture is one file that takes the place of the process's stderr while a suite runs. So it holds the records of the root
logger, warnings, and what child processes and C code print. It is emptied when a test ends; what a class's ``setUpClass`` prints
belongs to the first test of that class. The root logger gets its handlers and level back at the same time: client programs that
run in this process (openstack, moorage) add a handler at each call.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["install", "isolated_logging"]

#: Bytes of a test's output that its report shows, from the end.
_SHOWN = 64 << 10
_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@contextlib.contextmanager
def isolated_logging() -> Iterator[None]:
    """Around a program that sets up logging for a process of its own: the root logger is afterwards what it was before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def install() -> None:
    """Capture the output of every suite that reports to a program, as stestr's workers do.

    ``python -m unittest`` prints its own report to the same stderr, and is left alone.
    """
    run = unittest.TestSuite.run

    def captured(suite: unittest.TestSuite, result: Any, debug: bool = False) -> Any:
        if debug or isinstance(result, unittest.TextTestResult | _Reports):
            return run(suite, result, debug)
        with _Capture() as capture:
            reports: Any = _Reports(result, capture)
            run(suite, reports)
        return result

    unittest.TestSuite.run = captured  # type: ignore[method-assign, assignment]


class _Capture:
    """The file that stands in for stderr."""

    def __enter__(self) -> _Capture:
        sys.stderr.flush()
        self._stack = contextlib.ExitStack()
        self._file = self._stack.enter_context(tempfile.NamedTemporaryFile())
        # With O_APPEND several processes write one after the other, also after the file was emptied.
        self._append = os.open(self._file.name, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._stack.callback(os.close, self._append)
        terminal = os.dup(2)
        self._stack.callback(os.close, terminal)
        os.dup2(self._append, 2)
        self._stack.callback(os.dup2, terminal, 2)
        # Tests print to stdout too; the runner has taken its stream for reports before.
        text = io.TextIOWrapper(io.FileIO(os.dup(self._append), "w"), errors="backslashreplace", write_through=True)
        self._stack.enter_context(text)
        self._stack.enter_context(contextlib.redirect_stdout(text))
        self._stack.enter_context(contextlib.redirect_stderr(text))
        self._log = logging.StreamHandler(text)
        self._log.setFormatter(logging.Formatter(_FORMAT))
        self._stack.enter_context(isolated_logging())
        self._reset_logging()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def text(self) -> str:
        """What was printed and logged since the last test ended, or the last part of it."""
        size = os.fstat(self._append).st_size
        said = os.pread(self._file.fileno(), _SHOWN, max(0, size - _SHOWN)).decode(errors="backslashreplace")
        left_out = f"({size - _SHOWN} bytes before are left out)\n" if size > _SHOWN else ""
        return left_out + said

    def clear(self) -> None:
        """Forget the output of the test that ended, and the log handlers that it left behind."""
        os.ftruncate(self._append, 0)
        self._reset_logging()

    def _reset_logging(self) -> None:
        root = logging.getLogger()
        root.handlers[:] = [self._log]
        root.setLevel(logging.INFO)


class _Reports:
    """A test result that adds the captured output to each failure."""

    _FAILURES = frozenset({"addError", "addFailure", "addSubTest"})

    def __init__(self, result: Any, capture: _Capture) -> None:
        self._result = result
        self._capture = capture

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._result, name)
        return self._with_output(found) if name in self._FAILURES else found

    def stopTest(self, test: Any) -> None:
        """The test has ended."""
        self._result.stopTest(test)
        self._capture.clear()

    def _with_output(self, add: Callable[..., Any]) -> Callable[..., Any]:
        def added(*arguments: Any) -> Any:
            failure = arguments[-1]
            said = self._capture.text()
            if failure is not None and said:
                failure[1].add_note(f"What the test printed and logged:\n{said}")
            return add(*arguments)

        return added
