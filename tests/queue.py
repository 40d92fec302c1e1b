# SPDX-License-Identifier: Apache-2.0
"""A queue of test classes that all workers of a run share.

stestr divides the tests before it starts its workers, by the durations of earlier runs. A fresh clone has none, so that one
worker may get most of the long classes and run alone for minutes. Instead ``make test`` gives every worker all tests, in one
order. A worker runs a class if it is the first to claim it. So every worker is busy until no class is left.

A worker imports a module when it has claimed one of its classes: the imports of all tests cost each worker some seconds. The
listing of tests, before the workers start, imports everything; a module that cannot be imported ends the run there.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import sys
import traceback
import unittest
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

__all__ = ["FIRST", "ClaimedClass", "Queue", "flat", "of_worker"]

#: Classes that come before all others: those that fork hundreds of processes, which takes several times as long in a grown worker,
#: and those that take a minute, so that no worker ends with one of them alone.
FIRST = (
    "tests.simulation.test_scale.ScaleTests",
    "tests.simulation.test_simulation.SimulationTests",
    "tests.unit.block_storage.test_crashes.SqliteCrashTests",
    "tests.unit.cleanup.test_guards.GuardTests",
    "tests.unit.lease.test_model.LeaseModelTests",
    "tests.unit.work.test_guards.GuardTests",
)


def _class_of(test: str) -> str:
    return test.rpartition(".")[0]


def _place(test: str) -> tuple[bool, str]:
    return _class_of(test) not in FIRST, _class_of(test)


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yields the tests of a suite and of the suites in it."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from flat(each)
        else:
            yield each


@functools.cache
def _tests_of(module: str) -> dict[str, list[unittest.TestCase]]:
    """Imports a module; its tests by class, to be taken out when they run."""
    tests = flat(unittest.TestLoader().loadTestsFromModule(importlib.import_module(module)))
    found = {name: list(group) for name, group in itertools.groupby(tests, key=lambda test: _class_of(test.id()))}
    # The modules of tests stay to the end. The collector need not look through them again and again, nor a forked process copy
    # them when it does.
    gc.collect()
    gc.freeze()
    return found


class _NotLoaded(unittest.TestCase):
    """Fails in the place of a test that the worker did not find."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__("fails")
        self._name, self._why = name, why

    @override
    def id(self) -> str:
        return self._name

    def fails(self) -> None:
        self.fail(self._why)


class ClaimedClass(unittest.TestSuite):
    """The tests of one class; imports and runs them only if no other worker has claimed the class."""

    def __init__(self, folder: Path, name: str, ids: Iterable[str]) -> None:
        super().__init__()
        self._claim = folder / name
        self._ids = set(ids)

    @override
    def run(self, result: Any, debug: bool = False) -> Any:
        try:
            self._claim.touch(exist_ok=False)
        except FileExistsError:
            return result
        name = self._claim.name
        module = name.rpartition(".")[0]
        why = f"the module {module} does not have this test when a worker imports it"
        try:
            self.addTests(test for test in _tests_of(module).pop(name, []) if test.id() in self._ids)
        except Exception:
            why = f"a worker could not import {module}:\n{traceback.format_exc()}"
        self.addTests(_NotLoaded(each, why) for each in sorted(self._ids - {test.id() for test in flat(self)}))
        return super().run(result, debug)


class Queue(unittest.TestSuite):
    """All classes of a run, each to be claimed before it is imported.

    :param folder: of the run; a claim is an empty file in it, with the name of the class.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def filter_by_ids(self, ids: Iterable[str]) -> unittest.TestSuite:
        """The classes of those tests; called by stestr's worker with the selection of the run."""
        groups = itertools.groupby(sorted(ids, key=_place), key=_class_of)
        return unittest.TestSuite(ClaimedClass(self._folder, name, group) for name, group in groups)


def of_worker(folder: str) -> Queue | None:
    """The queue in that folder if this process is a worker of stestr; None if it lists tests or runs them alone."""
    return Queue(Path(folder)) if folder and "--load-list" in sys.argv else None
