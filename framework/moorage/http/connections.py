# SPDX-License-Identifier: Apache-2.0
"""Limits of connections: time, size and number of requests that have not arrived, and time to read answers.

uvicorn waits for a request as long as the client likes and keeps as much of its head as the client sends. These limits keep
clients without a password from using up the process's open files and memory. uvicorn's own protocol does the rest.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import resource
import sys
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["LimitedConnection", "PendingConnections"]

#: The largest head of a request, in bytes.
_LARGEST_HEAD = 65536
#: Bytes that a connection may have received beyond its body while a request is read or answered: heads, the frames of chunks,
#: and what uvicorn has read ahead.
_LARGEST_REST = 8 * _LARGEST_HEAD
#: Connections that may wait at the same time, if the process may open many more files than that.
_MOST = 2000
_END = b"Connection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n" + _END
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n" + _END
_ENDING = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\n" + _END


class _State(enum.Enum):
    HEAD = enum.auto()  # the head of a request must arrive
    BODY = enum.auto()  # the head has arrived, the body must
    WHOLE = enum.auto()  # the whole request has arrived and is answered
    IDLE = enum.auto()  # it was answered; there need not be another one


class PendingConnections:
    """The connections whose next request has not arrived.

    :param seconds: how long a head may take, how long a client may be silent within a body, and how long it may read nothing of an
        answer that is ready.
    :param most: how many may wait; the one that has waited longest is closed first. None: half of the files that the process may
        open, at most 2,000.
    """

    def __init__(self, *, seconds: float, most: int | None = None) -> None:
        self.seconds = seconds
        self.most = most or _most()
        #: Called when data arrive, before they are read.
        self.heard: Callable[[], object] = lambda: None
        # A dictionary, because it keeps the order.
        self._pending: dict[LimitedConnection, None] = {}

    def protocol(self) -> type[asyncio.Protocol]:
        """Returns the factory of protocols that uvicorn calls for each new connection."""
        return cast("type[asyncio.Protocol]", functools.partial(LimitedConnection, self))

    def add(self, connection: LimitedConnection) -> None:
        """Adds a connection that waits for a request. If there are too many, closes the one that has waited longest."""
        self._pending[connection] = None
        if len(self._pending) > self.most:
            next(iter(self._pending)).end(_TOO_LATE)

    def remove(self, connection: LimitedConnection) -> None:
        """Removes a connection that waits no longer, if it is there."""
        self._pending.pop(connection, None)

    def close(self) -> None:
        """Closes all waiting connections when the server stops. Call it in the event loop."""
        for connection in list(self._pending):
            connection.end(_ENDING)


class _BufferedTransport(asyncio.Transport):
    """Sends the head and the body of an answer with one system call; the client gets one packet.

    Each system call releases the interpreter, which another thread then takes for a time.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        #: What was written since :meth:`hold`; None: writes are not buffered.
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        """Starts to buffer writes, until :meth:`release` or :meth:`close`."""
        self._held = []

    def release(self) -> None:
        """Sends the buffered writes together, and stops buffering."""
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends data to the client, or buffers it if :meth:`hold` was called."""
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(bytes(data))

    def close(self) -> None:
        """Sends the buffered writes, and closes the connection."""
        self.release()
        self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once. What was not sent is lost."""
        self._held = None
        self._transport.abort()

    def is_closing(self) -> bool:
        """Returns whether the connection is closed, or is about to be."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Returns the number of bytes that the operating system has not accepted yet, without the buffered writes."""
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stops reading from the client."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads from the client again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns information about the connection by name, such as its ``socket`` or ``peername``."""
        return self._transport.get_extra_info(name, default)


class LimitedConnection(asyncio.Protocol):
    """uvicorn's protocol of one connection, behind limits. The application reports the progress of each request."""

    def __init__(self, pending: PendingConnections, app_state: dict[str, Any], **arguments: Any) -> None:
        self._pending = pending
        self._inner = HttpToolsProtocol(app_state={**app_state, "connection": self}, **arguments)
        self._loop = asyncio.get_running_loop()
        self._transport: _BufferedTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: Until when the client has to send more, by the event loop's clock; None: it need not.
        self._deadline: float | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._state = _State.HEAD
        self._received = 0

    # -- asyncio's side -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts to serve a new connection, and the time limit for its first request."""
        self._transport = _BufferedTransport(transport)
        self._inner.connection_made(self._transport)
        self._pending.add(self)
        self._await_more()

    def data_received(self, data: bytes) -> None:
        """Passes received data to uvicorn, and checks afterwards that the unread part is not too large."""
        self._pending.heard()
        self._received += len(data)
        if self._state is _State.IDLE:
            self._state = _State.HEAD
            self._await_more()
        elif self._state is _State.BODY:
            self._await_more()
        self._inner.data_received(data)
        if self._received > _LARGEST_HEAD:
            # Later: if a head is whole now, the application is called before that.
            self._loop.call_soon(self._check_size)

    def eof_received(self) -> None:
        """Tells uvicorn that the client has closed its sending side."""
        self._inner.eof_received()

    def pause_writing(self) -> None:
        """Pauses uvicorn's writes while the send buffer is full, and starts the time limit for the client to read."""
        self._inner.pause_writing()
        self._check_reading(sys.maxsize)

    def resume_writing(self) -> None:
        """Resumes uvicorn's writes after the client has read from the send buffer."""
        self._stop_reading_timer()
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Stops the timers of a closed connection, and removes it from the waiting ones."""
        self._stop_timers()
        self._pending.remove(self)
        self._inner.connection_lost(error)

    # -- the application's side ---------------------------------------------------------------------------------------

    def head_arrived(self) -> None:
        """Starts the time limit for the body of a request whose head has arrived."""
        self._state = _State.BODY
        self._await_more()

    def body_part_arrived(self, size: int) -> None:
        """Subtracts the bytes of the body that the application has read from the unread bytes."""
        self._received -= size

    def body_arrived(self) -> None:
        """Ends the time limit for a request that has arrived completely."""
        self._state = _State.WHOLE
        self._deadline = None
        self._pending.remove(self)

    def hold_writes(self) -> None:
        """Buffers the answer until :meth:`release_writes`, or until the connection is closed."""
        if self._transport is not None:
            self._transport.hold()

    def release_writes(self) -> None:
        """Sends the buffered parts of the answer."""
        if self._transport is not None:
            self._transport.release()

    def answered(self) -> None:
        """Marks the request as answered, so that the connection waits for the next one. uvicorn closes idle connections."""
        if self._transport is not None and not self._transport.is_closing():
            self._state = _State.IDLE
            self._received = 0
            self._pending.add(self)

    def end(self, answer: bytes) -> None:
        """Closes the connection, with an answer if a request has begun."""
        self._pending.remove(self)
        self._stop_timers()
        if self._transport is not None and not self._transport.is_closing():
            if self._state in {_State.HEAD, _State.BODY}:
                self._transport.write(answer)
            self._transport.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_size(self) -> None:
        if self._received > (_LARGEST_REST if self._state in {_State.BODY, _State.WHOLE} else _LARGEST_HEAD):
            self.end(_TOO_LARGE)

    def _check_reading(self, unsent: int) -> None:
        if self._transport is None:
            return
        left = self._transport.get_write_buffer_size()
        if left >= unsent:
            self._transport.abort()
            return
        self._stop_reading_timer()
        self._reading = self._loop.call_later(self._pending.seconds, self._check_reading, left)

    def _await_more(self) -> None:
        """Gives the client its time again to send more. One timer serves all requests: it looks at the deadline when it fires."""
        self._deadline = self._loop.time() + self._pending.seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() >= self._deadline:
            self.end(_TOO_LATE)
        else:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _stop_reading_timer(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_timers(self) -> None:
        self._deadline = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stop_reading_timer()


def _most() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else min(_MOST, files // 2)
