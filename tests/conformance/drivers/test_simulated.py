# SPDX-License-Identifier: Apache-2.0
"""The simulated driver on the kit of compute drivers."""

from __future__ import annotations

import unittest
from collections.abc import Sequence

from oslo_config import cfg
from typing_extensions import override

from moorage.drivers.interface import ComputeDriver, DriverTools, WorkloadState
from moorage.testing.drivers import ComputeDriverTests
from moorage_plugins.compute import options
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors


class SimulatedDriverTests(ComputeDriverTests, unittest.TestCase):
    @override
    def make_driver(self, tools: DriverTools) -> ComputeDriver:
        return SimulatedDriver(tools)

    @override
    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        return options.list_opts()

    @override
    def copies(self, host: str, uuid: str) -> Sequence[object]:
        """The memories of what runs. A start of what was stopped makes another one."""
        return [
            each.run for each in hypervisors.found(self.state_dir(), host, uuid) if each.state is WorkloadState.RUNNING
        ]
