# SPDX-License-Identifier: Apache-2.0
"""Every reference weigher on the conformance kit, against Nova's semantics said as a plain loop would."""

from __future__ import annotations

import random
import unittest
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import WEIGHERS, HostState, HostWeigher, InstanceRecord, RequestSpec
from moorage.testing import fleets
from moorage.testing.scheduling import HostWeigherTests
from tests.conformance.scheduling import nova_semantics
from tests.conformance.scheduling.configuration import plugin_conf


class ReferenceWeigherTests(HostWeigherTests):
    # Many fleets: aggregates that set a multiplier are rare.
    requests_per_fleet = 3
    plugin: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    #: Raw weights are of another unit than Nova's by this factor; normalising takes it out.
    unit = 1.0

    def setUp(self) -> None:
        self.conf = plugin_conf(**self.options)

    @override
    def make_weigher(self) -> HostWeigher:
        made: Any = WEIGHERS.load(self.plugin).plugin
        return made(conf=self.conf)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> float:
        return float(nova_semantics.WEIGHERS[self.plugin][1](host_state, spec, self.conf)) / self.unit

    def test_multipliers_are_those_of_the_aggregates(self) -> None:
        plugin = self.make_weigher()
        of_one_host = nova_semantics.WEIGHERS[self.plugin][2]
        own = 0
        for fleet, _ in self.fleets_and_requests():
            rows = np.arange(fleet.size, dtype=np.intp)
            found = plugin.row_multipliers(fleet, rows)
            multipliers = [plugin.multiplier] * fleet.size if found is None else list(found)
            self.assertEqual([of_one_host(fleet.host_state(row), self.conf) for row in range(fleet.size)], multipliers)
            own += found is not None
        self.assertTrue(own, "no aggregate of any fleet set a multiplier")

    def test_bounds_are_those_of_nova(self) -> None:
        plugin = self.make_weigher()
        self.assertEqual(nova_semantics.WEIGHERS[self.plugin][0], plugin.minval)
        self.assertIsNone(plugin.maxval)


class CpuTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "cpu"


class RamTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "ram"


class DiskTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "disk"
    unit = 1024.0


class IoOpsTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "io_ops"


class NumInstancesTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "num_instances"


class BuildFailureTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "build_failure"


class HypervisorVersionTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "hypervisor_version"


class SoftAffinityTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "soft_affinity"


class SoftAntiAffinityTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "soft_anti_affinity"


class MetricsTests(ReferenceWeigherTests, unittest.TestCase):
    plugin = "metrics"
    options: ClassVar[dict[str, Any]] = {
        "weigher_metrics__settings": ["cpu.percent=-1.0", "power=0.5"],
        "weigher_metrics__required": False,
    }


class MetricsWithoutMultiplierTests(MetricsTests):
    options: ClassVar[dict[str, Any]] = {**MetricsTests.options, "weigher_metrics__multiplier": 0.0}


class TestMetricsErrors(unittest.TestCase):
    def weigher(self, **options: Any) -> HostWeigher:
        made: Any = WEIGHERS.load("metrics").plugin
        return made(conf=plugin_conf(**options))

    def test_a_node_without_a_required_metric_is_named(self) -> None:
        weigher = self.weigher(weigher_metrics__settings=["absent=1.0"])
        fleet = fleets.random_fleet(random.Random(1), 3).snapshot()
        with self.assertRaisesRegex(LookupError, "node node-0 has no metric absent; enable the filter metrics"):
            weigher.weigh_rows(fleet, np.arange(3, dtype=np.intp), fleets.random_request(random.Random(1)))

    def test_a_setting_that_is_none_is_refused_at_the_start(self) -> None:
        for setting in ("cpu.percent", "cpu.percent=much", "=1.0", "cpu=nan"):
            with self.assertRaisesRegex(ValueError, "write NAME=RATIO"):
                self.weigher(weigher_metrics__settings=[setting])


class TestLeastWaste(unittest.TestCase):
    """Its weights depend on the scarce classes of the fleet, which one node alone does not show."""

    def setUp(self) -> None:
        made: Any = WEIGHERS.load("least_waste").plugin
        self.weigher: HostWeigher = made(conf=plugin_conf())
        self.random = random.Random(7)

    def cases(self) -> Iterator[tuple[Any, Any, RequestSpec, Any]]:
        for _ in range(300):
            fleet = fleets.random_fleet(self.random, self.random.choice((1, 2, 7, 20))).snapshot()
            some = self.random.sample(range(fleet.size), self.random.randrange(1, fleet.size + 1))
            rows = np.array(sorted(some), dtype=np.intp)
            spec = fleets.random_request(self.random)
            yield fleet, rows, spec, self.weigher.weigh_rows(fleet, rows, spec)

    def test_a_node_that_wastes_nothing_beats_every_node_that_wastes_something(self) -> None:
        compared = 0
        for fleet, rows, spec, weights in self.cases():
            scarce = {
                name
                for row in range(fleet.size)
                for name in fleet.host_state(row).capacity
                if name not in spec.flavor.resources
                and any(name not in fleet.host_state(other).capacity for other in range(fleet.size))
            }
            wasting = [any(fleet.host_state(row).free.get(name, 0) > 0 for name in scarce) for row in rows]
            for wastes, weight in zip(wasting, weights, strict=True):
                self.assertTrue(1.0 < weight <= 2.0 if wastes else weight == 0.0, (wastes, weight))
            compared += len(set(wasting)) > 1
        self.assertGreater(compared, 50)

    def test_a_class_that_is_asked_for_is_never_waste(self) -> None:
        for fleet, rows, spec, _ in self.cases():
            asked = replace(spec, flavor=replace(spec.flavor, resources=dict.fromkeys(fleet.resource_classes, 1)))
            self.assertFalse(self.weigher.weigh_rows(fleet, rows, asked).any())

    def test_using_more_of_a_scarce_class_never_makes_a_node_worse(self) -> None:
        compared = 0
        for fleet, rows, spec, weights in self.cases():
            row = self.random.choice(list(rows))
            free = {name: amount for name, amount in fleet.host_state(row).free.items() if amount > 0}
            for name in free.keys() - spec.flavor.resources.keys():
                record = InstanceRecord("filler", *self.place(fleet, row), "any", {name: int(free[name])})
                after = self.weigher.weigh_rows(fleet.with_placed(record, row), rows, spec)
                self.assertLessEqual(after[rows == row], weights[rows == row])
                compared += after[rows == row] < weights[rows == row]
        self.assertGreater(compared, 20)

    def test_a_weight_stays_while_more_is_in_use_on_other_nodes(self) -> None:
        self.assertTrue(self.weigher.weighs_alone)
        compared = 0
        for fleet, rows, spec, weights in self.cases():
            more = np.array([row for row in rows if self.random.random() < 0.5], dtype=np.intp)
            others = ~np.isin(rows, more)
            flavor = replace(spec.flavor, resources=dict.fromkeys(fleet.resource_classes, 1))
            after = self.weigher.weigh_rows(fleet.with_more_on(more, flavor, counted=True), rows, spec)
            self.assertEqual(weights[others].tolist(), after[others].tolist())
            compared += (weights != after).any()
        self.assertGreater(compared, 20)

    def test_a_weight_does_not_depend_on_the_other_rows(self) -> None:
        compared = 0
        for fleet, rows, spec, weights in self.cases():
            whole = self.weigher.weigh_rows(fleet, fleet.all_rows, spec)
            self.assertEqual(whole[rows].tolist(), weights.tolist())
            compared += weights.any() and len(rows) < fleet.size
        self.assertGreater(compared, 50)

    def place(self, fleet: Any, row: int) -> tuple[str, str]:
        return fleet.nodes[row].host, fleet.nodes[row].name


#: Weighers that Nova does not have: :class:`TestLeastWaste` and ``tests/unit/scheduling/test_fragmentation.py`` stand for the kit.
OF_SETS = {"least_waste", "gpu_fragmentation"}


class TestAllAreThere(unittest.TestCase):
    def test_every_reference_weigher_has_its_conformance_test(self) -> None:
        tested = OF_SETS | {
            each.plugin
            for each in globals().values()
            if isinstance(each, type) and issubclass(each, ReferenceWeigherTests) and each is not ReferenceWeigherTests
        }
        own = {finding.name for finding in WEIGHERS.survey() if finding.target.startswith("moorage_plugins.")}
        self.assertEqual(own, tested)
        self.assertEqual(own, OF_SETS | set(nova_semantics.WEIGHERS))
