# SPDX-License-Identifier: Apache-2.0
"""The receiving side of transport ``local``: one socket, a thread per connection that only reads, bounded queues behind it."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
from dataclasses import dataclass
from typing import Any

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage import threads as threads_module
from moorage.clock import Clock
from moorage.read_only import replaced
from moorage.rpc import wire
from moorage.rpc.interface import Handler, Message, Subscription
from moorage.rpc.queues import OfferResult, WorkQueue
from moorage_plugins.transports.local_link import LINK_ERRORS, STALL_SECONDS, Link, listen
from moorage_plugins.transports.local_registry import ListenerLock

__all__ = ["LocalSubscription", "ListenerSettings"]

LOG = logging.getLogger(__name__)

#: Connections that a listener keeps at once; more are closed as they come.
_MOST_LINKS = 512


@dataclass(frozen=True, slots=True)
class ListenerSettings:
    """Bounds of both sides, from ``[rpc]``."""

    max_bytes: int
    queue_limit: int

    @property
    def frame_limit(self) -> int:
        """A frame is a message and a little around it."""
        return self.max_bytes + 256

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait in one queue."""
        return 4 * self.max_bytes


@dataclass(frozen=True, slots=True)
class _Request:
    """A call (then ``reply_to`` is its connection) or a cast that waits for a thread."""

    message: Message
    reply_to: Link | None
    arrived: float


class LocalSubscription(Subscription):
    """Serves one (topic, server) until it is stopped."""

    def __init__(
        self,
        claim: ListenerLock,
        topic: str,
        server: str,
        handler: Handler,
        threads: int,
        settings: ListenerSettings,
        key: bytes,
        clock: Clock,
    ) -> None:
        self._claim = claim
        self._topic = topic
        self._server = server
        self._handler = handler
        self._settings = settings
        self._key = key
        self._clock = clock
        self._links: set[Link] = set()
        self._lock = threads_module.lock()
        self._stopped = threads_module.event()
        self._pid = os.getpid()
        name = f"rpc-{topic}-{server}"
        bounds: dict[str, Any] = {"limit": settings.queue_limit, "byte_limit": settings.queue_bytes, "clock": clock}
        self._requests = WorkQueue(self._handle, threads=threads, name=name, **bounds)
        self._fanouts = WorkQueue(self._absorb, threads=1, name=f"{name}-fanout", drop_oldest=True, **bounds)
        self._socket = listen(claim.place.socket)
        threads_module.thread(self._accept, name=f"{name}-accept", args=(self._socket,)).start()

    def listens_at(self, topic: str) -> str | None:
        """Returns the path of its socket, if it serves the topic now."""
        return self._claim.place.socket if self._topic == topic and not self._stopped.is_set() else None

    @property
    def waiting(self) -> int:
        """Messages that wait for a thread."""
        return self._requests.waiting + self._fanouts.waiting

    @override
    def stop(self, drain_seconds: float) -> bool:
        if self._pid != os.getpid():
            return True  # the child of a fork: it serves nothing, and the locks may be as the parent held them
        with self._lock:
            if self._stopped.is_set():
                return True
            self._stopped.set()
        # First no sender finds this listener any more (and a successor may claim the name), then accepted calls are finished.
        self._claim.release()
        _close_listening(self._socket)
        until = self._clock.monotonic() + drain_seconds
        done, never_begun = self._requests.stop(drain_seconds)
        fanouts_done, _dropped = self._fanouts.stop(max(0.0, until - self._clock.monotonic()))
        for request in never_begun:
            self._reply(request.reply_to, wire.refusal(self._gone()))
        with self._lock:
            links = list(self._links)
        for link in links:
            link.shutdown()
        return done and fanouts_done

    def abandon(self) -> None:
        """In the child of a fork: close what was inherited, so that the parent's end is seen by its peers."""
        self._stopped.set()
        self._claim.forget()
        self._socket.close()
        for link in self._links:
            link.abandon()

    # -- accepting and reading ------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connected, _address = listening.accept()
            except OSError as error:
                if self._stopped.is_set():
                    return
                LOG.warning("Topic '%s', server '%s': cannot accept a connection: %s", self._topic, self._server, error)
                self._clock.sleep(0.1)  # out of descriptors, most likely: give some time for others to close
                continue
            link = Link(connected, STALL_SECONDS)
            if not self._admit(link):
                link.close()
                continue
            if threads_module.try_start(self._read, name=f"rpc-{self._topic}-read", args=(link,)) is None:
                with self._lock:
                    self._links.discard(link)
                link.close()
                self._clock.sleep(0.1)

    def _admit(self, link: Link) -> bool:
        with self._lock:
            if self._stopped.is_set():
                return False
            if len(self._links) >= _MOST_LINKS:
                LOG.warning(
                    "Topic '%s', server '%s': more than %d connections.", self._topic, self._server, _MOST_LINKS
                )
                return False
            self._links.add(link)
            return True

    def _read(self, link: Link) -> None:
        try:
            link.prove_second(self._key)
            while link.readable(None) and self._take(link):
                pass
        except multiprocessing.AuthenticationError as error:
            LOG.warning(
                "Topic '%s', server '%s': refused a connection with a wrong key (%s); was the key file in the run folder "
                "replaced while services ran?",
                self._topic,
                self._server,
                error,
            )
        except LINK_ERRORS as error:
            if not isinstance(error, EOFError):
                LOG.debug("Topic '%s', server '%s': a connection broke: %s", self._topic, self._server, error)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _take(self, link: Link) -> bool:
        """Read one frame and queue what it asks for; False when the link cannot be used any more."""
        try:
            encoded = link.receive(self._settings.frame_limit)
        except errors.MessageTooLarge as error:
            link.send(wire.refusal(error))
            return False
        try:
            frame = wire.load(encoded, "frame")
            kind, timeout = frame.get("k"), frame.get("t")
            message = wire.message_from_data(
                frame["m"], float(timeout) if kind == "call" and timeout is not None else None
            )
            if kind not in ("call", "cast", "fanout"):
                raise errors.InvalidInput("A frame is a call, a cast or a fanout.")
        except errors.InvalidInput as error:
            link.send(wire.refusal(error))
            return True
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            link.send(wire.refusal(errors.InvalidInput(f"The frame is not one of this protocol ({error!r}).")))
            return True
        self._queue(link, str(kind), message, len(encoded))
        return True

    def _queue(self, link: Link, kind: str, message: Message, size: int) -> None:
        if kind == "fanout":
            self._fanouts.offer(message, size)
            return
        request = _Request(message, link if kind == "call" else None, self._clock.monotonic())
        # The sender of a call sends nothing else over its connection until it has the answer.
        offer = self._requests.offer(request, size, here=kind == "call")
        if offer is OfferResult.FULL:
            link.send(wire.refusal(self._busy()))
        elif offer is OfferResult.STOPPED:
            link.send(wire.refusal(self._gone()))
        elif kind == "cast":
            link.send(_ACCEPTED)

    # -- working --------------------------------------------------------------------------------------------------

    def _handle(self, request: _Request) -> None:
        message = request.message
        if request.reply_to is None:
            wire.absorb(self._handler, message, self._topic)
            return
        left = message.timeout
        if left is not None:
            left += request.arrived - self._clock.monotonic()
            if left <= 0:
                LOG.warning(
                    "'%s' to topic '%s' waited too long for a thread; its caller is gone.", message.method, self._topic
                )
                return
        link = request.reply_to
        wire.answer_once(
            self._handler,
            replaced(message, timeout=left),
            self._settings.max_bytes,
            functools.partial(self._reply, link),
            # The thread that hangs reads no further request. Its caller opens another connection for the next one.
            link.end_reading,
        )

    def _absorb(self, message: Message) -> None:
        wire.absorb(self._handler, message, self._topic)

    def _reply(self, link: Link | None, reply: bytes) -> None:
        if link is None:
            return
        try:
            link.send(reply)
        except LINK_ERRORS as error:
            LOG.debug("Topic '%s', server '%s': a reply was not wanted any more: %s", self._topic, self._server, error)
            link.shutdown()

    def _busy(self) -> errors.Busy:
        return errors.Busy(
            f"Server '{self._server}' of topic '{self._topic}' has {self._requests.waiting} messages waiting; try again, or "
            "raise [rpc] threads there."
        )

    def _gone(self) -> errors.NoListener:
        return errors.NoListener(f"Server '{self._server}' of topic '{self._topic}' is stopping.")


_ACCEPTED = b'{"result":null}'


def _close_listening(listening: socket.socket) -> None:
    # Closing alone would leave the accepting thread asleep; shutting down wakes it.
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
