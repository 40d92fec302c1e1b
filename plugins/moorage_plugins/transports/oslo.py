# SPDX-License-Identifier: Apache-2.0
"""Transport ``oslo``: several machines, through RabbitMQ or what else oslo.messaging drives.

How it maps: a served topic is two oslo.messaging servers, one for calls and casts (the topic), one with a single thread for
fanouts (the topic with ``.fanout`` added), because one server with a pool does not keep order. The header (origin, and for a call
the time its sender waits) is the context key ``moorage``, so that method and arguments stay as any oslo.messaging service
writes and reads them: a message without the key is a foreign one, it has no origin, and gets a bare reply.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moorage_plugins.transports import oslo_backend  # before oslo_messaging

# isort: split
import oslo_messaging
from oslo_config import cfg
from oslo_log import log as logging
from oslo_messaging import opts as oslo_messaging_opts
from typing_extensions import override

from moorage import errors
from moorage import threads as threads_module
from moorage.clock import Clock
from moorage.rpc import options, wire
from moorage.rpc.interface import (
    API_VERSION,
    CROSS_HOST,
    CROSS_PROCESS,
    ORDERED,
    QUEUES_FOR_ABSENT,
    Handler,
    Message,
    Subscription,
    Transport,
)
from moorage.rpc.queues import OfferResult, WorkQueue

__all__ = ["OsloTransport"]

LOG = logging.getLogger(__name__)

_HEADER = "moorage"
_FANOUT = ".fanout"
#: Where a broker listens whose URL does not say.
_PORT = 5672
_LAST_PORT = 65535
#: Threads that wait for replies; they are started when needed.
_CALL_THREADS = 64
#: Tries to reach the broker for a call, with back-off 1, 2, 4 ... seconds.
_CALL_RETRIES = 3
#: Seconds for which close() sends what is queued, and then closes connections.
_FLUSH_SECONDS = 1.0
_CLOSE_SECONDS = 5.0

# oslo.messaging reads these groups from the configuration it is given, but registers them only with the global one, and
# leaves them out of list_opts() (seen in 18.3.1).
_FORGOTTEN_GROUPS = (
    ("oslo_messaging._metrics.client", "oslo_messaging_metrics"),
    ("oslo_messaging._tracing.client", "oslo_messaging_tracing"),
)


@dataclass(slots=True)
class _Job:
    """A call on its way; ``outcome`` returns the reply or raises."""

    work: Callable[[], Any]
    until: float
    outcome: Callable[[], Any] | None = None
    done: threads_module.Event = field(default_factory=threads_module.event)


class _Dispatcher(oslo_messaging.RPCDispatcher):  # type: ignore[misc]  # oslo.messaging ships no types
    """Gives every incoming message to one handler."""

    def __init__(self, handler: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
        super().__init__([], None)
        self._handler = handler

    @override
    def dispatch(self, incoming: Any) -> Any:
        context = dict(incoming.ctxt)
        # Put there by oslo.messaging on its way, not by the sender.
        context.pop("client_timeout", None)
        return self._handler(incoming.message, context)


class _Subscription(Subscription):
    """Two oslo.messaging servers, and a bounded queue for the fanouts."""

    def __init__(
        self, engine: _Engine, topic: str, server: str, handler: Handler, threads: int, queue_limit: int, clock: Clock
    ) -> None:
        self._handler = handler
        self._topic = topic
        self._limit = engine.max_bytes
        self._clock = clock
        self._pid = os.getpid()
        self._stopping = threads_module.lock()
        self._stopped = False
        # oslo.messaging queues without bound in front of its threads; a fanout handler that stands still must not eat memory.
        self._fanouts: WorkQueue[Message] = WorkQueue(
            self._absorb,
            threads=1,
            limit=queue_limit,
            byte_limit=4 * self._limit,
            name=f"rpc-{topic}-{server}-fanout",
            clock=clock,
            drop_oldest=True,
        )
        self._requests = engine.server(topic, server, _Dispatcher(self._request))
        self._fanout_server = engine.server(topic + _FANOUT, server, _Dispatcher(self._fanout))
        self._begin(engine, topic, server, threads)

    def _begin(self, engine: _Engine, topic: str, server: str, threads: int) -> None:
        """Start both servers; oslo.messaging waits for the broker without bound, so it does in a thread of its own."""
        begun = threads_module.event()
        failed: list[Exception] = []

        def begin() -> None:
            try:
                self._requests.start(override_pool_size=threads)
                self._fanout_server.start(override_pool_size=1)
            except Exception as error:  # noqa: BLE001  (raised again in the thread that serves)
                failed.append(error)
            with self._stopping:
                begun.set()
            if self._stopped and not failed:
                # No call waits any more.
                _end(self._requests)
                _end(self._fanout_server)

        threads_module.thread(begin, name="rpc-oslo-serve").start()
        self._clock.wait(begun, engine.connect_timeout)
        with self._stopping:
            self._stopped = late = not begun.is_set()
        if late:
            self._fanouts.stop(0.0)
            raise errors.TransportError(
                f"No message broker let server '{server}' listen to topic '{topic}' within {engine.connect_timeout:g} seconds; "
                f"[rpc] transport_url names {engine.brokers}. Does it run there, and are user, password and virtual host right?"
            )
        for error in failed:
            self._fanouts.stop(0.0)
            if not isinstance(error, oslo_messaging.MessagingException):
                raise error
            raise errors.TransportError(
                f"The message broker ({engine.brokers}) does not let server '{server}' listen to topic '{topic}' ({error}). Where "
                "queues of another kind were used before ([oslo_messaging_rabbit] rabbit_quorum_queue and the like), use a new "
                "vhost."
            ) from error

    @override
    def stop(self, drain_seconds: float) -> bool:
        if self._pid != os.getpid():
            return True
        with self._stopping:
            if self._stopped:
                return True
            self._stopped = True
        until = self._clock.monotonic() + drain_seconds
        # oslo.messaging waits without bound for handlers that run, so it waits in threads of its own.
        waiters = [
            threads_module.thread(_end, name="rpc-oslo-stop", args=(server,))
            for server in (self._requests, self._fanout_server)
        ]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            # Closing alone takes some tenths of a second, which is not draining.
            waiter.join(max(2.0, until - self._clock.monotonic()))
        fanouts_done, _dropped = self._fanouts.stop(max(0.0, until - self._clock.monotonic()))
        return fanouts_done and not any(waiter.is_alive() for waiter in waiters)

    def _request(self, body: dict[str, Any], context: dict[str, Any]) -> Any:
        header = context.pop(_HEADER, None)
        if not isinstance(header, dict):
            return self._foreign(body, context)
        try:
            message = _message(body, context, header)
        except errors.InvalidInput as error:
            return {"refused": errors.to_wire(error)}
        if message.timeout is None:
            wire.absorb(self._handler, message, self._topic)
            return None
        return json.loads(wire.answer(self._handler, message, self._limit))

    def _foreign(self, body: dict[str, Any], context: dict[str, Any]) -> Any:
        """A bare message: bare reply, and errors as oslo.messaging carries them, without its log of tracebacks."""
        try:
            return self._handler(_message(body, context, {}))
        except Exception as error:  # noqa: BLE001  (whatever a handler raises is answered)
            shown = error if isinstance(error, errors.MoorageError) else wire.unexpected(str(body.get("method")), error)
            try:
                raise shown.with_traceback(None) from None
            except errors.MoorageError:
                raise oslo_messaging.ExpectedException from None

    def _fanout(self, body: dict[str, Any], context: dict[str, Any]) -> None:
        header = context.pop(_HEADER, None)
        try:
            message = _message(body, context, header if isinstance(header, dict) else {})
        except errors.InvalidInput as error:
            LOG.warning("A fanout to topic '%s' was not understood: %s", self._topic, error)
            return
        # The size was bounded by its sender; a mean of some kB is near enough for the bound of this queue.
        self._fanouts.offer(message, 4096)

    def _absorb(self, message: Message) -> None:
        wire.absorb(self._handler, message, self._topic)


class _Engine:
    """oslo.messaging's objects in one process."""

    def __init__(self, conf: cfg.ConfigOpts, url: str, clock: Clock) -> None:
        self.max_bytes: int = conf.rpc.max_message_bytes
        self.connect_timeout: float = conf.rpc.connect_timeout
        self._clock = clock
        self._transport = oslo_backend.open_url(oslo_messaging.get_rpc_transport, conf, url, "[rpc]")
        #: Where the brokers are, to be shown; without user and password.
        self.brokers = ", ".join(
            f"{each.hostname}:{each.port or _PORT}" for each in oslo_messaging.TransportURL.parse(conf, url).hosts
        )
        _refuse_nowhere(url, oslo_messaging.TransportURL.parse(conf, url).hosts)
        self._client = oslo_messaging.get_rpc_client(self._transport, oslo_messaging.Target())
        bounds: dict[str, Any] = {"limit": conf.rpc.queue_limit, "byte_limit": 4 * self.max_bytes, "clock": clock}
        self._calls: WorkQueue[_Job] = WorkQueue(self._run, threads=_CALL_THREADS, name="rpc-oslo-call", **bounds)
        self._casts: WorkQueue[Callable[[], None]] = WorkQueue(_post, threads=1, name="rpc-oslo-cast", **bounds)
        self._fanouts: WorkQueue[Callable[[], None]] = WorkQueue(
            _post, threads=1, name="The message broker", drop_oldest=True, **bounds
        )

    def server(self, topic: str, server: str, dispatcher: _Dispatcher) -> Any:
        """Returns an oslo.messaging server that is not started."""
        made = oslo_messaging.get_rpc_server(self._transport, oslo_messaging.Target(topic=topic, server=server), [])
        made.dispatcher = dispatcher
        return made

    def call(self, topic: str, message: Message, server: str | None, timeout: float) -> Any:
        """Send and wait; the waiting for the broker itself is bounded too, which oslo.messaging's is not."""
        context, _size = self._context(topic, message, timeout)
        # With the mandatory flag the broker says when no queue takes the message, and a call need not wait in vain.
        prepared = self._client.prepare(
            topic=topic,
            server=server,
            timeout=timeout,
            retry=_CALL_RETRIES,
            version=None,
            transport_options=oslo_messaging.TransportOptions(at_least_once=True),
        )
        job = _Job(lambda: prepared.call(context, message.method, **message.args), self._clock.monotonic() + timeout)
        if self._calls.offer(job, 0) is not OfferResult.ACCEPTED:
            raise errors.Busy("Too many calls wait for the message broker; is it reachable?")
        if not self._clock.wait(job.done, timeout + 0.5) or job.outcome is None:
            raise errors.CallTimeout(
                f"'{message.method}' to topic '{topic}' was not answered within {timeout:g} seconds. Check that a service serves "
                "the topic."
            )
        return job.outcome()

    def cast(self, topic: str, message: Message, server: str | None) -> None:
        """Queue for the broker."""
        context, size = self._context(topic, message, None)
        prepared = self._client.prepare(topic=topic, server=server, version=None)
        if (
            self._casts.offer(lambda: prepared.cast(context, message.method, **message.args), size)
            is not OfferResult.ACCEPTED
        ):
            raise errors.Busy("Too many messages wait for the message broker; is it reachable?")

    def fanout(self, topic: str, message: Message) -> None:
        """Queue for the broker; the oldest are dropped when it is away for long."""
        context, size = self._context(topic, message, None)
        prepared = self._client.prepare(topic=topic + _FANOUT, fanout=True, version=None)
        self._fanouts.offer(lambda: prepared.cast(context, message.method, **message.args), size)

    def close(self) -> None:
        """Flush and disconnect, bounded."""
        self._casts.stop(_FLUSH_SECONDS)
        self._fanouts.stop(_FLUSH_SECONDS)
        self._calls.stop(0.0)
        closer = threads_module.thread(self._transport.cleanup, name="rpc-oslo-close")
        closer.start()
        closer.join(_CLOSE_SECONDS)

    def _context(self, topic: str, message: Message, timeout: float | None) -> tuple[dict[str, Any], int]:
        """Returns the context with the header in it, once the message is known to be JSON and not too large; and its size."""
        data = wire.message_to_data(message)
        size = len(wire.dump(data, self.max_bytes, f"message '{message.method}' to topic '{topic}'"))
        header = {"origin": data["origin"], "version": message.version, "timeout": timeout}
        return {**data["context"], _HEADER: header}, size

    def _run(self, job: _Job) -> None:
        if self._clock.monotonic() >= job.until:
            return
        try:
            reply = job.work()
        except Exception as error:  # noqa: BLE001  (raised again in the thread that called)
            job.outcome = _raiser(_translated(error))
        else:
            job.outcome = lambda: wire.result_of(reply) if isinstance(reply, dict) else _not_ours()
        job.done.set()


class OsloTransport(Transport):
    """Messages between machines, through oslo.messaging (RabbitMQ: classic queues, or quorum queues with stream fanout).

    What it cannot do, and its capabilities say: tell who listens (a call to a server whose queue outlived it waits for its whole
    timeout; a cast to it is handled, stale, when the server comes back), and refuse when a receiver is full. Casts and fanouts
    are handed to a thread, so they never wait for a broker that restarts; :meth:`serve` waits for one, ``[rpc] connect_timeout``
    seconds at most.
    """

    api_version = API_VERSION
    capabilities = frozenset({CROSS_PROCESS, CROSS_HOST, ORDERED, QUEUES_FOR_ABSENT})

    def __init__(self, *, conf: cfg.ConfigOpts, url: str, clock: Clock) -> None:
        options.register_opts(conf)
        _register_oslo_options(conf)
        self._conf = conf
        self._url = url
        self._clock = clock
        self._closed = False
        self._subscriptions: list[_Subscription] = []
        self._engine = _Engine(conf, url, clock)
        _living.add(self)

    @override
    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        limit = self._conf.rpc.queue_limit
        subscription = _Subscription(self._open_engine(), topic, server, handler, threads, limit, self._clock)
        self._subscriptions.append(subscription)
        return subscription

    @override
    def call(self, topic: str, message: Message, *, server: str | None = None, timeout: float) -> Any:
        return self._open_engine().call(topic, message, server, timeout)

    @override
    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        self._open_engine().cast(topic, message, server)

    @override
    def fanout(self, topic: str, message: Message) -> None:
        self._open_engine().fanout(topic, message)

    @override
    def listeners(self, topic: str) -> None:
        return None

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for subscription in self._subscriptions:
            subscription.stop(0.0)
        self._engine.close()
        _living.discard(self)

    def _open_engine(self) -> _Engine:
        if self._closed:
            raise errors.TransportError("This transport was closed; the service is stopping.")
        return self._engine

    def _after_fork(self) -> None:
        # A connection to the broker must not be used by two processes.
        self._subscriptions = []
        self._engine = _Engine(self._conf, self._url, self._clock)


def _refuse_nowhere(url: str, hosts: Sequence[Any]) -> None:
    """oslo.messaging takes a broker without a name, and waits for it for ever."""
    if any(not each.hostname or not 0 < (each.port or _PORT) <= _LAST_PORT for each in hosts):
        raise errors.ConfigError(
            f"[rpc] transport_url ({url.partition(':')[0]}:...) names a broker without a host, or with a port that is not from "
            f"1 to {_LAST_PORT}. Write for example rabbit://user:password@host:5672/vhost; in names and passwords write %40 "
            "for @, %3A for a colon, %2F for a slash."
        )


def _register_oslo_options(conf: cfg.ConfigOpts) -> None:
    """Register all groups that oslo.messaging reads, and Moorage's defaults, which the configuration overrides."""
    for group, opts in oslo_messaging_opts.list_opts():
        conf.register_opts(opts, group=group)
    for module, name in _FORGOTTEN_GROUPS:
        # Private modules: a release that moves them has, one may hope, repaired this.
        with contextlib.suppress(ImportError, AttributeError):
            conf.register_opts(getattr(importlib.import_module(module), name), group=name)
    conf.set_default("control_exchange", "moorage")
    # Stream fanout refuses to work without a prefetch count.
    conf.set_default("rabbit_qos_prefetch_count", 100, group="oslo_messaging_rabbit")


def _message(body: dict[str, Any], context: dict[str, Any], header: dict[str, Any]) -> Message:
    data = {
        "method": body.get("method"),
        "args": body.get("args"),
        "version": header.get("version") or body.get("version") or "1.0",
        "origin": header.get("origin"),
        "context": context,
    }
    timeout = header.get("timeout")
    return wire.message_from_data(data, float(timeout) if isinstance(timeout, int | float) else None)


def _post(send: Callable[[], None]) -> None:
    try:
        send()
    except Exception as error:  # noqa: BLE001  (no caller waits for the outcome)
        LOG.warning("A message was lost: %s", _translated(error))


def _raiser(error: Exception) -> Callable[[], Any]:
    def outcome() -> Any:
        raise error

    return outcome


def _not_ours() -> Any:
    raise errors.TransportError("The reply has neither a result nor an error; is the other side a Moorage service?")


def _translated(error: Exception) -> errors.MoorageError:
    """oslo.messaging's errors as ours."""
    match error:
        case oslo_messaging.MessagingTimeout():
            return errors.CallTimeout("No reply came in time; whether the message was handled is not known.")
        case oslo_messaging.MessageUndeliverable():
            return errors.NoListener("No queue of the broker took the message: no service has ever served it.")
        case oslo_messaging.RemoteError():
            return errors.RemoteError(f"The other side failed: {error.value}", remote_code=str(error.exc_type))
        case oslo_messaging.MessagingException():
            return errors.TransportError(
                "The message broker cannot be reached; whether the message was handled is not known."
            )
        case _:
            # An exception of a foreign server arrives as its own class, or one with _Remote added, with its traceback as text.
            name = type(error).__name__.removesuffix("_Remote")
            text, remote, _traceback = str(error).partition("\nTraceback (most recent call last)")
            if remote:
                return errors.RemoteError(f"The other side failed: {text}", remote_code=name)
            return errors.TransportError(f"Sending failed ({name}: {text}).")


def _end(server: Any) -> None:
    server.stop()
    server.wait()


_living: weakref.WeakSet[OsloTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_living):
        transport._after_fork()


os.register_at_fork(after_in_child=_after_fork)
