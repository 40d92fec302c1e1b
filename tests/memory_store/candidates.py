# SPDX-License-Identifier: Apache-2.0
"""The part of the memory store that finds candidates."""

from __future__ import annotations

import itertools

from typing_extensions import override

from moorage.allocation.interface import CandidateQuery, CandidateSet, CandidateSource
from moorage_plugins.stores.candidates import ProviderForest, ProviderNode, find
from moorage_plugins.stores.checks import candidate_limit
from tests.memory_store.part import MemoryPart, MemoryProvider

__all__ = ["MemoryCandidates"]


class MemoryCandidates(MemoryPart, CandidateSource):
    """Candidates; looks at every provider."""

    @override
    def candidates(self, query: CandidateQuery) -> CandidateSet:
        limit = candidate_limit(query, self._max_candidates)
        with self._lock:
            self._check_classes(name for group in query.groups for name in group.resources)
            named = (each for group in query.groups for each in (group.forbidden, *group.required))
            self._check_traits(query.root_required.union(query.root_forbidden, *named))
            fleet = ProviderForest(map(self._place, sorted(self._providers.values(), key=lambda row: row.number)))
        roots = [each.uuid for each in fleet.places.values() if each.root == each.uuid]
        found = tuple(itertools.islice(find(query, fleet, roots, self._step_rule), limit))
        return CandidateSet(found, fleet.summaries(found))

    def _place(self, row: MemoryProvider) -> ProviderNode:
        provider = self._shown(row)
        items = {each.resource_class: (each, row.used[each.resource_class]) for each in provider.inventories}
        return ProviderNode(row.uuid, row.parent, provider.root, items, row.traits, row.aggregates)
