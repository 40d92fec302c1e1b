# SPDX-License-Identifier: Apache-2.0
"""Checks whether some order of the operations on one object explains their answers, each between its call and its answer.

The algorithm is that of Wing and Gong ("Testing and verifying concurrent objects", 1993) with Lowe's memory of configurations
("Testing for linearizability", 2017): a search over sets of operations that have taken effect, with the state that they leave. An
operation without an answer may take effect at any time after its call, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["LIMIT", "History", "Operation", "UndecidedError", "is_linearizable"]

S = TypeVar("S", bound=Hashable)
#: Configurations that one check looks at. A history that needs more is not decided.
LIMIT = 200_000


class UndecidedError(Exception):
    """A history needs more configurations than a check may look at."""


@dataclass(slots=True)
class Operation:
    """One operation of a client.

    :param what: what was asked for. :param called: its place among all calls and answers of the history.
    :param answered: likewise; None: nobody knows what came of it. :param outcome: the answer.
    """

    client: str
    what: tuple[Any, ...]
    called: int
    answered: int | None = None
    outcome: Any = None

    def __str__(self) -> str:
        ends = "?" if self.answered is None else str(self.answered)
        return f"[{self.called}..{ends}] {self.client}: {' '.join(map(str, self.what))} -> {self.outcome}"


class History:
    """Collects the operations of clients on one object."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._moments = 0

    def call(self, client: str, *what: Any) -> Operation:
        """An operation begins."""
        self._moments += 1
        self.operations.append(Operation(client, what, self._moments))
        return self.operations[-1]

    def answer(self, operation: Operation, outcome: Any) -> None:
        """An operation was answered. One whose outcome is unknown is never answered."""
        self._moments += 1
        operation.answered, operation.outcome = self._moments, outcome

    def __str__(self) -> str:
        return "; ".join(map(str, self.operations))


def is_linearizable(
    operations: Sequence[Operation], first: S, step: Callable[[S, Operation], Iterable[S]], limit: int = LIMIT
) -> bool:
    """Whether some order of the operations explains their answers.

    :param first: the state before all of them.
    :param step: the states that an operation may leave behind it in a state; none: its answer does not fit. An operation without an
        answer fits in any state.
    :raises UndecidedError: more than ``limit`` configurations would have to be looked at.
    """
    known = sum(1 << place for place, each in enumerate(operations) if each.answered is not None)
    seen: set[tuple[int, S]] = {(0, first)}
    left: list[tuple[int, S]] = [(0, first)]
    while left:
        done, state = left.pop()
        if done & known == known:
            return True
        waiting = [(place, each) for place, each in enumerate(operations) if not done >> place & 1]
        # What was called after another one was answered comes after that one.
        end = min(each.answered for _, each in waiting if each.answered is not None)
        for place, each in waiting:
            if each.called > end:
                continue
            for then in step(state, each):
                found = (done | 1 << place, then)
                if found not in seen:
                    seen.add(found)
                    left.append(found)
        if len(seen) > limit:
            raise UndecidedError(f"more than {limit} configurations of {len(operations)} operations")
    return False
