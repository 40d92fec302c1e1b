# SPDX-License-Identifier: Apache-2.0
"""The part of the memory store that knows who shares with whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from moorage.allocation.interface import SHARES, PoolSource, ProviderUsage
from tests.memory_store.part import MemoryPart

__all__ = ["MemoryPools"]


class MemoryPools(MemoryPart, PoolSource):
    """Pools."""

    @override
    def pools(self, providers: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        found = {}
        with self._lock:
            sharing = [row for _, row in sorted(self._providers.items()) if SHARES in row.traits]
            for uuid in providers:
                row = self._providers.get(uuid)
                if row is not None:
                    pools = [each for each in sharing if each is not row and each.aggregates & row.aggregates]
                    if pools:
                        found[uuid] = tuple(self._usage(each) for each in pools)
        return found
