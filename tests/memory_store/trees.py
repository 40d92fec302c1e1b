# SPDX-License-Identifier: Apache-2.0
"""The part of the memory store that knows which providers are below which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from moorage.allocation.interface import ProviderUsage, TreeSource
from tests.memory_store.part import MemoryPart

__all__ = ["MemoryTrees"]


class MemoryTrees(MemoryPart, TreeSource):
    """Trees."""

    @override
    def nested(self, roots: Sequence[str]) -> Mapping[str, tuple[ProviderUsage, ...]]:
        found: dict[str, list[ProviderUsage]] = {}
        with self._lock:
            for row in sorted(self._providers.values(), key=lambda row: row.number):
                usage = self._usage(row)
                if usage.provider.parent is not None and usage.provider.root in roots:
                    found.setdefault(usage.provider.root, []).append(usage)
        return {root: tuple(usages) for root, usages in found.items()}

    @override
    def roots_of(self, providers: Sequence[str]) -> Mapping[str, str]:
        with self._lock:
            known = (self._providers[uuid] for uuid in providers if uuid in self._providers)
            return {row.uuid: self._usage(row).provider.root for row in known}
