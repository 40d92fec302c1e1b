# SPDX-License-Identifier: Apache-2.0
"""A queue of test classes that all workers of a run share.

stestr divides the tests before it starts its workers, by the durations of earlier runs. A fresh clone has none, so that one
worker may get most of the long classes and run alone for minutes. Instead ``make test`` gives every worker all tests, in one
order. A worker runs a class if it is the first to claim it. So every worker is busy until no class is left.

A class with ``RUNS_FIRST = True`` comes before all others. It is for classes that fork hundreds of processes, which takes several
times as long when the worker has grown, and for classes that take a minute, so that no worker ends with one of them alone.
"""

from __future__ import annotations

import gc
import itertools
import unittest
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

__all__ = ["ClaimedClass", "Queue"]


def _class_of(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[0]


def _place(test: unittest.TestCase) -> tuple[bool, str]:
    return not getattr(test, "RUNS_FIRST", False), _class_of(test)


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _flat(each)
        else:
            yield each


class ClaimedClass(unittest.TestSuite):
    """The tests of one class; runs them only if no other worker has claimed the class."""

    def __init__(self, folder: Path, name: str, tests: list[unittest.TestCase]) -> None:
        super().__init__(tests)
        self._claim = folder / name

    @override
    def run(self, result: Any, debug: bool = False) -> Any:
        try:
            self._claim.touch(exist_ok=False)
        except FileExistsError:
            return result
        return super().run(result, debug)


class Queue(unittest.TestSuite):
    """All classes of a suite, each to be claimed before it is run.

    :param folder: of the run; a claim is an empty file in it, with the name of the class.
    """

    def __init__(self, folder: Path, suite: unittest.TestSuite) -> None:
        self._folder = folder
        tests = sorted(_flat(suite), key=_place)
        super().__init__(
            ClaimedClass(folder, name, list(group)) for name, group in itertools.groupby(tests, key=_class_of)
        )

    @override
    def run(self, result: Any, debug: bool = False) -> Any:
        # The modules of all tests stay to the end. The collector need not look through them again and again, nor a forked
        # process copy them when it does.
        gc.collect()
        gc.freeze()
        return super().run(result, debug)

    def filter_by_ids(self, ids: Container[str]) -> Queue:
        """The queue of those tests; called by stestr's worker with the selection of the run."""
        return Queue(self._folder, unittest.TestSuite(test for test in _flat(self) if test.id() in ids))
