# SPDX-License-Identifier: Apache-2.0
"""Filter and weigher on Moorage's conformance kits."""

from __future__ import annotations

import random as random_module
import unittest
from dataclasses import replace
from typing import Any

from acme_moorage.filters import FirmwareFilter
from acme_moorage.options import list_opts
from acme_moorage.weighers import UNKNOWN, CoolWeigher
from oslo_config import cfg

from moorage import errors
from moorage.scheduling.interface import Flavor, HostFilter, HostState, HostWeigher, RequestSpec
from moorage.testing import fleets
from moorage.testing.scheduling import HostFilterTests, HostWeigherTests

VERSIONS = ("1.9", "1.10", "1.10.2", "2.0", "beta", None)
ORDER = {"beta": -1, None: -1, "1.9": 0, "1.10": 1, "1.10.2": 2, "2.0": 3}


def fleet_with(random: random_module.Random, name: str, values: tuple[Any, ...]) -> Any:
    """Random nodes that have the property, or not."""
    nodes = []
    for number in range(random.choice((1, 2, 7, 20))):
        node, value = fleets.random_node(random, number), random.choice(values)
        nodes.append(replace(node, properties={**node.properties, **({} if value is None else {name: value})}))
    return fleets.random_fleet(random, len(nodes), nodes=nodes)


class FirmwareFilterTests(HostFilterTests, unittest.TestCase):
    cases = 200

    def make_filter(self) -> HostFilter:
        return FirmwareFilter(conf=None)

    def make_fleet(self, random: random_module.Random) -> Any:
        return fleet_with(random, "firmware", VERSIONS)

    def make_request(self, random: random_module.Random) -> RequestSpec:
        spec = fleets.random_request(random, 20)
        wanted = random.choice((*VERSIONS[:4], None))
        return replace(
            spec, flavor=replace(spec.flavor, extra_specs={} if wanted is None else {"acme:firmware": wanted})
        )

    def expected(self, host_state: HostState, spec: RequestSpec) -> bool:
        wanted = spec.flavor.extra_specs.get("acme:firmware")
        return wanted is None or ORDER[host_state.properties.get("firmware")] >= ORDER[wanted]

    def test_a_request_that_makes_no_sense_is_refused_in_words(self) -> None:
        spec = RequestSpec("new", Flavor("small", {}, {"acme:firmware": "newest"}))
        fleet = self.make_fleet(random_module.Random(1)).snapshot()
        with self.assertRaisesRegex(errors.InvalidInput, "acme:firmware = newest is no version"):
            self.make_filter().prepare(spec, fleet)


class CoolWeigherTests(HostWeigherTests, unittest.TestCase):
    cases = 100

    def make_weigher(self) -> HostWeigher:
        conf = cfg.ConfigOpts()
        for group, options in list_opts():
            conf.register_opts(options, group=group)
        conf([])
        return CoolWeigher(conf=conf)

    def make_fleet(self, random: random_module.Random) -> Any:
        return fleet_with(random, "inlet_temperature", (18, 21.5, 35, None))

    def expected(self, host_state: HostState, spec: Any) -> float:
        return -float(host_state.properties.get("inlet_temperature", UNKNOWN))
