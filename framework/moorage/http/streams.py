# SPDX-License-Identifier: Apache-2.0
"""The answer of a WSGI application, and the sending of one that is a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moorage import threads

__all__ = ["StreamedResponse", "Receive", "Send", "Stream", "finish", "refuse", "soon"]

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class StreamedResponse:
    """What an application answers."""

    status: int = 0
    headers: Headers = field(default_factory=list)
    body: bytes | Iterable[bytes] = b""
    _written: list[bytes] = field(default_factory=list)

    def start_response(self, status: str, headers: list[tuple[str, str]], _: Any = None) -> Callable[[bytes], None]:
        """WSGI."""
        self.status = int(status[:3])
        self.headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        return self._written.append

    def start(self) -> dict[str, Any]:
        """Returns the ASGI message that begins the answer.

        :raises RuntimeError: the application did not call ``start_response``.
        """
        if not self.status:
            raise RuntimeError("The application did not call start_response.")
        return {"type": "http.response.start", "status": self.status, "headers": self.headers}

    def finish(self, body: bytes, method: str) -> None:
        """Set the whole body, and its length if the application did not."""
        self.body = b"".join(self._written) + body if self._written else body
        bodiless = method == "HEAD" or self.status in {204, 304}
        length = str(len(self.body)).encode()
        # Our own applications write it so.
        if bodiless or (b"Content-Length", length) in self.headers:
            return
        if not any(name.lower() == b"content-length" for name, _ in self.headers):
            self.headers.append((b"content-length", length))

    def close(self) -> None:
        """Tell the application that its body is needed no longer."""
        close = getattr(self.body, "close", None)
        if close is not None:
            close()


class Stream:
    """Sends an answer whose parts an application makes one after the other, in a thread of its own.

    :param answer: its body is an iterable. The application may call ``start_response`` as late as with the first part.
    """

    def __init__(self, answer: StreamedResponse, send: Send) -> None:
        self._answer = answer
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._begun = False
        #: Done when the application has no more parts; cancelled when the client does not wait for them any longer.
        self._parts: asyncio.Future[None] = self._loop.create_future()

    async def run(self, receive: Receive) -> None:
        """Send parts until the application has no more, the client leaves, or :meth:`end` is called."""
        if threads.try_start(self._make, name="http-stream") is None:
            self._answer.close()
            await refuse(self._send)
            return
        leaving = asyncio.ensure_future(_leave(receive))
        try:
            await asyncio.wait((self._parts, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = leaving.done()
            leaving.cancel()
            ended = self._parts.cancelled() or not self._parts.done()
            self._parts.cancel()
        if left:
            return
        if ended and not self._begun:
            await refuse(self._send)
            return
        if not ended:
            self._parts.result()
            await self._begin()
        await self._send({"type": "http.response.body", "body": b""})

    def end(self) -> None:
        """Send no more parts; the answer ends as if there were none, or is 503 if there was none yet."""
        self._parts.cancel()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        error: BaseException | None = None
        try:
            for part in self._answer.body:
                if self._parts.done():
                    break
                if part:
                    asyncio.run_coroutine_threadsafe(self._send_part(part), self._loop).result()
        except BaseException as raised:  # noqa: BLE001  (the server logs it)
            error = raised
        try:
            self._answer.close()
        except BaseException as raised:  # noqa: BLE001
            error = error or raised
        soon(self._loop, finish, self._parts, None, error)

    async def _send_part(self, part: Any) -> None:
        if not self._parts.done():
            await self._begin()
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            await self._send(self._answer.start())


async def _leave(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def refuse(send: Send) -> None:
    """Answer 503: there are too many streams, or the server ends."""
    headers = [(b"content-length", b"0"), (b"retry-after", b"5"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """Call in the event loop of another thread, if it still runs."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def finish(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    """Gives a future its result or error, unless it is done."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
