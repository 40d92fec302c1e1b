# SPDX-License-Identifier: Apache-2.0
"""What every mount shares: the version header, and how an error becomes an answer (:mod:`moorage.http.error_statuses`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import microversion_parse

from moorage import errors
from moorage.http.error_statuses import STATUSES, core_shape
from moorage.http.routes import Version

__all__ = ["Dialect", "parse_version", "requested_version"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way of speaking over HTTP.

    :param service_type: the first word of the header ``OpenStack-API-Version`` (``scheduling``, ``placement``, ...).
    :param lowest: oldest and ``highest`` newest microversion that is served.
    :param shape: the body of an error.
    """

    service_type: str
    lowest: Version
    highest: Version
    shape: Callable[[errors.MoorageError, int, str], Mapping[str, Any]] = core_shape
    statuses: Mapping[type[errors.MoorageError], int] = field(default_factory=lambda: STATUSES)

    def version(self, header: str | None) -> Version:
        """Returns the microversion that the header ``OpenStack-API-Version`` of a request asks for; the lowest without a header.

        :raises UnsupportedVersion: it is malformed or out of range; says which range.
        """
        text = requested_version(header, self.service_type)
        if not text:
            return self.lowest
        if text == "latest":
            return self.highest
        try:
            version = parse_version(text)
        except ValueError:
            raise self._out_of_range(text) from None
        if not self.lowest <= version <= self.highest:
            raise self._out_of_range(text)
        return version

    def status(self, error: Exception) -> int:
        """Returns the HTTP status of an error."""
        return next((self.statuses[cls] for cls in type(error).__mro__ if cls in self.statuses), 500)

    def shows(self, error: errors.MoorageError) -> bool:
        """Returns whether an answer shows the error, because its class or an ancestor is in the table."""
        return any(cls in self.statuses for cls in type(error).__mro__)

    def _out_of_range(self, text: str) -> errors.UnsupportedVersion:
        low, high = (f"{major}.{minor}" for major, minor in (self.lowest, self.highest))
        return errors.UnsupportedVersion(
            f"Version {text} of {self.service_type} is not served; {low} to {high} are. Correct the header "
            "OpenStack-API-Version.",
            min_version=low,
            max_version=high,
        )


@functools.lru_cache(1024)
def requested_version(header: str | None, service_type: str) -> str | None:
    """Returns the version of a service that the header ``OpenStack-API-Version`` names; None if it names none."""
    if not header:
        return None
    found: str | None = microversion_parse.get_version({"openstack-api-version": header}, service_type)
    return found


@functools.lru_cache(1024)
def parse_version(text: str) -> Version:
    """Returns the numbers of a microversion.

    :raises ValueError: it is malformed.
    """
    try:
        major, minor = microversion_parse.parse_version_string(text)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return int(major), int(minor)
