# SPDX-License-Identifier: Apache-2.0
"""Trees with more levels than new ones may have, which an earlier release has written."""

from __future__ import annotations

import itertools
import unittest
from unittest import mock

from moorage.allocation.interface import (
    MOST_LEVELS,
    CandidateQuery,
    ClaimRequest,
    FullStore,
    InventoryItem,
    RequestGroup,
    ResourceProvider,
    TreeTooDeep,
)
from moorage.instances.providers import offer, read_providers
from moorage.scheduling.assignment import proposal
from moorage.scheduling.interface import NodeState
from moorage.scheduling.provider_columns import ProviderColumns
from moorage.testing.allocation import new_uuid
from moorage_plugins.stores import checks
from tests.conformance.allocation.stores import SqlCase, memory_store, sql_store

#: Pairs of processors and a GPU in one subtree. With the third set, every node with enough of both is searched.
PAIRS = CandidateQuery(
    (
        RequestGroup("a", {"VCPU": 1}),
        RequestGroup("b", {"PGPU": 1}),
        RequestGroup("c", {"VCPU": 1}),
        RequestGroup("d", {"PGPU": 1}),
    ),
    same_subtree=(frozenset("ab"), frozenset("cd"), frozenset("a")),
)


class MemoryTests(unittest.TestCase):
    def make_store(self) -> FullStore:
        return memory_store()

    def setUp(self) -> None:
        self.store = self.make_store()
        limit = mock.patch.object(checks, "MOST_LEVELS", 2 * MOST_LEVELS)
        limit.start()
        self.addCleanup(limit.stop)
        self.beside = [self.deep([1, 1]) for _ in range(2)]
        self.apart = self.deep([1, 2])
        limit.stop()

    def deep(self, cells_of_gpus: list[int]) -> list[str]:
        """A chain, two cells with a processor below it, and GPUs below these cells; the uuids of the chain and the GPUs."""
        chain = [new_uuid() for _ in range(MOST_LEVELS + 3)]
        cells = [chain[-1], new_uuid(), new_uuid()]
        gpus = [new_uuid() for _ in cells_of_gpus]
        below = dict.fromkeys(cells[1:], chain[-1]) | {
            gpu: cells[cell] for gpu, cell in zip(gpus, cells_of_gpus, strict=True)
        }
        items = {uuid: (InventoryItem("PGPU" if uuid in gpus else "VCPU", 1),) for uuid in below}
        self.store.ensure_providers(
            [
                *(
                    ResourceProvider(uuid, uuid, parent=above)
                    for above, uuid in itertools.pairwise([None, *chain])
                    if uuid
                ),
                *(ResourceProvider(uuid, uuid, inventories=items[uuid], parent=above) for uuid, above in below.items()),
            ]
        )
        return [*chain, *gpus]

    def test_they_may_move_up_and_not_down(self) -> None:
        chain, other = self.beside
        for uuid, parent in ((chain[-1], other[-1]), (chain[10], other[11])):
            with self.assertRaises(TreeTooDeep):
                self.store.update_provider(uuid, parent=parent)
        with self.assertRaises(TreeTooDeep):
            self.store.create_provider(ResourceProvider(new_uuid(), "new", parent=chain[-1]))
        self.assertEqual(chain[-4], self.store.update_provider(chain[-1], parent=chain[-4]).parent)
        self.assertEqual(chain[5], self.store.update_provider(chain[7], parent=chain[5]).parent)
        self.assertIsNone(self.store.update_provider(chain[10], parent=None).parent)

    def test_they_have_candidates_and_places(self) -> None:
        roots = [chain[0] for chain in (*self.beside, self.apart)]
        candidates = {each.anchor: each for each in self.store.candidates(PAIRS).candidates}
        self.assertEqual({self.apart[0]}, candidates.keys())
        providers = read_providers(self.store, self.store.usages(providers=roots))
        nodes = [NodeState(uuid, uuid, uuid, *offer(providers[uuid]), providers=providers[uuid]) for uuid in roots]
        fits = ProviderColumns.of(nodes).fits(PAIRS, {}, "seed")
        self.assertEqual([uuid in candidates for uuid in roots], fits.tolist())
        propose = proposal(PAIRS, providers[self.apart[0]], {}, "seed")
        assert propose is not None
        holds = propose(frozenset())
        assert holds is not None
        self.store.claim(ClaimRequest(new_uuid(), holds))
        self.assertEqual((), tuple(self.store.candidates(PAIRS).candidates))


class SqlTests(SqlCase, MemoryTests):
    def make_store(self) -> FullStore:
        self.empty()
        return sql_store(self.database)


if __name__ == "__main__":
    unittest.main()
