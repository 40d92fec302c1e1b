# SPDX-License-Identifier: Apache-2.0
"""The HTTP surface as data: what a family says of its part of ``/scheduling/v1``.

Families write tables of :class:`Route` in their ``api.py``; :mod:`moorage.api` turns all tables into one application and one
OpenAPI document, validates every body and query with the very schemas that are published, and asks the policy before a handler
runs. Nothing here knows a web framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moorage import context as context_module

__all__ = ["ApiRequest", "ApiResponse", "PolicyRule", "Route", "Schema"]

#: A JSON schema (draft 2020-12) as plain data.
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """One rule of the policy: who may do what, as oslo.policy understands it.

    :param name: for example ``scheduling:nodes:create``.
    :param check: the default check string; the roles are reader, member, manager, admin and service.
    :param scope_types: ``system`` and/or ``project``.
    """

    name: str
    check: str
    description: str
    scope_types: tuple[str, ...] = ("system", "project")


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A request after authentication, policy and validation.

    ``path`` are the parts of the URL that the route names, ``query`` the validated query (typed as its schema says),
    ``body`` the validated JSON body or None.
    """

    context: context_module.RequestContext
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any
    url_prefix: str = ""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """What a handler answers; ``body`` is JSON data, or None for no body."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of the API.

    :param method: GET, POST, PUT, PATCH or DELETE.
    :param path: relative to the mount, with ``{name}`` parts (``/nodes/{uuid}``).
    :param policy: the name of the rule that is enforced before ``handler`` runs.
    :param summary: one sentence for the OpenAPI document.
    :param query: JSON schema (type object) of the query; absent means that no parameter is allowed.
    :param body: JSON schema of the body; absent means that no body is allowed.
    :param responses: schema (or None: no body) by status code, without the errors, which all routes share.
    :param path_schemas: JSON schemas of path parts by name; a plain non-empty string where absent.
    """

    method: str
    path: str
    policy: str
    summary: str
    handler: Callable[[ApiRequest], ApiResponse]
    responses: Mapping[int, Schema | None]
    query: Schema | None = None
    body: Schema | None = None
    path_schemas: Mapping[str, Schema] = field(default_factory=dict)
    tags: Sequence[str] = ()
