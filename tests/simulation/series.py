# SPDX-License-Identifier: Apache-2.0
"""One series of schedules over many workloads, on several processors: ``python -m tests.simulation --series N``.

Each workload gets the same time. Its schedules have consecutive seeds. A process for each processor runs one batch after another;
batches do not depend on each other, so the result of a schedule does not depend on the number of processors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from tests.simulation import runner

__all__ = ["run"]

#: Schedules from one line about the progress to the next.
_PROGRESS = 1000


@dataclass
class _Share:
    """What a workload has had so far."""

    name: str
    next: int
    seconds: float = 0.0
    schedules: int = 0
    violations: int = 0
    faults: Counter[str] = field(default_factory=Counter)


@dataclass
class _Lane:
    """A process that runs batches on a processor of its own."""

    child: int
    orders: IO[str]
    results: IO[str]
    share: _Share | None = None
    #: Seconds that its batch is expected to take.
    expected: float = 0.0


def run(
    names: Sequence[str],
    first: int,
    total: int,
    seconds: float | None,
    processors: Sequence[int],
    say: Callable[[str], None],
) -> int:
    """Run schedules on the memory engine and print what became of them; 1 when an invariant was broken.

    :param first: the first seed of each workload. :param total: schedules of all workloads together.
    :param seconds: after which no further batch begins.
    """
    runners = {name: runner.Runner(name) for name in names}
    for each in runners.values():
        each.warm()
    lanes: list[_Lane] = []
    for processor in processors:
        lanes.append(_lane(runners, processor, lanes))
    series = _Series([_Share(name, first) for name in names], total, seconds, say)
    series.run(lanes)
    series.table(first, len(processors))
    return int(bool(series.violations))


class _Series:
    def __init__(self, shares: Sequence[_Share], total: int, seconds: float | None, say: Callable[[str], None]) -> None:
        self._shares = shares
        self._left = total
        self._began = time.monotonic()
        self._deadline = self._began + (float("inf") if seconds is None else seconds)
        self._say = say

    @property
    def violations(self) -> int:
        """Of all workloads."""
        return sum(each.violations for each in self._shares)

    def run(self, lanes: Sequence[_Lane]) -> None:
        """Run batches until there is nothing left to do."""
        with selectors.DefaultSelector() as ready:
            for lane in lanes:
                ready.register(lane.results, selectors.EVENT_READ, lane)
                self._order(lane)
            while ready.get_map():
                for key, _ in ready.select():
                    line = key.data.results.readline()
                    if line:
                        self._take(key.data, json.loads(line))
                        self._order(key.data)
                        continue
                    ready.unregister(key.data.results)
                    _, status = os.waitpid(key.data.child, 0)
                    if status:
                        raise RuntimeError(f"a lane ended with status {status}")

    def _order(self, lane: _Lane) -> None:
        """Give a lane the next batch of the workload that has had the least time; or end it."""
        size = min(runner.BATCH, self._left) if time.monotonic() < self._deadline else 0
        self._left -= size
        if not size:
            lane.orders.close()
            return
        lane.share = share = min(self._shares, key=lambda each: each.seconds)
        # What is on its way counts, so that lanes take different workloads.
        lane.expected = size * (share.seconds / share.schedules if share.schedules else 0.1)
        share.seconds += lane.expected
        lane.orders.write(f"{share.name} {share.next} {size}\n")
        lane.orders.flush()
        share.next += size

    def _take(self, lane: _Lane, results: Sequence[Mapping[str, Any]]) -> None:
        share = lane.share
        assert share is not None
        before = self._schedules()
        share.seconds -= lane.expected
        for result in (runner.Result(**each) for each in results):
            share.schedules += 1
            share.seconds += result.seconds
            share.faults.update(result.faults)
            if result.verdict:
                share.violations += 1
                self._say(f"{share.name} SEED={result.seed}: {result.verdict}")
        if self._schedules() // _PROGRESS > before // _PROGRESS:
            passed = time.monotonic() - self._began
            self._say(f"{self._schedules()} schedules, {self.violations} violations, {passed:.0f} seconds")

    def _schedules(self) -> int:
        return sum(each.schedules for each in self._shares)

    def table(self, first: int, processors: int) -> None:
        """Print what became of each workload's schedules."""
        self._say(f"{'workload':24} schedules  violations  faults  seeds")
        for each in self._shares:
            self._say(
                f"{each.name:24} {each.schedules:9}  {each.violations:10}  {each.faults.total():6}  "
                f"{first}-{each.next - 1}  {dict(sorted(each.faults.items()))}"
            )
        faults = sum(each.faults.total() for each in self._shares)
        self._say(
            f"{'all':24} {self._schedules():9}  {self.violations:10}  {faults:6}  "
            f"in {time.monotonic() - self._began:.0f} seconds on {processors} processors; "
            f"to go on: --seed {max(each.next for each in self._shares)}"
        )


def _lane(runners: Mapping[str, runner.Runner], processor: int, others: Sequence[_Lane]) -> _Lane:
    orders, results = os.pipe(), os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(orders[0])
        os.close(results[1])
        # A lane writes one line for each order, so no line waits in the buffer, where the selector would not see it.
        return _Lane(child, os.fdopen(orders[1], "w"), os.fdopen(results[0], "r"))
    status = 1
    try:
        os.close(orders[1])
        os.close(results[0])
        for each in others:  # its end must end them
            each.orders.close()
        os.sched_setaffinity(0, {processor})
        with os.fdopen(orders[0]) as reading, os.fdopen(results[1], "w") as writing:
            for line in reading:
                name, seed, size = line.split()
                made = runners[name].many([str(int(seed) + number) for number in range(int(size))])
                writing.write(json.dumps([dataclasses.asdict(each) for each in made]) + "\n")
                writing.flush()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)
