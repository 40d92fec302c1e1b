# SPDX-License-Identifier: Apache-2.0
"""Policies that choose which thread runs next: random choice, priorities that change, long pauses.

The portfolio draws one for each seed. No single one finds everything: random choice alone found two of three planted bugs at most
once in 1,500 schedules (PCT: Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs", 2010).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from typing_extensions import override

from tests.simulation.kernel import Kernel, Policy, SimThread

__all__ = ["Pauses", "Priorities", "RandomChoice", "draw"]


class RandomChoice(Policy):
    """Switches with a probability at each point, to any thread."""

    def __init__(self, generator: random.Random, often: float) -> None:
        self._random = generator
        self._often = often

    @override
    def born(self, thread: SimThread) -> None:
        """Nothing depends on it."""

    @override
    def choose(self, kernel: Kernel, me: SimThread | None, ready: Sequence[SimThread]) -> SimThread:
        if len(ready) == 1:
            return ready[0]
        if me is not None and self._random.random() >= self._often:
            return me
        return ready[int(self._random.random() * len(ready))]

    @override
    def guarded(self, kernel: Kernel, me: SimThread) -> None:
        """All points are equal."""


class Pauses(RandomChoice):
    """Random choice, and threads that stop for long at guarded points.

    :param at: the numbers of those guarded points, with the length of the pause in steps.
    """

    def __init__(self, generator: random.Random, often: float, at: dict[int, int]) -> None:
        super().__init__(generator, often)
        self._at = at

    @override
    def guarded(self, kernel: Kernel, me: SimThread) -> None:
        steps = self._at.get(kernel.guarded_steps)
        if steps is not None:
            me.paused_until = kernel.steps + steps


class Priorities(Policy):
    """PCT: the ready thread of the highest priority runs; at some guarded points the running one falls below all others.

    :param falls: the numbers of those guarded points.
    """

    def __init__(self, generator: random.Random, falls: frozenset[int]) -> None:
        self._random = generator
        self._falls = falls
        self._lowest = 0.0

    @override
    def born(self, thread: SimThread) -> None:
        thread.priority = 1.0 + self._random.random()

    @override
    def choose(self, kernel: Kernel, me: SimThread | None, ready: Sequence[SimThread]) -> SimThread:
        return max(ready, key=lambda each: each.priority)

    @override
    def guarded(self, kernel: Kernel, me: SimThread) -> None:
        if kernel.guarded_steps in self._falls:
            self._lowest -= 1.0
            me.priority = self._lowest


def draw(generator: random.Random, points: int) -> tuple[str, Policy]:
    """A policy of the portfolio, and what to call it.

    :param points: about how many guarded points a schedule of the workload has.
    """
    kind = generator.choice(("random", "priorities", "pauses", "pauses"))
    often = generator.choice((0.02, 0.1, 0.3, 0.8))
    if kind == "random":
        return f"random {often}", RandomChoice(generator, often)
    if kind == "priorities":
        depth = generator.randint(2, 5)
        falls = frozenset(generator.randrange(1, points + 1) for _ in range(depth - 1))
        return f"priorities {depth}", Priorities(generator, falls)
    at = {
        generator.randrange(1, points + 1): round(math.exp(generator.uniform(math.log(8), math.log(2000))))
        for _ in range(generator.randint(1, 6))
    }
    return f"pauses {len(at)}", Pauses(generator, often, at)
