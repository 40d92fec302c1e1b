# SPDX-License-Identifier: Apache-2.0
"""Describes an HTTP API as data: routes, the requests that their handlers get, and the responses that handlers return.

Families and dialects write tables of :class:`Route`. :class:`moorage.http.application.Application` serves a table. Nothing here
knows how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from moorage import errors
from moorage.context import RequestContext, anonymous

__all__ = [
    "ANY_QUERY",
    "FIELDS",
    "PAGE",
    "PolicyCheck",
    "PolicyRule",
    "Request",
    "Response",
    "Route",
    "Schema",
    "Version",
    "Wsgi",
    "environ_key",
    "wanted_fields",
]

#: Percent-encodes the path of a mount; a server has few mounts.
_quoted = functools.lru_cache(64)(quote)
#: A WSGI application (PEP 3333).
Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
#: A JSON schema (draft 2020-12) as plain data.
Schema = Mapping[str, Any]
#: A microversion: major and minor number.
Version = tuple[int, int]
_NO_CONTEXT = anonymous()

#: The query of a route whose handler reads all parameters itself, and refuses those that it does not know.
ANY_QUERY: Schema = {"type": "object"}
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
    """One rule of the policy: which callers may do something, in the language of oslo.policy.

    :param name: for example ``scheduling:nodes:create``.
    :param check: the default check string; the roles are reader, member, manager, admin and service.
    :param scope_types: ``system`` and/or ``project``.
    """

    name: str
    check: str
    description: str
    scope_types: tuple[str, ...] = ("system", "project")


class PolicyCheck(Protocol):
    """Refuses what the caller may not do."""

    def __call__(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> None:
        """Refuse it, or return.

        :param target: what is acted upon, for rules such as ``project_id:%(project_id)s``; None: the caller's own project.
        :raises Forbidden: names the rule.
        """


@functools.lru_cache(256)
def environ_key(name: str) -> str:
    """Returns the key of a header in a WSGI environment (PEP 3333)."""
    key = name.upper().replace("-", "_")
    return key if key in {"CONTENT_TYPE", "CONTENT_LENGTH"} else "HTTP_" + key


@dataclass(slots=True)
class Request:
    """A request. The application fills in the fields from top to bottom; the handler gets all of them.

    :param path: below the mount.
    :param path_params: the parts of the path that the route names.
    :param query: as the schema of the route's query says.
    :param body: the JSON data of the body, or None.
    :param idempotency: names the work of a request with an Idempotency-Key. It is equal in every repetition, and empty without a
        key.
    :param enforce: raises Forbidden unless a context satisfies a rule; see :meth:`check_policy`.
    :param received_at: by the clock of this host, in microseconds since the Unix epoch.
    """

    environ: Mapping[str, Any] = field(default_factory=dict)
    method: str = "GET"
    path: str = ""
    request_id: str = ""
    version: Version = (0, 0)
    context: RequestContext = _NO_CONTEXT
    path_params: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    idempotency: str = ""
    enforce: PolicyCheck = lambda rule, context, target=None: None
    received_at: int = 0

    @property
    def prefix(self) -> str:
        """The path of the mount: links and Location headers begin with it. Empty at the root."""
        return _quoted(str(self.environ.get("SCRIPT_NAME", "")))

    @property
    def base_url(self) -> str:
        """Scheme, host and mount as the client wrote them, for absolute links."""
        environ = self.environ
        host = environ.get("HTTP_HOST") or f"{environ.get('SERVER_NAME')}:{environ.get('SERVER_PORT')}"
        return f"{environ.get('wsgi.url_scheme', 'http')}://{host}{self.prefix}"

    @property
    def operation_id(self) -> str:
        """Names the work: a claim or an operation with this id was begun by this request, or by an earlier try of it."""
        return self.idempotency or str(self.context.request_id)

    def header(self, name: str) -> str | None:
        """Returns a header of the request; None when it was not sent."""
        found = self.environ.get(environ_key(name))
        return None if found is None else str(found)

    def check_policy(self, rule: str, target: Mapping[str, Any] | None = None) -> None:
        """Check a rule beyond the route's own, for example for a field that needs more rights.

        :param target: what is acted upon; None: something of the caller's own project.
        :raises Forbidden: the caller does not satisfy it.
        """
        self.enforce(rule, self.context, target)


@dataclass(frozen=True, slots=True)
class Response:
    """What a handler answers. ``body`` is JSON data; bytes: JSON that is written already; None: no body at all.

    An iterator of bytes is a stream. The server gives it a thread of its own. The iterator yields every few seconds, empty
    bytes if there is nothing new.
    """

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """One operation of an API. A method and path may have several routes, with versions that do not overlap.

    :param method: GET, POST, PUT, PATCH or DELETE.
    :param path: relative to the mount, with ``{name}`` parts that match one segment (``/nodes/{uuid}``).
    :param policy: the name of the rule that is enforced before ``handler`` runs; None: the handler checks policies itself.
    :param summary: one sentence for the OpenAPI document.
    :param responses: schema (or None: no body) by status code, without the errors, which all routes share.
    :param query: JSON schema (type object) of the query; None: the route takes no parameters, and refuses any.
    :param body: JSON schema of the body; None: the route takes no body, and refuses one.
    :param path_schemas: JSON schemas of path parts by name; a plain non-empty string where absent.
    :param public: needs no authentication.
    :param since: first and ``until`` last version with it; None: it still exists.
    """

    method: str
    path: str
    handler: Callable[[Request], Response]
    policy: str | None = None
    summary: str = ""
    responses: Mapping[int, Schema | None] = field(default_factory=dict)
    query: Schema | None = None
    body: Schema | None = None
    path_schemas: Mapping[str, Schema] = field(default_factory=dict)
    tags: Sequence[str] = ()
    public: bool = False
    since: Version = (0, 0)
    until: Version | None = None

    def serves(self, version: Version) -> bool:
        """It exists in that version."""
        return self.since <= version and (self.until is None or version <= self.until)
