# SPDX-License-Identifier: Apache-2.0
"""A Redfish emulator with the machines of a fleet, for tests of the driver redfish."""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oslo_config import cfg

from moorage.clock import SystemClock
from moorage.drivers.interface import DriverTools, Machine
from moorage.options import defaults
from moorage_plugins.drivers import options
from moorage_plugins.drivers.redfish.driver import RedfishDriver
from tests.servers.kinds import Redfish

__all__ = ["FAST", "Fleet", "machine_of", "make_driver", "set_options", "system_of"]

#: Options with which nothing waits for long.
FAST = {"timeout": 60.0, "power_timeout": 60.0, "shutdown_timeout": 60.0, "poll_interval": 0.0}


def set_options(conf: cfg.ConfigOpts, **more: Any) -> None:
    """Sets options of ``[driver_redfish]``: those of :data:`FAST`, and more."""
    for name, value in {**FAST, **more}.items():
        conf.set_override(name, value, group=options.REDFISH_GROUP.name)


def make_driver(state_dir: str, machines: Sequence[Machine], **settings: Any) -> RedfishDriver:
    """A driver of the host host-1 that manages these machines."""
    conf = defaults(control_plane={"state_dir": state_dir}, driver_redfish={**FAST, **settings})
    return RedfishDriver(DriverTools(conf, SystemClock(), "host-1", lambda: machines))


def system_of(machine: Machine) -> str:
    """The uuid that the emulator knows a machine by."""
    return str(machine.driver_info["redfish_system_id"]).rpartition("/")[2]


def machine_of(server: Redfish, number: int, **info: Any) -> Machine:
    """The node of a machine of the emulator, by its number from 1 on."""
    return Machine(
        uuid=str(uuid.uuid5(uuid.NAMESPACE_OID, f"node {number}")),
        name=f"node-{number}",
        driver="redfish",
        driver_info={**server.driver_info(str(uuid.UUID(int=number))), **info},
    )


class Fleet:
    """Two hosts that have a machine each for every node. Instances get nodes one after the other.

    :param folder: keeps which instance has which node, also for processes that are forked.
    """

    def __init__(self, server: Redfish, folder: Path) -> None:
        self._server = server
        self._half = server.MACHINES // 2
        self._lock = threading.Lock()
        self._folder = folder

    def machines(self, host: str) -> list[Machine]:
        """Those of a host; the nodes of both hosts have the same uuids."""
        shift = 0 if host == "host-1" else self._half
        return [
            dataclasses.replace(
                machine_of(self._server, number), driver_info=machine_of(self._server, number + shift).driver_info
            )
            for number in range(1, self._half + 1)
        ]

    def node_of(self, instance: str) -> str:
        """The node of an instance, which it gets with the first call."""
        path = self._folder / instance
        with self._lock:
            if not path.exists():
                path.write_text(str(len(os.listdir(self._folder)) % self._half))
        return self.machines("host-1")[int(path.read_text())].uuid

    def copies(self, host: str, instance: str) -> list[tuple[str, int]]:
        """The machine of an instance, and how often it was turned on, where it is on now."""
        node = self.node_of(instance)
        (machine,) = (each for each in self.machines(host) if each.uuid == node)
        system = system_of(machine)
        found = self._server.machines()[system]
        return [(system, found["boots"])] if found["power_state"] == "On" else []
