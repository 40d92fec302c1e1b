# SPDX-License-Identifier: Apache-2.0
"""Who asks: the request context that travels through API, messages and logs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oslo_context import context as oslo_context

from moorage import randomness

__all__ = ["RequestContext", "anonymous", "from_dict", "global_request_id", "internal", "new_request_id"]

_REQUEST_ID = re.compile(r"req-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class RequestContext(oslo_context.RequestContext):
    """A request's identity: user, project, roles, system scope, request ids.

    It is oslo.context's class (so logs and policies understand it) under Moorage's name.
    """


def new_request_id() -> str:
    """An id for one request to one service. It is always made by the service that answers."""
    return f"req-{randomness.new_uuid()}"


def global_request_id(given: str | None) -> str | None:
    """The caller's own id, which OpenStack sends with many calls; None when it is not of the form req-UUID. Only for tracing."""
    return given if given and _REQUEST_ID.fullmatch(given) else None


def from_dict(values: Mapping[str, Any]) -> RequestContext:
    """The context that ``to_dict()`` described in another process; unknown keys are ignored."""
    context = RequestContext.from_dict(dict(values), overwrite=False)
    assert isinstance(context, RequestContext)  # noqa: S101  (for the type checker; from_dict is a classmethod)
    if not values.get("request_id"):
        # Otherwise oslo.context makes an id up, and logs would name a request that nobody sent.
        vars(context)["request_id"] = None
    return context


def anonymous() -> RequestContext:
    """An empty context: lines in the log of a thread that has it name no request."""
    return from_dict({})


def internal(service: str, request_id: str | None = None) -> RequestContext:
    """A context for work that no user asked for (periodic work, cleanup); role ``service``, system scope."""
    return RequestContext(
        user_id=service, roles=["service"], system_scope="all", request_id=request_id, overwrite=False
    )
