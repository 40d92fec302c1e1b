# SPDX-License-Identifier: Apache-2.0
"""The reference filters on the conformance kit, each with its meaning said as a plain loop would."""

from __future__ import annotations

import unittest

from typing_extensions import override

from moorage.scheduling.interface import HostFilter, HostState, RequestSpec
from moorage.testing.scheduling import HostFilterTests
from moorage_plugins.filters.affinity import DifferentHostFilter, SameHostFilter
from moorage_plugins.filters.capacity import CapacityFilter
from moorage_plugins.filters.compute import ComputeFilter
from moorage_plugins.filters.type_affinity import TypeAffinityFilter


class TypeAffinityTests(HostFilterTests, unittest.TestCase):
    @override
    def make_filter(self) -> HostFilter:
        return TypeAffinityFilter(conf=None)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        return {each.flavorid for each in host_state.instances.values()} <= {spec.flavor.flavorid}


class SameHostTests(HostFilterTests, unittest.TestCase):
    @override
    def make_filter(self) -> HostFilter:
        return SameHostFilter(conf=None)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        hint = spec.hints.get("same_host", [])
        return not hint or not set(host_state.instances).isdisjoint(hint)


class DifferentHostTests(HostFilterTests, unittest.TestCase):
    @override
    def make_filter(self) -> HostFilter:
        return DifferentHostFilter(conf=None)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        return set(host_state.instances).isdisjoint(spec.hints.get("different_host", []))


class ComputeTests(HostFilterTests, unittest.TestCase):
    @override
    def make_filter(self) -> HostFilter:
        return ComputeFilter(conf=None)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        return all((host_state.service_up, host_state.service_enabled, host_state.can_host))


class CapacityTests(HostFilterTests, unittest.TestCase):
    @override
    def make_filter(self) -> HostFilter:
        return CapacityFilter(conf=None)

    @override
    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        return not any(amount > host_state.free.get(name, 0) for name, amount in spec.flavor.resources.items())
