# SPDX-License-Identifier: Apache-2.0
"""Filter and weigher classes that were written for Nova run as they are."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import textwrap
import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh
from moorage.scheduling.interface import HostFilter, HostWeigher, RequestSpec
from moorage.scheduling.nova.adapter import adapted_filter, adapted_weigher
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.testing import fleets
from moorage.testing.scheduling import HostFilterTests, HostWeigherTests
from tests.conformance.scheduling.configuration import scheduling_conf
from tests.conformance.scheduling.test_differential import NoIncidents
from tests.unit.scheduling import nova_classes

PATH = nova_classes.__name__


class TestReadsEverything(HostFilterTests, unittest.TestCase):
    @override
    def make_filter(self) -> HostFilter:
        return adapted_filter(nova_classes.ReadsEverything)(conf=None)


class TestFreeRam(HostWeigherTests, unittest.TestCase):
    @override
    def make_weigher(self) -> HostWeigher:
        return adapted_weigher(nova_classes.FreeRam)(conf=None)


def run(fleet: Any, spec: RequestSpec, filters: Sequence[str], weighers: Sequence[str] = (), **options: Any) -> Any:
    conf = scheduling_conf(
        scheduling__enabled_filters=list(filters), scheduling__enabled_weighers=list(weighers), **options
    )
    guard = PluginRunner(SystemClock(), NoIncidents(), print, deadline=600, threshold=1, window=60, skip_advisory=False)
    try:
        return filter_and_weigh.load(conf).run(guard, fleet, np.arange(fleet.size, dtype=np.intp), spec)
    finally:
        guard.close()


class TestPipeline(unittest.TestCase):
    def setUp(self) -> None:
        self.random = random.Random(5)
        view = fleets.random_fleet(self.random, 30)
        # Nothing lands on the others, whatever these classes say.
        view.set_nodes([dataclasses.replace(node, can_host=True) for node in view.snapshot().nodes])
        self.fleet = view.snapshot()
        self.hosts = [self.fleet.host_state(row) for row in range(30)]
        self.spec = fleets.random_request(self.random)

    def names(self, *filters: str, **changes: Any) -> list[str]:
        spec = dataclasses.replace(self.spec, **changes)
        found = run(self.fleet, spec, [path if "." in path else f"{PATH}.{path}" for path in filters])
        return [self.fleet.nodes[row].name for row in found.rows]

    def test_one_host_at_a_time(self) -> None:
        odd = [host.nodename for host in self.hosts if int(host.host.rpartition("-")[2]) % 2]
        self.assertEqual(odd, self.names("OddHosts"))
        self.assertEqual([host.nodename for host in self.hosts if host.nodename not in odd], self.names("EvenHosts"))

    def test_all_hosts_at_once_in_the_configured_place(self) -> None:
        odd = [host for host in self.hosts if int(host.host.rpartition("-")[2]) % 2]
        fewest = min(host.num_instances for host in odd)
        after = [host.nodename for host in odd if host.num_instances == fewest]
        self.assertEqual(after, self.names("OddHosts", "FewestInstances"))
        fewest = min(host.num_instances for host in self.hosts)
        before = [host.nodename for host in odd if host.num_instances == fewest]
        self.assertEqual(before, self.names("FewestInstances", "OddHosts"))

    def test_none_from_filter_all_leaves_no_host(self) -> None:
        flavor = self.spec.flavor
        self.assertEqual([], self.names("StopsForGpu", flavor=dataclasses.replace(flavor, flavorid="gpu")))
        self.assertEqual(30, len(self.names("StopsForGpu", flavor=dataclasses.replace(flavor, flavorid="tiny"))))

    def test_a_rebuild_asks_only_those_that_say_so(self) -> None:
        self.assertEqual(30, len(self.names("OddHosts", rebuild=True)))
        spec = dataclasses.replace(self.spec, rebuild=True)
        self.assertLess(len(run(self.fleet, spec, [f"{PATH}.ReadsEverything"]).rows), 30)

    def test_once_per_request(self) -> None:
        for name in ("OnlyTheFirst", "OnlyTheFirstBySaying"):
            plugin = adapted_filter(getattr(nova_classes, name))(conf=None)
            self.assertTrue(plugin.run_filter_once_per_request, name)
        self.assertFalse(adapted_filter(nova_classes.OddHosts)(conf=None).run_filter_once_per_request)

    def test_functions_and_colons_and_plugins_of_moorage_beside_them(self) -> None:
        wanted = self.names("OddHosts", "FewestInstances")
        found = run(self.fleet, self.spec, ["all_hosts", f"{PATH}:several"])
        self.assertEqual(wanted, [self.fleet.nodes[row].name for row in found.rows])
        self.assertEqual({f"{PATH}:several[OddHosts]", f"{PATH}:several[FewestInstances]"}, set(found.removed))
        own = run(self.fleet, self.spec, ["moorage_plugins.filters.compute.ComputeFilter"])
        self.assertEqual(list(run(self.fleet, self.spec, ["compute"]).rows), list(own.rows))

    def test_weighers_are_those_of_nova(self) -> None:
        found = run(self.fleet, self.spec, ["all_hosts"], [f"{PATH}.FreeRam", f"{PATH}.Crowd"])
        ram = [min(max(host.free_ram_mb, 0), 6000) for host in self.hosts]
        crowd = [host.num_instances for host in self.hosts]
        low, high = min(crowd), max(crowd)
        totals = [
            (2.0 if host.aggregates else 1.0) * (weight - 0.0) / 6000.0 - (count - low) / (high - low)
            for host, weight, count in zip(self.hosts, ram, crowd, strict=True)
        ]
        order = sorted(range(30), key=lambda row: round(-totals[row], 9))
        np.testing.assert_allclose([totals[row] for row in order], found.weights)

    def test_the_groups_hosts_are_those_of_its_members(self) -> None:
        seen = []

        class LooksAtTheGroup:
            def host_passes(self, host_state: Any, spec_obj: Any) -> bool:
                seen.append(spec_obj.instance_group.hosts)
                return True

        plugin = adapted_filter(LooksAtTheGroup)(conf=None)
        spec = self.spec
        while spec.server_group is None or not self.fleet.rows_of_instances(spec.server_group.members).size:
            spec = fleets.random_request(self.random, 30)
        spec = self.fleet.resolved(spec)
        plugin.prepare(spec, self.fleet)
        plugin.host_passes(self.hosts[0], spec)
        rows = self.fleet.rows_of_instances(spec.server_group.members if spec.server_group else ())
        self.assertEqual([sorted({self.hosts[row].host for row in rows})], seen)


class TestWrongPaths(unittest.TestCase):
    def refused(self, text: str, *filters: str) -> None:
        conf = scheduling_conf(scheduling__enabled_filters=list(filters), scheduling__enabled_weighers=[])
        with self.assertRaisesRegex(errors.PluginLoadError, text):
            filter_and_weigh.load(conf)

    def test_each_is_named_with_what_is_wrong(self) -> None:
        self.refused(
            "'nowhere.at.All' .*cannot be imported .ModuleNotFoundError.*package.module.Class", "nowhere.at.All"
        )
        self.refused("cannot be imported .AttributeError", f"{PATH}.Missing")
        self.refused("NotOne.* is no class that moorage.filters can use", f"{PATH}.NotOne")
        self.refused("NotOne.* is no class that moorage.filters can use", f"{PATH}.wrong")
        self.refused("cannot be built: RuntimeError: no licence", f"{PATH}.CannotBeBuilt")
        self.refused("more than once", f"{PATH}.OddHosts", f"{PATH}.OddHosts")
        self.refused("unheard_of.*nowhere.at.All", "unheard_of", "nowhere.at.All")

    def test_a_class_on_novas_base_says_what_to_do(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "on_nova_base.py").write_text("from nova.scheduler import filters\n")
            sys.path.insert(0, folder)
            self.addCleanup(sys.path.remove, folder)
            self.refused("install nova, or set .scheduling. nova_shim = true", "on_nova_base.Any")


ON_BASE = """
from nova.scheduler import filters, weights
from nova.scheduler.filters import utils
from nova.scheduler import utils as scheduler_utils
from nova.i18n import _

class Zoned(filters.BaseHostFilter):
    RUN_ON_REBUILD = False
    def host_passes(self, host_state, spec_obj):
        values = utils.aggregate_metadata_get_by_host(host_state, "availability_zone")
        return "north" in values.get("availability_zone", set())

class Ram(weights.BaseHostWeigher):
    minval = 0
    def weight_multiplier(self, host_state):
        return scheduler_utils.get_weight_multiplier(host_state, "ram_weight_multiplier", 1.0)
    def _weigh_object(self, host_state, weight_properties):
        return host_state.free_ram_mb
"""

CHECK = """
import dataclasses, random, sys
import numpy as np
from moorage.testing import fleets
from tests.unit.scheduling.test_nova_classes import run
several = 0
for seed in range(12):
    random_ = random.Random(seed)
    fleet = fleets.random_fleet(random_, 40).snapshot()
    spec = dataclasses.replace(fleets.random_request(random_), availability_zone="north")
    found = run(fleet, spec, ["on_base.Zoned"], ["on_base.Ram"], scheduling__nova_shim=True)
    own = run(fleet, spec, ["availability_zone"], ["ram"])
    assert list(found.rows) == list(own.rows), (seed, found.rows, own.rows)
    np.testing.assert_allclose(found.weights, own.weights)
    several += len(found.rows) > 1
assert several > 1
assert sys.modules["nova"].moorage_shim
"""


class TestShim(unittest.TestCase):
    def test_classes_on_novas_base_run_without_nova(self) -> None:
        # In a process of its own: what stands in for Nova stays in the process.
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "on_base.py").write_text(textwrap.dedent(ON_BASE))
            done = subprocess.run(
                [sys.executable, "-c", CHECK],
                env={"PYTHONPATH": os.pathsep.join([folder, *sys.path])},
                capture_output=True,
                text=True,
            )
        self.assertEqual(0, done.returncode, done.stderr)
