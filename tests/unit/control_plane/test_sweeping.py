# SPDX-License-Identifier: Apache-2.0
"""An agent's services sweep each for itself."""

from __future__ import annotations

import threading
import unittest
from unittest import mock

from typing_extensions import override

from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.interface import AgentService, AgentTools


class Sweeper(AgentService):
    """Counts its sweeps; some raise."""

    api_version = (1, 0)

    @override
    def __init__(self, tools: AgentTools | None, error: BaseException | None = None) -> None:
        self.error = error
        self.swept = 0
        self.stopped = False

    @override
    def endpoints(self) -> list[object]:
        return []

    @override
    def start(self) -> None: ...

    @override
    def sweep(self) -> None:
        self.swept += 1
        if self.error is not None:
            raise self.error

    @override
    def stop(self) -> None:
        self.stopped = True
        if self.error is not None:
            raise self.error

    @override
    def tell_instances(self, *, everything: bool) -> None:
        self.told = everything


class SweepingTests(unittest.TestCase):
    def test_a_service_that_fails_holds_up_no_other_one(self) -> None:
        broken, away, well = Sweeper(None, KeyError("bug")), Sweeper(None, errors.Unavailable("away")), Sweeper(None)
        leaves = Sweeper(None, SystemExit(5))
        agent = Agent()
        agent._services = [broken, leaves, away, well]
        agent._soon = threading.Event()
        agent.sync_instances(soon=True)
        with self.assertLogs("moorage.control_plane.repeating", "WARNING") as told:
            agent._sweep_all()
        self.assertEqual([each.swept for each in (broken, leaves, away, well)], [1, 1, 1, 1])
        # Nor what is done after them.
        self.assertEqual((well.told, agent._soon.is_set()), (False, False))
        self.assertEqual([record.levelname for record in told.records], ["ERROR", "ERROR", "WARNING"])

    def test_a_service_that_does_not_end_well_keeps_no_other_one_from_its_end(self) -> None:
        leaves, well = Sweeper(None, SystemExit(5)), Sweeper(None)
        agent = Agent()
        agent._services, agent._periodic = [leaves, well], []
        agent._subscription, agent._cleaning = mock.Mock(), mock.Mock()
        with self.assertLogs("moorage.control_plane.repeating", "ERROR") as told:
            agent.stop(1.0)
        self.assertTrue(well.stopped)
        self.assertIn("SystemExit(5)", told.output[0])
