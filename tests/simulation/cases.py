# SPDX-License-Identifier: Apache-2.0
"""Smaller forms of a schedule: without some faults and clients, and with fewer switches of threads.

A policy's decisions are recorded as numbers of choices. A replay makes those that are still possible; for the others the running
thread goes on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from tests.simulation.kernel import Kernel, Policy, SimThread

if TYPE_CHECKING:
    from tests.simulation.runner import Result, Runner

__all__ = ["Case", "Recorder", "Replay", "shrink"]

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A schedule in a smaller form.

    :param without_faults: by their descriptions. :param without_clients: by their names.
    :param switches: number of a choice -> the thread that is chosen; None: as the policy of the seed chooses.
    :param pauses: number of a guarded point -> steps for which its thread waits.
    """

    without_faults: frozenset[str] = frozenset()
    without_clients: frozenset[str] = frozenset()
    switches: Mapping[int, str] | None = None
    pauses: Mapping[int, int] = field(default_factory=dict)


class Recorder(Policy):
    """A policy whose decisions are recorded: every choice of another thread than :func:`_usual`, and every pause."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._choices = 0
        self._switches: list[tuple[int, str]] = []
        self._pauses: list[tuple[int, int]] = []

    def decisions(self) -> tuple[list[tuple[int, str]], list[tuple[int, int]]]:
        """Switches, as (number of the choice, thread); pauses, as (number of the guarded point, steps)."""
        return self._switches, self._pauses

    @override
    def born(self, thread: SimThread) -> None:
        self._policy.born(thread)

    @override
    def choose(self, kernel: Kernel, me: SimThread | None, ready: Sequence[SimThread]) -> SimThread:
        self._choices += 1
        chosen = self._policy.choose(kernel, me, ready)
        if chosen is not (me or ready[0]):
            self._switches.append((self._choices, _name(chosen)))
        return chosen

    @override
    def guarded(self, kernel: Kernel, me: SimThread) -> None:
        before = me.paused_until
        self._policy.guarded(kernel, me)
        if me.paused_until != before:
            self._pauses.append((kernel.guarded_steps, me.paused_until - kernel.steps))


class Replay(Recorder):
    """Makes recorded decisions."""

    def __init__(self, switches: Mapping[int, str], pauses: Mapping[int, int]) -> None:
        super().__init__(self)
        self._to = switches
        self._long = pauses

    @override
    def born(self, thread: SimThread) -> None:
        """Nothing depends on it."""

    @override
    def choose(self, kernel: Kernel, me: SimThread | None, ready: Sequence[SimThread]) -> SimThread:
        self._choices += 1
        name = self._to.get(self._choices)
        found = next((each for each in ready if _name(each) == name), None) if name is not None else None
        if found is not None and name is not None:
            self._switches.append((self._choices, name))
            return found
        return me or ready[0]

    @override
    def guarded(self, kernel: Kernel, me: SimThread) -> None:
        steps = self._long.get(kernel.guarded_steps)
        if steps is not None:
            self._pauses.append((kernel.guarded_steps, steps))
            me.paused_until = kernel.steps + steps


def _name(thread: SimThread) -> str:
    return f"{thread.process.name}/{thread.name}/{thread.number}"


def kind(verdict: str) -> str:
    """A verdict without names and numbers."""
    return re.sub(r"[0-9a-f-]*\d[0-9a-f-]*|\(.*|\[.*|\{.*", "", verdict.partition("\n")[0])[:60]


def smaller(items: Sequence[T], holds: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Delta debugging: a part of the items for which it still holds, of which no single one can be left out.

    ``holds`` says False when there is no time left.
    """
    if not items or holds(()):
        return ()
    parts = 2
    while len(items) >= 2:
        size = -(-len(items) // parts)
        for begin in range(0, len(items), size):
            rest = [*items[:begin], *items[begin + size :]]
            if holds(rest):
                items, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(items), parts * 2)
    return items


def shrink(made: Runner, seed: str, prepare: Callable[[], Any], seconds: float) -> tuple[Result, Case, int] | None:
    """The smallest form of a failing schedule that is found in real seconds, its result, and how many runs that took.

    None: the schedule does not fail.
    """
    deadline = time.monotonic() + seconds
    runs = 0

    def run(case: Case) -> Result:
        nonlocal runs
        runs += 1
        (result,) = made.many([seed], prepare, keep=True, case=case)
        return result

    case = Case()
    best = run(case)
    if not best.verdict:
        return None
    wanted = kind(best.verdict)

    def fails(smaller_case: Case) -> bool:
        nonlocal best, case
        if time.monotonic() > deadline:
            return False
        result = run(smaller_case)
        if kind(result.verdict) != wanted:
            return False
        best, case = result, smaller_case
        return True

    planned, clients = best.planned, best.clients
    smaller(planned, lambda kept: fails(replace(case, without_faults=frozenset(planned) - frozenset(kept))))
    smaller(clients, lambda kept: fails(replace(case, without_clients=frozenset(clients) - frozenset(kept))))
    if fails(replace(case, switches=dict(best.switches), pauses=dict(best.pauses))):
        pauses, switches = best.pauses, best.switches
        smaller(pauses, lambda kept: fails(replace(case, pauses=dict(kept))))
        smaller(switches, lambda kept: fails(replace(case, switches=dict(kept))))
    return best, case, runs
