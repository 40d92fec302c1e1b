# SPDX-License-Identifier: Apache-2.0
"""Agents that fall silent and nodes that are taken out of service, in a control plane of real processes.

Schedulers read the whole fleet only every 60 seconds here.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import requests

from moorage.cli import main
from tests import servers
from tests.commands import in_process
from tests.functional.control_plane.test_slice import SliceCase, flavor

DOWN_TIME = 6.0
#: Seconds after which a change must have reached every scheduler.
REACH = 2.0


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
refresh_interval = 60
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

    def moorage(self, *words: str) -> Any:
        status, said, _ = in_process(main.main, [*words, "--state-dir", str(self.plane.state), "-f", "json"])
        self.assertEqual(0, status, said)
        return json.loads(said)

    def test_a_silent_agent_gets_nothing_after_its_down_time_and_again_when_it_is_back(self) -> None:
        stream = Stream(self)
        self.addCleanup(stream.end)
        servers.wait_until(lambda: len(stream.hosts_after(0)) == 2, "both agents get instances", 60)
        pid = self.plane.processes()["agent-1"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        paused = time.monotonic()
        try:
            late = paused + DOWN_TIME + REACH
            servers.wait_until(
                lambda: len([each for each in stream.accepted if each[0] > late]) >= 20, "20 creates", 60
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
            60,
        )
        back = time.monotonic()
        servers.wait_until(lambda: "agent-1" in stream.hosts_after(continued), "it gets instances again", 60)
        self.assertLess(time.monotonic() - back, REACH)
        stream.end()
        for _, uuid, _ in stream.accepted:
            self.wait_active(uuid)

    def wait_active(self, uuid: str) -> None:
        servers.wait_until(lambda: self.api.instance(uuid)["status"] == "active", f"{uuid} is active", 60)

    def test_a_node_in_maintenance_or_disabled_gets_nothing_within_two_seconds(self) -> None:
        node = self.api.create_instance(flavor(VCPU=1))["node"]
        for out, back in (
            (lambda: self.ironic("PUT", node, {"reason": "disk"}), lambda: self.ironic("DELETE", node)),
            (
                lambda: self.moorage("node", "set", node, "--disable", "--disable-reason", "old"),
                lambda: self.moorage("node", "set", node, "--enable"),
            ),
        ):
            stream = Stream(self)
            out()
            moment = time.monotonic() + REACH
            servers.wait_until(lambda: [each for each in stream.accepted if each[0] > moment], "time passes", 60)  # noqa: B023
            stream.end()
            nodes = {self.api.instance(uuid)["node"] for asked, uuid, _ in stream.accepted if asked > moment}
            self.assertNotIn(node, nodes)
            fleet = {each["node"]: each for each in self.api.hosts()}
            self.assertFalse(fleet[node]["enabled"])
            self.assertRegex(fleet[node]["disabled_reason"], "in maintenance .disk.|disabled .old.")
            back()
            servers.wait_until(lambda: {each["node"]: each for each in self.api.hosts()}[node]["enabled"], "back", 2)
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
