# SPDX-License-Identifier: Apache-2.0
"""Only nodes whose firmware is new enough."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

from moorage import errors
from moorage.extensions import deprecated_plugin
from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip

__all__ = ["FirmwareFilter", "FirmwareVersionFilter"]

PROPERTY = "firmware"
ASKED = "acme:firmware"


class FirmwareFilter(HostFilter):
    """Passes nodes whose property ``firmware`` (1.10.2) is not older than the flavor's extra spec ``acme:firmware``.

    A flavor that asks for none passes everywhere; a node whose firmware is not known falls.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone: ClassVar[bool] = True
    ignores_owner: ClassVar[bool] = True

    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        """One node, one answer."""
        wanted = spec_obj.flavor.extra_specs.get(ASKED)
        return wanted is None or _version(host_state.properties.get(PROPERTY)) >= _asked(wanted)

    def host_key(self, host_state: HostState) -> Hashable:
        """Nodes with the same firmware have the same answer, so it is asked once for each version, not for each node."""
        return str(host_state.properties.get(PROPERTY))

    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        """Nothing to ask where the flavor asks for nothing; a request that makes no sense is refused before any node is seen."""
        wanted = spec.flavor.extra_specs.get(ASKED)
        if wanted is None:
            return SKIP
        _asked(wanted)
        return None

    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        """Why a node fell, for a person."""
        has = host_state.properties.get(PROPERTY, "unknown")
        return f"its firmware is {has}, the flavor asks for {spec.flavor.extra_specs.get(ASKED)} or newer"


@deprecated_plugin(since="acme-moorage 1.0", instead="choose firmware")
class FirmwareVersionFilter(FirmwareFilter):
    """``firmware``, under its name of before 1.0."""


def _version(text: object) -> tuple[int, ...]:
    """Comparable; what is no version is older than any."""
    try:
        return tuple(int(part) for part in str(text).split("."))
    except ValueError:
        return ()


def _asked(text: str) -> tuple[int, ...]:
    found = _version(text)
    if not found:
        raise errors.InvalidInput(f"{ASKED} = {text} is no version; write numbers joined by dots (1.10.2).", path=ASKED)
    return found
