# SPDX-License-Identifier: Apache-2.0
"""``make simulate``: runs schedules and prints what they found."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from tests.simulation import cases, runner, series, timelines
from tests.simulation.workloads import WORKLOADS


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run what the arguments ask for; 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(
        prog="make simulate", description="Runs seeded schedules of the whole control plane."
    )
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append", help="default: all")
    parser.add_argument(
        "--engine", choices=("memory", "postgresql", "mariadb"), default="memory", help="default: memory"
    )
    parser.add_argument("--seed", help="run this one schedule and print its time line; else the first of many")
    parser.add_argument("--schedules", type=int, help="of each workload; default 100")
    parser.add_argument(
        "--seconds",
        type=float,
        help="of each workload, instead of a number of schedules; of each mutant, and of a series, at most",
    )
    parser.add_argument(
        "--series",
        type=int,
        help="so many schedules of all workloads together, which get the same time, on all processors of this process",
    )
    parser.add_argument("--mutants", action="store_true", help="plant each mutant and look how soon it falls")
    parser.add_argument(
        "--mutant", action="append", help="only this one, may be repeated; with --seed: planted in that schedule"
    )
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to reduce a failing --seed; 0: as it is")
    options = parser.parse_args()
    processors = sorted(os.sched_getaffinity(0))
    runner.pinned()
    names = options.workload or sorted(WORKLOADS)
    once = options.seed is not None and not (options.schedules or options.seconds or options.series)
    if options.mutants or (options.mutant and not once):
        from tests.simulation import mutants

        return mutants.run(names, options.schedules or 2000, options.mutant, options.seconds or 600.0)
    if options.series:
        return series.run(names, int(options.seed or 0), options.series, options.seconds, processors, say)
    if once:
        plant = mutants_named(options.mutant or ())
        return sum(show(name, options.engine, options.seed, plant, options.shrink) for name in names)
    return sum(
        many(name, options.engine, options.seed or "0", options.schedules or 100, options.seconds) for name in names
    )


def mutants_named(names: Sequence[str]) -> Callable[[], object]:
    """Plants the mutants."""
    from tests.simulation import mutants

    plants = [next(each.plant for each in mutants.MUTANTS if each.name == name) for name in names]
    return lambda: [plant() for plant in plants]


def show(name: str, engine: str, seed: str, plant: Callable[[], object], seconds: float) -> int:
    """One schedule with its time line; one that fails is reduced first."""
    made = runner.Runner(name, engine)
    made.warm()
    found = cases.shrink(made, seed, plant, seconds) if seconds else None
    if found is None:
        (result,) = made.many([seed], plant, keep=True)
    else:
        result, case, runs = found
        whole = next(iter(made.many([seed], plant, keep=True)))
    for line in timelines.lines(result):
        say(line)
    say(f"{name} SEED={seed}: {result.verdict or 'holds'}\npolicy {result.policy}; trace {result.trace}")
    if found is not None:
        say(
            f"reduced in {runs} runs: faults {len(whole.planned)} -> {len(result.planned)}, clients {len(whole.clients)} -> "
            f"{len(result.clients)}, switches {len(whole.switches)} -> {len(result.switches)}, pauses "
            f"{len(whole.pauses)} -> {len(result.pauses)}, steps {whole.steps} -> {result.steps}; trace of the whole: "
            f"{whole.trace}"
        )
        for each in result.planned:
            say(f"fault: {each}")
        if case.switches is None:
            say("The decisions of the policy could not be replayed; its switches are not reduced.")
    return int(bool(result.verdict))


def many(name: str, engine: str, first: str, schedules: int, seconds: float | None) -> int:
    """Schedules with numbers for seeds, from the first; prints those that break something."""
    made = runner.Runner(name, engine)
    made.warm()
    results: list[runner.Result] = []
    began = time.monotonic()
    number = int(first)
    while len(results) < schedules if seconds is None else time.monotonic() - began < seconds:
        size = min(runner.BATCH, schedules - len(results)) if seconds is None else runner.BATCH
        for each in made.many([str(number + one) for one in range(size)]):
            results.append(each)
            if each.verdict:
                say(f"{name} SEED={each.seed}: {each.verdict}")
        number += size
    say(f"{name}: {runner.summary(results)}")
    return int(any(each.verdict for each in results))


if __name__ == "__main__":
    sys.exit(main())
