# SPDX-License-Identifier: Apache-2.0
"""What nodes offer with pools, and where claims take of."""

from __future__ import annotations

import unittest
from collections.abc import Mapping

from moorage import errors
from moorage.allocation.interface import ClaimRequest, InventoryItem, ProviderUsage, ResourceProvider
from moorage.allocation.pools import PoolKeeper
from moorage.instances.pools import claim_somewhere, offer
from moorage.testing.allocation import held, new_uuid, provider
from tests.conformance.allocation.stores import memory_store


def usage(uuid: str, used: int = 0, **totals: int) -> ProviderUsage:
    items = tuple(InventoryItem(name, total) for name, total in totals.items())
    return ProviderUsage(ResourceProvider(uuid, uuid, inventories=items), dict.fromkeys(totals, used))


class OfferTests(unittest.TestCase):
    def test_a_node_without_pools_offers_its_own(self) -> None:
        found = offer(usage("node", 2, VCPU=8, DISK_GB=10))
        self.assertEqual(
            ({"VCPU": 8, "DISK_GB": 10}, {"VCPU": 2, "DISK_GB": 2}, {}), (found.capacity, found.used, found.pools)
        )

    def test_the_roomiest_pool_stands_for_a_class_that_the_node_lacks(self) -> None:
        pools = [usage("a", 900, DISK_GB=1000), usage("b", 10, DISK_GB=500), usage("c", 0, DISK_GB=490)]
        found = offer(usage("node", 0, VCPU=8), pools)
        self.assertEqual((500, 10), (found.capacity["DISK_GB"], found.used["DISK_GB"]))
        self.assertEqual({"DISK_GB": ("b", "c", "a")}, found.pools)
        self.assertEqual({}, offer(usage("node", 0, VCPU=8, DISK_GB=1), pools).pools)


class ClaimSomewhereTests(unittest.TestCase):
    def setUp(self) -> None:
        self.store = memory_store()
        given = [provider("node", VCPU=4), provider("a", DISK_GB=10), provider("b", DISK_GB=100)]
        self.store.ensure_providers(given)
        self.node, self.small, self.large = (each.uuid for each in given)

    def claim(self, pools: list[str], **wanted: int) -> None:
        def take(resources: Mapping[str, Mapping[str, int]]) -> None:
            self.store.claim(ClaimRequest(new_uuid(), resources))

        claim_somewhere(self.node, wanted, {"DISK_GB": pools}, take)

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
        self.assertEqual({}, held(self.store))


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
