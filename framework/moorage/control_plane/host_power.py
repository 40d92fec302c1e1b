# SPDX-License-Identifier: Apache-2.0
"""Turns the machines of a host off, with the fencing drivers that its nodes name."""

from __future__ import annotations

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors
from moorage.clock import Clock
from moorage.control_plane.node_machines import machines_of
from moorage.drivers.interface import FENCING_DRIVERS, DriverError
from moorage.fleet.nodes import NodeStore

__all__ = ["HostPower"]

LOG = logging.getLogger(__name__)
#: More nodes than one request can turn off.
_MOST = 100


class HostPower:
    """Turns hosts off. Nothing is written; who fences a host does that afterwards."""

    def __init__(self, nodes: NodeStore, conf: cfg.ConfigOpts, clock: Clock) -> None:
        self._nodes = nodes
        self._conf = conf
        self._clock = clock

    def turn_off(self, host: str) -> str:
        """Turns the machine of each node of a host off; a sentence for the journal when all are seen to be off.

        :raises Conflict: one is not seen to be off, or it is not known how to turn it off. Others may be off by then.
        """
        machines = {each.uuid: each for each in machines_of(self._nodes, {"host": host})}
        nodes = self._nodes.list(host=host, limit=_MOST + 1)
        if not nodes or len(nodes) > _MOST:
            raise self._refused(host, f"it has {len(nodes) or 'no'} nodes, and 1 to {_MOST} can be turned off")
        if without := [node.name for node in nodes if node.uuid not in machines]:
            raise self._refused(
                host,
                f"node {', '.join(without[:3])} names no driver that could turn it off. Give it one: moorage node import with "
                "driver and driver_info",
            )
        names = sorted({each.driver for each in machines.values()})
        try:
            drivers = {name: FENCING_DRIVERS.load(name).build(self._conf, self._clock) for name in names}
        except errors.MoorageError as error:
            raise self._refused(host, f"its machines cannot be turned off: {error.message}") from error
        for node in nodes:
            machine = machines[node.uuid]
            try:
                drivers[machine.driver].turn_off(machine)
            except DriverError as error:
                raise self._refused(host, f"node {node.name} is not seen to be off: {error}") from error
            LOG.warning("The machine of node %s was turned off, to fence host %s.", node.name, host)
        return f"seen off by {', '.join(names)}: {', '.join(node.name for node in nodes)}"

    def _refused(self, host: str, why: str) -> errors.Conflict:
        return errors.Conflict(
            f"Host {host} is not fenced: {why.removesuffix('.')}. If you know by yourself that the host is off, fence it without "
            "--power-off.",
            host=host,
        )
