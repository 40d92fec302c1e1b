# SPDX-License-Identifier: Apache-2.0
"""Takes one condition out of one prebuilt statement at a time, and looks whether tests notice.

If no test fails without a guard, its removal goes unnoticed. Each mutant runs in a forked process, so it harms no other test.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import unittest
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.sql import operators
from sqlalchemy.sql.elements import BooleanClauseList, Grouping

from moorage.work.operation_statements import Transfer
from tests.simulation.planting import everywhere

__all__ = ["Guard", "guards_of", "quick_tests", "survivors", "transfer", "weaker"]

_DIALECT = sqlite.dialect()
#: Seconds of processor and wall time for a mutant. One that runs or waits for ever was noticed.
_PROCESSOR_SECONDS = 12
_SECONDS = 120
_SLOW = ("race", "purges")


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition of a statement, and how to take it out."""

    name: str
    remove: Callable[[], object]


def guards_of(module: ModuleType, *, skipped: Iterable[str] = ()) -> Iterator[Guard]:
    """Yields every condition of every prebuilt statement of a module.

    :param skipped: beginnings of the names of guards that the tests cannot miss, such as those of another database.
    """
    left_out = tuple(skipped)
    for guard in _guards_of(module):
        if not guard.name.startswith(left_out):
            yield guard


def _guards_of(module: ModuleType) -> Iterator[Guard]:
    for name, statement in sorted(vars(module).items()):
        if isinstance(statement, Transfer):
            for text, made in weaker(statement.plain):
                yield Guard(f"{name}: {text}", _replacing(statement, transfer(made)))
        elif isinstance(statement, (sa.Update, sa.Delete, sa.Select)):
            for text, made in weaker(statement):
                yield Guard(f"{name}: {text}", _replacing(statement, made))


def _weakened(condition: Any) -> Iterator[tuple[str, Any]]:
    """Yields the condition without each of the terms of its conjunctions in turn, wherever they stand in it."""
    if isinstance(condition, Grouping):
        condition = condition.element
    if isinstance(condition, BooleanClauseList):
        all_must_hold = condition.operator is operators.and_
        join = sa.and_ if all_must_hold else sa.or_
        for text, terms in _fewer(list(condition.clauses), all_must_hold):
            yield text, join(*terms)


def _fewer(terms: list[Any], all_must_hold: bool) -> Iterator[tuple[str, list[Any]]]:
    for place, term in enumerate(terms):
        before, after = terms[:place], terms[place + 1 :]
        inner = list(_weakened(term))
        if all_must_hold and not (inner and getattr(term, "operator", None) is operators.and_):
            yield _text(term), [*before, *after]
        for text, weaker in inner:
            yield text, [*before, weaker, *after]


def weaker(statement: Any) -> Iterator[tuple[str, Any]]:
    """Yields a statement without each of its conditions in turn, with the text of that condition."""
    for text, terms in _fewer(list(statement._where_criteria), all_must_hold=True):
        made = statement._generate()
        made._where_criteria = tuple(terms)
        yield text, made


def transfer(statement: Any) -> Transfer:
    """Makes the pair of forms of a statement, without the condition that :class:`Transfer` adds to each."""
    made = Transfer(statement)
    made.plain = statement
    made.returning = statement.returning(*made.returning._returning)
    return made


def survivors(guards: Iterable[Guard], tests: Callable[[], Sequence[unittest.TestCase]]) -> list[str]:
    """The names of guards without which all of the tests pass.

    The tests that noticed earlier guards are run first, the last of them before the others: the guards of a statement are often
    noticed by the same test.

    :param tests: makes them, the quickest to notice first; called in each process.
    """
    found: list[str] = []
    noticing: list[str] = []
    for guard in guards:
        passed, test = _look(guard, tests, noticing)
        if passed:
            found.append(guard.name)
        if test:
            noticing = [test, *(each for each in noticing if each != test)]
    return found


def _place(test: unittest.TestCase, order: Sequence[str]) -> int:
    return order.index(test.id()) if test.id() in order else len(order)


def quick_tests(first: Sequence[str], *cases: type[unittest.TestCase]) -> Sequence[unittest.TestCase]:
    """Returns the tests of some classes, without those that race for long.

    :param first: words of the names of tests that notice most; those tests are run before the other ones.
    """
    found = [case(name) for case in cases for name in unittest.defaultTestLoader.getTestCaseNames(case)]
    quick = [test for test in found if not any(word in test.id() for word in _SLOW)]
    return sorted(quick, key=lambda test: not any(word in test.id() for word in first))


def _look(guard: Guard, tests: Callable[[], Sequence[unittest.TestCase]], first: Sequence[str]) -> tuple[bool, str]:
    """Whether all tests pass without the guard; the id of the one that fails, empty when the process ended in another way.

    :param first: ids of tests that are run before the others, in this order.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
        passed = False
        with contextlib.suppress(BaseException), contextlib.redirect_stderr(io.StringIO()):
            guard.remove()
            ordered = sorted(tests(), key=lambda test: _place(test, first))
            failed = next((test for test in ordered if not _one_passes(test)), None)
            passed = failed is None
            os.write(writing, b"" if failed is None else failed.id().encode())
        os._exit(0 if passed else 1)
    os.close(writing)
    passed = os.waitpid(child, 0)[1] == 0
    # Not read until its end: a process of a test may hold the other end.
    os.set_blocking(reading, False)
    said = b""
    with contextlib.suppress(BlockingIOError):
        said = os.read(reading, 4096)
    os.close(reading)
    return passed, said.decode()


def _one_passes(test: unittest.TestCase) -> bool:
    result = unittest.TestResult()
    test.run(result)
    return result.wasSuccessful()


def _replacing(old: object, new: object) -> Callable[[], None]:
    return lambda: everywhere(old, new)


def _text(term: Any) -> str:
    return " ".join(str(term.compile(dialect=_DIALECT)).split())
