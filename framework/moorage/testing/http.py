# SPDX-License-Identifier: Apache-2.0
"""Sends requests to a WSGI application within the process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from wsgiref import util

__all__ = ["ReceivedResponse", "send"]


@dataclass(frozen=True, slots=True)
class ReceivedResponse:
    """The answer of an application."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    @property
    def json(self) -> Any:
        """The data of the body."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """Returns all values of a header, separated by commas; None without the header."""
        found = [value for known, value in self.headers if known.lower() == name.lower()]
        return ", ".join(found) if found else None


def send(
    application: Callable[..., Iterable[bytes]],
    method: str,
    target: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> ReceivedResponse:
    """Sends a request.

    :param target: path below the mount, with a query: ``/things?limit=1``.
    :param body: bytes, or data that becomes JSON; None: no body.
    """
    path, _, query = target.partition("?")
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path.encode().decode("latin-1"),
        "QUERY_STRING": query,
        "wsgi.input": io.BytesIO(raw),
    }
    if raw:
        environ |= {"CONTENT_LENGTH": str(len(raw)), "CONTENT_TYPE": "application/json"}
    for name, value in (headers or {}).items():
        key = name.upper().replace("-", "_")
        environ[key if key in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{key}"] = value
    util.setup_testing_defaults(environ)
    started: list[tuple[str, Sequence[tuple[str, str]]]] = []
    data = b"".join(application(environ, lambda status, found, *_: started.append((status, found))))
    status, found = started[-1]
    return ReceivedResponse(int(status.partition(" ")[0]), found, data)
