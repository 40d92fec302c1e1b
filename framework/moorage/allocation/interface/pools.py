# SPDX-License-Identifier: Apache-2.0
"""Pools: providers without a node, from which the provider trees in their aggregates also take resources."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Final

from moorage.allocation.interface.claims import ProviderUsage

__all__ = ["SHARES", "PoolSource"]

#: The trait of a provider that shares with the providers of its aggregates (its name is os-traits').
SHARES: Final = "MISC_SHARES_VIA_AGGREGATE"


class PoolSource(abc.ABC):
    """A power of stores: who shares with whom."""

    @abc.abstractmethod
    def pools(self, providers: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        """The sharing providers that each of the given providers may take of, ordered by uuid; itself is none of them.

        Who may take of none is not named. At most five statements, and one where nothing shares.
        """
