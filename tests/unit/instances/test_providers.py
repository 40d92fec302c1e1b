# SPDX-License-Identifier: Apache-2.0
"""What nodes offer with pools, and where claims take of."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from dataclasses import replace

from moorage import errors
from moorage.allocation.interface import CandidateQuery, ClaimRequest, InventoryItem, RequestGroup
from moorage.allocation.pools import PoolKeeper
from moorage.instances.providers import claim_of_node, offer
from moorage.scheduling.assignment import proposal
from moorage.scheduling.interface import ProviderState
from moorage.testing.allocation import held, new_uuid, provider
from tests.conformance.allocation.stores import memory_store


def state(uuid: str, used: int = 0, **totals: int) -> ProviderState:
    items = tuple(InventoryItem(name, total) for name, total in totals.items())
    return ProviderState(uuid, None, items, dict.fromkeys(totals, used))


class OfferTests(unittest.TestCase):
    def test_a_node_offers_the_sums_of_all_its_own_providers(self) -> None:
        gpus = [state(f"gpu{number}", number, PGPU=4) for number in range(2)]
        self.assertEqual(
            ({"VCPU": 8, "DISK_GB": 10, "PGPU": 8}, {"VCPU": 2, "DISK_GB": 2, "PGPU": 1}),
            offer([state("node", 2, VCPU=8, DISK_GB=10), *gpus]),
        )

    def test_the_roomiest_pool_stands_for_a_class_that_the_node_lacks(self) -> None:
        pools = [
            replace(state(uuid, used, DISK_GB=total), shared=True)
            for uuid, used, total in (("a", 900, 1000), ("b", 10, 500), ("c", 0, 490))
        ]
        capacity, used = offer([state("node", 0, VCPU=8), *pools])
        self.assertEqual((500, 10), (capacity["DISK_GB"], used["DISK_GB"]))
        self.assertEqual(1, offer([state("node", 0, VCPU=8, DISK_GB=1), *pools])[0]["DISK_GB"])


class ClaimTests(unittest.TestCase):
    """Claims of a node and two pools of 10 and 100."""

    def setUp(self) -> None:
        self.store = memory_store()
        given = [provider("node", VCPU=4), provider("a", DISK_GB=10), provider("b", DISK_GB=100)]
        self.store.ensure_providers(given)
        self.node, self.small, self.large = (each.uuid for each in given)

    def claim(self, pools: list[str], **wanted: int) -> None:
        """Claim by a view that believes each pool to have 1000 free, those that stand first more."""

        def take(resources: Mapping[str, Mapping[str, int]]) -> None:
            self.store.claim(ClaimRequest(new_uuid(), resources))

        shared = [replace(state(uuid, 0, DISK_GB=1000 - place), shared=True) for place, uuid in enumerate(pools)]
        query = CandidateQuery((RequestGroup("", wanted),))
        propose = proposal(query, [state(self.node, 0, VCPU=1000), *shared], {}, "seed")
        _, taken = claim_of_node(self.node, wanted, propose, take)
        assert taken is not None
        self.assertEqual(wanted, {name: units for each in taken.values() for name, units in each.items()})

    def test_the_next_pool_is_tried_when_one_has_no_room(self) -> None:
        self.claim([self.small, self.large], VCPU=1, DISK_GB=20)
        self.claim([self.small, self.large], VCPU=1, DISK_GB=5)
        self.claim([new_uuid(), self.large], VCPU=1, DISK_GB=5)
        self.assertEqual(
            {(self.node, "VCPU"): 3, (self.large, "DISK_GB"): 25, (self.small, "DISK_GB"): 5}, held(self.store)
        )

    def test_no_room_anywhere_is_said_and_nothing_is_held(self) -> None:
        for pools, wanted, refused in (
            ([self.small, self.large], {"VCPU": 1, "DISK_GB": 200}, self.large),
            ([self.small], {"VCPU": 5, "DISK_GB": 1}, self.node),
        ):
            with self.assertRaises(errors.CapacityExceeded) as caught:
                self.claim(pools, **wanted)
            self.assertEqual(refused, caught.exception.details["provider"])
        with self.assertRaises(errors.CapacityExceeded):
            self.claim([new_uuid()], VCPU=1, DISK_GB=1)
        with self.assertRaisesRegex(errors.ConstraintViolated, "cannot give all request groups"):
            self.claim([self.small], PGPU=1)
        self.assertEqual({}, held(self.store))

    def test_a_node_with_one_provider_gives_everything(self) -> None:
        holds: list[Mapping[str, Mapping[str, int]]] = []
        self.assertEqual((None, None), claim_of_node(self.node, {"VCPU": 1}, None, holds.append))
        self.assertEqual([{self.node: {"VCPU": 1}}], holds)


class PoolKeeperTests(unittest.TestCase):
    def test_members_come_and_go_and_keep_other_aggregates(self) -> None:
        store = memory_store()
        nodes = [provider(VCPU=1) for _ in range(3)]
        store.ensure_providers(nodes)
        one, two, three = sorted(each.uuid for each in nodes)
        other = new_uuid()
        store.set_aggregates(one, {other})
        keeper, uuid = PoolKeeper(store), new_uuid()
        keeper.set(uuid, "pool", [InventoryItem("DISK_GB", 10)], {one, two})
        self.assertEqual({one, two}, set(store.pools([one, two, three, uuid])))
        pool = keeper.set(uuid, "pool", [InventoryItem("DISK_GB", 20)], {two, three})
        self.assertEqual((two, three), pool.members)
        self.assertEqual((other,), store.provider_aggregates(one)[1])
        self.assertFalse(store.provider(uuid).can_host)
        self.assertEqual([pool], list(keeper.list()))
        keeper.delete(uuid)
        self.assertEqual({}, store.pools([one, two, three]))
        self.assertEqual(((), ()), tuple(store.provider_aggregates(each)[1] for each in (two, three)))
