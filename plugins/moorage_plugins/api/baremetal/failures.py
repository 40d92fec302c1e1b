# SPDX-License-Identifier: Apache-2.0
"""Ironic's words for a version that is too old, and the shape of errors that its clients read."""

from __future__ import annotations

import json

from moorage.http.error_statuses import NotAcceptable
from moorage.http.routes import Version

__all__ = ["fault", "needs_version"]


def needs_version(version: Version, what: str) -> NotAcceptable:
    """Returns the refusal of a field, filter or key that is not there yet in the microversion of the request."""
    return NotAcceptable(
        f"Request not acceptable. The minimal required API version should be {version[0]}.{version[1]} for {what}.",
        path=what,
    )


def fault(message: str, status: int) -> bytes:
    """Returns the body of an error: JSON as a text inside of JSON, which is what the clients take apart."""
    inner = {"faultcode": "Client" if status < 500 else "Server", "faultstring": message, "debuginfo": None}
    return json.dumps({"error_message": json.dumps(inner)}).encode()
