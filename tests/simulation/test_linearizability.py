# SPDX-License-Identifier: Apache-2.0
"""The checker of histories agrees with a search of all orders, and says so when it cannot decide."""

from __future__ import annotations

import itertools
import unittest
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.linearizability import History, Operation, UndecidedError, is_linearizable


def register(state: int, operation: Operation) -> Iterable[int]:
    """A register that is written and read."""
    if operation.what[0] == "write":
        return (operation.what[1],)
    return (state,) if operation.answered is None or operation.outcome == state else ()


def by_all_orders(operations: Sequence[Operation]) -> bool:
    """The definition itself."""
    known = [each for each in operations if each.answered is not None]
    unknown = [each for each in operations if each.answered is None]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *some]):
                places = {id(each): place for place, each in enumerate(order)}
                if any(
                    one.answered is not None and one.answered < two.called and places[id(one)] > places[id(two)]
                    for one in order
                    for two in order
                ):
                    continue
                state = 0
                for each in order:
                    then = list(register(state, each))
                    if not then:
                        break
                    (state,) = then
                else:
                    return True
    return False


@st.composite
def histories(draw: st.DrawFn) -> list[Operation]:
    """Up to five operations of clients that overlap; one in four is not answered."""
    history, running = History(), []
    for number in range(draw(st.integers(1, 5))):
        what = draw(st.sampled_from((("write", 1), ("write", 2), ("read",))))
        running.append(history.call(f"c{number}", *what))
        while running and bool(draw(st.booleans())):
            ends = running.pop(draw(st.integers(0, len(running) - 1)))
            if draw(st.integers(0, 3)):
                history.answer(ends, draw(st.integers(0, 2)) if ends.what == ("read",) else None)
    return history.operations


class LinearizabilityTests(unittest.TestCase):
    @given(histories())
    def test_it_says_what_a_search_of_all_orders_says(self, operations: list[Operation]) -> None:
        self.assertEqual(by_all_orders(operations), is_linearizable(operations, 0, register))

    def test_a_read_of_what_was_overwritten_is_found(self) -> None:
        history = History()
        for what, outcome in ((("write", 1), None), (("write", 2), None), (("read",), 1)):
            history.answer(history.call("c", *what), outcome)
        self.assertFalse(is_linearizable(history.operations, 0, register))
        self.assertIn("read -> 1", str(history))

    def test_a_write_of_unknown_outcome_may_come_late_and_once(self) -> None:
        history = History()
        history.call("lost", "write", 1)
        for outcome in (0, 1, 1):
            history.answer(history.call("c", "read"), outcome)
        self.assertTrue(is_linearizable(history.operations, 0, register))
        history.answer(history.call("c", "read"), 0)
        self.assertFalse(is_linearizable(history.operations, 0, register))

    def test_a_history_that_is_too_long_is_not_decided(self) -> None:
        history = History()
        for number in range(20):
            history.call(f"c{number}", "write", number)
        history.answer(history.call("c", "read"), 99)
        with self.assertRaises(UndecidedError):
            is_linearizable(history.operations, 0, register, limit=1000)
