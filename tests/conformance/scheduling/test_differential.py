# SPDX-License-Identifier: Apache-2.0
"""The whole pipeline against Nova's semantics as a naive loop: same survivors, same order, for random fleets and requests.

MOORAGE_SEED chooses other cases; a failure names the case.
"""

from __future__ import annotations

import os
import random
import unittest
from collections import Counter
from typing import Any

import numpy as np

import tests
from moorage import errors
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.testing import fleets
from tests.conformance.scheduling import nova_semantics
from tests.conformance.scheduling.configuration import scheduling_conf

CASES = 10_000
CHUNKS = 4
#: Requests that are asked of one fleet, and with one configuration (to read one takes long).
OF_ONE_FLEET = 25
OF_ONE_CONFIGURATION = 100
SEED = int(os.environ.get("MOORAGE_SEED", "20"))


class NoIncidents:
    def record(self, plugin: str) -> None:
        raise AssertionError(f"{plugin} hung")

    def count(self, plugin: str) -> int:
        return 0


def random_configuration(random: random.Random) -> Any:
    filters = random.sample(sorted(nova_semantics.FILTERS), random.randrange(1, 7))
    weighers = random.sample(sorted(nova_semantics.WEIGHERS), random.randrange(6))
    multipliers = {
        f"weigher_{name}__multiplier": random.choice((1.0, -1.0, 0.0, 2.5))
        for name in weighers
        if random.random() < 0.5
    }
    return scheduling_conf(
        scheduling__enabled_filters=filters,
        scheduling__enabled_weighers=weighers,
        filter_num_instances__max_instances_per_host=random.choice((2, 3, 50)),
        filter_io_ops__max_io_ops_per_host=random.choice((1, 2, 8)),
        filter_isolated_hosts__isolated_images=random.choice(([], ["img-a"])),
        filter_isolated_hosts__isolated_hosts=random.choice(([], ["host-0", "host-3"])),
        filter_isolated_hosts__restrict_isolated_hosts_to_isolated_images=random.random() < 0.5,
        filter_image_properties__default_architecture=random.choice((None, "x86_64")),
        weigher_metrics__settings=random.choice(([], ["power=0.5", "cpu.percent=-1.0"])),
        weigher_metrics__required=False,
        **multipliers,
    )


class TestDifferential(unittest.TestCase):
    def compare(self, chunk: int, cases: int) -> Counter[str]:
        """Counts of what came of the cases; a difference fails."""
        random_ = random.Random(SEED * 1000 + chunk)
        guard = PluginRunner(
            SystemClock(),
            NoIncidents(),
            self.fail,
            deadline=600,
            threshold=1,
            window=60,
            skip_advisory=False,
            threads=1,
        )
        self.addCleanup(guard.close)
        seen: Counter[str] = Counter()
        for number in range(cases):
            if number % OF_ONE_CONFIGURATION == 0:
                conf = random_configuration(random_)
                line = filter_and_weigh.load(conf)
            if number % OF_ONE_FLEET == 0:
                fleet = fleets.random_fleet(random_, random_.choice((0, 1, 3, 9, 25))).snapshot()
                hosts = [fleet.host_state(row) for row in range(fleet.size)]
            spec = fleet.resolved(fleets.random_request(random_, 40))
            filters, weighers = conf.scheduling.enabled_filters, conf.scheduling.enabled_weighers
            try:
                found = line.run(guard, fleet, np.arange(fleet.size, dtype=np.intp), spec)
            except errors.InvalidInput:
                seen["refused"] += 1
                self.assertTrue(_is_malformed(spec), f"case {chunk}/{number}: {spec}")
                continue
            wanted = nova_semantics.ranked(nova_semantics.survivors(hosts, spec, filters, conf), spec, weighers, conf)
            self.assertEqual(
                [host.uuid for host in wanted],
                [fleet.nodes[row].uuid for row in found.rows],
                f"case {chunk}/{number}, seed {SEED}: {filters}, {weighers}, {spec}",
            )
            seen["none" if not wanted else "one" if len(wanted) == 1 else "several"] += 1
            seen["some fell"] += 0 < len(wanted) < fleet.size
        return seen

    def chunk(self, number: int) -> None:
        cases = CASES * (10 if tests.SOAK else 1) // CHUNKS
        seen = self.compare(number, cases)
        # The cases are worth something only when they differ.
        for kind, least in (("none", 0.02), ("one", 0.02), ("several", 0.05), ("some fell", 0.05)):
            self.assertGreater(seen[kind], cases * least, seen)
        self.assertLess(seen["refused"], cases * 0.3, seen)

    def test_first_quarter(self) -> None:
        self.chunk(0)

    def test_second_quarter(self) -> None:
        self.chunk(1)

    def test_third_quarter(self) -> None:
        self.chunk(2)

    def test_fourth_quarter(self) -> None:
        self.chunk(3)


def _is_malformed(spec: RequestSpec) -> bool:
    """Whether an extra spec states a condition that can never be right."""
    for text in spec.flavor.extra_specs.values():
        words = text.split()
        if words and words[0] in nova_semantics.OPERATORS and len(words) == 1:
            return True
        if words and words[0] in nova_semantics.NUMBERS and not words[1].replace(".", "").isdigit():
            return True
    return False
