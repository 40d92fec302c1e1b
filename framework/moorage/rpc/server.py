# SPDX-License-Identifier: Apache-2.0
"""The receiving side: dispatches each message to its method."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import context as request_context
from moorage import errors, plugin_isolation, threads
from moorage.clock import Clock, SystemClock
from moorage.rpc import wire
from moorage.rpc.interface import Message

__all__ = ["RpcDispatcher", "endpoints_of", "incoming", "remaining_seconds", "request_id", "rpc_method"]

LOG = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "_moorage_rpc_method"
#: Sets of names of arguments that are remembered to fit.
_FITTING = 1000


@dataclass(frozen=True, slots=True)
class _Handling:
    """The request that this thread handles; ``until`` on the monotonic clock, None if no caller waits."""

    message: Message
    until: float | None
    clock: Clock


_current: contextvars.ContextVar[_Handling | None] = contextvars.ContextVar("moorage_rpc_handling", default=None)


def incoming() -> Message | None:
    """Returns the message that the calling thread handles; None outside of a handler."""
    handling = _current.get()
    return None if handling is None else handling.message


def remaining_seconds() -> float | None:
    """Returns the seconds for which the caller still waits (zero or less: it has stopped); None if no caller waits."""
    handling = _current.get()
    if handling is None or handling.until is None:
        return None
    return handling.until - handling.clock.monotonic()


def request_id(default: str) -> str:
    """The id of the request that the present message belongs to; the default outside of a handler, or when there is none."""
    message = incoming()
    return str((message.context.get("request_id") if message is not None else None) or default)


def rpc_method(function: F) -> F:
    """Mark a method of an endpoint object as callable by messages, under its own name."""
    setattr(function, _MARK, True)
    return function


def endpoints_of(*objects: object) -> dict[str, Callable[..., Any]]:
    """Returns the marked methods of some objects by name; raises ConfigError when two have one name."""
    table: dict[str, Callable[..., Any]] = {}
    for endpoint in objects:
        for name, member in inspect.getmembers(endpoint, callable):
            if not getattr(member, _MARK, False):
                continue
            if name in table:
                raise errors.ConfigError(
                    f"Two endpoint objects serve the method '{name}'; the second is {type(endpoint)}."
                )
            table[name] = member
    return table


def _signature(endpoint: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of an endpoint. Signatures of methods are kept by class."""
    if inspect.ismethod(endpoint):
        return _signature_of_method(endpoint.__func__)
    return inspect.signature(endpoint)


@functools.lru_cache(maxsize=1000)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    whole = inspect.signature(function)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


class RpcDispatcher:
    """A handler for :meth:`moorage.rpc.interface.Transport.serve` that calls the method a message names.

    While it runs, the message's context is the current one of the thread (for logs and policies), :func:`incoming` gives the
    message and :func:`remaining_seconds` the time left.

    :param endpoints: functions by method name, see :func:`endpoints_of`; arguments are passed by name.
    :param version: ``major.minor`` of the interface: served are messages of the same major and at most this minor.
    """

    def __init__(
        self, endpoints: Mapping[str, Callable[..., Any]], *, version: str = "1.0", clock: Clock | None = None
    ) -> None:
        #: Methods with names of arguments that fit: whether they do follows from the names alone, and to find out takes long.
        self._fitting: set[tuple[str, frozenset[str]]] = set()
        self._endpoints = {name: (function, _signature(function)) for name, function in endpoints.items()}
        self._version = version
        self._parsed = _parse(version)
        self._clock = clock or SystemClock()

    def __call__(self, message: Message) -> Any:
        """Handle one message and return its reply.

        :raises UnsupportedVersion: see ``version``.
        :raises NotFound: no such method.
        :raises InvalidInput: arguments are missing or unknown.
        :raises MoorageError: what the method raised; a surprise is logged under an id, and raised as a plain MoorageError.
        """
        self._check_version(message)
        function, signature = self._endpoint(message.method)
        names = (message.method, frozenset(message.args))
        if names not in self._fitting:
            try:
                signature.bind(**message.args)
            except TypeError as error:
                raise errors.InvalidInput(
                    f"The arguments of '{message.method}' do not fit: {error}.", method=message.method
                ) from error
            if len(self._fitting) < _FITTING:
                self._fitting.add(names)
        with self._as_current(message):
            try:
                with plugin_isolation.isolate_plugin_call(message.method):
                    return function(**message.args)
            except errors.MoorageError:
                raise
            except Exception as error:
                raise wire.unexpected(message.method, error) from error

    def _check_version(self, message: Message) -> None:
        major, minor = _parse(message.version)
        if major != self._parsed[0] or minor > self._parsed[1]:
            raise errors.UnsupportedVersion(
                f"'{message.method}' was asked for in version {message.version}, this service serves up to {self._version}; "
                "upgrade the older side.",
                asked=message.version,
                served=self._version,
            )

    def _endpoint(self, method: str) -> tuple[Callable[..., Any], inspect.Signature]:
        try:
            return self._endpoints[method]
        except KeyError:
            raise errors.NotFound(
                f"This service has no method '{method}'; it serves: {', '.join(sorted(self._endpoints))}.",
                method=method,
            ) from None

    @contextmanager
    def _as_current(self, message: Message) -> Iterator[None]:
        before = oslo_context.get_current()
        until = None if message.timeout is None else self._clock.monotonic() + message.timeout
        token = _current.set(_Handling(message, until, self._clock))
        request_context.from_dict(message.context).update_store()
        try:
            yield
        finally:
            _current.reset(token)
            (before or _nobody()).update_store()


_local = threads.local()


def _nobody() -> request_context.RequestContext:
    """Returns an empty context for this thread between two messages, so that logs do not name the last one's user."""
    empty: request_context.RequestContext | None = getattr(_local, "nobody", None)
    if empty is None:
        empty = _local.nobody = request_context.anonymous()
    return empty


def _parse(version: str) -> tuple[int, int]:
    major, dot, minor = version.partition(".")
    if not (major.isdecimal() and (minor.isdecimal() or not dot)):
        raise errors.UnsupportedVersion(f"'{version}' is not a version; versions are major.minor, for example 1.0.")
    return int(major), int(minor or 0)
