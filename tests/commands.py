# SPDX-License-Identifier: Apache-2.0
"""Command lines, run in the process of the test."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

__all__ = ["in_process"]


def in_process(program: Callable[[list[str]], Any], words: list[str]) -> tuple[int, str]:
    """Run a command line here, much quicker than in a process of its own; status and what it printed."""
    printed = io.StringIO()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OS_", "MOORAGE_"))}
    with mock.patch.dict(os.environ, environment, clear=True), contextlib.redirect_stdout(printed):
        try:
            status = program(words) or 0
        except SystemExit as error:
            status = error.code
    return int(status or 0), printed.getvalue()
