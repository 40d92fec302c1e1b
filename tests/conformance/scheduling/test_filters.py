# SPDX-License-Identifier: Apache-2.0
"""Every reference filter on the conformance kit, against Nova's semantics said as a plain loop would."""

from __future__ import annotations

import random
import unittest
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import FILTERS, HostFilter, HostState, RequestSpec
from moorage.testing import fleets
from moorage.testing.scheduling import HostFilterTests
from tests.conformance.scheduling import nova_semantics
from tests.conformance.scheduling.configuration import plugin_conf


class ReferenceFilterTests(HostFilterTests):
    """The filter of one name, with some options."""

    plugin: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.conf = plugin_conf(**self.options)

    @override
    def make_filter(self) -> HostFilter:
        made: Any = FILTERS.load(self.plugin).plugin
        return made(conf=self.conf)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        return nova_semantics.FILTERS[self.plugin](host_state, spec, self.conf)


class TypeAffinityTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "type_affinity"

    def test_the_version_of_a_flavor_does_not_matter(self) -> None:
        plugin = self.make_filter()
        for fleet, spec, _, passing in self.asked(plugin):
            for version in (1, 2, 7):
                flavor = replace(spec.flavor, version=version, resources={"VCPU": version})
                other = replace(spec, flavor=flavor)
                found = [row for row in range(fleet.size) if plugin.host_passes(fleet.host_state(row), other)]
                self.assertEqual(passing, found, other)
                mask = plugin.mask_rows(fleet, slice(None), other)
                assert mask is not None
                self.assertEqual(passing, np.flatnonzero(mask).tolist(), other)


class SameHostTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "same_host"


class DifferentHostTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "different_host"


class ComputeTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "compute"


class CapacityTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "capacity"


class AllHostsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "all_hosts"
    never_refuses = True


class NumInstancesTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "num_instances"
    options: ClassVar[dict[str, Any]] = {"filter_num_instances__max_instances_per_host": 3}


class AggregateNumInstancesTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_num_instances"
    options: ClassVar[dict[str, Any]] = {"filter_num_instances__max_instances_per_host": 4}


class IoOpsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "io_ops"
    options: ClassVar[dict[str, Any]] = {"filter_io_ops__max_io_ops_per_host": 2}


class AggregateIoOpsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_io_ops"
    options: ClassVar[dict[str, Any]] = {"filter_io_ops__max_io_ops_per_host": 2}


class AvailabilityZoneTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "availability_zone"


class AggregateInstanceExtraSpecsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_instance_extra_specs"


class AggregateMultiTenancyIsolationTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_multitenancy_isolation"


class AggregateTypeAffinityTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_type_affinity"


class AggregateImagePropertiesIsolationTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_image_properties_isolation"


class NamespacedImagePropertiesIsolationTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "aggregate_image_properties_isolation"
    options: ClassVar[dict[str, Any]] = {
        "filter_aggregate_image_properties_isolation__namespace": "os",
        "filter_aggregate_image_properties_isolation__separator": "_",
    }


class IsolatedHostsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "isolated_hosts"
    options: ClassVar[dict[str, Any]] = {
        "filter_isolated_hosts__isolated_images": ["img-a", "img-b"],
        "filter_isolated_hosts__isolated_hosts": ["host-1", "host-3", "host-0"],
    }


class UnrestrictedIsolatedHostsTests(IsolatedHostsTests):
    options: ClassVar[dict[str, Any]] = {
        **IsolatedHostsTests.options,
        "filter_isolated_hosts__restrict_isolated_hosts_to_isolated_images": False,
    }


class IsolatedHostsWithoutImagesTests(IsolatedHostsTests):
    options: ClassVar[dict[str, Any]] = {"filter_isolated_hosts__isolated_hosts": ["host-1", "host-3", "host-0"]}


class ComputeCapabilitiesTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "compute_capabilities"


class ImagePropertiesTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "image_properties"


class ImagePropertiesWithDefaultTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "image_properties"
    options: ClassVar[dict[str, Any]] = {"filter_image_properties__default_architecture": "x86_64"}


class SimpleCidrAffinityTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "simple_cidr_affinity"


class JsonTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "json"


class MetricsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "metrics"
    options: ClassVar[dict[str, Any]] = {"weigher_metrics__settings": ["cpu.percent=-1.0", "power=0.5"]}


class ServerGroupAffinityTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "server_group_affinity"


class ServerGroupAntiAffinityTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "server_group_anti_affinity"

    @override
    def make_request(self, random: random.Random) -> RequestSpec:
        # Fewer instances to name, so that several members meet on one node.
        return fleets.random_request(random, random.choice((4, 20)))


class RequiredTraitsTests(ReferenceFilterTests, unittest.TestCase):
    plugin = "required_traits"


class TestAllAreThere(unittest.TestCase):
    def test_every_reference_filter_has_its_conformance_test(self) -> None:
        tested = {
            each.plugin
            for each in globals().values()
            if isinstance(each, type) and issubclass(each, ReferenceFilterTests) and each is not ReferenceFilterTests
        }
        own = {finding.name for finding in FILTERS.survey() if finding.target.startswith("moorage_plugins.")}
        self.assertEqual(own, tested)
        self.assertEqual(own, set(nova_semantics.FILTERS))
