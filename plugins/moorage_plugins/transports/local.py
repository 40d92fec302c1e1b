# SPDX-License-Identifier: Apache-2.0
"""Transport ``local``: the processes of one machine and one user, through AF_UNIX sockets in a run folder.

There is no broker: every listener has a socket, the run folder says who they are (:mod:`.local_registry`), and senders connect to
them directly. A frame is a JSON object: ``k`` (call, cast or fanout), ``m`` (the message) and for a call ``t`` (seconds that its
sender waits). Calls and casts are answered with a reply as :mod:`moorage.rpc.wire` has it (for a cast it says that the message is
queued), fanouts with nothing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from oslo_config import cfg
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, randomness
from moorage import threads as threads_module
from moorage.clock import Clock
from moorage.rpc import options, wire
from moorage.rpc.interface import (
    API_VERSION,
    BOUNDED,
    CROSS_PROCESS,
    KNOWS_LISTENERS,
    ORDERED,
    Handler,
    Message,
    Subscription,
    Transport,
)
from moorage_plugins.transports.local_fanout import Fanouts
from moorage_plugins.transports.local_link import LINK_ERRORS, STALL_SECONDS, Link, connect
from moorage_plugins.transports.local_listener import ListenerSettings, LocalSubscription
from moorage_plugins.transports.local_registry import Registry, SocketPath

__all__ = ["LocalTransport"]

LOG = logging.getLogger(__name__)

#: Unused connections that are kept for each listener.
_IDLE_LINKS = 16
#: Seconds for which close() goes on sending what is queued.
_FLUSH_SECONDS = 1.0


class _Pool:
    """Unused connections by socket path."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Link]] = {}
        self._lock = threads_module.lock()

    def take(self, path: str) -> Link | None:
        """Removes the connection that was used last, and returns it; None: there is none.

        The peer may have closed it meanwhile. Sending over it raises an error then.
        """
        with self._lock:
            links = self._idle.get(path)
            return links.pop() if links else None

    def give(self, path: str, link: Link) -> None:
        with self._lock:
            links = self._idle.setdefault(path, [])
            if len(links) < _IDLE_LINKS:
                links.append(link)
                return
        link.close()

    def forget(self, path: str | None = None) -> None:
        """Close the unused connections to one path, or all."""
        with self._lock:
            if path is None:
                links = [link for kept in self._idle.values() for link in kept]
                self._idle.clear()
            else:
                links = self._idle.pop(path, [])
        for link in links:
            link.close()

    def abandon(self) -> None:
        """In the child of a fork: close inherited descriptors, without locks."""
        for links in list(self._idle.values()):
            for link in list(links):
                link.abandon()


class LocalTransport(Transport):
    """Messages between the processes of one machine; nothing to install or start.

    ``local://`` uses ``[rpc] run_dir``, ``local:///path`` the path. A call of a small message costs some tenths of a millisecond.
    """

    api_version = API_VERSION
    capabilities = frozenset({CROSS_PROCESS, KNOWS_LISTENERS, ORDERED, BOUNDED})

    def __init__(self, *, conf: cfg.ConfigOpts, url: str, clock: Clock) -> None:
        options.register_opts(conf)
        self._clock = clock
        self._settings = ListenerSettings(conf.rpc.max_message_bytes, conf.rpc.queue_limit)
        self._registry = Registry(_run_dir(url, conf.rpc.run_dir), clock)
        self._closed = False
        self._subscriptions: list[LocalSubscription] = []
        self._start()
        _living.add(self)

    @override
    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        self._check_open()
        claim = self._registry.claim(topic, server)
        try:
            subscription = LocalSubscription(
                claim, topic, server, handler, threads, self._settings, self._registry.key(), self._clock
            )
        except BaseException:
            claim.release()
            raise
        self._subscriptions.append(subscription)
        return subscription

    @override
    def call(self, topic: str, message: Message, *, server: str | None = None, timeout: float) -> Any:
        until = self._clock.monotonic() + timeout
        frame = self._frame("call", topic, message, timeout)
        return self._to_one(topic, server, frame, until, timeout)

    @override
    def begin_call(
        self, topic: str, message: Message, *, server: str | None = None, timeout: float
    ) -> Callable[[], Any]:
        later = super().begin_call(topic, message, server=server, timeout=timeout)
        until = self._clock.monotonic() + timeout
        frame = self._frame("call", topic, message, timeout)
        place = next(self._candidates(topic, server), None)
        link = self._pool.take(place.socket) if place is not None else None
        if place is None or link is None:
            # To connect may take seconds.
            return later
        try:
            link.send(frame)
        except LINK_ERRORS:
            # The frame did not arrive whole, so nothing was handled.
            link.close()
            return later

        def end() -> Any:
            reply = self._receive(link, place, topic, server, until, timeout)
            decoded = wire.load(reply, f"reply of topic '{topic}'")
            return later() if "refused" in decoded else wire.result_of(decoded)

        return end

    @override
    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        frame = self._frame("cast", topic, message, None)
        until = self._clock.monotonic() + STALL_SECONDS
        try:
            self._to_one(topic, server, frame, until, STALL_SECONDS)
        except (errors.CallTimeout, errors.PeerLost) as error:
            # It was sent; a cast promises no more.
            LOG.warning("Whether the cast '%s' arrived is not known: %s", message.method, error)

    @override
    def fanout(self, topic: str, message: Message) -> None:
        self._check_open()
        places = self._registry.places(topic)
        own = {each.listens_at(topic) for each in self._subscriptions} if message.to_others else frozenset()
        if all(place.socket in own for place in places):
            return
        frame = self._frame("fanout", topic, message, None)
        self._fanouts.send(topic, places, frame, own)

    @override
    def listeners(self, topic: str) -> Sequence[str]:
        return self._registry.servers(topic)

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for subscription in self._subscriptions:
            subscription.stop(0.0)
        self._fanouts.close(_FLUSH_SECONDS)
        self._pool.forget()
        _living.discard(self)

    @property
    def dropped(self) -> int:
        """Fanouts that were dropped because listeners were too slow or stopped."""
        return self._fanouts.dropped()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Fresh connections, queues and locks, at the beginning and after a fork."""
        self._pool = _Pool()
        self._fanouts = Fanouts(self._open_for_fanout, self._settings, self._clock)
        self._turns = itertools.count(randomness.generator().randrange(1 << 16))

    def _after_fork(self) -> None:
        """In the child: what was inherited belongs to the parent."""
        self._pool.abandon()
        self._fanouts.abandon()
        for subscription in self._subscriptions:
            subscription.abandon()
        self._subscriptions = []
        self._start()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.TransportError("This transport was closed; the service is stopping.")

    def _frame(self, kind: str, topic: str, message: Message, timeout: float | None) -> bytes:
        self._check_open()
        data: dict[str, Any] = {"k": kind, "m": wire.message_to_data(message)}
        if timeout is not None:
            data["t"] = timeout
        return wire.dump(data, self._settings.max_bytes, f"message '{message.method}' to topic '{topic}'")

    def _to_one(self, topic: str, server: str | None, frame: bytes, until: float, timeout: float) -> Any:
        """Send to the named server, or to the topic's servers in turn until one takes it; return its reply."""
        refused: errors.TransportError = errors.NoListener(_not_served(topic, server))
        for place in self._candidates(topic, server):
            try:
                reply = self._exchange(place, topic, server, frame, until, timeout)
                decoded = wire.load(reply, f"reply of topic '{topic}'")
                if "refused" not in decoded:
                    return wire.result_of(decoded)
                wire.result_of(decoded)
            except (errors.NoListener, errors.Busy) as error:
                # Only a refusal: it was certainly not handled there, so the next one may have it.
                refused = refused if isinstance(refused, errors.Busy) else error
        raise refused

    def _candidates(self, topic: str, server: str | None) -> Iterator[SocketPath]:
        if server is not None:
            yield self._registry.place(topic, server)
            return
        places = self._registry.places(topic)
        first = next(self._turns)
        for index in range(len(places)):
            yield places[(first + index) % len(places)]

    def _exchange(
        self, place: SocketPath, topic: str, server: str | None, frame: bytes, until: float, timeout: float
    ) -> bytes:
        link = self._send(place, topic, server, frame, until)
        return self._receive(link, place, topic, server, until, timeout)

    def _receive(
        self, link: Link, place: SocketPath, topic: str, server: str | None, until: float, timeout: float
    ) -> bytes:
        """Waits for the reply on a connection, and returns the connection to the pool."""
        keep = False
        try:
            if not link.readable(until - self._clock.monotonic()):
                raise errors.CallTimeout(f"{_named(topic, server)} did not answer within {timeout:g} seconds.")
            reply = link.receive(self._settings.frame_limit)
            keep = True
            return reply
        except LINK_ERRORS as error:
            raise errors.PeerLost(
                f"{_named(topic, server)} broke the connection before it answered; whether it did the work is not known."
            ) from error
        finally:
            if keep:
                self._pool.give(place.socket, link)
            else:
                link.close()

    def _send(self, place: SocketPath, topic: str, server: str | None, frame: bytes, until: float) -> Link:
        """Send over a kept or a new connection; an error means that nothing was handled."""
        link = self._pool.take(place.socket)
        if link is not None:
            try:
                link.send(frame)
                return link
            except LINK_ERRORS as error:
                link.close()
                if isinstance(error, BlockingIOError):
                    raise errors.Busy(f"{_named(topic, server)} does not read its messages.") from error
                # Kept connections end when a listener is restarted; a frame that was not sent whole may be sent again.
                self._pool.forget(place.socket)
        seconds = min(STALL_SECONDS, until - self._clock.monotonic())
        if seconds <= 0:
            raise errors.CallTimeout(f"No time was left to connect to {_named(topic, server)}.")
        link = self._open(place, topic, server, seconds, STALL_SECONDS)
        try:
            link.send(frame)
        except BlockingIOError as error:
            link.close()
            raise errors.Busy(f"{_named(topic, server)} does not read its messages.") from error
        except LINK_ERRORS as error:
            link.close()
            raise errors.NoListener(_not_served(topic, server)) from error
        return link

    def _open_for_fanout(self, place: SocketPath, topic: str) -> Link:
        return self._open(place, topic, None, STALL_SECONDS, 0.0)

    def _open(self, place: SocketPath, topic: str, server: str | None, seconds: float, stall: float) -> Link:
        try:
            return connect(place.socket, self._registry.key(), handshake_seconds=seconds, stall_seconds=stall)
        except ConnectionRefusedError as error:
            self._registry.sweep(place)
            raise errors.NoListener(_not_served(topic, server)) from error
        except BlockingIOError as error:
            raise errors.Busy(f"{_named(topic, server)} does not answer; is it stopped or overloaded?") from error
        except multiprocessing.AuthenticationError as error:
            raise errors.TransportError(
                f"{_named(topic, server)} and this process have different keys; was the key file in the run folder replaced? "
                "Restart the services that use this folder."
            ) from error
        except (FileNotFoundError, ConnectionError, EOFError) as error:
            raise errors.NoListener(_not_served(topic, server)) from error
        except OSError as error:
            raise errors.TransportError(f"Cannot connect to {_named(topic, server)}: {error}.") from error


def _run_dir(url: str, configured: str | None) -> str:
    parts = urlsplit(url)
    if parts.netloc:
        raise errors.ConfigError(
            f"[rpc] transport_url = {parts.scheme}://{parts.hostname}... names a machine, but this transport is for one machine; "
            "write local:// or local:///path/of/the/run/folder."
        )
    path = unquote(parts.path) or configured
    if not path:
        raise errors.ConfigError("Transport 'local' needs a folder for its sockets: set [rpc] run_dir.")
    return os.path.abspath(path)


def _named(topic: str, server: str | None) -> str:
    return f"A server of topic '{topic}'" if server is None else f"Server '{server}' of topic '{topic}'"


def _not_served(topic: str, server: str | None) -> str:
    if server is None:
        return f"No service on this machine serves topic '{topic}'. Start one, or try again."
    return f"No server '{server}' of topic '{topic}' runs on this machine; start it, or correct the name."


_living: weakref.WeakSet[LocalTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_living):
        transport._after_fork()


os.register_at_fork(after_in_child=_after_fork)
