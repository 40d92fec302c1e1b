# SPDX-License-Identifier: Apache-2.0
"""A control plane on one machine with the driver redfish, over an emulator of BMCs."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import tempfile
import unittest
import warnings
from typing import Any, ClassVar

import openstack
from keystoneauth1 import http_basic, session

from moorage import client, errors
from moorage.cli import main
from tests import servers
from tests.commands import in_process
from tests.functional.compute.bmcs import machine_of, system_of
from tests.functional.control_plane.test_slice import Plane, flavor
from tests.servers import wait_until
from tests.servers.kinds import Redfish

SOON = 120.0


class PlaneCase(unittest.TestCase):
    """Two machines, the nodes ``node-1`` and ``node-2`` of one agent."""

    server: ClassVar[Redfish]
    plane: ClassVar[Plane]
    api: ClassVar[client.Client]
    extra = (
        "[agent]\nenrol = false\nsweep_interval = 0.5\n[compute]\ndriver = redfish\n"
        "[driver_redfish]\npoll_interval = 0\ntimeout = 60\n"
    )

    @classmethod
    def setUpClass(cls) -> None:
        servers.require("redfish")
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.server = cls.enterClassContext(servers.redfish())
        cls.plane = Plane(pathlib.Path(folder), cls.extra)
        cls.addClassCleanup(cls.plane.end)
        ready = cls.plane.wait_ready()
        assert ready.startswith("moorage is ready at http://127.0.0.1:"), (ready, cls.plane.end())
        cls.api = cls.plane.connect()
        cls.api.import_nodes([cls.node(number) for number in (1, 2)])
        wait_until(lambda: sum(host["up"] for host in cls.api.hosts()) == 2, "two nodes", SOON)

    @classmethod
    def node(cls, number: int) -> dict[str, Any]:
        """As a file of nodes has it."""
        machine = machine_of(cls.server, number)
        return {
            "uuid": machine.uuid, "name": machine.name, "driver": machine.driver, "driver_info": machine.driver_info,
            "resource_class": "CUSTOM_METAL", "inventories": {"CUSTOM_METAL": 1},
        }  # fmt: skip

    def real(self, number: int) -> tuple[str, int]:
        found = self.server.machines()[system_of(machine_of(self.server, number))]
        return found["power_state"], found.get("boots", 0)

    def settled(self, uuid: str) -> dict[str, Any]:
        def is_settled() -> bool:
            found = self.api.instance(uuid)
            return found["status"] in ("active", "error", "stopped") and not found["pending"]

        wait_until(is_settled, "the end of the operation", SOON)
        return dict(self.api.instance(uuid))

    def made(self) -> dict[str, Any]:
        created = self.api.create_instance(flavor(CUSTOM_METAL=1))
        return self.settled(created["uuid"])

    def delete(self, uuid: str) -> None:
        self.api.delete_instance(uuid)

        def gone() -> bool:
            with contextlib.suppress(errors.NotFound):
                self.api.instance(uuid)
                return False
            return True

        wait_until(gone, "the deletion", SOON)


class RedfishPlaneTests(PlaneCase):
    def test_an_instance_has_a_machine_until_it_is_deleted(self) -> None:
        first, second = self.made(), self.made()
        self.assertEqual(("active", "active"), (first["status"], second["status"]), (first["fault"], second["fault"]))
        self.assertEqual({"node-1", "node-2"}, {first["node"], second["node"]})
        self.assertEqual(("On", "On"), (self.real(1)[0], self.real(2)[0]))
        with self.assertRaises(errors.MoorageError):
            self.api.create_instance(flavor(CUSTOM_METAL=1))
        number = int(first["node"][-1])
        self.delete(first["uuid"])
        self.assertEqual(("Off", "On"), (self.real(number)[0], self.real(3 - number)[0]))
        self.delete(second["uuid"])
        self.assertEqual("Off", self.real(3 - number)[0])

    def test_a_machine_outlives_its_agent_and_is_stopped_and_started(self) -> None:
        found = self.made()
        number, uuid = int(found["node"][-1]), found["uuid"]
        power, boots = self.real(number)
        before = self.plane.processes()["agent-1"]
        os.kill(before["pid"], signal.SIGKILL)
        wait_until(lambda: self.plane.processes()["agent-1"]["restarts"] > before["restarts"], "another agent", SOON)
        self.assertEqual((power, boots), self.real(number))
        self.api.act_on_instance(uuid, "stop")
        self.assertEqual(("stopped", "stopped"), tuple(self.settled(uuid)[each] for each in ("status", "actual_state")))
        self.assertEqual(("Off", boots), self.real(number))
        self.api.act_on_instance(uuid, "start")
        self.assertEqual(("active", "running"), tuple(self.settled(uuid)[each] for each in ("status", "actual_state")))
        self.assertEqual(("On", boots + 1), self.real(number))
        self.delete(uuid)
        self.assertEqual("Off", self.real(number)[0])

    def test_a_resize_goes_to_another_machine_of_the_agent(self) -> None:
        found = self.made()
        number, uuid = int(found["node"][-1]), found["uuid"]
        self.api.act_on_instance(uuid, "resize", flavor("large", CUSTOM_METAL=1))
        settled = self.settled(uuid)
        self.assertEqual(
            ("active", "", "large", f"node-{3 - number}"),
            tuple(settled[each] for each in ("status", "fault", "flavorid", "node")),
        )
        self.assertEqual(("Off", "On"), (self.real(number)[0], self.real(3 - number)[0]))
        self.delete(uuid)
        self.assertEqual("Off", self.real(3 - number)[0])


class BaremetalStateTests(PlaneCase):
    """What Ironic's clients see of the nodes, and what nova-compute concludes from it."""

    metal: ClassVar[Any]
    url: ClassVar[str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.url = f"{cls.plane.data['url']}/baremetal"
        cls.enterClassContext(warnings.catch_warnings())
        # What the SDK says of its own future is none of ours.
        warnings.simplefilter("ignore")
        auth = http_basic.HTTPBasicAuth(cls.url, cls.plane.data["username"], cls.plane.data["password"])
        connection = openstack.connection.Connection(
            session=session.Session(auth=auth), baremetal_endpoint_override=cls.url
        )
        cls.addClassCleanup(connection.close)
        cls.metal = connection.baremetal

    def setUp(self) -> None:
        for number in (1, 2):
            self.server.change(system_of(machine_of(self.server, number)), power_state="Off", mute=False)

    def seen(self, name: str) -> tuple[Any, ...]:
        node = self.metal.get_node(name)
        return node.power_state, node.provision_state, node.target_power_state, node.fault

    def await_seen(self, name: str, *wanted: Any) -> None:
        try:
            wait_until(lambda: self.seen(name) == wanted, "the states", SOON)
        except AssertionError:
            self.assertEqual(wanted, self.seen(name))

    def is_available_to_nova(self, name: str) -> bool:
        """By the rule of nova's IronicDriver: _node_resources_used and _node_resources_unavailable."""
        node = self.metal.get_node(name)
        unavailable = (
            node.is_maintenance
            or node.power_state in ("error", None)
            or node.provision_state not in ("available", None)
        )
        return node.instance_id is None and not unavailable

    def test_nova_compute_sees_nodes_with_their_power_and_what_is_free(self) -> None:
        for name in ("node-1", "node-2"):
            self.await_seen(name, "power off", "available", None, None)
            self.assertTrue(self.is_available_to_nova(name))
        found = self.made()
        self.await_seen(found["node"], "power on", "active", None, None)
        self.assertFalse(self.is_available_to_nova(found["node"]))
        self.assertEqual(1, sum(map(self.is_available_to_nova, ("node-1", "node-2"))))
        self.api.act_on_instance(found["uuid"], "stop")
        self.await_seen(found["node"], "power off", "active", None, None)
        self.delete(found["uuid"])
        self.await_seen(found["node"], "power off", "available", None, None)
        self.assertTrue(self.is_available_to_nova(found["node"]))

    def test_a_node_whose_power_cannot_be_seen_is_in_error_and_not_available(self) -> None:
        machine = system_of(machine_of(self.server, 2))
        self.await_seen("node-2", "power off", "available", None, None)
        self.server.change(machine, mute=True)
        self.await_seen("node-2", "error", "available", None, "power failure")
        self.assertIn("does not say whether the machine is on", self.metal.get_node("node-2").last_error)
        self.assertFalse(self.is_available_to_nova("node-2"))
        self.assertTrue(self.is_available_to_nova("node-1"))
        self.server.change(machine, mute=False)
        self.await_seen("node-2", "power off", "available", None, None)
        self.assertIsNone(self.metal.get_node("node-2").last_error)

    def test_a_node_that_a_client_enrols_becomes_available_when_its_power_is_seen(self) -> None:
        machine = machine_of(self.server, 3)
        node = self.metal.create_node(driver="redfish", name="node-3", driver_info=dict(machine.driver_info))
        self.assertEqual((None, "enroll"), (node.power_state, node.provision_state))
        self.await_seen("node-3", "power off", "available", None, None)
        self.assertEqual("******", self.metal.get_node("node-3").driver_info["redfish_password"])
        wrong = {**machine.driver_info, "redfish_password": "wrong"}
        self.metal.create_node(driver="redfish", name="node-4", driver_info=wrong)
        self.await_seen("node-4", "error", "enroll", None, "power failure")
        self.assertIn("does not accept the user name and password", self.metal.get_node("node-4").last_error)
        for name in ("node-3", "node-4"):
            self.metal.delete_node(name)

    def test_a_change_of_power_is_one_event_and_a_period_without_change_is_none(self) -> None:
        machine = machine_of(self.server, 1)
        self.await_seen("node-1", "power off", "available", None, None)

        def events() -> list[str]:
            query = {"subject": f"node/{machine.uuid}", "limit": 1000}
            found = self.api.request("GET", "/events", query=query)["events"]
            self.assertNotIn(self.server.password, str(found))
            return [each["state"]["power_state"] for each in found if each["state"]["power_state"]]

        self.server.change(system_of(machine), power_state="On")
        self.await_seen("node-1", "power on", "available", None, None)
        # Of this node the agent has seen nothing new since, however often it looked.
        self.server.change(system_of(machine_of(self.server, 2)), power_state="On")
        self.await_seen("node-2", "power on", "available", None, None)
        wait_until(lambda: events()[-1:] == ["power on"], "the event", SOON)
        self.assertEqual([power for power, _ in itertools.groupby(events())], events())


class FenceCommandTests(PlaneCase):
    extra = PlaneCase.extra + "[services]\nservice_down_time = 2\n"

    def moorage(self, *words: str) -> tuple[int, str, str]:
        return in_process(main.main, [*words, "--state-dir", str(self.plane.state)])

    def test_the_host_of_an_agent_that_is_silent_is_turned_off_and_fenced_until_it_starts(self) -> None:
        found = self.made()
        number = int(found["node"][-1])
        fence = ("host", "fence", "agent-1", "--reason", "smoke", "--power-off", "-f", "json")
        status, _, said = self.moorage(*fence)
        self.assertNotEqual(0, status)
        self.assertIn("its agent is not declared dead", said)
        self.assertEqual("On", self.real(number)[0])
        agent = self.plane.processes()["agent-1"]
        os.kill(agent["pid"], signal.SIGSTOP)
        try:
            self.assertEqual(0, self.moorage("service", "set", "agent:agent-1", "--forced-down")[0])
            # It may have beaten just now.
            wait_until(lambda: not self.moorage(*fence)[0], "the fence", SOON)
            self.assertEqual("Off", self.real(number)[0])
            (row,) = self.api.services(binary="agent", host="agent-1")
            self.assertTrue(row["fenced"])
            self.assertRegex(row["fence_reason"], r"\Asmoke \(seen off by redfish: .*node-")
        finally:
            os.kill(agent["pid"], signal.SIGCONT)
        wait_until(lambda: self.plane.processes()["agent-1"]["restarts"] > agent["restarts"], "another agent", SOON)
        wait_until(lambda: not self.api.services(binary="agent", host="agent-1")[0]["fenced"], "its start", SOON)
        self.assertEqual(0, self.moorage("service", "set", "agent:agent-1", "--up")[0])
        wait_until(lambda: self.api.instance(found["uuid"])["actual_state"] == "ended", "what is seen", SOON)
        self.delete(found["uuid"])
