# SPDX-License-Identifier: Apache-2.0
"""One of two schedulers is killed while requests run: each is answered once and for all, and both views are right afterwards."""

from __future__ import annotations

import os
import signal
import threading
import uuid

from moorage import errors
from moorage.rpc.client import RpcSender
from tests import cases, servers
from tests.functional.control_plane.test_slice import SliceCase, flavor

SCHEDULERS = ("scheduler-1", "scheduler-2")
KILLS = 1 if cases(1) == 1 else 6
CLIENTS = 4


class KilledSchedulerTests(SliceCase):
    schedulers = 2

    def view(self, sender: RpcSender, scheduler: str) -> dict[str, list[str]] | None:
        """Host -> instances, as that scheduler sees them; None while it cannot be asked."""
        try:
            hosts = {each["host"] for each in sender.call("scheduler", "list_hosts", {}, server=scheduler, timeout=30)}
            return {
                host: sender.call("scheduler", "show_host", {"host": host}, server=scheduler, timeout=30)["instances"]
                for host in hosts
            }
        except (errors.TransportError, errors.Unavailable):
            return None

    def kill(self, scheduler: str) -> None:
        before = self.plane.processes()[scheduler]["pid"]
        os.kill(before, signal.SIGKILL)
        servers.wait_until(
            lambda: self.plane.processes()[scheduler]["pid"] not in (None, before), f"{scheduler} is started again", 90
        )

    def ask_until(
        self, ended: threading.Event, client: int, outcomes: dict[str, str | None], faults: list[str]
    ) -> None:
        """Ask for more than there is room for, and to the end of the kills; instance -> its node, None when refused."""
        api = self.plane.connect()
        number = 0
        while number < 5 or not ended.is_set():
            name = str(uuid.UUID(int=client * 10_000 + number, version=4))
            number += 1
            try:
                outcomes[name] = api.create_instance({"uuid": name, **flavor(VCPU=2)})["node"]
            except errors.NoValidHost:
                outcomes[name] = None
            except errors.MoorageError as error:
                faults.append(f"{type(error).__name__}: {error.message}")

    def test_every_request_is_answered_and_every_view_is_right(self) -> None:
        outcomes: dict[str, str | None] = {}
        faults: list[str] = []
        ended = threading.Event()
        threads = [
            threading.Thread(target=self.ask_until, args=(ended, number, outcomes, faults))
            for number in range(1, CLIENTS + 1)
        ]
        for each in threads:
            each.start()
        servers.wait_until(lambda: len(outcomes) >= 3, "some are answered", 90)
        try:
            for number in range(KILLS):
                self.kill(SCHEDULERS[number % 2])
        finally:
            ended.set()
        for each in threads:
            each.join()

        self.assertEqual(faults, [])
        placed = {name for name, node in outcomes.items() if node is not None}
        # What was answered is what is there: nothing more, nothing less, and to the last place (8 nodes of 4, instances of 2).
        self.assertEqual({each["uuid"] for each in self.api.instances()}, placed)
        self.assertEqual(len(placed), 16)
        servers.wait_until(lambda: {each["status"] for each in self.api.instances()} == {"active"}, "all are built", 90)
        used: dict[str, int] = {}
        for item in self.api.allocations():
            used[item["provider"]] = used.get(item["provider"], 0) + item["used"]
        self.assertEqual(sorted(used.values()), [4] * 8)
        self.check_views()

    def check_views(self) -> None:
        wanted: dict[str, list[str]] = {each["host"]: [] for each in self.api.hosts()}
        for each in self.api.instances():
            wanted[each["host"]].append(each["uuid"])
        wanted = {host: sorted(there) for host, there in wanted.items()}
        sender = self.sender()
        for scheduler in SCHEDULERS:
            servers.wait_until(lambda name=scheduler: self.view(sender, name) == wanted, f"{scheduler} is right", 150)  # type: ignore[misc]
