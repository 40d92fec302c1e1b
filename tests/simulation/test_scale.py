# SPDX-License-Identifier: Apache-2.0
"""A short form of ``python -m tests.simulation.scale``: one partition that heals, one restart of everything, and planted errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from typing import Any

from tests.simulation.scale import MISTAKES

_SIZE = (
    *("--nodes", "240", "--agents", "24", "--population", "96", "--arrivals", "48", "--comparison", "30"),
    "--no-curves",
)
#: Planted error -> the scenario that finds it, and a part of the name of each law that must fall.
_FALLS = {
    "services that were started together work together": (
        "herd",
        ("quiet: busiest second, statements", "quiet: busiest second, transactions"),
    ),
    "each scheduler that starts is answered apart": ("herd", ("restart of schedulers: messages",)),
    "a comparison tells each instance by itself": ("partition", ("healed: messages",)),
}


def simulate(scenario: str, *mistakes: str) -> dict[str, Any]:
    """Run a scenario in a process of its own."""
    planted = [word for each in mistakes for word in ("--mistake", each)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.scale", scenario, *_SIZE, *planted],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(done.stdout[-2000:] + done.stderr[-4000:]) from None
    return found


class ScaleTests(unittest.TestCase):
    """Counts of one seed, no times."""

    def assert_holds(self, found: dict[str, Any]) -> None:
        self.assertEqual("", found["verdict"])
        self.assertEqual([], [each for each in found["laws"] if not each["holds"]])

    def test_a_partition_that_heals_causes_no_storm(self) -> None:
        found = simulate("partition")
        self.assert_holds(found)
        # The schedulers did miss something.
        self.assertGreater(found["facts"]["views that differed"], 0)
        self.assertGreater(found["seconds_until_rest"]["healed"], 0)

    def test_a_restart_of_all_agents_and_of_all_schedulers_causes_no_herd(self) -> None:
        self.assert_holds(simulate("herd"))

    def test_the_laws_find_planted_errors(self) -> None:
        self.assertEqual(set(MISTAKES), set(_FALLS))
        for scenario in ("herd", "partition"):
            planted = [name for name, (where, _) in _FALLS.items() if where == scenario]
            found = simulate(scenario, *planted)
            self.assertEqual("", found["verdict"])
            fell = {each["name"] for each in found["laws"] if not each["holds"]}
            for name in planted:
                with self.subTest(name):
                    self.assertLessEqual(set(_FALLS[name][1]), fell)
