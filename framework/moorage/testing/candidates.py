# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of stores that find candidates (:class:`moorage.allocation.interface.CandidateSource`).

Mix :class:`CandidateTests` into the test case of the store's other kits. What is found is compared with what trying every
assignment of groups to providers finds, on random small fleets.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from moorage import errors
from moorage.allocation.interface import (
    AllocationStore,
    Candidate,
    CandidateQuery,
    CandidateSource,
    InventoryItem,
    NameCatalogue,
    ProviderCatalogue,
    RequestGroup,
    ResourceProvider,
)
from moorage.testing.store_kit import StoreKit, new_uuid

__all__ = ["CandidateTests"]

SHARING = "MISC_SHARES_VIA_AGGREGATE"
FAST, SAFE = "HW_CPU_X86_AVX", "HW_CPU_X86_SSE"
_CLASSES = ("VCPU", "DISK_GB")


class _Store(AllocationStore, ProviderCatalogue, NameCatalogue, CandidateSource):
    """What the tests use."""


@dataclass
class _Known:
    """A provider of a random fleet as the oracle sees it."""

    uuid: str
    parent: str | None
    root: str
    totals: dict[str, int]
    traits: set[str] = field(default_factory=set)
    aggregates: set[str] = field(default_factory=set)


def _plain(candidates: Sequence[Candidate]) -> list[dict[str, dict[str, int]]]:
    return [{uuid: dict(taken) for uuid, taken in each.allocations.items()} for each in candidates]


def _key(taken: Mapping[tuple[str, str], int], mappings: Mapping[str, Sequence[str]]) -> tuple[Any, ...]:
    return tuple(sorted(taken.items())), tuple(sorted((suffix, tuple(uuids)) for suffix, uuids in mappings.items()))


class CandidateTests(StoreKit):
    """The contract of candidates."""

    def node(
        self,
        parent: str | None = None,
        *,
        traits: Sequence[str] = (),
        aggregates: Sequence[str] = (),
        **totals: int | InventoryItem,
    ) -> str:
        """Create a provider; its uuid."""
        store = cast(_Store, self.store)
        items = tuple(
            each if isinstance(each, InventoryItem) else InventoryItem(name, each) for name, each in totals.items()
        )
        uuid = new_uuid()
        store.create_provider(ResourceProvider(uuid, f"provider-{uuid}", inventories=items, parent=parent))
        if traits:
            store.set_traits(uuid, set(traits))
        if aggregates:
            store.set_aggregates(uuid, set(aggregates))
        return uuid

    def find(self, *groups: RequestGroup, **more: Any) -> list[Candidate]:
        """Returns the candidates for the groups."""
        return list(cast(_Store, self.store).candidates(CandidateQuery(groups, **more)).candidates)

    # -- pools ----------------------------------------------------------------------------------------------------

    def test_two_hosts_with_a_shared_pool_are_candidates_with_it_until_it_is_full(self) -> None:
        aggregate = new_uuid()
        hosts = [self.node(aggregates=[aggregate], VCPU=8) for _ in range(2)]
        pool = self.node(aggregates=[aggregate], traits=[SHARING], DISK_GB=1000)
        self.node(VCPU=8)
        wanted = RequestGroup(resources={"VCPU": 1, "DISK_GB": 600})
        expected = [{host: {"VCPU": 1}, pool: {"DISK_GB": 600}} for host in hosts]
        self.assertEqual(expected, _plain(self.find(wanted)))
        self.claim(self.find(wanted)[0].allocations)
        self.assertEqual([], self.find(wanted))

    def test_the_answer_describes_every_provider_of_the_trees_it_takes_of(self) -> None:
        aggregate = new_uuid()
        host = self.node(aggregates=[aggregate], MEMORY_MB=64)
        cell = self.node(host, traits=[FAST], VCPU=8)
        pool = self.node(aggregates=[aggregate], traits=[SHARING], DISK_GB=1000)
        self.node(VCPU=1)
        self.claim({cell: {"VCPU": 3}})
        query = CandidateQuery((RequestGroup(resources={"VCPU": 2, "DISK_GB": 1}),))
        summaries = cast(_Store, self.store).candidates(query).summaries
        self.assertEqual({host, cell, pool}, set(summaries))
        self.assertEqual(({"VCPU": 8}, {"VCPU": 3}), (summaries[cell].capacity, summaries[cell].used))
        self.assertEqual((FAST,), summaries[cell].traits)
        self.assertEqual((host, host), (summaries[cell].parent, summaries[cell].root))
        self.assertEqual(({"MEMORY_MB": 64}, {"MEMORY_MB": 0}), (summaries[host].capacity, summaries[host].used))

    # -- units, names, limits -------------------------------------------------------------------------------------

    def test_units_and_steps_count(self) -> None:
        self.node(VCPU=InventoryItem("VCPU", 100, min_unit=4, step_size=4, max_unit=8))
        found = [amount for amount in range(1, 13) if self.find(RequestGroup(resources={"VCPU": amount}))]
        self.assertEqual([4, 8], found)

    def test_unknown_names_are_told_and_unknown_uuids_find_nothing(self) -> None:
        self.node(VCPU=8)
        wanted = {"VCPU": 1}
        for group, key in (
            (RequestGroup(resources={"CUSTOM_NOWHERE": 1}), "resource_class"),
            (RequestGroup(resources=wanted, required=(frozenset({"CUSTOM_NOWHERE"}),)), "traits"),
            (RequestGroup(resources=wanted, forbidden=frozenset({"CUSTOM_NOWHERE"})), "traits"),
        ):
            with self.assertRaises(errors.NotFound) as caught:
                self.find(group)
            self.assertIn(key, caught.exception.details)
        with self.assertRaises(errors.NotFound):
            self.find(RequestGroup(resources=wanted), root_required=frozenset({"CUSTOM_NOWHERE"}))
        self.assertEqual([], self.find(RequestGroup(resources=wanted, in_tree=new_uuid())))
        self.assertEqual([], self.find(RequestGroup("1", wanted, in_tree=new_uuid())))
        self.assertEqual([], self.find(RequestGroup(resources=wanted, member_of=(frozenset({new_uuid()}),))))

    def test_a_limit_gives_the_first_of_all_in_the_same_order(self) -> None:
        hosts = [self.node(VCPU=8) for _ in range(40)]
        group = RequestGroup(resources={"VCPU": 1})
        everything = _plain(self.find(group))
        self.assertEqual([{host: {"VCPU": 1}} for host in hosts], everything)
        for limit in (1, 17, 40, 41):
            self.assertEqual(everything[:limit], _plain(self.find(group, limit=limit)))

    def test_a_limit_skips_those_that_are_full(self) -> None:
        hosts = [self.node(VCPU=1) for _ in range(30)]
        for host in hosts[:29]:
            self.claim({host: {"VCPU": 1}})
        self.assertEqual([{hosts[29]: {"VCPU": 1}}], _plain(self.find(RequestGroup(resources={"VCPU": 1}), limit=1)))

    # -- roots and trees ------------------------------------------------------------------------------------------

    def test_the_traits_of_the_root_choose_the_tree(self) -> None:
        fast = self.node(traits=[FAST])
        slow = self.node()
        cells = [self.node(each, VCPU=8) for each in (fast, slow)]
        group = RequestGroup(resources={"VCPU": 1})
        for more, cell in (
            ({"root_required": frozenset({FAST})}, cells[0]),
            ({"root_forbidden": frozenset({FAST})}, cells[1]),
        ):
            self.assertEqual([{cell: {"VCPU": 1}}], _plain(self.find(group, **more)))

    def test_in_tree_names_any_provider_of_it(self) -> None:
        hosts = [self.node() for _ in range(2)]
        cells = [self.node(each, VCPU=8) for each in hosts]
        for group in (RequestGroup(resources={"VCPU": 1}), RequestGroup("1", {"VCPU": 1})):
            for uuid in (hosts[1], cells[1]):
                there = RequestGroup(group.suffix, group.resources, in_tree=uuid)
                self.assertEqual([{cells[1]: {"VCPU": 1}}], _plain(self.find(there)))

    # -- against the definition -----------------------------------------------------------------------------------

    def test_random_fleets_have_exactly_the_candidates_that_trying_all_finds(self) -> None:
        chance = random.Random(20)  # noqa: S311  (a test that repeats itself)
        sizes = set()
        for _ in range(12):
            self.store = self.make_store()
            known = self._random_fleet(chance)
            for _ in range(6):
                query = self._random_query(chance, known)
                with self.subTest(query=query, fleet=known):
                    found = cast(_Store, self.store).candidates(query).candidates
                    got = [
                        _key({(u, n): a for u, taken in e.allocations.items() for n, a in taken.items()}, e.mappings)
                        for e in found
                    ]
                    self.assertEqual(len(set(got)), len(got))
                    self.assertEqual(_all_of(query, known), set(got))
                    sizes.add(min(len(got), 5))
        self.assertEqual({0, 1, 2, 3, 4, 5}, sizes)

    def _random_fleet(self, chance: random.Random) -> list[_Known]:
        aggregates = [new_uuid() for _ in range(2)]
        known: list[_Known] = []
        for _ in range(chance.randint(2, 6)):
            above = chance.choice([None, *known])
            totals = {name: chance.randint(1, 3) for name in _CLASSES if chance.random() < 0.6}
            traits = {name for name in (FAST, SAFE, SHARING) if chance.random() < 0.3}
            members = {each for each in aggregates if chance.random() < 0.4}
            parent = None if above is None else above.uuid
            uuid = self.node(parent, traits=sorted(traits), aggregates=sorted(members), **totals)
            known.append(_Known(uuid, parent, above.root if above else uuid, totals, traits, members))
        return known

    def _random_query(self, chance: random.Random, known: Sequence[_Known]) -> CandidateQuery:
        aggregates = sorted(set().union(*(each.aggregates for each in known)))

        def group(suffix: str) -> RequestGroup:
            names = chance.sample(_CLASSES, chance.randint(1, 2))
            return RequestGroup(
                suffix,
                {name: chance.randint(1, 2) for name in names},
                required=(frozenset(chance.sample((FAST, SAFE), chance.randint(1, 2))),)
                if chance.random() < 0.3
                else (),
                forbidden=frozenset({FAST}) if chance.random() < 0.2 else frozenset(),
                member_of=(frozenset({chance.choice(aggregates)}),) if aggregates and chance.random() < 0.3 else (),
                not_member_of=frozenset({chance.choice(aggregates)})
                if aggregates and chance.random() < 0.15
                else frozenset(),
                in_tree=chance.choice(known).uuid if chance.random() < 0.15 else None,
            )

        suffixes = chance.choice([("",), ("_1",), ("", "_1"), ("_1", "_2"), ("", "_1", "_2")])
        named = [each for each in suffixes if each]
        return CandidateQuery(
            tuple(group(suffix) for suffix in suffixes),
            isolate=chance.random() < 0.5,
            root_required=frozenset({SAFE}) if chance.random() < 0.1 else frozenset(),
            root_forbidden=frozenset({FAST}) if chance.random() < 0.1 else frozenset(),
            same_subtree=(frozenset(named),) if len(named) > 1 and chance.random() < 0.5 else (),
            nested=chance.random() < 0.9,
        )


# -- the oracle ---------------------------------------------------------------------------------------------------


def _all_of(query: CandidateQuery, known: Sequence[_Known]) -> set[tuple[Any, ...]]:
    by_uuid = {each.uuid: each for each in known}
    found = set()
    for root in known:
        if root.parent is None and query.root_required <= root.traits and not query.root_forbidden & root.traits:
            for chosen in itertools.product(*(_ways(each, root, known) for each in query.groups)):
                mappings = {
                    group.suffix: sorted(set(way.values())) for group, way in zip(query.groups, chosen, strict=True)
                }
                taken: dict[tuple[str, str], int] = {}
                for group, way in zip(query.groups, chosen, strict=True):
                    for name, uuid in way.items():
                        taken[uuid, name] = taken.get((uuid, name), 0) + group.resources[name]
                if _holds(query, mappings, taken, by_uuid):
                    found.add(_key(taken, mappings))
    return found


def _holds(
    query: CandidateQuery,
    mappings: Mapping[str, Sequence[str]],
    taken: Mapping[tuple[str, str], int],
    known: Mapping[str, _Known],
) -> bool:
    """What concerns all groups together."""
    if any(amount > known[uuid].totals[name] for (uuid, name), amount in taken.items()):
        return False
    named = [uuids[0] for suffix, uuids in mappings.items() if suffix]
    if query.isolate and len(set(named)) < len(named):
        return False
    providers = {uuid for uuid, _ in taken}
    if not query.nested and len({known[uuid].root for uuid in providers}) < len(providers):
        return False
    return all(
        any(all(top in _line(uuid, known) for uuid in members) for top in members)
        for members in ({mappings[suffix][0] for suffix in suffixes} for suffixes in query.same_subtree)
    )


def _line(uuid: str, known: Mapping[str, _Known]) -> list[str]:
    found, at = [], known.get(uuid)
    while at is not None:
        found.append(at.uuid)
        at = known.get(at.parent or "")
    return found


def _ways(group: RequestGroup, root: _Known, known: Sequence[_Known]) -> Iterator[dict[str, str]]:
    """Every assignment of the group's classes to providers that is right by itself."""
    tree = [each for each in known if each.root == root.uuid]
    around = set().union(*(each.aggregates for each in tree))
    shared = [each for each in known if each not in tree and SHARING in each.traits and each.aggregates & around]
    target = next((each.root for each in known if each.uuid == group.in_tree), None)
    names = list(group.resources)
    for chosen in itertools.product([*tree, *shared], repeat=len(names)):
        pairs = list(zip(names, chosen, strict=True))
        traits = set().union(*(each.traits for each in chosen))
        if (
            all(each.totals.get(name, 0) >= group.resources[name] for name, each in pairs)
            and not any(group.forbidden & each.traits for each in chosen)
            and all(wanted & traits for wanted in group.required)
            and (group.in_tree is None or all(each.root == target for each in chosen))
            and (_alone(group, chosen) if group.suffix else _spread(group, chosen, root, tree))
        ):
            yield {name: each.uuid for name, each in pairs}


def _alone(group: RequestGroup, chosen: Sequence[_Known]) -> bool:
    one = chosen[0]
    return (
        all(each is one for each in chosen)
        and all(wanted & one.aggregates for wanted in group.member_of)
        and not group.not_member_of & one.aggregates
    )


def _spread(group: RequestGroup, chosen: Sequence[_Known], root: _Known, tree: Sequence[_Known]) -> bool:
    for each in chosen:
        own = all(wanted & each.aggregates for wanted in group.member_of)
        by_root = each in tree and all(wanted & root.aggregates for wanted in group.member_of)
        if not (own or by_root) or group.not_member_of & (each.aggregates | root.aggregates):
            return False
    return group.in_tree is None or all(each in tree for each in chosen)
