# SPDX-License-Identifier: Apache-2.0
"""The sending side: messages with a number, a context and a deadline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from oslo_context import context as oslo_context

from moorage import errors, threads
from moorage.context import RequestContext
from moorage.rpc.interface import Message, Origin, Transport
from moorage.rpc.server import remaining_seconds

__all__ = ["RpcSender"]


class RpcSender:
    """Sends for one incarnation of one service; thread safe. Make one per process and (service, epoch), and share it.

    Every message gets the next number of (service, epoch), counted over all topics, and the request context: the one that is
    given, else the current one of the thread.

    :param timeout: seconds that :meth:`call` waits by default: ``[rpc] call_timeout``.
    """

    def __init__(self, transport: Transport, service: str, epoch: int, *, timeout: float = 60.0) -> None:
        self._transport = transport
        self._service = service
        self._epoch = epoch
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._lock = threads.lock()

    @property
    def transport(self) -> Transport:
        """What it sends through."""
        return self._transport

    def call(
        self,
        topic: str,
        method: str,
        args: Mapping[str, Any] | None = None,
        *,
        server: str | None = None,
        timeout: float | None = None,
        context: RequestContext | None = None,
        version: str = "1.0",
    ) -> Any:
        """Ask and wait for the answer; errors as :meth:`moorage.rpc.interface.Transport.call` has them.

        Inside the handling of a call, it waits no longer than the caller of that one does.

        :raises CallTimeout: also at once, without sending, when the caller of the present handling waits no more.
        """
        seconds = self._seconds(topic, method, timeout)
        message = self._message(method, args, context, version)
        return self._transport.call(topic, message, server=server, timeout=seconds)

    def begin_call(
        self,
        topic: str,
        method: str,
        args: Mapping[str, Any] | None = None,
        *,
        server: str | None = None,
        timeout: float | None = None,
        context: oslo_context.RequestContext | None = None,
        version: str = "1.0",
    ) -> Callable[[], Any]:
        """Asks, and returns a function that waits for the answer; see :meth:`moorage.rpc.interface.Transport.begin_call`.

        The function raises all errors of :meth:`call`, also those that are known at once.
        """
        try:
            seconds = self._seconds(topic, method, timeout)
            message = self._message(method, args, context, version)
            return self._transport.begin_call(topic, message, server=server, timeout=seconds)
        except errors.MoorageError as error:
            return functools.partial(_fail, error)

    def cast(
        self,
        topic: str,
        method: str,
        args: Mapping[str, Any] | None = None,
        *,
        server: str | None = None,
        context: RequestContext | None = None,
        version: str = "1.0",
    ) -> None:
        """Send to one server and do not wait; see :meth:`moorage.rpc.interface.Transport.cast`."""
        self._transport.cast(topic, self._message(method, args, context, version), server=server)

    def fanout(
        self,
        topic: str,
        method: str,
        args: Mapping[str, Any] | None = None,
        *,
        context: RequestContext | None = None,
        version: str = "1.0",
        to_others: bool = False,
    ) -> None:
        """Send to every server of the topic; see :meth:`moorage.rpc.interface.Transport.fanout`.

        Fanouts of one sender are numbered and handed to the transport in one order, whichever threads send them.
        """
        with self._lock:
            message = self._message(method, args, context, version, to_others)
            self._transport.fanout(topic, message)

    def _seconds(self, topic: str, method: str, timeout: float | None) -> float:
        """Returns the seconds to wait for a reply: inside the handling of a call, no more than its caller still waits.

        :raises CallTimeout: that caller waits no more.
        """
        seconds = self._timeout if timeout is None else timeout
        left = remaining_seconds()
        if left is None:
            return seconds
        if left <= 0:
            raise errors.CallTimeout(f"'{method}' was not sent to topic '{topic}': its own caller waits no longer.")
        return min(seconds, left)

    def _message(
        self,
        method: str,
        args: Mapping[str, Any] | None,
        context: oslo_context.RequestContext | None,
        version: str,
        to_others: bool = False,
    ) -> Message:
        chosen = context if context is not None else oslo_context.get_current()
        # next() on an itertools.count is atomic, so calls and casts need no lock.
        origin = Origin(self._service, self._epoch, next(self._numbers))
        return Message(
            method, args or {}, origin, chosen.to_dict() if chosen is not None else {}, version, None, to_others
        )


def _fail(error: errors.MoorageError) -> NoReturn:
    raise error
