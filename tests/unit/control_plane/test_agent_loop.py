# SPDX-License-Identifier: Apache-2.0
"""The loop that an agent's service gets from its tools: the options of the agent hold for it, and observers are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oslo_config import cfg
from typing_extensions import override

from moorage.clock import SystemClock
from moorage.control_plane import options
from moorage.control_plane.interface import AgentTools, LoopService
from moorage.observers.interface import ObserverEvent, OperationHung, WorkReported
from moorage.work.interface import Phase
from tests.servers import wait_until
from tests.unit.work.test_loop import ME, SOON, LoopCase, Things


class ThingService(LoopService):
    """Does the operations of :class:`Things`."""

    api_version = (1, 0)

    @override
    def __init__(self, tools: AgentTools) -> None:
        self.work = Things(tools.database, tools.workers)  # type: ignore[arg-type]
        self.loop = tools.work_loop("things", self.work, operations=2)


class AgentLoopTests(LoopCase):
    def setUp(self) -> None:
        super().setUp()
        self.events: list[ObserverEvent] = []
        self.conf = cfg.ConfigOpts()
        options.register_opts(self.conf)
        self.conf([], project="moorage", default_config_files=[])

    def service(self) -> ThingService:
        made = ThingService(
            AgentTools(
                conf=self.conf, clock=SystemClock(), database=self.database, identity=ME, workers=self.store,
                instances=None, store=None, release=lambda *_: True, reporter=None, tell=self.events.append,  # type: ignore[arg-type]
            )
        )  # fmt: skip
        self.addCleanup(made.stop)
        self.addCleanup(self.gate.set)
        self.work = made.work
        return made

    def told(self, kind: type[ObserverEvent]) -> Sequence[Any]:
        return [each for each in self.events if isinstance(each, kind)]

    def test_an_operation_that_hangs_is_given_up_after_the_deadline_of_the_agent(self) -> None:
        self.conf.set_override("operation_deadline", 0.2, group="agent")
        self.want("one")
        service = self.service()
        service.work.on_do = self.held
        service.start()

        def swept() -> bool:
            service.sweep()
            return bool(self.told(OperationHung))

        wait_until(swept, "observers are told that it hangs", SOON)
        self.assertEqual(self.told(OperationHung), [OperationHung("things", "thing", "one", "make", 0)])
        self.assertEqual(self.phases(), {"one": Phase.WAITING})

    def test_observers_are_told_what_became_of_the_operations(self) -> None:
        self.want("one", "two")
        service = self.service()
        service.start()
        self.wait_for(service.loop)
        service.sweep()
        told = self.told(WorkReported)
        self.assertEqual((sum(each.taken for each in told), sum(each.ended.get("done", 0) for each in told)), (2, 2))
        self.assertEqual((told[-1].service, told[-1].waiting, told[-1].running), ("things", 0, 0))

    def test_the_end_of_the_service_does_not_wait_longer_than_the_agent_drains(self) -> None:
        self.conf.set_override("drain_timeout", 1, group="control_plane")
        self.want("one")
        service = self.service()
        service.work.on_do = self.held
        service.start()
        wait_until(lambda: self.work.calls["one"] == 1, "it hangs", SOON)
        service.stop()
        self.assertFalse(self.gate.is_set())
        self.assertEqual(self.phases(), {"one": Phase.WAITING})
