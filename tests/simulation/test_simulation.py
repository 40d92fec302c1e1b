# SPDX-License-Identifier: Apache-2.0
"""A short form of ``make simulate``: seeds of each workload, repetition, and thirteen mutants."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import ClassVar

import tests
from tests.simulation import invariants, stepping
from tests.simulation.workloads import WORKLOADS

#: Schedules of each workload.
SCHEDULES = tests.cases(6)
MUTANTS = (
    "claims take without looking at the room",
    "consumers change without their generation",
    "no repeated claim is known",
    "commits of unknown outcome are run again",
    "claims ignore the version of residents",
    "a cursor moves before the delivery",
    "a cursor moves without the lease and from any place",
    "a move is committed before its source has stopped",
    "a destination starts what is not committed",
    "any number of hosts is fenced in a period",
    "claims of a commit of unknown outcome are not looked up",
    "reads answer what they have read before",
    "a recount drops what is being claimed",
)

#: Plants each mutant in a process of its own, and prints those that do not fit production's code any more.
_PLANT_ALL = """
import os
from tests.simulation import mutants
for mutant in mutants.MUTANTS:
    child = os.fork()
    if not child:
        try:
            mutant.plant()
        except BaseException as error:
            print(f"{mutant.name}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
print("planted")
"""

#: Prints the traces of some schedules, each by itself and after others.
_TRACES = """
from tests.simulation import runner
runner.pinned()
made = runner.Runner("placement")
made.warm()
seeds = [str(seed) for seed in range(7)]
print([each.trace for each in made.many(seeds)])
print([next(made.many([seed])).trace for seed in seeds])
"""

#: Schedules that broke an invariant once: workload and seed. Each bug has a test of its own as well, since a schedule changes
#: with the code that it runs.
FOUND = (
    ("cleaning", "163"),
    ("creates", "69"),
    ("automatic_evacuations", "7000"),
    ("moves", "1000033"),
    ("shared_instances", "3001502"),
    ("stale_feeds", "4000787"),
    ("volumes", "3001349"),
)


def simulate(*arguments: str, hash_seed: str | None = "0") -> subprocess.CompletedProcess[str]:
    """Run the simulation as ``make simulate`` does; a process of its own, since it forks and pins itself.

    :param hash_seed: PYTHONHASHSEED; with another one than 0 it starts itself again, which takes a second of a processor.
    """
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if hash_seed is None else {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=tests.cases(1200), check=False, env=environment
    )


class SimulationTests(unittest.TestCase):
    """Each in some seconds; ``make soak`` runs more schedules."""

    first: ClassVar[str]
    done: ClassVar[subprocess.CompletedProcess[str]]

    @classmethod
    def setUpClass(cls) -> None:
        # One process for all workloads: half of what each takes by itself are the imports.
        cls.first = str(tests.seeded().randrange(10**6))
        cls.done = simulate("--seed", cls.first, "--schedules", str(SCHEDULES))

    def assert_holds(self, workload: str) -> None:
        said = [
            line for line in self.done.stdout.splitlines() if line.startswith((f"{workload}:", f"{workload} SEED="))
        ]
        shown = f"first seed {self.first}\n{self.done.stdout[-6000:]}{self.done.stderr[-2000:]}"
        self.assertEqual(1, len(said), shown)
        self.assertTrue(said[0].startswith(f"{workload}: {SCHEDULES} schedules, 0 violations"), shown)

    def test_placement_keeps_every_invariant(self) -> None:
        self.assert_holds("placement")

    def test_claims_that_share_transactions_keep_every_invariant(self) -> None:
        self.assert_holds("creates")

    def test_a_scheduler_without_messages_keeps_every_invariant(self) -> None:
        self.assert_holds("stale_feeds")

    def test_promises_of_filters_keep_every_invariant(self) -> None:
        self.assert_holds("promises")

    def test_claims_keep_every_invariant(self) -> None:
        self.assert_holds("claims")

    def test_leases_keep_every_invariant(self) -> None:
        self.assert_holds("leases")

    def test_sweeps_keep_every_invariant(self) -> None:
        self.assert_holds("sweeps")

    def test_cleaning_keeps_every_invariant(self) -> None:
        self.assert_holds("cleaning")

    def test_ticks_keep_every_invariant(self) -> None:
        self.assert_holds("ticks")

    def test_volumes_keep_every_invariant(self) -> None:
        self.assert_holds("volumes")

    def test_shards_keep_every_invariant(self) -> None:
        self.assert_holds("shards")

    def test_deliveries_keep_every_invariant(self) -> None:
        self.assert_holds("deliveries")

    def test_evacuations_keep_every_invariant(self) -> None:
        self.assert_holds("evacuations")

    def test_quotas_keep_every_invariant(self) -> None:
        self.assert_holds("quotas")

    def test_moves_keep_every_invariant(self) -> None:
        self.assert_holds("moves")

    def test_clients_that_share_instances_keep_every_invariant(self) -> None:
        self.assert_holds("shared_instances")

    def test_hosts_that_fence_themselves_keep_every_invariant(self) -> None:
        self.assert_holds("self_fences")

    def test_histories_of_a_consumer_are_linearizable(self) -> None:
        self.assert_holds("consumer_histories")

    def test_histories_of_an_instance_are_linearizable(self) -> None:
        self.assert_holds("instance_histories")

    def test_two_releases_at_once_keep_every_invariant(self) -> None:
        self.assert_holds("versions")

    def test_schedules_that_found_something_hold(self) -> None:
        for workload, seed in FOUND:
            with self.subTest(workload=workload, seed=seed):
                done = simulate("--workload", workload, "--seed", seed, "--schedules", "1")
                self.assertIn("1 schedules, 0 violations", done.stdout, done.stdout + done.stderr)

    def test_automatic_evacuations_keep_every_invariant(self) -> None:
        self.assert_holds("automatic_evacuations")

    def test_one_seed_gives_one_trace(self) -> None:
        for workload in ("claims", "placement"):
            # Also when it has to start itself again.
            one, two = (simulate("--workload", workload, "--seed", "7", hash_seed=each).stdout for each in ("0", None))
            self.assertIn("trace ", one)
            self.assertEqual(one, two)

    def test_a_trace_does_not_depend_on_the_schedules_before(self) -> None:
        command = [sys.executable, "-c", _TRACES]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=tests.cases(1200), check=False, env=environment
        )
        together, apart = done.stdout.splitlines() or ("", done.stderr)
        self.assertEqual(together, apart)

    def test_a_series_runs_all_that_is_asked_for_with_consecutive_seeds(self) -> None:
        done = simulate("--workload", "claims", "--workload", "sweeps", "--series", "50", "--seed", "3")
        rows = re.findall(r"(?m)^(claims|sweeps) +(\d+) +0 +\d+  3-(\d+)", done.stdout)
        self.assertEqual(["claims", "sweeps"], [name for name, _, _ in rows], done.stdout + done.stderr)
        self.assertEqual([int(count) for _, count, _ in rows], [int(last) - 2 for _, _, last in rows])
        self.assertRegex(done.stdout, r"(?m)^all +50 +0 ")

    def test_thirteen_mutants_fall(self) -> None:
        done = simulate("--schedules", "60", *(word for mutant in MUTANTS for word in ("--mutant", mutant)))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        for mutant in MUTANTS:
            with self.subTest(mutant):
                self.assertRegex(done.stdout, rf"(?m)^{re.escape(mutant)} +\S+ +\d+ schedules  ")

    def test_every_mutant_can_be_planted(self) -> None:
        command = [sys.executable, "-c", _PLANT_ALL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        self.assertEqual("planted\n", done.stdout, done.stderr)

    def test_every_checker_and_every_page_of_the_table_is_there(self) -> None:
        kinds = {kind.__name__: kind for each in WORKLOADS.values() for kind in each.__mro__}
        kinds["_SteppedSite"] = stepping._SteppedSite
        pages = Path(__file__).parents[2] / "doc" / "source" / "explanation"
        for each in invariants.INVARIANTS:
            with self.subTest(each.name):
                self.assertTrue((pages / f"{each.promised}.rst").is_file())
                for owner, method in invariants.checkers(each):
                    self.assertTrue(hasattr(kinds[owner], method), f"{owner} has no {method}")

    def test_every_workload_has_a_test(self) -> None:
        tested = re.findall(r'self.assert_holds\("(\w+)"\)', Path(__file__).read_text(encoding="utf-8"))
        self.assertEqual(sorted(WORKLOADS), sorted(tested))

    def test_the_documentation_lists_every_invariant(self) -> None:
        page = Path(__file__).parents[2] / "doc" / "source" / "explanation" / "simulation.rst"
        self.assertIn(invariants.table(), page.read_text(encoding="utf-8"))
