# SPDX-License-Identifier: Apache-2.0
"""Transport ``memory``: the threads of one process; for tests, for everything in one process, and for simulations.

Messages are turned to JSON and back, so that what works here works with the other transports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from oslo_config import cfg
from typing_extensions import override

from moorage import errors
from moorage import threads as threads_module
from moorage.clock import Clock
from moorage.rpc import options, wire
from moorage.rpc.interface import (
    API_VERSION,
    BOUNDED,
    KNOWS_LISTENERS,
    ORDERED,
    Handler,
    Message,
    Subscription,
    Transport,
)
from moorage.rpc.queues import OfferResult, WorkQueue
from moorage_plugins.transports.memory_network import Listener, Network, Parcel

__all__ = ["MessageHub", "MemoryTransport"]


class MessageHub:
    """Who listens; the transports of one hub reach each other."""

    def __init__(self) -> None:
        self._lock = threads_module.lock()
        self._topics: dict[str, dict[str, _Subscription]] = {}
        self._turn = 0

    def add(self, subscription: _Subscription) -> None:
        """Listen; raises AlreadyExists when the name is taken."""
        with self._lock:
            served = self._topics.setdefault(subscription.topic, {})
            if subscription.server in served:
                raise errors.AlreadyExists(
                    f"Topic '{subscription.topic}' is served under the name '{subscription.server}'; choose another name."
                )
            served[subscription.server] = subscription

    def remove(self, subscription: _Subscription) -> None:
        """Listen no more."""
        with self._lock:
            served = self._topics.get(subscription.topic, {})
            if served.get(subscription.server) is subscription:
                del served[subscription.server]

    def of(self, topic: str) -> list[_Subscription]:
        """Returns all that serve a topic, sorted by name."""
        with self._lock:
            return [self._topics[topic][name] for name in sorted(self._topics.get(topic, ()))]

    def candidates(self, topic: str, server: str | None) -> list[_Subscription]:
        """Returns the servers that may take a call or cast, the next in turn first; raises NoListener if there is none."""
        found = [one for one in self.of(topic) if server in (None, one.server)]
        if not found:
            wanted = f"server '{server}' of topic '{topic}'" if server else f"topic '{topic}'"
            raise errors.NoListener(f"No service serves {wanted} in this process. Start one.")
        with self._lock:
            self._turn += 1
            first = self._turn % len(found)
        return found[first:] + found[:first]


@dataclass(slots=True)
class _Job:
    """A message that waits for a thread; ``done`` is set when a call's reply is there."""

    encoded: bytes
    until: float | None = None
    reply: bytes | None = None
    done: threads_module.Event = field(default_factory=threads_module.event)

    def answer(self, reply: bytes) -> None:
        """Stores the reply, and wakes the caller."""
        self.reply = reply
        self.done.set()


class _Subscription(Subscription, Listener):
    """A served topic, with threads or, in a simulation, without."""

    def __init__(self, transport: MemoryTransport, topic: str, server: str, handler: Handler, threads: int) -> None:
        self.topic = topic
        self.server = server
        self.owner = transport.name
        self._transport = transport
        self._handler = handler
        self._stopped = False
        bounds: dict[str, Any] = {
            "limit": transport.queue_limit,
            "byte_limit": 4 * transport.max_bytes,
            "clock": transport.clock,
        }
        name = f"rpc-{topic}-{server}"
        self._requests = WorkQueue(self._work, threads=threads, name=name, **bounds)
        self._fanouts = WorkQueue(self._work_fanout, threads=1, name=f"{name}-fanout", drop_oldest=True, **bounds)

    @override
    def stop(self, drain_seconds: float) -> bool:
        if self._stopped:
            return True
        self._stopped = True
        self._transport.hub.remove(self)
        until = self._transport.clock.monotonic() + drain_seconds
        done, never_begun = self._requests.stop(drain_seconds)
        fanouts_done, _dropped = self._fanouts.stop(max(0.0, until - self._transport.clock.monotonic()))
        for job in never_begun:
            job.answer(wire.refusal(errors.NoListener(f"Server '{self.server}' of topic '{self.topic}' stopped.")))
        return done and fanouts_done

    @property
    @override
    def alive(self) -> bool:
        return not self._stopped

    @override
    def handle_now(self, encoded: bytes, timeout: float | None) -> bytes:
        """Handle in the thread of the caller (a simulation has no others) and return the reply."""
        message = wire.message_from_data(wire.load(encoded, "message"), timeout)
        if timeout is None:
            wire.absorb(self._handler, message, self.topic)
            return b'{"result":null}'
        return wire.answer(self._handler, message, self._transport.max_bytes)

    @override
    def handle_call(self, encoded: bytes, timeout: float, send: Callable[[bytes], None]) -> None:
        message = wire.message_from_data(wire.load(encoded, "message"), timeout)
        wire.answer_once(self._handler, message, self._transport.max_bytes, send)

    def request(self, job: _Job) -> None:
        """Queue a call or a cast; raises Busy or NoListener."""
        offer = self._requests.offer(job, len(job.encoded))
        if offer is OfferResult.FULL:
            raise errors.Busy(
                f"Server '{self.server}' of topic '{self.topic}' has {self._requests.waiting} messages waiting."
            )
        if offer is OfferResult.STOPPED:
            raise errors.NoListener(f"Server '{self.server}' of topic '{self.topic}' is stopping.")

    def post(self, encoded: bytes) -> None:
        """Queue a fanout; drops the oldest when full."""
        self._fanouts.offer(encoded, len(encoded))

    def _work(self, job: _Job) -> None:
        if job.until is None:
            self.handle_now(job.encoded, None)
            return
        left = job.until - self._transport.clock.monotonic()
        if left > 0:
            self.handle_call(job.encoded, left, job.answer)

    def _work_fanout(self, encoded: bytes) -> None:
        self.handle_now(encoded, None)


_hubs: dict[str, MessageHub] = {}
_hubs_lock = threads_module.lock()


class MemoryTransport(Transport):
    """Messages inside one process; transports with the same ``memory://NAME`` reach each other.

    :param hub: used instead of the one of the URL's name.
    :param network: a simulated network; then there are no threads, and messages move when the network says so.
    :param name: of the simulated process, for partitions of that network.
    """

    api_version = API_VERSION
    capabilities = frozenset({KNOWS_LISTENERS, ORDERED, BOUNDED})

    def __init__(
        self,
        *,
        conf: cfg.ConfigOpts,
        url: str,
        clock: Clock,
        hub: MessageHub | None = None,
        network: Network | None = None,
        name: str = "",
    ) -> None:
        options.register_opts(conf)
        self.clock = clock
        self.max_bytes: int = conf.rpc.max_message_bytes
        self.queue_limit: int = conf.rpc.queue_limit
        self.name = name
        self.hub = hub if hub is not None else _hub_of(url)
        self._network = network
        self._subscriptions: list[_Subscription] = []
        self._closed = False

    @override
    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        self._check_open()
        subscription = _Subscription(self, topic, server, handler, threads)
        self.hub.add(subscription)
        self._subscriptions.append(subscription)
        return subscription

    @override
    def call(self, topic: str, message: Message, *, server: str | None = None, timeout: float) -> Any:
        return self.begin_call(topic, message, server=server, timeout=timeout)()

    @override
    def begin_call(
        self, topic: str, message: Message, *, server: str | None = None, timeout: float
    ) -> Callable[[], Any]:
        encoded = self._encode(topic, message)
        candidates = self.hub.candidates(topic, server)
        if self._network is not None:
            receive = self._network.begin_call(Parcel(self.name, topic, candidates[0], encoded), timeout)
        else:
            until = self.clock.monotonic() + timeout
            job = _Job(encoded, until)
            _to_first(candidates, job)

            def receive() -> bytes:
                if not self.clock.wait(job.done, until - self.clock.monotonic()) or job.reply is None:
                    raise errors.CallTimeout(
                        f"'{message.method}' to topic '{topic}' was not answered within {timeout:g} seconds."
                    )
                return job.reply

        return lambda: wire.result_of(wire.load(receive(), "reply"))

    @override
    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        encoded = self._encode(topic, message)
        candidates = self.hub.candidates(topic, server)
        if self._network is not None:
            self._network.post(Parcel(self.name, topic, candidates[0], encoded))
        else:
            _to_first(candidates, _Job(encoded))

    @override
    def fanout(self, topic: str, message: Message) -> None:
        encoded = self._encode(topic, message)
        for subscription in self.hub.of(topic):
            if self._network is not None:
                self._network.post(Parcel(self.name, topic, subscription, encoded))
            else:
                subscription.post(encoded)

    @override
    def listeners(self, topic: str) -> Sequence[str]:
        return [subscription.server for subscription in self.hub.of(topic)]

    @override
    def close(self) -> None:
        self._closed = True
        for subscription in self._subscriptions:
            subscription.stop(0.0)

    def _encode(self, topic: str, message: Message) -> bytes:
        self._check_open()
        what = f"message '{message.method}' to topic '{topic}'"
        return wire.dump(wire.message_to_data(message), self.max_bytes, what)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.TransportError("This transport was closed; the service is stopping.")


def _to_first(candidates: Sequence[_Subscription], job: _Job) -> None:
    """Give the job to the first that takes it; raises the refusal of the last, or Busy when one was."""
    refused: errors.TransportError | None = None
    for subscription in candidates:
        try:
            subscription.request(job)
            return
        except (errors.NoListener, errors.Busy) as error:
            refused = refused if isinstance(refused, errors.Busy) else error
    if refused is not None:
        raise refused


def _hub_of(url: str) -> MessageHub:
    name = urlsplit(url).netloc
    with _hubs_lock:
        return _hubs.setdefault(name, MessageHub())
