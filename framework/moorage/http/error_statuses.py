# SPDX-License-Identifier: Apache-2.0
"""The HTTP status of every error, and the shape of an error in the core's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moorage import errors

__all__ = ["STATUSES", "MethodNotAllowed", "NotAcceptable", "UnsupportedMediaType", "core_shape"]


class MethodNotAllowed(errors.InvalidInput):
    """The path is known and the method is not; ``details['allow']`` lists the known ones."""


class NotAcceptable(errors.InvalidInput):
    """The client accepts no type that is written, or asks for what its microversion does not have."""


class UnsupportedMediaType(errors.InvalidInput):
    """The body is of a type that is not read."""


#: Error class -> HTTP status. The nearest ancestor in the table counts. An error that is not in the table is internal: the answer
#: is 500 and does not show it.
STATUSES: Mapping[type[errors.MoorageError], int] = {
    errors.InvalidInput: 400,
    MethodNotAllowed: 405,
    NotAcceptable: 406,
    UnsupportedMediaType: 415,
    errors.PayloadTooLarge: 413,
    errors.UnsupportedVersion: 406,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Gone: 410,
    errors.Conflict: 409,
    errors.PluginFailed: 500,
    errors.RemoteError: 500,
    errors.Unavailable: 503,
}


def core_shape(error: errors.MoorageError, status: int, request_id: str) -> dict[str, Any]:
    """Returns an error of /scheduling/v1."""
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "details": error.details,
            "status": status,
            "request_id": request_id,
        }
    }
