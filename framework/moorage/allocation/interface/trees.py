# SPDX-License-Identifier: Apache-2.0
"""Trees: providers below others, such as the NUMA cells and devices of a machine."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

from moorage.allocation.interface.claims import ProviderUsage

__all__ = ["TreeSource"]


class TreeSource(abc.ABC):
    """A power of stores: finds the providers below others."""

    @abc.abstractmethod
    def nested(self, roots: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        """Reads all providers below each of the roots, in the order of their creation, with inventories and use.

        Roots without such providers, and providers that are no roots, are absent. Three statements, and one if no root has any.
        """

    @abc.abstractmethod
    def roots_of(self, providers: Sequence[str]) -> Mapping[str, str]:
        """Reads the uuid of the root of each provider's tree; unknown providers are left out. One statement."""
