# SPDX-License-Identifier: Apache-2.0
"""Messages on instances that are lost, doubled and late on their way through real transports.

After one period of comparisons every scheduler knows what the store knows.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

from moorage.clock import Clock
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.factories import open_workers
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.in_place import InPlace
from moorage.rpc.interface import Transport
from moorage_plugins.transports.local import LocalTransport
from moorage_plugins.transports.oslo import OsloTransport
from tests import cases, seeded, servers
from tests.functional.scheduling.plane import SOON, Plane, Weather
from tests.servers import wait_until

HOSTS = ("h1", "h2", "h3")


class _LostMessages(unittest.TestCase):
    """Subclasses say through what messages go."""

    def open(self, conf: Any, clock: Clock, folder: str) -> Transport:
        raise NotImplementedError

    def settle(self, plane: Plane, uuid: str) -> None:
        def settled() -> bool:
            found = plane.instances.get(uuid)
            return found.status in ("active", "shelved_offloaded") and not found.pending

        wait_until(settled, f"{uuid} is settled", SOON)

    def run_through(self, plane: Plane) -> None:
        """Every kind of operation, some several times."""
        workers = open_workers(plane.client, plane.conf)
        in_place = InPlace(plane.database, plane.instances, workers, cast_to_agent(plane.client.sender))
        made = [plane.create()["uuid"] for _ in range(cases(10))]
        for uuid in made:
            self.settle(plane, uuid)

        def move(uuid: str, operation: str, **wanted: Any) -> None:
            args = {"instance_uuid": uuid, "operation": operation, "wanted": wanted}
            plane.ask("move_instance", {**args, "request_id": f"{operation} {uuid}"})

        big = {"flavorid": "big", "resources": {"VCPU": 2}, "extra_specs": {}}
        actions: list[Callable[[str], object]] = [
            lambda uuid: move(uuid, "live_migrate"),
            lambda uuid: move(uuid, "resize", flavor=big),
            lambda uuid: in_place.begin(uuid, "shelve_offload", {}),
            plane.deleter().delete,
            lambda uuid: None,
        ]
        for number, uuid in enumerate(made):
            actions[number % 5](uuid)
        for number, uuid in enumerate(made):
            if number % 5 == 3:
                plane.wait_status(uuid, "gone")
            else:
                self.settle(plane, uuid)
        move(made[2], "unshelve")
        self.settle(plane, made[2])

    def test_after_one_period_every_scheduler_knows_what_the_store_knows(self) -> None:
        plane = Plane(
            self,
            transport=self.open,
            scheduling__scheduler_instance_sync_interval=-1,
            scheduling__heal_timeout=2.0,
        )
        weather = Weather(seeded())
        plane.carry = weather.carry
        plane.enrol(dict.fromkeys(HOSTS, 1), vcpus=cases(32))
        for host in HOSTS:
            plane.start(Agent(), host)
        for name in ("scheduler-1", "scheduler-2"):
            plane.start(SchedulerRole(), name)
        self.run_through(plane)
        weather.end()
        for kind in ("lost", "double", "late"):
            self.assertGreater(weather.counts[kind], 0, weather.counts)
        for host in HOSTS:
            plane.roles[host].sync_instances()
        plane.wait_agreement()


class LocalTests(_LostMessages):
    def open(self, conf: Any, clock: Clock, folder: str) -> Transport:
        return LocalTransport(conf=conf, url=f"local://{folder}/rpc", clock=clock)


class RabbitmqTests(_LostMessages):
    def open(self, conf: Any, clock: Clock, folder: str) -> Transport:
        return OsloTransport(conf=conf, url=servers.shared("rabbitmq").url, clock=clock)


def load_tests(loader: unittest.TestLoader, tests: unittest.TestSuite, pattern: str | None) -> unittest.TestSuite:
    """Not by themselves."""
    return unittest.TestSuite(loader.loadTestsFromTestCase(each) for each in (LocalTests, RabbitmqTests))
