# SPDX-License-Identifier: Apache-2.0
"""One authenticated connection of transport ``local``: frames of bytes, bounded in size and in time.

Framing and the mutual proof of the key are :mod:`multiprocessing.connection`'s; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from moorage import errors, threads
from moorage_plugins.transports.local_registry import socket_address

__all__ = ["LINK_ERRORS", "STALL_SECONDS", "Link", "connect", "listen"]

#: Seconds for which a peer may stand still in the middle of a handshake or of a frame.
STALL_SECONDS = 2.0
_BACKLOG = 128

#: What reading or writing raises when the peer is gone, stands still or talks nonsense.
LINK_ERRORS = (OSError, EOFError)


class Link:
    """A connected socket. One thread reads; any thread may send, shut down or close."""

    def __init__(self, connected: socket.socket, stall_seconds: float) -> None:
        _set_timeouts(connected, stall_seconds)
        self._connection: Connection = Connection(connected.detach())
        self._poller = select.poll()
        self._poller.register(self._connection.fileno(), select.POLLIN)
        self._sending = threads.lock()
        self._closing = threads.lock()

    def prove_first(self, key: bytes) -> None:
        """The connecting side of the handshake.

        :raises multiprocessing.AuthenticationError: the keys differ.
        """
        try:
            answer_challenge(self._connection, key)
            deliver_challenge(self._connection, key)
        except AssertionError as error:
            raise multiprocessing.AuthenticationError("the other side does not speak the protocol") from error

    def prove_second(self, key: bytes) -> None:
        """The listening side of the handshake; raises as :meth:`prove_first`."""
        try:
            deliver_challenge(self._connection, key)
            answer_challenge(self._connection, key)
        except AssertionError as error:
            raise multiprocessing.AuthenticationError("the other side does not speak the protocol") from error

    def set_stall(self, seconds: float) -> None:
        """Seconds for which the peer may stand still in the middle of a frame; zero: for ever."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            _set_timeouts(same, seconds)

    def send(self, frame: bytes) -> None:
        """Send one frame. An exception means that the frame did not arrive whole, so the peer cannot act on it.

        :raises BlockingIOError: the peer stood still for too long; the link is of no use any more.
        :raises OSError: the peer is gone.
        """
        with self._sending:
            self._connection.send_bytes(frame)

    def readable(self, seconds: float | None) -> bool:
        """Returns whether a frame, or the end, can be read within ``seconds`` (None: no limit)."""
        return bool(self._poller.poll(None if seconds is None else max(0.0, seconds * 1000.0)))

    def receive(self, limit: int) -> bytes:
        """One frame of at most ``limit`` bytes; a larger one is refused before its body is read.

        :raises EOFError: the peer closed. :raises OSError: it stood still or broke off in a frame.
        :raises MessageTooLarge: the link cannot be read any more; sending is still possible.
        """
        try:
            return self._connection.recv_bytes(limit)
        except OSError as error:
            if error.errno is None and "bad message length" in str(error):
                raise errors.MessageTooLarge(
                    f"A frame of more than {limit} bytes came; raise [rpc] max_message_bytes on both sides or send less.",
                    limit=limit,
                ) from error
            raise

    def shutdown(self) -> None:
        """Wakes readers and writers; they get the end of the connection or an error. Idempotent."""
        self._shut(socket.SHUT_RDWR)

    def end_reading(self) -> None:
        """Makes each later :meth:`send` of the peer fail. The peer can still receive. Idempotent."""
        self._shut(socket.SHUT_RD)

    def _shut(self, how: int) -> None:
        with self._closing, contextlib.suppress(OSError):
            if not self._connection.closed:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
                    same.shutdown(how)

    def close(self) -> None:
        """Shut down and give the descriptor back; not while another thread reads. Idempotent."""
        self.shutdown()
        # The lock: a sender must never write to a descriptor that was closed and now belongs to another connection.
        with self._sending, self._closing:
            self._connection.close()

    def abandon(self) -> None:
        """Close this process's copy of the descriptor, without locks: for the child of a fork."""
        self._connection.close()


def connect(path: str, key: bytes, *, handshake_seconds: float, stall_seconds: float) -> Link:
    """Returns a link to the listener at ``path``.

    :param stall_seconds: for the time after the handshake; zero means to wait for ever.
    :raises OSError: FileNotFoundError, ConnectionRefusedError: no process listens. BlockingIOError: it does not answer.
    :raises EOFError: it ended meanwhile. :raises multiprocessing.AuthenticationError: the keys differ.
    """
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux applies the send timeout to connect as well: a full backlog raises BlockingIOError after it.
        _set_timeouts(raw, handshake_seconds)
        with socket_address(path) as address:
            raw.connect(address)
    except BaseException:
        raw.close()
        raise
    link = Link(raw, handshake_seconds)
    try:
        link.prove_first(key)
        link.set_stall(stall_seconds)
    except BaseException:
        link.close()
        raise
    return link


def listen(path: str) -> socket.socket:
    """Returns a listening socket at ``path``, which must not exist."""
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(path) as address:
            raw.bind(address)
        raw.listen(_BACKLOG)
    except BaseException:
        raw.close()
        raise
    return raw


def _set_timeouts(raw: socket.socket, seconds: float) -> None:
    """Kernel timeouts of single reads and writes (zero: none), with the descriptor blocking otherwise."""
    raw.setblocking(True)
    whole = int(seconds)
    value = struct.pack("ll", whole, int((seconds - whole) * 1_000_000))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
