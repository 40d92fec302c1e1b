# SPDX-License-Identifier: Apache-2.0
"""Who asks: the request context that travels through API, messages and logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oslo_context import context as oslo_context

__all__ = ["RequestContext", "from_dict", "internal"]


class RequestContext(oslo_context.RequestContext):
    """A request's identity: user, project, roles, system scope, request ids.

    It is oslo.context's class (so logs and policies understand it) under Moorage's name.
    """


def from_dict(values: Mapping[str, Any]) -> RequestContext:
    """The context that ``to_dict()`` described in another process; unknown keys are ignored."""
    context = RequestContext.from_dict(dict(values), overwrite=False)
    assert isinstance(context, RequestContext)  # noqa: S101  (for the type checker; from_dict is a classmethod)
    return context


def internal(service: str, request_id: str | None = None) -> RequestContext:
    """A context for work that no user asked for (periodic work, cleanup); role ``service``, system scope."""
    return RequestContext(
        user_id=service, roles=["service"], system_scope="all", request_id=request_id, overwrite=False
    )
