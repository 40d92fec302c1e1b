# SPDX-License-Identifier: Apache-2.0
"""Runs schedules, in batches of forked processes: ``python -m tests.simulation``."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moorage.db import sqlite
from tests.simulation.cases import Case
from tests.simulation.kernel import Stalled, Violation
from tests.simulation.workloads import WORKLOADS
from tests.simulation.workloads.base import Workload
from tests.simulation.world import Base, World

__all__ = ["Result", "Runner", "pinned"]

#: Schedules that one forked process runs: the threads of each stay where they ended.
BATCH = 40


@dataclass
class Result:
    """What became of one schedule."""

    workload: str
    seed: str
    verdict: str
    trace: str
    policy: str
    steps: int
    guarded: int
    virtual: float
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    timeline: list[tuple[float, str, str, str]] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    #: Decisions of the policy; see :class:`tests.simulation.cases.Recorder`.
    switches: list[tuple[int, str]] = field(default_factory=list)
    pauses: list[tuple[int, int]] = field(default_factory=list)


class Runner:
    """Runs schedules of one workload. Everything that costs time is made once, before the first schedule."""

    def __init__(self, name: str, engine: str = "memory") -> None:
        self.name = name
        self.engine = engine
        self.workload: type[Workload] = WORKLOADS[name]
        self.base = Base(self.workload.settings, self.workload.fill, engine, self.workload.reloaded)
        logging.disable(logging.CRITICAL)
        threading.stack_size(512 * 1024)

    def one(self, seed: str, *, keep: bool = False, case: Case | None = None) -> Result:
        """One schedule, in this process."""
        began = time.perf_counter()
        world = World(self.base, f"{self.name}/{seed}", self.workload.points, keep=keep, case=case)
        workload = self.workload(world)
        kernel = world.kernel
        verdict = ""
        trace = ""
        try:
            trace = workload.run()
        except (Violation, Stalled) as error:
            verdict = f"{type(error).__name__}: {error}"
            trace = kernel.digest()
        return Result(
            self.name, seed, verdict, trace, world.policy_name, kernel.steps, kernel.guarded_steps, kernel.now,
            time.perf_counter() - began, dict(workload.faults.counts), workload.facts, kernel.timeline or [],
            workload.faults.planned, workload.started, *(world.recorder.decisions() if keep or case else ([], [])),
        )  # fmt: skip

    def many(
        self,
        seeds: Sequence[str],
        prepare: Callable[[], object] = lambda: None,
        *,
        keep: bool = False,
        case: Case | None = None,
    ) -> Iterator[Result]:
        """Schedules in forked processes of :data:`BATCH` each; one processor.

        :param prepare: called in each of these first: plants a mutant.
        """
        for first in range(0, len(seeds), BATCH):
            yield from self._batch(seeds[first : first + BATCH], prepare, keep, case)

    def _batch(
        self, seeds: Sequence[str], prepare: Callable[[], object], keep: bool, case: Case | None
    ) -> Iterator[Result]:
        reading, writing = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(reading)
            status = 1
            # Processes that a warm schedule killed keep their transactions open, on a file that no schedule opens again.
            sqlite._INHERITED.clear()
            try:
                with os.fdopen(writing, "w") as out:
                    prepare()
                    for seed in seeds:
                        out.write(json.dumps(dataclasses.asdict(self.one(seed, keep=keep, case=case))) + "\n")
                        out.flush()
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        try:
            with os.fdopen(reading) as results:
                for line in results:
                    yield Result(**json.loads(line))
        except GeneratorExit:
            os.kill(child, signal.SIGKILL)  # enough was seen
            raise
        finally:
            _, status = os.waitpid(child, 0)
        if status:
            raise RuntimeError(f"a batch of {self.name} ended with status {status}")

    def warm(self) -> None:
        """Fill caches of compiled statements, of plugins and of modules, before the first schedule that counts."""
        for number in range(2):
            self.one(f"warm-{number}")


def pinned() -> None:
    """Bring this process into the state in which one seed gives one schedule; may start it again."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    # A thread that gets the baton does not interrupt the thread that gives it, only to wait for the interpreter.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    sys.setswitchinterval(1000.0)
    gc.collect()
    gc.freeze()
    gc.disable()


def summary(results: Sequence[Result]) -> str:
    """Of all, in a line."""
    faults: Counter[str] = Counter()
    facts: Counter[str] = Counter()
    for each in results:
        faults.update(each.faults)
        facts.update(each.facts)
    seconds = sum(each.seconds for each in results) or 1e-9
    return (
        f"{len(results)} schedules, {sum(bool(each.verdict) for each in results)} violations, "
        f"{len(results) / seconds:.1f} schedules/s, {sum(each.steps for each in results) / len(results):.0f} steps and "
        f"{sum(each.guarded for each in results) / len(results):.0f} guarded points and "
        f"{sum(each.virtual for each in results) / len(results):.0f} virtual seconds each; faults: {dict(faults)}; "
        f"facts: {dict(facts)}"
    )
