# SPDX-License-Identifier: Apache-2.0
"""Agents that fall silent and nodes that are taken out of service, in a control plane of real processes.

Schedulers read the whole fleet only once an hour here, so that nothing but the look at states tells them of a change.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import requests

from moorage import errors
from moorage.cli import main
from tests import servers
from tests.commands import in_process
from tests.functional.control_plane.test_slice import SliceCase, flavor
from tests.pausing import pause

DOWN_TIME = 10.0
SCHEDULERS = ("scheduler-1", "scheduler-2")
PATIENCE = 90.0


class Stream:
    """Creates instances one after the other in a thread; (when it was accepted, uuid, host) of each."""

    def __init__(self, case: StateTests) -> None:
        self.accepted: list[tuple[float, str, str]] = []
        self._stop = threading.Event()
        self._case = case
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        api = self._case.plane.connect()
        while not self._stop.is_set():
            asked = time.monotonic()
            made = api.create_instance(flavor(VCPU=1))
            self.accepted.append((asked, made["uuid"], made["host"]))
            self._stop.wait(0.2)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()

    def hosts_after(self, moment: float) -> set[str]:
        return {host for asked, _, host in self.accepted if asked > moment}


class StateTests(SliceCase):
    schedulers = 2
    agents = 2
    extra = f"""
[scheduling]
refresh_interval = 3600
[control_plane]
stopped_timeout = 0
[services]
report_interval = 1
service_down_time = {DOWN_TIME:g}
"""

    @classmethod
    def setUpClass(cls) -> None:
        # A paused process may hold a transaction open: on SQLite it would stop all the others.
        url = servers.fresh_database(servers.shared("postgresql"))
        cls.extra = f"{cls.extra}[database]\nconnection = {url}\n"
        super().setUpClass()
        cls.api.import_nodes([{"name": f"node-{number}", "inventories": {"VCPU": 1000}} for number in range(8)])
        servers.wait_until(lambda: all(host["capacity"]["VCPU"] == 1000 for host in cls.api.hosts()), "room", 90)

    def state_of(self, host: str) -> str:
        return str(self.api.services(binary="agent", host=host)[0]["state"])

    def wait_seen(self, what: str, wanted: Callable[[dict[str, Any]], bool], field: str, value: bool) -> None:
        """Wait until every scheduler sees the value in all of the hosts that are wanted."""
        sender = self.sender()

        def seen(scheduler: str) -> set[bool]:
            with contextlib.suppress(errors.TransportError, errors.Unavailable):
                hosts = sender.call("scheduler", "list_hosts", {}, server=scheduler, timeout=30)
                return {each[field] for each in hosts if wanted(each)}
            return set()

        for scheduler in SCHEDULERS:
            servers.wait_until(lambda name=scheduler: seen(name) == {value}, f"{what} for {scheduler}", PATIENCE)  # type: ignore[misc]

    def moorage(self, *words: str) -> Any:
        status, said, _ = in_process(main.main, [*words, "--state-dir", str(self.plane.state), "-f", "json"])
        self.assertEqual(0, status, said)
        return json.loads(said)

    def test_a_silent_agent_gets_nothing_after_its_down_time_and_again_when_it_is_back(self) -> None:
        stream = Stream(self)
        self.addCleanup(stream.end)
        servers.wait_until(lambda: len(stream.hosts_after(0)) == 2, "both agents get instances", 60)
        pid = self.plane.processes()["agent-1"]["pid"]
        pause(pid, f"sqlite:///{self.plane.state / 'moorage.sqlite'}")
        paused = time.monotonic()
        try:
            self.wait_seen("agent-1 to be down", lambda each: each["host"] == "agent-1", "up", False)
            late = time.monotonic()
            servers.wait_until(
                lambda: len([each for each in stream.accepted if each[0] > late]) >= 20, "20 creates", 120
            )
            self.assertEqual({"agent-2"}, stream.hosts_after(late))
            # What the paused agent was given before it was known to be down is built elsewhere.
            for _, uuid, _ in [each for each in stream.accepted if each[0] > paused]:
                self.wait_active(uuid)
        finally:
            os.kill(pid, signal.SIGCONT)
        continued = time.monotonic()
        servers.wait_until(
            lambda: self.plane.processes()["agent-1"]["pid"] not in (None, pid) and self.state_of("agent-1") == "up",
            "the agent is back",
            PATIENCE,
        )
        servers.wait_until(lambda: "agent-1" in stream.hosts_after(continued), "it gets instances again", PATIENCE)
        stream.end()
        for _, uuid, _ in stream.accepted:
            self.wait_active(uuid)

    def wait_active(self, uuid: str) -> None:
        servers.wait_until(lambda: self.api.instance(uuid)["status"] == "active", f"{uuid} is active", 60)

    def test_a_node_in_maintenance_or_disabled_gets_nothing_before_the_next_refresh(self) -> None:
        node = self.api.create_instance(flavor(VCPU=1))["node"]
        for out, back in (
            (lambda: self.ironic("PUT", node, {"reason": "disk"}), lambda: self.ironic("DELETE", node)),
            (
                lambda: self.moorage("node", "disable", node, "--reason", "old"),
                lambda: self.moorage("node", "enable", node),
            ),
        ):
            stream = Stream(self)
            self.addCleanup(stream.end)
            out()
            self.wait_seen("the node to be disabled", lambda each: each["node"] == node, "enabled", False)
            moment = time.monotonic()
            servers.wait_until(
                lambda: len([each for each in stream.accepted if each[0] > moment]) >= 20,  # noqa: B023
                "20 creates",
                PATIENCE,
            )
            stream.end()
            nodes = {self.api.instance(uuid)["node"] for asked, uuid, _ in stream.accepted if asked > moment}
            self.assertNotIn(node, nodes)
            fleet = {each["node"]: each for each in self.api.hosts()}
            self.assertFalse(fleet[node]["enabled"])
            self.assertRegex(fleet[node]["disabled_reason"], "in maintenance .disk.|disabled .old.")
            back()
            self.wait_seen("the node to be enabled", lambda each: each["node"] == node, "enabled", True)
        shown = self.moorage("node", "show", node)
        self.assertEqual((False, False, ""), (shown["maintenance"], shown["disabled"], shown["disabled_reason"]))

    def ironic(self, method: str, node: str, body: Any = None) -> None:
        answer = requests.request(
            method,
            f"{self.plane.data['url']}/baremetal/v1/nodes/{node}/maintenance",
            json=body,
            headers={"X-OpenStack-Ironic-API-Version": "1.82"},
            auth=(self.plane.data["username"], self.plane.data["password"]),
            timeout=60,
        )
        self.assertEqual(202, answer.status_code, answer.text)
