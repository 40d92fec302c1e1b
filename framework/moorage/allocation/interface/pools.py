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
    """A power of stores: finds the sharing providers of providers."""

    @abc.abstractmethod
    def pools(self, providers: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        """Returns the other sharing providers from which each provider may take resources, ordered by uuid.

        Providers that may use none are absent. At most five statements, and one if there are no sharing providers.
        """
