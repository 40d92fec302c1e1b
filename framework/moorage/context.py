# SPDX-License-Identifier: Apache-2.0
"""The request context: user, project and ids of a request, in the API, messages and logs."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from oslo_context import context as oslo_context

from moorage import randomness
from moorage.json_text import writer

__all__ = [
    "RequestContext",
    "acting_for",
    "anonymous",
    "from_dict",
    "from_text",
    "global_request_id",
    "internal",
    "new_request_id",
    "to_text",
    "trace_parent",
]

_REQUEST_ID = re.compile(r"req-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
#: What an operation keeps of its request, by the names of messages: the attribute, and how much of it at most. All together fit
#: into the column.
_KEPT = {
    "request_id": ("request_id", 64), "global_request_id": ("global_request_id", 64), "user": ("user_id", 255),
    "project_id": ("project_id", 255), "traceparent": ("traceparent", 55),
}  # fmt: skip
#: Contexts of :func:`from_text` that are kept: making one takes 10 us, and the operations of a set have the same one.
_REMEMBERED = 256
_JSON = writer(ensure_ascii=False)
#: Where oslo.context keeps the context of each thread.
_STORE = oslo_context._request_store
#: The arguments of a context, by their names in messages: those that oslo.context's ``from_dict`` reads, and ours.
_ARGUMENTS = {
    name: name
    for name in (
        "auth_token", "project_id", "is_admin", "read_only", "show_deleted", "request_id", "global_request_id",
        "resource_uuid", "roles", "user_name", "project_name", "domain_name", "user_domain_name", "project_domain_name",
        "is_admin_project", "system_scope", "traceparent", "received_at",
    )
} | {"user": "user_id", "domain": "domain_id", "user_domain": "user_domain_id", "project_domain": "project_domain_id"}  # fmt: skip


class RequestContext(oslo_context.RequestContext):
    """A request's identity: user, project, roles, system scope, request ids.

    It is oslo.context's class (so logs and policies understand it) with two fields more.

    :ivar traceparent: the caller's place in a distributed trace (W3C Trace Context), passed on to every service; None without.
    :ivar received_at: when the API received the request, by the clock of its host, in microseconds since the Unix epoch; 0: not
        known.
    """

    FROM_DICT_EXTRA_KEYS = ["traceparent", "received_at"]

    def __init__(
        self, *, traceparent: str | None = None, received_at: int | None = None, overwrite: bool = True, **values: Any
    ) -> None:
        bare = not overwrite and oslo_context.get_current() is None
        super().__init__(overwrite=overwrite, **values)
        if bare:
            # oslo.context makes it that of a thread that has none all the same. Whatever the thread did next would be done in the
            # name of a request that it has only read of.
            vars(_STORE).pop("context", None)
        self.traceparent = traceparent
        self.received_at = received_at or 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the context as plain data, for messages and logs."""
        values = super().to_dict()
        if self.traceparent:
            values["traceparent"] = self.traceparent
        if self.received_at:
            values["received_at"] = self.received_at
        return values


def new_request_id(seconds: float) -> str:
    """Returns a new request id. The service that answers the request makes it; the caller's is :func:`global_request_id`.

    The ids sort by time. The journal has an index of the requests, in which the events of one moment are neighbours.

    :param seconds: since the Unix epoch.
    """
    return f"req-{randomness.new_ordered_uuid(seconds)}"


def global_request_id(given: str | None) -> str | None:
    """Returns the caller's own request id, for tracing only; None when it is not of the form req-UUID."""
    return given if given and _REQUEST_ID.fullmatch(given) else None


def trace_parent(given: str | None) -> str | None:
    """Returns the caller's ``traceparent`` header; None when it is not of the form that W3C Trace Context (2021) describes."""
    return given if given and _TRACE_PARENT.fullmatch(given) else None


def to_text(context: oslo_context.RequestContext | None) -> str | None:
    """Writes the fields of a context that an operation keeps, in at most 1,000 characters; None when there is no context."""
    if context is None or not context.request_id:
        return None
    found = {}
    for name, (attribute, length) in _KEPT.items():
        value = getattr(context, attribute, None)
        if value:
            found[name] = str(value)[:length]
    return _JSON(found)


@functools.lru_cache(_REMEMBERED)
def from_text(text: str | None) -> RequestContext | None:
    """Parses a context that :func:`to_text` wrote; it has no roles. Callers share the result, so they must not change it."""
    return from_dict(json.loads(text)) if text else None


def from_dict(values: Mapping[str, Any]) -> RequestContext:
    """Makes a context from what ``to_dict()`` returned in another process; unknown keys are ignored."""
    given = {_ARGUMENTS[name]: value for name, value in values.items() if name in _ARGUMENTS}
    request_id = given.pop("request_id", None)
    # Without an id, oslo.context would make one up, and logs would name a request that no client sent.
    context = RequestContext(overwrite=False, request_id=request_id or "-", **given)
    if not request_id:
        vars(context)["request_id"] = None
    return context


def anonymous() -> RequestContext:
    """Makes an empty context: lines in the log of a thread that has it name no request."""
    return from_dict({})


def internal(service: str, request_id: str | None = None) -> RequestContext:
    """Makes a context for work that no user asked for (periodic work, cleanup); role ``service``, system scope."""
    return RequestContext(
        user_id=service, roles=["service"], system_scope="all", request_id=request_id, overwrite=False
    )


class acting_for:
    """Makes a context that of the thread for the length of the block: its log lines and events name that request."""

    # A generator as a context manager would take three times as long, and oslo.context's functions twice; there are ten of these
    # blocks per instance.

    __slots__ = ("_before", "_context")

    def __init__(self, context: oslo_context.RequestContext | None) -> None:
        self._context = context
        self._before: oslo_context.RequestContext | None = None

    def __enter__(self) -> None:
        self._before = getattr(_STORE, "context", None)
        _STORE.context = self._context or anonymous()

    def __exit__(self, *failure: object) -> None:
        _STORE.context = self._before or anonymous()
