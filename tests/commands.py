# SPDX-License-Identifier: Apache-2.0
"""Command lines, run in the process of the test."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, TextIO
from unittest import mock

from tests.output import isolated_logging

__all__ = ["in_process"]


def in_process(program: Callable[[list[str]], Any], words: list[str]) -> tuple[int, str, str]:
    """Runs a command line in this process, which is much quicker than in a new one. Returns its status, stdout and stderr.

    The environment has no variables for OpenStack's clients or for Moorage, and logging is afterwards as it was before. The output
    has only what the calling thread writes. The output of other threads, such as those of a server, belongs to the test.
    """
    out, err = _OfThisThread(sys.stdout), _OfThisThread(sys.stderr)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OS_", "MOORAGE_"))}
    with (
        isolated_logging(),
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = program(words) or 0
        except SystemExit as error:
            status = error.code
    return int(status or 0), out.getvalue(), err.getvalue()


class _OfThisThread(io.StringIO):
    """Captures the output of the thread that creates it. The output of other threads goes to ``elsewhere``."""

    def __init__(self, elsewhere: TextIO) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._elsewhere = elsewhere

    def write(self, text: str) -> int:
        """Writes text to this stream, or to ``elsewhere`` if another thread calls."""
        return super().write(text) if threading.get_ident() == self._thread else self._elsewhere.write(text)
