# SPDX-License-Identifier: Apache-2.0
"""Which traits there are without being created: those of os-traits."""

from __future__ import annotations

import re

import os_traits

from moorage import errors

__all__ = ["SHARES", "STANDARD_TRAITS", "check_trait", "no_such_traits"]

STANDARD_TRAITS: frozenset[str] = frozenset(os_traits.get_traits())
#: A provider with this trait offers its resources to the trees of its aggregates.
SHARES: str = os_traits.MISC_SHARES_VIA_AGGREGATE
_NAME = re.compile(r"CUSTOM_[A-Z0-9_]{1,248}")


def check_trait(name: str) -> None:
    """Refuse a name that no custom trait can have.

    :raises InvalidInput: it does not begin with ``CUSTOM_``, or has other characters than A-Z, 0-9 and _.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise errors.InvalidInput(
            f"{name!r:.80} cannot be a trait; the name of a trait of your own begins with CUSTOM_ and has only A-Z, 0-9 and _, "
            "at most 255 characters.",
            path="trait",
        )


def no_such_traits(names: set[str] | frozenset[str]) -> errors.NotFound:
    """Returns the error for traits that do not exist."""
    wanted = sorted(names)
    return errors.NotFound(
        f"No such trait(s): {', '.join(wanted)}. A trait of your own is created before it is used.",
        trait=wanted[0],
        traits=wanted,
    )
