# SPDX-License-Identifier: Apache-2.0
"""Defines a power of stores: reads the providers that have changed."""

from __future__ import annotations

import abc

from moorage.db.changes import RecentRows

__all__ = ["ChangeSource"]


class ChangeSource(abc.ABC):
    """A power of stores: readers keep a copy of the providers at the cost of what changes."""

    @abc.abstractmethod
    def recent_providers(self, since: int) -> RecentRows:
        """Reads the providers that were written since then, with their inventories, use, traits and aggregates.

        :param since: microseconds of the database's time; 0: all providers.
        """

    @abc.abstractmethod
    def provider_uuids(self) -> frozenset[str]:
        """Reads the uuids of all providers."""

    @abc.abstractmethod
    def sharing(self) -> frozenset[str]:
        """Reads the uuids of the providers that share with those of their aggregates."""
