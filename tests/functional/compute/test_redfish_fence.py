# SPDX-License-Identifier: Apache-2.0
"""Fences by driver: the machines of a dead host are turned off through their BMCs, and only then the host is fenced."""

from __future__ import annotations

import unittest
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import sqlalchemy as sa
from oslo_config import cfg

from moorage import errors
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.control_plane.host_power import HostPower
from moorage.db import MICROSECONDS
from moorage.db.tables import events
from moorage.drivers.interface import Machine
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.http.routes import Request
from moorage.services import api
from moorage.services.interface import Service
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.services.tables import services
from moorage_plugins.drivers import options
from tests import servers
from tests.functional.compute.bmcs import machine_of, set_options, system_of
from tests.functional.db.databases import TablesCase
from tests.servers.kinds import Redfish

DOWN_TIME = 60.0


class FenceCase(TablesCase):
    """The host's agent is declared dead and has been silent for long; its two machines are on."""

    server: ClassVar[Redfish]

    @classmethod
    def setUpClass(cls) -> None:
        servers.require("redfish")
        super().setUpClass()
        cls.server = cls.enterClassContext(servers.redfish())

    def setUp(self) -> None:
        super().setUp()
        self.host = f"host-{uuid.uuid4().hex[:8]}"
        self.registry = ServiceRegistry(self.database, SystemClock())
        self.nodes = NodeStore(self.database)
        self.agent = self.registry.enlist("agent", self.host, rpc_version="1.0").uuid
        self.registry.set(self.agent, forced_down=True)
        self.silence()
        self.machines = [machine_of(self.server, number) for number in (1, 2)]
        self.names = []
        for machine in self.machines:
            self.server.change(system_of(machine), power_state="On", deaf=False, refuses=False, mute=False, delay=0.0)
            self.names.append(self.add(driver="redfish", driver_info=dict(machine.driver_info)))

    def add(self, **details: Any) -> str:
        found = str(uuid.uuid4())
        spec = NodeSpec(found, f"node-{found[:8]}", host=self.host, details=details)
        self.database.run(lambda tx: self.nodes.insert(tx, spec))
        return spec.name

    def silence(self, seconds: float = 3600.0) -> None:
        with self.database.write() as tx:
            mine = services.c.uuid == self.agent
            beat_at = services.c.beat_at - int(seconds * MICROSECONDS)
            tx.execute(sa.update(services).where(mine).values(beat_at=beat_at))

    def power(self, after: Callable[[], object] = lambda: None, **settings: Any) -> Callable[[str], str]:
        """Turns hosts off.

        :param after: what happens before the fence is written.
        """
        conf = cfg.ConfigOpts()
        conf.register_opts(options.REDFISH_OPTS, group=options.REDFISH_GROUP.name)
        conf([], default_config_files=[], default_config_dirs=[])
        set_options(conf, **settings)
        turn_off = HostPower(self.nodes, conf, SystemClock()).turn_off

        def work(host: str) -> str:
            how = turn_off(host)
            after()
            return how

        return work

    def fence(self, turn_off: Callable[[str], str] | None = None, reason: str = "smoke") -> Service:
        routes = api.routes(
            self.registry, LivenessObserver(SystemClock(), DOWN_TIME), lambda: None, turn_off or self.power()
        )
        route = next(each for each in routes if each.path.endswith("/fence"))
        context = RequestContext(user_id="ada", overwrite=False)
        route.handler(
            Request(context=context, path_params={"uuid": self.agent}, body={"reason": reason, "power_off": True})
        )
        return self.registry.get(self.agent)

    def assert_refused(self, said: str, turn_off: Callable[[str], str] | None = None) -> str:
        before = self.registry.get(self.agent).epoch
        with self.assertRaisesRegex(errors.Conflict, said) as raised:
            self.fence(turn_off)
        found = self.registry.get(self.agent)
        self.assertFalse(found.fenced)
        self.assertLessEqual(before, found.epoch)
        return str(raised.exception)

    def real(self) -> list[str]:
        found = self.server.machines()
        return [found[system_of(machine)]["power_state"] for machine in self.machines]

    def change(self, machine: Machine, **members: Any) -> None:
        self.server.change(system_of(machine), **members)

    def test_all_machines_are_off_before_the_host_is_fenced(self) -> None:
        seen: list[list[str]] = []
        found = self.fence(self.power(lambda: seen.append([*self.real(), str(self.registry.get(self.agent).fenced)])))
        self.assertEqual([["Off", "Off", "False"]], seen)
        self.assertTrue(found.fenced)
        self.assertIn("smoke (seen off by redfish: ", found.fence_reason)
        for name in self.names:
            self.assertIn(name, found.fence_reason)
        with self.database.read() as tx:
            told = [
                row.state
                for row in tx.execute(sa.select(events).where(events.c.subject == f"service/{self.agent}"))
                if row.kind == "service.fence"
            ]
        self.assertEqual([found.fence_reason], [each["fence_reason"] for each in told])
        self.assertNotIn(self.server.password, str(told))
        # Again: they are off already, and the reason is the newer one.
        self.assertEqual(found.epoch, self.fence(reason="fire").epoch)
        self.assertIn("fire (", self.registry.get(self.agent).fence_reason)

    def test_a_machine_that_seems_off_and_is_about_to_be_on_is_off_in_the_end(self) -> None:
        self.change(self.machines[0], power_state="Off", delay=3600.0)
        requests = self.server.machines()[system_of(self.machines[0])]
        self.assertIsNone(requests["pending_power"])
        self.change(self.machines[0], pending_power={"power_state": "On", "apply_time": 2**40}, delay=0.0)
        self.assertTrue(self.fence().fenced)
        self.assertIsNone(self.server.machines()[system_of(self.machines[0])]["pending_power"])

    def test_a_machine_that_is_not_seen_off_fences_nothing(self) -> None:
        last = self.machines[1]
        for broken, said in (
            ({"deaf": True}, "was to be turned off, and its BMC has not said so"),
            ({"refuses": True}, "refused or failed"),
            ({"mute": True}, "was to be turned off, and its BMC has not said so"),
        ):
            self.change(last, power_state="On", deaf=False, refuses=False, mute=False)
            self.change(last, **broken)
            message = self.assert_refused(said, self.power(power_timeout=0.2))
            self.assertIn(f"node {self.names[1]} is not seen to be off", message)
            self.assertIn("without --power-off", message)
            self.assertNotIn(self.server.password, message)

    def test_a_bmc_that_is_away_or_refuses_the_password_fences_nothing(self) -> None:
        self.server.kill()
        try:
            self.assert_refused("does not answer", self.power(timeout=5.0))
        finally:
            self.server.restart()
        self.server.pause()
        try:
            self.assert_refused("does not answer", self.power(timeout=0.5))
        finally:
            self.server.resume()
        info = {**self.machines[0].driver_info, "redfish_password": "wrong"}
        self.add(driver="redfish", driver_info=info)
        self.assert_refused("does not accept the user name and password")

    def test_an_agent_that_starts_in_between_is_not_fenced(self) -> None:
        def start() -> None:
            self.registry.enlist("agent", self.host, rpc_version="1.0")
            self.silence()

        self.assert_refused("its agent started again", self.power(start))

    def test_an_agent_that_beats_although_its_host_seems_off_is_not_fenced(self) -> None:
        """The BMC lies, or it is the BMC of another machine."""
        self.assert_refused("its agent beat .* so its host is not off", self.power(lambda: self.silence(-3600.0)))

    def test_an_agent_that_is_believed_again_in_between_is_not_fenced(self) -> None:
        up = self.power(lambda: self.registry.set(self.agent, forced_down=False))
        self.assert_refused("its agent is not declared dead", up)

    def test_a_host_of_a_living_agent_is_not_turned_off(self) -> None:
        self.registry.set(self.agent, forced_down=False)
        self.assert_refused("its agent is not declared dead")
        self.assertEqual(["On", "On"], self.real())

    def test_a_host_whose_nodes_do_not_say_how_is_refused_before_anything_is_turned_off(self) -> None:
        name = self.add()
        self.assert_refused(f"node {name} names no driver that could turn it off")
        self.assertEqual(["On", "On"], self.real())

    def test_a_driver_that_is_not_installed_is_named(self) -> None:
        self.names.append(self.add(driver="ipmi", driver_info={}))
        self.assert_refused("Plugin 'ipmi' in group moorage.fencing_drivers: no installed distribution offers it")
        self.assertEqual(["On", "On"], self.real())


class SqliteTests(FenceCase, unittest.TestCase):
    pass


class PostgresqlTests(FenceCase, unittest.TestCase):
    kind = "postgresql"


class MariadbTests(FenceCase, unittest.TestCase):
    kind = "mariadb"
