# SPDX-License-Identifier: Apache-2.0
"""The rules of candidates on small fleets; Placement's own suite tries them over HTTP."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import unittest
from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis
from hypothesis import strategies

from moorage import errors
from moorage.allocation.interface import (
    Candidate,
    CandidateQuery,
    InventoryItem,
    RequestGroup,
    ResourceProvider,
)
from moorage.testing.allocation import new_uuid
from moorage_plugins.stores.candidates import SHARING, ProviderForest, ProviderNode, Search, find
from moorage_plugins.stores.checks import SEED_RULE
from moorage_plugins.stores.sql import SqlStore
from tests.conformance.allocation.stores import SqlCase, memory_store, sql_store
from tests.memory_store.store import MemoryStore

A, B = "agg-a", "agg-b"


def place(
    uuid: str,
    parent: str | None = None,
    root: str = "",
    *,
    traits: Iterable[str] = (),
    aggregates: Iterable[str] = (),
    used: int = 0,
    **totals: int,
) -> ProviderNode:
    items = {name: (InventoryItem(name, total), used) for name, total in totals.items()}
    return ProviderNode(uuid, parent, root or uuid, items, frozenset(traits), frozenset(aggregates))


def groups(*given: RequestGroup, **more: object) -> CandidateQuery:
    return CandidateQuery(given, **more)  # type: ignore[arg-type]


def found(query: CandidateQuery, *places: ProviderNode) -> list[Candidate]:
    fleet = ProviderForest(places)
    return list(find(query, fleet, fleet.trees, SEED_RULE))


def taken(query: CandidateQuery, *places: ProviderNode) -> list[dict[str, dict[str, int]]]:
    return [{uuid: dict(each) for uuid, each in one.allocations.items()} for one in found(query, *places)]


POOL = place("pool", aggregates=[A], traits=[SHARING], DISK_GB=1000)


class TestSpread(unittest.TestCase):
    def test_two_hosts_share_a_pool_and_each_is_a_candidate_with_it(self) -> None:
        hosts = [place(name, aggregates=[A], VCPU=8) for name in ("host-1", "host-2")]
        query = groups(RequestGroup(resources={"VCPU": 2, "DISK_GB": 10}))
        self.assertEqual(
            [{"host-1": {"VCPU": 2}, "pool": {"DISK_GB": 10}}, {"host-2": {"VCPU": 2}, "pool": {"DISK_GB": 10}}],
            taken(query, *hosts, POOL),
        )

    def test_who_is_in_no_aggregate_of_the_pool_takes_nothing_of_it(self) -> None:
        query = groups(RequestGroup(resources={"VCPU": 2, "DISK_GB": 10}))
        self.assertEqual([], taken(query, place("host", aggregates=[B], VCPU=8), POOL))

    def test_what_the_pool_alone_can_give_is_named_once(self) -> None:
        hosts = [place(name, aggregates=[A], VCPU=8) for name in ("host-1", "host-2")]
        query = groups(RequestGroup(resources={"DISK_GB": 10}))
        self.assertEqual([{"pool": {"DISK_GB": 10}}], taken(query, *hosts, POOL))

    def test_required_traits_may_be_spread_and_forbidden_ones_rule_out_their_provider(self) -> None:
        tree = (
            place("host"),
            place("left", "host", "host", traits=["FAST"], VCPU=4),
            place("right", "host", "host", traits=["HOT"], VCPU=4),
            place("card", "host", "host", traits=["SAFE"], VGPU=1),
        )
        wanted = {"VCPU": 1, "VGPU": 1}
        both = RequestGroup(resources=wanted, required=(frozenset({"FAST"}), frozenset({"SAFE"})))
        self.assertEqual([{"left": {"VCPU": 1}, "card": {"VGPU": 1}}], taken(groups(both), *tree))
        cool = RequestGroup(resources=wanted, forbidden=frozenset({"HOT"}))
        self.assertEqual([{"left": {"VCPU": 1}, "card": {"VGPU": 1}}], taken(groups(cool), *tree))

    def test_the_aggregates_of_a_root_count_for_its_tree(self) -> None:
        tree = (place("host", aggregates=[B]), place("cell", "host", "host", VCPU=4))
        query = groups(RequestGroup(resources={"VCPU": 1}, member_of=(frozenset({B}),)))
        self.assertEqual([{"cell": {"VCPU": 1}}], taken(query, *tree))
        query = groups(RequestGroup(resources={"VCPU": 1}, not_member_of=frozenset({B})))
        self.assertEqual([], taken(query, *tree))


class TestSuffixed(unittest.TestCase):
    def test_a_group_takes_all_of_one_provider(self) -> None:
        tree = (
            place("host"),
            place("cell-0", "host", "host", VCPU=4),
            place("cell-1", "host", "host", VCPU=4, MEMORY_MB=64),
        )
        query = groups(RequestGroup("1", {"VCPU": 1, "MEMORY_MB": 1}))
        self.assertEqual([{"cell-1": {"VCPU": 1, "MEMORY_MB": 1}}], taken(query, *tree))

    def test_groups_on_one_provider_must_fit_together(self) -> None:
        host = place("host", VCPU=3)
        two = (RequestGroup("1", {"VCPU": 2}), RequestGroup("2", {"VCPU": 2}))
        self.assertEqual([], taken(groups(*two), host))
        small = (RequestGroup("1", {"VCPU": 2}), RequestGroup("2", {"VCPU": 1}))
        self.assertEqual([{"host": {"VCPU": 3}}], taken(groups(*small), host))
        self.assertEqual([], taken(groups(*small, isolate=True), host))

    def test_same_subtree_joins_what_hangs_together(self) -> None:
        tree = (
            place("host"),
            place("cell-0", "host", "host", traits=["NUMA"], VCPU=4),
            place("cell-1", "host", "host", traits=["NUMA"], VCPU=4),
            place("card-0", "cell-0", "host", VGPU=1),
            place("card-1", "cell-1", "host", VGPU=1),
        )
        near = (RequestGroup("_CPU", {"VCPU": 1}), RequestGroup("_GPU", {"VGPU": 1}))
        query = groups(*near, same_subtree=(frozenset({"_CPU", "_GPU"}),))
        self.assertEqual([{f"cell-{n}": {"VCPU": 1}, f"card-{n}": {"VGPU": 1}} for n in (0, 1)], taken(query, *tree))
        self.assertEqual(4, len(taken(groups(*near), *tree)))

    def test_a_group_without_resources_only_says_where(self) -> None:
        tree = (place("host"), place("cell", "host", "host", traits=["NUMA"]), place("card", "cell", "host", VGPU=1))
        query = groups(
            RequestGroup("_CARD", {"VGPU": 1}),
            RequestGroup("_CELL", required=(frozenset({"NUMA"}),)),
            same_subtree=(frozenset({"_CARD", "_CELL"}),),
        )
        (one,) = found(query, *tree)
        self.assertEqual({"card": {"VGPU": 1}}, one.allocations)
        self.assertEqual({"_CARD": ("card",), "_CELL": ("cell",)}, one.mappings)


class TestAnswer(unittest.TestCase):
    def test_the_limit_bounds_the_work_of_a_huge_product(self) -> None:
        cards = [place(f"card-{n}", "host", "host", VGPU=8) for n in range(8)]
        fleet = ProviderForest([place("host"), *cards])
        many = groups(*(RequestGroup(str(n), {"VGPU": 1}) for n in range(1, 13)), limit=10)
        got = list(itertools.islice(find(many, fleet, fleet.trees, SEED_RULE), many.limit))
        self.assertEqual(10, len(got))
        self.assertEqual(9, len(fleet.summaries(got)))

    def test_amounts_that_meet_on_one_provider_keep_its_step(self) -> None:
        item = InventoryItem("DISK_GB", 100, min_unit=2, step_size=2, max_unit=4)
        host = ProviderNode("host", None, "host", {"DISK_GB": (item, 0)})
        for first, second, expected in ((2, 2, 1), (2, 1, 0), (4, 2, 0)):
            query = groups(RequestGroup("1", {"DISK_GB": first}), RequestGroup("2", {"DISK_GB": second}))
            self.assertEqual(expected, len(found(query, host)), (first, second))

    def test_a_product_without_a_result_is_left_with_words(self) -> None:
        cards = [place(f"card-{n}", "host", "host", VGPU=8) for n in range(9)]
        fleet = ProviderForest([place("host"), *cards])
        query = groups(*(RequestGroup(str(n), {"VGPU": 1}) for n in range(1, 11)), isolate=True, limit=1)
        with self.assertRaisesRegex(errors.InvalidInput, "more ways than are looked at"):
            list(find(query, fleet, fleet.trees, SEED_RULE, Search(5000)))

    def test_old_clients_get_nothing_of_two_providers_of_a_tree(self) -> None:
        tree = (place("host", MEMORY_MB=64), place("cell", "host", "host", VCPU=4))
        wanted = RequestGroup(resources={"VCPU": 1, "MEMORY_MB": 1})
        self.assertEqual(1, len(taken(groups(wanted), *tree)))
        self.assertEqual([], taken(groups(wanted, nested=False), *tree))


class TestStoresAgree(SqlCase, unittest.TestCase):
    """The sql store reads by ranges or by lists of ids, and decides most trees in SQL; the memory store does neither."""

    def test_both_stores_give_the_same_answer_for_the_same_fleet(self) -> None:
        chance = random.Random(31)
        sizes = collections.Counter[int]()
        for share_of_gone, share_below, share_of_pools in itertools.product((0.0, 0.9), (0.0, 0.3), (0.0, 0.03)):
            self.empty()
            stores: list[SqlStore | MemoryStore] = [sql_store(self.database), memory_store()]
            aggregates = [new_uuid() for _ in range(3)]
            uuids = self._fill(chance, stores, aggregates, share_of_gone, share_below, share_of_pools)
            for group in _some_groups(chance, aggregates, uuids):
                for limit in (None, 3):
                    first, second = (each.candidates(CandidateQuery((group,), limit=limit)) for each in stores)
                    self.assertEqual(second, first, group)
                    self.assertEqual(list(second.summaries), list(first.summaries), group)
                    sizes[min(len(first.candidates), 4)] += 1
        self.assertEqual({0, 3, 4}, {0, 3, 4} & sizes.keys())

    def _fill(
        self,
        chance: random.Random,
        stores: list[SqlStore | MemoryStore],
        aggregates: list[str],
        share_of_gone: float,
        share_below: float,
        share_of_pools: float,
    ) -> list[str]:
        for store in stores:
            store.create_resource_class("CUSTOM_CARD")
        gone: list[str] = []
        present: list[str] = []
        for number in range(150):
            parent = chance.choice(present) if present and chance.random() < share_below else None
            items = [
                InventoryItem(name, total, reserved=1, allocation_ratio=1.5, step_size=chance.choice((1, 2)))
                for name, total in (("VCPU", 4), ("MEMORY_MB", 64), ("CUSTOM_CARD", 2))
                if chance.random() < 0.7
            ]
            provider = ResourceProvider(new_uuid(), f"p-{number}", parent=parent, inventories=tuple(items))
            traits = {name for name in ("HW_CPU_X86_AVX", "HW_CPU_X86_SSE") if chance.random() < 0.3}
            traits |= {SHARING} if chance.random() < share_of_pools else set()
            members = {each for each in aggregates if chance.random() < 0.2}
            for store in stores:
                store.create_provider(provider)
                store.set_traits(provider.uuid, traits)
                store.set_aggregates(provider.uuid, members)
            leaves = parent is None and chance.random() < share_of_gone
            (gone if leaves else present).append(provider.uuid)
        for uuid, store in itertools.product(gone, stores):
            store.delete_provider(uuid)
        return present


def _some_groups(chance: random.Random, aggregates: list[str], uuids: list[str]) -> Iterator[RequestGroup]:
    for suffix, name, amount in itertools.product(("", "_1"), ("VCPU", "CUSTOM_CARD"), (1, 2, 5)):
        yield RequestGroup(
            suffix,
            {name: amount, "MEMORY_MB": 8} if chance.random() < 0.5 else {name: amount},
            required=(frozenset({"HW_CPU_X86_AVX"}),) if chance.random() < 0.3 else (),
            forbidden=frozenset({"HW_CPU_X86_SSE"}) if chance.random() < 0.3 else frozenset(),
            member_of=(frozenset(aggregates[:1]),) if chance.random() < 0.3 else (),
            not_member_of=frozenset(aggregates[1:2]) if chance.random() < 0.3 else frozenset(),
            in_tree=chance.choice(uuids) if chance.random() < 0.1 else None,
        )


class TestBounds(SqlCase, unittest.TestCase):
    def stores(self) -> list[SqlStore | MemoryStore]:
        self.empty()
        return [sql_store(self.database, max_candidates=50), memory_store(max_candidates=50)]

    def test_no_query_is_answered_with_more_candidates_than_the_option_says(self) -> None:
        for store in self.stores():
            root = ResourceProvider(new_uuid(), "root")
            cards = [
                ResourceProvider(new_uuid(), f"card-{n}", parent=root.uuid, inventories=(InventoryItem("VGPU", 8),))
                for n in range(4)
            ]
            store.ensure_providers([root, *cards])
            query = groups(*(RequestGroup(str(n), {"VGPU": 1}) for n in range(1, 6)))
            for limit, expected in ((None, 50), (7, 7), (1000, 50)):
                asked = dataclasses.replace(query, limit=limit)
                self.assertEqual(expected, len(store.candidates(asked).candidates))

    def test_more_groups_than_anybody_can_mean_are_refused(self) -> None:
        for store in self.stores():
            query = groups(*(RequestGroup(str(n), {"VGPU": 1}) for n in range(1, 102)))
            with self.assertRaises(errors.InvalidInput):
                store.candidates(query)
            self.assertEqual((), store.candidates(dataclasses.replace(query, groups=query.groups[:100])).candidates)


amounts = strategies.integers(min_value=0, max_value=4)


def _positive(names: Iterable[str], numbers: Iterable[int]) -> dict[str, Any]:
    return {name: number for name, number in zip(names, numbers, strict=True) if number}


class TestModel(unittest.TestCase):
    """Against the definition: every assignment of groups to providers of one tree, tried one by one."""

    @hypothesis.given(
        strategies.lists(strategies.tuples(amounts, amounts), min_size=1, max_size=4),
        strategies.lists(strategies.tuples(amounts, amounts), min_size=1, max_size=3),
        strategies.booleans(),
    )
    def test_suffixed_groups_find_what_trying_all_finds(
        self, totals: list[tuple[int, int]], wanted: list[tuple[int, int]], isolate: bool
    ) -> None:
        wanted = [each for each in wanted if any(each)] or [(1, 0)]
        names = ("VCPU", "VGPU")
        places = [
            place(str(n), None if n == 0 else "0", "0", **_positive(names, each)) for n, each in enumerate(totals)
        ]
        asked = [RequestGroup(f"_{n}", _positive(names, each)) for n, each in enumerate(wanted)]
        expected = set()
        for chosen in itertools.product(range(len(totals)), repeat=len(wanted)):
            held = [[0, 0] for _ in totals]
            for number, (cpus, cards) in zip(chosen, wanted, strict=True):
                held[number][0] += cpus
                held[number][1] += cards
            fits = all(h <= t for hs, ts in zip(held, totals, strict=True) for h, t in zip(hs, ts, strict=True))
            if fits and (not isolate or len(set(chosen)) == len(chosen)):
                expected.add(chosen)
        got = [
            tuple(int(one.mappings[f"_{n}"][0]) for n in range(len(wanted)))
            for one in found(groups(*asked, isolate=isolate), *places)
        ]
        self.assertEqual(len(set(got)), len(got))
        self.assertEqual(expected, set(got))
