# SPDX-License-Identifier: Apache-2.0
"""Serves a WSGI application through ASGI. A thread is taken only when the whole request has arrived.

The event loop of the server reads requests and writes answers; threads run the application. A body that is larger than 64 KiB
waits in a temporary file. What an application returns decides how it is sent:

* a list or tuple is the whole answer: it is sent when the thread is free again;
* any other iterable is a stream (events, a long poll): it gets a thread of its own, so that it keeps no other request waiting.
  It returns a part every few seconds, an empty one if there is nothing new: only then does it notice that the client left.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import io
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import IO, Any, Protocol
from urllib.parse import unquote_to_bytes

from moorage import threads as threads_module
from moorage.http.routes import Wsgi, environ_key
from moorage.http.streams import Receive, Send, Stream, StreamedResponse, finish, refuse, soon

__all__ = ["Bridge", "Connection"]

#: A larger body waits in a temporary file, in bytes.
_IN_MEMORY = 65536
#: Streams that are open at the same time; each has a thread.
MOST_STREAMS = 512


class Connection(Protocol):
    """The connection of a request: it limits how long the next request may take to arrive."""

    def head_arrived(self) -> None:
        """Notes that the head of a request has arrived."""

    def body_part_arrived(self, size: int) -> None:
        """Notes that so many bytes of the body were read."""

    def body_arrived(self) -> None:
        """Notes that the body has arrived, too."""

    def hold_writes(self) -> None:
        """Buffers the answer until :meth:`release_writes`."""

    def release_writes(self) -> None:
        """Sends the buffered parts of the answer, with one system call."""

    def answered(self) -> None:
        """Notes that the request was answered."""


class Bridge:
    """ASGI application that runs a WSGI application in threads.

    :param threads: number of requests that are answered at the same time, not counting streams.
    :param largest_body: in bytes. A request with a larger body is passed on at once, without its body: the application refuses it
        by its ``CONTENT_LENGTH``.
    """

    def __init__(self, application: Wsgi, *, threads: int, largest_body: int) -> None:
        self.largest_body = largest_body
        self._application = application
        self._requests: threads_module.Queue[tuple[asyncio.Future[StreamedResponse], dict[str, Any]] | None] = (
            threads_module.queue()
        )
        #: Answers that the event loop has to send.
        self._answers: collections.deque[
            tuple[asyncio.Future[StreamedResponse], StreamedResponse, BaseException | None]
        ] = collections.deque()
        #: The event loop was asked to look at them, and has not begun.
        self._asked = False
        self._threads = threads
        self._streams: set[Stream] = set()
        self._ending = False
        for number in range(threads):
            threads_module.start(self._work, name=f"http-{number}")

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI."""
        connection: Connection = scope["state"]["connection"]
        connection.head_arrived()
        environ = _environ(scope)
        try:
            read = await self._read(environ, receive, connection)
            connection.body_arrived()
            if read is not None:
                answer = await self._run(environ)
                if not read:
                    # The rest of the body is not read: the connection cannot be used again.
                    answer.headers.append((b"connection", b"close"))
                await self._send(answer, receive, send, connection)
                connection.answered()
        finally:
            environ["wsgi.input"].close()

    def end_streams(self) -> None:
        """End all streams, and begin no more. Call it in the event loop."""
        self._ending = True
        for stream in self._streams:
            stream.end()

    def end_threads(self) -> None:
        """Let each thread end when it has answered its request. Call it when no more requests can arrive."""
        for _ in range(self._threads):
            self._requests.put(None)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _read(self, environ: dict[str, Any], receive: Receive, connection: Connection) -> bool | None:
        """Read the body into the environment. False: it is too large and was not read; None: the client left."""
        declared = int(environ.get("CONTENT_LENGTH") or 0)
        chunked = environ.pop("HTTP_TRANSFER_ENCODING", None) is not None
        environ["wsgi.input"] = io.BytesIO()
        if declared > self.largest_body:
            return False
        if not declared and not chunked:
            return True
        body: IO[bytes] = environ["wsgi.input"]
        if chunked or declared > _IN_MEMORY:
            body = environ["wsgi.input"] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  (the caller closes it)
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            connection.body_part_arrived(len(part))
            size += body.write(part)
            environ["CONTENT_LENGTH"] = str(size)
            if size > self.largest_body:
                return False
            more = message.get("more_body", False)
        body.seek(0)
        return True

    async def _run(self, environ: dict[str, Any]) -> StreamedResponse:
        future: asyncio.Future[StreamedResponse] = asyncio.get_running_loop().create_future()
        self._requests.put((future, environ))
        return await future

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            future, environ = request
            loop = future.get_loop()
            answer, failure = StreamedResponse(), None
            try:
                self._answer(environ, answer)
            except BaseException as error:  # noqa: BLE001  (the server logs it and answers 500)
                failure = error
            self._answers.append((future, answer, failure))
            # Each call wakes the event loop by a system call. Requests that a scheduler answers together end together.
            if not self._asked:
                self._asked = True
                soon(loop, self._finish_all)

    def _finish_all(self) -> None:
        """Passes finished answers to the tasks that wait for them."""
        # Before they are looked at: a thread that adds one later asks again.
        self._asked = False
        while self._answers:
            finish(*self._answers.popleft())

    def _answer(self, environ: dict[str, Any], answer: StreamedResponse) -> None:
        body = self._application(environ, answer.start_response)
        if isinstance(body, list | tuple):
            answer.finish(b"".join(body), environ["REQUEST_METHOD"])
        else:
            answer.body = body

    async def _send(self, answer: StreamedResponse, receive: Receive, send: Send, connection: Connection) -> None:
        if isinstance(answer.body, bytes):
            connection.hold_writes()
            try:
                await send(answer.start())
                await send({"type": "http.response.body", "body": answer.body})
            finally:
                connection.release_writes()
            return
        if self._ending or len(self._streams) >= MOST_STREAMS:
            answer.close()
            await refuse(send)
            return
        stream = Stream(answer, send)
        self._streams.add(stream)
        try:
            await stream.run(receive)
        finally:
            self._streams.discard(stream)


def _environ(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the WSGI environment of an ASGI request, without its body."""
    host, port = scope["server"]
    environ: dict[str, Any] = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(scope["raw_path"]).decode("latin-1"),
        "QUERY_STRING": scope["query_string"].decode("latin-1"),
        "SERVER_NAME": host,
        "SERVER_PORT": str(port),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "REMOTE_ADDR": scope["client"][0],
        "REMOTE_PORT": str(scope["client"][1]),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "wsgi.input_terminated": True,
    }
    for name, value in scope["headers"]:
        key = _key(name)
        if key:
            given = environ.get(key)
            separator = "; " if key == "HTTP_COOKIE" else ","
            text = value.decode("latin-1")
            environ[key] = text if given is None else f"{given}{separator}{text}"
    return environ


@functools.lru_cache(1024)
def _key(name: bytes) -> str:
    """Returns the WSGI environment's name of a header; empty for names with an underscore, which would look like a hyphen."""
    return "" if b"_" in name else environ_key(name.decode("latin-1"))
