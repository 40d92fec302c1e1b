# SPDX-License-Identifier: Apache-2.0
"""Runs a file of HTTP tests (gabbi) within one test, against a server that is there already."""

from __future__ import annotations

import pathlib
import unittest

import yaml
from gabbi import handlers, suitemaker

__all__ = ["run_file"]


def run_file(test: unittest.TestCase, url: str, file: pathlib.Path, *, prefix: str = "") -> None:
    """Every request of the file must be made, and answered as it says.

    :param url: of the server; only its host and port count.
    :param prefix: before every path.
    """
    given = yaml.safe_load(file.read_text())
    host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
    suite = suitemaker.test_suite_from_dict(
        unittest.TestLoader(), file.stem, given, str(file.parent), host, int(port), None, None, prefix=prefix,
        handlers=[handler() for handler in handlers.RESPONSE_HANDLERS],
    )  # fmt: skip
    found = unittest.TestResult()
    suite.run(found)
    test.assertEqual([], [f"{each}: {text}" for each, text in (*found.failures, *found.errors)])
    test.assertEqual(len(given["tests"]), found.testsRun)
    test.assertEqual([], found.skipped)
