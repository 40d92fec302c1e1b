# SPDX-License-Identifier: Apache-2.0
"""Services of two neighbouring releases at once: each process of a role is older or newer, and is upgraded when it starts again.

An older process does not know the messages that a later release brought: newer senders give these a later version, which the
dispatcher of an older receiver refuses, and an older process does not send them. An older agent tells schedulers nothing, and says
nothing of the powers of its driver. Schedulers read what is on its host from the store. It refuses the message of a build that
brings the instance, and an older scheduler does not send one that does.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.rpc.interface import Handler, Message, Subscription
from moorage.scheduling.resource_request import needed_powers
from moorage.scheduling.scheduler import Scheduler
from moorage.scheduling.snapshot import Snapshot
from tests.simulation.kernel import Process
from tests.simulation.network import SimTransport
from tests.simulation.workloads.placement import HOSTS, SCHEDULERS, Placement

__all__ = ["Versions"]

#: What agents tell schedulers of their instances.
TOLD = frozenset({"update_instance_info", "delete_instance_info", "sync_instance_info"})
#: Messages of the later release, and the version that they have.
LATER = frozenset({"claimed_instances", "states_changed", "look_at_instance", "let_go_instance"})
OLDER, NEWER = "1.0", "1.1"
#: Seconds for which a scheduler believes what it has read of hosts whose agents tell nothing.
AGE = 5.0


class _Older:
    """Changes the transport of an older process."""

    def __init__(self, transport: SimTransport, *, tells: bool) -> None:
        self._fanout = transport.fanout
        self._cast = transport.cast
        self._serve = transport.serve
        self._sends = LATER if tells else LATER | TOLD
        transport.fanout = self.fanout  # type: ignore[method-assign]
        transport.cast = self.cast  # type: ignore[method-assign]
        transport.serve = self.serve  # type: ignore[method-assign]

    def fanout(self, topic: str, message: Message) -> None:
        """As the transport, without what this release does not send."""
        if message.method not in self._sends:
            self._fanout(topic, message)

    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        """As the transport, without what this release does not send."""
        if message.method in self._sends:
            return
        if message.method == "build_instance":
            message = dataclasses.replace(message, args={"instance_uuid": message.args["instance_uuid"]})
        self._cast(topic, message, server=server)

    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        """As the transport; a dispatcher refuses arguments that its release does not know."""

        def handle(message: Message) -> Any:
            if message.method == "build_instance" and len(message.args) > 1:
                raise errors.InvalidInput("The arguments of 'build_instance' do not fit.")
            return handler(message)

        return self._serve(topic, server, handle, threads=threads)


class _Newer:
    """Changes the transport of a newer process: it sends and takes messages of both versions."""

    def __init__(self, transport: SimTransport) -> None:
        self._fanout, self._cast, self._serve = transport.fanout, transport.cast, transport.serve
        transport.fanout = self.fanout  # type: ignore[method-assign]
        transport.cast = self.cast  # type: ignore[method-assign]
        transport.serve = self.serve  # type: ignore[method-assign]

    def fanout(self, topic: str, message: Message) -> None:
        """As the transport, with the version of the message."""
        self._fanout(topic, _versioned(message))

    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        """As the transport, with the version of the message."""
        self._cast(topic, _versioned(message), server=server)

    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        """As the transport; the dispatcher of the present release serves what it knows in any of its versions."""

        def handle(message: Message) -> Any:
            return handler(dataclasses.replace(message, version=OLDER))

        return self._serve(topic, server, handle, threads=threads)


def _versioned(message: Message) -> Message:
    return dataclasses.replace(message, version=NEWER) if message.method in LATER else message


class Versions(Placement):
    """As :class:`Placement`; at least one process is older."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {**Placement.settings, ("scheduling", "silent_hosts_age"): AGE}
    seconds: ClassVar[float] = 30.0

    @override
    def begin(self) -> None:
        #: Roles that have been upgraded by their last start, or were new from the beginning.
        self._upgraded = {each for each in (*HOSTS, *SCHEDULERS) if self.random.random() < 0.5}
        if len(self._upgraded) == len(HOSTS) + len(SCHEDULERS):
            self._upgraded.discard(self.random.choice((*HOSTS, *SCHEDULERS)))
        self._asked = False
        super().begin()

    @override
    def make_platform(self, role: Any, process: Process, name: str) -> Any:
        older, agent = name not in self._upgraded, role.binary == "agent"
        if older and self.random.random() < 0.5:
            # Its next start is that of the later release.
            self._upgraded.add(name)
        self.kernel.note("version", f"{process.name}: {OLDER if older else NEWER}")
        made = self.world.platform(
            process, role.binary, cluster=self.cluster_of(name), offers=["compute"] if older and agent else None
        )
        transport: Any = made.transport
        if older:
            _Older(transport, tells=not agent)
        else:
            _Newer(transport)
        return made

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        super().check_step()
        self.check_moves()

    def check_moves(self) -> None:
        """No agent that says nothing of powers takes part in a move with steps."""
        moving = self.rows("SELECT uuid, host, pending FROM instances WHERE status IN ('migrating', 'resizing')")
        if not moving:
            return
        older = {
            row[0]
            for row in self.rows(
                "SELECT host FROM services WHERE \"binary\" = 'agent' AND offers NOT LIKE '%compute.powers%'"
            )
        }
        for uuid, host, text in moving:
            pending = json.loads(text)
            both = {host, pending.get("host", host)}
            self.require(
                "phase" not in pending or not both & older, f"instance {uuid} moves between {both}; older are {older}"
            )

    @override
    def check_refusal(self, scheduler: Scheduler, fleet: Snapshot, work: Any, began: float) -> None:
        # Nodes with an older agent are left out where a request needs powers.
        if not needed_powers(work.spec):
            super().check_refusal(scheduler, fleet, work, began)

    @override
    def quiet(self) -> str:
        if not self._asked:
            self._asked = True
            self.client("asker", self._ask)
        return super().quiet()

    def _ask(self, process: Process) -> None:
        """Asks each scheduler for a decision again and again: it reads then what is on hosts whose agents tell nothing."""
        platform = self.world.platform(process, "api", beats=False)
        flavor = {"flavorid": "f1", "resources": {"VCPU": 1}}
        args = {"request": {"uuid": "a0000000-0000-4000-8000-000000000000", "flavor": flavor}, "count": 1}
        while True:
            for name in platform.transport.listeners("scheduler") or ():
                try:
                    platform.sender.call("scheduler", "select", args, server=name)
                except errors.MoorageError as error:
                    self.kernel.note("refused", type(error).__name__)
            platform.clock.sleep(AGE / 2)
