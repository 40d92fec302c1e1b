# SPDX-License-Identifier: Apache-2.0
"""An agent's services sweep each for itself."""

from __future__ import annotations

import threading
import unittest
from typing import Any
from unittest import mock

from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.interface import AgentService, AgentTools
from moorage.control_plane.process import Platform
from tests.servers import wait_until


class Sweeper(AgentService):
    """Counts its sweeps; some raise."""

    api_version = (1, 0)

    @override
    def __init__(self, tools: AgentTools | None, error: BaseException | None = None) -> None:
        self.error = error
        self.swept = 0
        self.stopped = False
        self.told: bool | None = None

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
    def platform(self) -> Platform:
        nobody: Any = None
        return Platform("a", SystemClock(), nobody, nobody, nobody, nobody, nobody, lambda reason: None)

    def sweeps(self, agent: Agent, services: list[Sweeper]) -> None:
        agent._services = list(services)
        agent._soon = threading.Event()
        agent.sync_instances(soon=True)
        periodic = agent._sweeps(self.platform(), 0.01)
        for each in periodic:
            self.addCleanup(each.stop)

    def test_a_service_that_fails_holds_up_no_other_one(self) -> None:
        broken, away, well = Sweeper(None, KeyError("bug")), Sweeper(None, errors.Unavailable("away")), Sweeper(None)
        leaves = Sweeper(None, SystemExit(5))
        services = [broken, leaves, away, well]
        agent = Agent()
        with self.assertLogs("moorage.control_plane.periodic_loop", "WARNING") as told:
            self.sweeps(agent, services)
            # Each goes on, and so does what is done beside them.
            wait_until(lambda: all(each.swept > 1 for each in services), "all sweep again", 60)
            wait_until(lambda: well.told is False and not agent._soon.is_set(), "instances are told", 60)
            self.doCleanups()
        self.assertEqual({record.levelname for record in told.records}, {"ERROR", "WARNING"})

    def test_a_service_whose_sweep_hangs_holds_up_no_other_one(self) -> None:
        gate = threading.Event()

        class Hanging(Sweeper):
            @override
            def sweep(self) -> None:
                super().sweep()
                assert gate.wait(120)

        hanging, well = Hanging(None), Sweeper(None)
        self.sweeps(Agent(), [hanging, well])
        self.addCleanup(gate.set)
        wait_until(lambda: hanging.swept == 1, "one hangs", 60)
        before = well.swept
        wait_until(lambda: well.swept > before + 1 and well.told is False, "the other one, and the rest, go on", 60)
        self.assertEqual(hanging.swept, 1)

    def test_a_service_that_does_not_end_well_keeps_no_other_one_from_its_end(self) -> None:
        leaves, well = Sweeper(None, SystemExit(5)), Sweeper(None)
        agent = Agent()
        agent._services, agent._periodic = [leaves, well], []
        agent._subscription, agent._cleaning, agent._clock = mock.Mock(), mock.Mock(), SystemClock()
        with self.assertLogs("moorage.control_plane.periodic_loop", "ERROR") as told:
            agent.stop(60.0)
        self.assertTrue(well.stopped)
        self.assertIn("SystemExit(5)", told.output[0])

    def test_services_end_side_by_side(self) -> None:
        together = threading.Barrier(2)

        class Meeting(Sweeper):
            @override
            def stop(self) -> None:
                together.wait(60)
                super().stop()

        services = [Meeting(None), Meeting(None)]
        agent = Agent()
        agent._services, agent._periodic = list(services), []
        agent._subscription, agent._cleaning, agent._clock = mock.Mock(), mock.Mock(), SystemClock()
        agent.stop(120.0)
        self.assertEqual([True, True], [each.stopped for each in services])

    def test_a_service_that_hangs_is_left_behind_at_the_deadline(self) -> None:
        gate = threading.Event()
        self.addCleanup(gate.set)

        class Hanging(Sweeper):
            @override
            def stop(self) -> None:
                assert gate.wait(120)

        well = Sweeper(None)
        agent = Agent()
        agent._services, agent._periodic = [Hanging(None), well], []
        agent._subscription, agent._cleaning, agent._clock = mock.Mock(), mock.Mock(), SystemClock()
        with self.assertLogs("moorage.control_plane.agent_role", "WARNING") as told:
            agent.stop(1.0)
        self.assertTrue(well.stopped)
        self.assertIn("Hanging has not ended", told.output[0])
