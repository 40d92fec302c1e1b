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
from moorage import errors

__all__ = ["FIELDS", "PAGE", "ApiRequest", "ApiResponse", "PolicyRule", "Route", "Schema", "wanted_fields"]

#: A JSON schema (draft 2020-12) as plain data.
Schema = Mapping[str, Any]


#: What the query of every list takes: the size of a page, and ``next_after`` of the page before.
PAGE: Mapping[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
    "after": {"type": "string", "maxLength": 255},
}
#: The fields that are shown, separated by commas; see :func:`wanted_fields`.
FIELDS: Mapping[str, Any] = {"type": "string", "minLength": 1, "maxLength": 1000}


def wanted_fields(text: str | None, known: Sequence[str]) -> Sequence[str]:
    """Returns the fields that a query asks for, and the uuid; all of them where the query names none.

    :raises InvalidInput: names a field that does not exist.
    """
    if text is None:
        return known
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise errors.InvalidInput(f"There is no field {unknown[0]!r}; fields are {', '.join(known)}.", path="fields")
    return ["uuid", *(name for name in names if name != "uuid")]


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
    ``body`` the validated JSON body or None. ``check_policy`` raises Forbidden unless the caller satisfies a rule; handlers call it
    for fields that need a rule of their own. ``idempotency`` names the work of a request with an Idempotency-Key; it is the same
    for every repetition, and empty without a key.
    """

    context: context_module.RequestContext
    path: Mapping[str, str]
    query: Mapping[str, Any]
    body: Any
    url_prefix: str = ""
    check_policy: Callable[[str], None] = lambda rule: None
    idempotency: str = ""

    @property
    def operation_id(self) -> str:
        """Names the work: a claim or an operation with this id was begun by this request, or by an earlier try of it."""
        return self.idempotency or str(self.context.request_id)


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
