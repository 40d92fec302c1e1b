# SPDX-License-Identifier: Apache-2.0
"""What agents offer of their compute driver."""

from __future__ import annotations

import unittest
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moorage.drivers.interface import ComputeDriver, Console
from moorage_plugins.compute import agent
from moorage_plugins.compute.agent import ComputeAgent


class Plain(ComputeDriver):
    """Has no power."""


class Talking(ComputeDriver, Console):
    runs_commands = True


class PowerTests(unittest.TestCase):
    def powers(self, driver: type[Any]) -> list[str]:
        conf: Any = SimpleNamespace(compute=SimpleNamespace(driver="mine"))
        with mock.patch.object(agent, "COMPUTE_DRIVERS") as drivers:
            drivers.load.return_value = SimpleNamespace(plugin=driver)
            return list(ComputeAgent.powers(conf))

    def test_an_agent_says_that_it_names_powers_also_if_its_driver_has_none(self) -> None:
        """Without that, it would look like an agent of an earlier version, which may have all."""
        own = [
            "compute.powers",
            "compute.holds",
            "compute.told_builds",
            "compute.told_sets",
            "compute.told_deletions",
            "compute.told_deletion_sets",
        ]
        self.assertEqual(own, self.powers(Plain))
        self.assertEqual([*own, "compute.commands", "compute.console"], self.powers(Talking))
