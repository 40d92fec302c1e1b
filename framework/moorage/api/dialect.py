# SPDX-License-Identifier: Apache-2.0
"""What every mount shares: a version header, one table from errors to statuses, and the shape of an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import microversion_parse

from moorage import errors

__all__ = ["CORE", "STATUSES", "Dialect"]

#: Error class -> HTTP status. The nearest ancestor in the table counts; what is not in it is 500.
STATUSES: Mapping[type[errors.MoorageError], int] = {
    errors.InvalidInput: 400,
    errors.PayloadTooLarge: 413,
    errors.UnsupportedVersion: 406,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Unavailable: 503,
}


def core_shape(error: errors.MoorageError, status: int, request_id: str) -> dict[str, Any]:
    """An error of /scheduling/v1."""
    return {
        "error": {
            "code": error.code,
            "message": error.message,
            "details": error.details,
            "status": status,
            "request_id": request_id,
        }
    }


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way of speaking over HTTP.

    :param service_type: the first word of the header ``OpenStack-API-Version`` (``scheduling``, ``placement``, ...).
    :param lowest: oldest and ``highest`` newest microversion that is served.
    :param shape: the body of an error.
    """

    service_type: str
    lowest: tuple[int, int]
    highest: tuple[int, int]
    shape: Callable[[errors.MoorageError, int, str], Mapping[str, Any]] = core_shape
    statuses: Mapping[type[errors.MoorageError], int] = field(default_factory=lambda: STATUSES)

    def version(self, headers: Mapping[str, str]) -> tuple[int, int]:
        """The microversion that a request asks for; the lowest without a header.

        :raises UnsupportedVersion: it is malformed or out of range; says which range.
        """
        text = microversion_parse.get_version(dict(headers), self.service_type)
        if not text:
            return self.lowest
        if text == "latest":
            return self.highest
        try:
            parsed = microversion_parse.parse_version_string(text)
            version = (int(parsed[0]), int(parsed[1]))
        except (TypeError, ValueError):
            raise self._out_of_range(text) from None
        if not self.lowest <= version <= self.highest:
            raise self._out_of_range(text)
        return version

    def status(self, error: errors.MoorageError) -> int:
        """The HTTP status of an error."""
        for cls in type(error).__mro__:
            if cls in self.statuses:
                return self.statuses[cls]
        return 500

    def _out_of_range(self, text: str) -> errors.UnsupportedVersion:
        low, high = (f"{major}.{minor}" for major, minor in (self.lowest, self.highest))
        return errors.UnsupportedVersion(
            f"Version {text} of {self.service_type} is not served; {low} to {high} are. Correct the header "
            "OpenStack-API-Version.",
            min_version=low,
            max_version=high,
        )


#: The dialect of /scheduling/v1.
CORE = Dialect("scheduling", (1, 0), (1, 0))
