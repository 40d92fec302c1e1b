# SPDX-License-Identifier: Apache-2.0
"""What tests of operations on instances share: a control plane in one process, and what is true when it has come to rest."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa

from moorage.control_plane.factories import open_workers
from moorage.drivers.interface import DriverError
from moorage.instances.agent_messages import cast_to_agent
from moorage.instances.in_place import InPlace
from moorage.instances.interface import DEPARTURE, Instance
from moorage.services.tables import services
from moorage_plugins.drivers.simulated import SimulatedDriver
from tests import hypervisors
from tests.functional.scheduling.plane import SOON, Plane
from tests.servers import wait_until


class OperationTestCase(unittest.TestCase):
    """A control plane of two schedulers and an agent for each of ``hosts``, with what operations on instances need."""

    url = ""
    hosts: ClassVar[tuple[str, ...]] = ("h1", "h2")
    settings: ClassVar[Mapping[str, Any]] = {}

    def setUp(self) -> None:
        self.plane = Plane(self, url=self.url, **self.settings)
        self.plane.up(self.hosts, schedulers=2)
        workers = open_workers(self.plane.client, self.plane.conf)
        self.in_place = InPlace(
            self.plane.database, self.plane.instances, workers, cast_to_agent(self.plane.client.sender)
        )

    def made(self, vcpus: int = 2, **extra_specs: str) -> str:
        request = self.plane.request(vcpus)
        request["flavor"]["extra_specs"] = extra_specs
        args = {"request": request, "request_id": request["uuid"]}
        uuid: str = self.plane.ask("create_instance", args)["uuid"]
        self.plane.wait_status(uuid, "active")
        return uuid

    def move(self, uuid: str, operation: str, request_id: str = "r", **wanted: Any) -> Mapping[str, Any]:
        args = {"instance_uuid": uuid, "operation": operation, "wanted": wanted, "request_id": request_id}
        found: Mapping[str, Any] = self.plane.ask("move_instance", args)
        return found

    def instance(self, uuid: str) -> Instance:
        return self.plane.instances.get(uuid)

    def running(self) -> dict[str, set[str]]:
        """Host -> what there is on its hypervisor."""
        return {host: {each.uuid for each in hypervisors.found(self.plane.folder, host)} for host in self.hosts}

    def leave(self, uuid: str, host: str, request_id: str = "leave") -> None:
        """The instance moves to a host; the agent of its present host stops before it has let go of the instance."""
        source = self.instance(uuid).host
        refuse = mock.patch.object(SimulatedDriver, "destroy", side_effect=DriverError("It cannot be destroyed now."))
        # Neither by the operation nor by a sweep.
        with refuse:
            self.move(uuid, "live_migrate", request_id, host=host)
            wait_until(
                lambda: self.instance(uuid).host == host and self.plane.status(uuid) == "active", "it moved", SOON
            )
            self.plane.stop(source)

    def executing(self, uuid: str) -> list[str]:
        """The hosts whose hypervisors execute an instance."""
        return hypervisors.executing(self.plane.folder, uuid)

    def assert_whole(self) -> None:
        """Rows, claims, hypervisors and the views of all schedulers agree, and nothing is in progress."""
        plane = self.plane
        self.wait_departures()
        rows = {each.uuid: each for each in plane.instances.list()}
        placed = {uuid: each for uuid, each in rows.items() if each.status not in ("error", "shelved_offloaded")}
        held: dict[str, dict[str, int]] = {}
        for item in plane.store.allocations():
            self.assertEqual(placed[item.consumer].node_uuid, item.provider)
            held.setdefault(item.consumer, {})[item.resource_class] = item.used
        self.assertEqual(held, {uuid: dict(each.resources) for uuid, each in placed.items()})
        wait_until(
            lambda: self.running() == {h: {u for u, r in placed.items() if r.host == h} for h in self.hosts},
            "hypervisors run what the rows say",
            SOON,
        )
        plane.wait_agreement()
        workers = open_workers(plane.client, plane.conf)
        self.assertEqual([workers.get("instance", uuid) for uuid in rows], [None] * len(rows))

    def wait_departures(self) -> None:
        """The sources of all moves have let go."""
        names = {each.consumer for each in self.plane.store.allocations()} | {
            each.uuid for each in self.plane.instances.list()
        }
        workers = open_workers(self.plane.client, self.plane.conf)
        for uuid in names:
            wait_until(lambda uuid=uuid: workers.get(DEPARTURE, uuid) is None, "the source has let go", SOON)  # type: ignore[misc]

    def silence(self, host: str) -> None:
        """Let the last heartbeat of the host's agent be older than service_down_time, as if the agent were paused."""
        self.plane.stop(host)
        with self.plane.database.write() as tx:
            tx.execute(
                sa.update(services).where(services.c.host == host).values(beat_at=services.c.beat_at - 60_000_000)
            )

    def on_h1(self, **extra_specs: str) -> str:
        request = self.plane.request(2, requested_host="h1")
        request["flavor"]["extra_specs"] = extra_specs
        uuid: str = self.plane.ask("create_instance", {"request": request, "request_id": request["uuid"]})["uuid"]
        self.plane.wait_status(uuid, "active")
        return uuid

    def held(self) -> dict[tuple[str, str], int]:
        """(consumer, provider) -> VCPUs."""
        return {
            (item.consumer, item.provider): item.used
            for item in self.plane.store.allocations()
            if item.resource_class == "VCPU"
        }
