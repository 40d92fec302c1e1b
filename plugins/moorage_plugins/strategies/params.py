# SPDX-License-Identifier: Apache-2.0
"""Reading what an operator gave to a strategy; every refusal says which parameter, and what it may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moorage import errors

__all__ = ["known", "text", "whole"]


def known(strategy: str, params: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuse parameters that the strategy does not have."""
    unknown = sorted(set(params) - set(names))
    if unknown:
        raise errors.InvalidInput(
            f"The strategy {strategy} has no parameter {', '.join(unknown)}; it has: {', '.join(sorted(names)) or 'none'}.",
            path=f"params/{unknown[0]}",
        )


def whole(params: Mapping[str, Any], name: str, default: int | None, least: int = 1) -> int | None:
    """Returns a whole number of ``least`` or more."""
    value = params.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise errors.InvalidInput(
            f"{name} is {value!r}; it must be a whole number of {least} or more.", path=f"params/{name}"
        )
    return value


def text(params: Mapping[str, Any], name: str, default: str | None) -> str | None:
    """Returns a text that is not empty."""
    value = params.get(name, default)
    if value is not None and (not isinstance(value, str) or not value):
        raise errors.InvalidInput(f"{name} is {value!r}; it must be a text.", path=f"params/{name}")
    return value
