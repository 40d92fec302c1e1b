# SPDX-License-Identifier: Apache-2.0
"""Where connections wait until the head of a request has arrived, so that no thread of the server waits for it.

cheroot gives a connection to a thread at once, and the thread then waits for whatever comes: as many silent connections as there
are threads, of strangers without a password, and nobody else is answered.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moorage.clock import Clock

__all__ = ["Lobby"]

#: The largest head of a request, in bytes.
_LARGEST = 65536
#: What most of them need at most.
_USUAL = 4096
#: How many wait at most, where the process may open many more files than that.
_SEATS = 2000
#: Seconds between looks for those who have waited too long.
_LOOK = 0.5
#: Seconds in which the rest of a body comes that is on its way.
_MOMENT = 1.0
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(slots=True)
class _Guest:
    connection: Any
    until: float


class Lobby:
    """Lets connections in when they have something to say.

    :param admit: gets a connection of cheroot's whose next request has a whole head.
    :param seconds: how long a head may take.
    :param seats: how many wait at most: of more, the ones that have waited longest are sent away. None: half of the files that the
        process may open, or 2,000.
    """

    def __init__(self, admit: Callable[[Any], None], clock: Clock, seconds: float, *, seats: int | None = None) -> None:
        self._admit = admit
        self._clock = clock
        self._seconds = seconds
        self._seats = seats or _seats()
        self._lock = threading.Lock()
        self._guests: dict[int, _Guest] = {}
        self._epoll = select.epoll()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="http-lobby", daemon=True)
        self._thread.start()

    def enter(self, connection: Any, *, readable: bool) -> None:
        """Take a connection; the caller has it no longer.

        :param readable: whether something has arrived for certain; it may then be let in at once.
        """
        # Of requests that came together, the server has read the second with the first.
        if _whole(_arrived(connection) if readable else _buffered(connection)):
            self._admit(connection)
            return
        number = connection.socket.fileno()
        with self._lock:
            seated = self._open and number >= 0
            if seated:
                self._guests[number] = _Guest(connection, self._clock.monotonic() + self._seconds)
                # Edge-triggered: told once for all that is there, and again for what comes later.
                self._epoll.register(number, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        if not seated:
            _send_away(connection, b"")

    def has_arrived(self, connection: Any, size: int) -> bool:
        """Whether so many bytes are there to be read, or come within a moment; never for more than the largest head."""
        if size > _LARGEST:
            return False
        poller = select.poll()
        poller.register(connection.socket.fileno(), select.POLLIN)
        until = self._clock.monotonic() + _MOMENT
        while True:
            data = _arrived(connection, whole=False) if poller.poll(0) else _buffered(connection)
            if len(data) >= size:
                return True
            if self._clock.monotonic() > until:
                return False
            self._clock.sleep(0.01)

    def close(self) -> None:
        """Send everybody away."""
        with self._lock:
            self._open = False
            guests, self._guests = self._guests, {}
        for guest in guests.values():
            _send_away(guest.connection, b"")
        self._thread.join(_LOOK * 10)

    def _run(self) -> None:
        looked_at = self._clock.monotonic()
        while self._open:
            for number, _event in self._epoll.poll(_LOOK):
                self._look(number)
            now = self._clock.monotonic()
            if now - looked_at >= _LOOK or len(self._guests) > self._seats:
                looked_at = now
                self._end_waiting(now)
        self._epoll.close()

    def _look(self, number: int) -> None:
        with self._lock:
            guest = self._guests.get(number)
        if guest is None:
            return
        data = _arrived(guest.connection)
        whole = _whole(data)
        if data and not whole and len(data) < _LARGEST:
            return
        if not self._take(number):
            return
        if whole:
            self._admit(guest.connection)
        else:
            _send_away(guest.connection, _TOO_LARGE if data else b"")

    def _take(self, number: int) -> bool:
        with self._lock:
            if self._guests.pop(number, None) is None:
                return False
            self._epoll.unregister(number)
            return True

    def _end_waiting(self, now: float) -> None:
        with self._lock:
            guests = list(self._guests.items())
        for place, (number, guest) in enumerate(guests):
            # They are in the order in which they came.
            if (now > guest.until or len(guests) - place > self._seats) and self._take(number):
                _send_away(guest.connection, _TOO_LATE)


def _seats() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _SEATS if files == resource.RLIM_INFINITY else min(_SEATS, files // 2)


def _arrived(connection: Any, *, whole: bool = True) -> bytes:
    """What can be read of a connection that is readable, left where it is; empty when it has ended.

    :param whole: the head of a request will do, if there is one.
    """
    buffered = _buffered(connection)
    if whole and _whole(buffered):
        return buffered
    try:
        data = connection.socket.recv(_USUAL, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if len(data) == _USUAL:
            data = connection.socket.recv(_LARGEST, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return buffered
    return buffered + bytes(data)


def _buffered(connection: Any) -> bytes:
    return bytes(connection.rfile.peek()) if connection.rfile.has_data() else b""


def _whole(data: bytes) -> bool:
    """Whether the head ends in it; also one with wrong line ends, which the server refuses at once."""
    head = data.lstrip(b"\r\n")
    return b"\n\r\n" in head or b"\n\n" in head


def _send_away(connection: Any, words: bytes) -> None:
    with contextlib.suppress(OSError):
        if words:
            connection.socket.send(words, socket.MSG_DONTWAIT)
    with contextlib.suppress(OSError):
        connection.close()
