# SPDX-License-Identifier: Apache-2.0
"""The network of a simulation, under transport ``memory``: messages take time, get lost, come twice, come late, meet partitions.

A message arrives by a timer of the kernel and waits in the receiver's queues, whose threads are the receiver's own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from moorage import errors, threads
from moorage.rpc.interface import Message
from moorage.rpc.queues import OfferResult, WorkQueue
from moorage_plugins.transports.memory import MemoryTransport, MessageHub
from moorage_plugins.transports.memory_network import Network, Parcel
from tests.simulation.kernel import Kernel, Process

__all__ = ["SimNetwork", "SimTransport", "Weather"]


@dataclass
class Weather:
    """How often what happens to a message; probabilities. ``late`` draws a delay of up to ``latest`` seconds."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    latest: float = 30.0
    reply_lost: float = 0.0


@dataclass
class _Call:
    """A call on its way."""

    parcel: Parcel
    timeout: float
    #: The true second from which nobody waits for the answer.
    until: float
    done: Any
    reply: bytes | None = None
    error: Exception | None = None


@dataclass
class _Queues:
    """Where messages of one listener wait; the bounds of transport ``memory``."""

    requests: WorkQueue[Any]
    fanouts: WorkQueue[Any]


@dataclass
class SimNetwork(Network):
    """Carries messages between simulated processes.

    :ivar cuts: (source, target) between which nothing gets through; one way each.
    :ivar counts: how often what happened.
    """

    kernel: Kernel
    random: random.Random
    weather: Weather = field(default_factory=Weather)
    cuts: set[tuple[str, str]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    hub: MessageHub = field(default_factory=MessageHub)
    #: Processes by the name under which they listen.
    owners: dict[str, Process] = field(default_factory=dict)
    _queues: dict[int, _Queues] = field(default_factory=dict)

    def transport(self, conf: Any, clock: Any, process: Process) -> SimTransport:
        """The transport of a process; its listeners go with the process."""
        made = SimTransport(conf=conf, url="memory://", clock=clock, hub=self.hub, network=self, name=process.name)
        self.owners[process.name] = process
        process.on_kill.append(lambda: self.forget(made))
        return made

    def forget(self, transport: SimTransport) -> None:
        """The process of the transport listens no more."""
        for subscription in transport.subscriptions:
            self.hub.remove(subscription)

    @override
    def post(self, parcel: Parcel) -> None:
        self._offered(parcel, fanout=False)

    def fan(self, parcel: Parcel) -> None:
        """One copy of a fanout."""
        self._offered(parcel, fanout=True)

    @override
    def call(self, parcel: Parcel, timeout: float) -> bytes:
        return self.begin_call(parcel, timeout)()

    @override
    def begin_call(self, parcel: Parcel, timeout: float) -> Callable[[], bytes]:
        call = _Call(parcel, timeout, self.kernel.now + timeout, threads.event())
        # Nobody waits for what a replay is answered.
        replay = _Call(parcel, timeout, call.until, threads.event())
        self._send(parcel, lambda: self._ask(call), lambda: self._ask(replay))

        def receive() -> bytes:
            if not call.done.wait(max(0.0, call.until - self.kernel.now)):
                raise errors.CallTimeout(
                    f"A call to topic '{parcel.topic}' was not answered within {timeout:g} seconds."
                )
            if call.error is not None:
                raise call.error
            return call.reply or b""

        return receive

    # -- inside ---------------------------------------------------------------------------------------------------

    def _offered(self, parcel: Parcel, *, fanout: bool) -> None:
        def arrive() -> None:
            self._offer(parcel, fanout=fanout)

        self._send(parcel, arrive, arrive)

    def _send(self, parcel: Parcel, arrive: Callable[[], None], again: Callable[[], None]) -> None:
        """Let a message arrive, and perhaps a second time, as from a broker that was not told of the first.

        A broker finds that out when a connection has ended, so replays are late more often than not.
        """
        what = f"{parcel.source}>{parcel.target.owner}"
        self.kernel.point("send", what, guarded=True)
        self._carry(parcel.source, parcel.target.owner, arrive, self.weather.lost)
        if self.random.random() < self.weather.doubled:
            self.counts["doubled"] += 1
            self._carry(parcel.source, parcel.target.owner, again, 0.0, max(0.6, self.weather.late))

    def _carry(
        self, source: str, target: str, arrive: Callable[[], None], lost: float, late: float | None = None
    ) -> None:
        if (source, target) in self.cuts:
            self.counts["cut"] += 1
            return
        if self.random.random() < lost:
            self.counts["lost"] += 1
            return
        delay = 0.0005 + 0.003 * self.random.random()
        if self.random.random() < (self.weather.late if late is None else late):
            self.counts["late"] += 1
            delay = self.weather.latest * self.random.random() ** 2
        self.kernel.later(delay, arrive)

    def _offer(self, parcel: Parcel, *, fanout: bool) -> None:
        process = self.owners[parcel.target.owner]
        if not process.alive or not parcel.target.alive:
            return
        queues = self._queues_of(parcel, process)
        queue = queues.fanouts if fanout else queues.requests
        self.kernel.call_as(process, lambda: queue.offer((parcel, None), len(parcel.encoded)))

    def _ask(self, call: _Call) -> None:
        parcel = call.parcel
        process = self.owners[parcel.target.owner]
        if not process.alive or not parcel.target.alive:
            call.error = errors.NoListener(f"No service serves topic '{parcel.topic}' there.")
            call.done.set()
            return
        queue = self._queues_of(parcel, process).requests
        if self.kernel.call_as(process, lambda: queue.offer((parcel, call), len(parcel.encoded))) is OfferResult.FULL:
            call.error = errors.Busy(f"The queue of topic '{parcel.topic}' is full.")
            call.done.set()

    def _queues_of(self, parcel: Parcel, process: Process) -> _Queues:
        found = self._queues.get(id(parcel.target))
        if found is None:
            found = self._queues[id(parcel.target)] = self.kernel.call_as(process, lambda: self._made(parcel))
        return found

    def _made(self, parcel: Parcel) -> _Queues:
        target: Any = parcel.target
        bounds: dict[str, Any] = {"limit": 10_000, "byte_limit": 1 << 26, "clock": target._transport.clock}
        name = f"rpc-{target.topic}"
        return _Queues(
            WorkQueue(self._work, threads=4, name=name, **bounds),
            WorkQueue(self._work, threads=1, name=f"{name}-fanout", drop_oldest=True, **bounds),
        )

    def _work(self, item: tuple[Parcel, _Call | None]) -> None:
        parcel, call = item
        if call is None:
            parcel.target.handle_now(parcel.encoded, None)
            return
        left = call.until - self.kernel.now
        if left <= 0:
            return  # as the transports do

        def send(reply: bytes) -> None:
            self.kernel.point("reply", parcel.target.owner, guarded=True)

            def arrive() -> None:
                call.reply = reply
                call.done.set()

            self._carry(parcel.target.owner, parcel.source, arrive, self.weather.reply_lost)

        parcel.target.handle_call(parcel.encoded, left, send)


class SimTransport(MemoryTransport):
    """Transport ``memory`` over a :class:`SimNetwork`."""

    @property
    def subscriptions(self) -> list[Any]:
        """What is served."""
        return self._subscriptions

    @override
    def fanout(self, topic: str, message: Message) -> None:
        network: Any = self._network
        encoded = self._encode(topic, message)
        for subscription in self.hub.of(topic):
            network.fan(Parcel(self.name, topic, subscription, encoded))
