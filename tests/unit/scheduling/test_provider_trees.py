# SPDX-License-Identifier: Apache-2.0
"""Nodes with several providers: the scheduler finds places where the store finds candidates, and the same ones."""

from __future__ import annotations

import unittest
from dataclasses import replace
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

import tests
from moorage.allocation.interface import (
    SHARES,
    CandidateQuery,
    ClaimRequest,
    FullStore,
    InventoryItem,
    RequestGroup,
    ResourceProvider,
)
from moorage.instances.providers import offer, read_providers
from moorage.scheduling import provider_columns
from moorage.scheduling.assignment import Search
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Flavor, FleetChanges, InstanceRecord, NodeState, ProviderState, RequestSpec
from moorage.scheduling.provider_columns import ProviderColumns
from moorage.scheduling.resource_request import with_held_resources
from moorage.testing.allocation import new_uuid
from moorage_plugins.filters.capacity import CapacityFilter
from moorage_plugins.filters.traits import RequiredTraitsFilter
from tests.conformance.allocation.stores import SqlCase, memory_store, sql_store

CLASSES = ("VCPU", "MEMORY_MB", "PGPU")
TRAITS = ("HW_CPU_X86_AVX2", "HW_CPU_X86_SSE", "HW_CPU_X86_MMX")
NONE: frozenset[str] = frozenset()
_traits = st.frozensets(st.sampled_from(TRAITS), max_size=2)
_items = st.dictionaries(
    st.sampled_from(CLASSES),
    st.builds(
        InventoryItem,
        st.just(""),
        st.integers(1, 4),
        reserved=st.sampled_from((0, 0, 1)),
        min_unit=st.sampled_from((1, 1, 1, 2)),
        max_unit=st.sampled_from((100, 100, 2)),
        step_size=st.sampled_from((1, 1, 2)),
    ),
    max_size=2,
)
#: Place of the parent among the providers before (modulo their number), inventories, traits, and whether they are in use.
_provider = st.tuples(st.integers(0, 3), _items, _traits, st.booleans())
_tree = st.lists(_provider, min_size=1, max_size=5)
_amounts = st.dictionaries(st.sampled_from(CLASSES), st.integers(1, 3), max_size=2)


@st.composite
def queries(draw: Any, amounts: Any = _amounts) -> CandidateQuery:
    """A query by the rules of the request language.

    :param amounts: what a group asks for.
    """
    groups: list[RequestGroup] = []
    traits = st.lists(st.frozensets(st.sampled_from(TRAITS), min_size=1, max_size=2), max_size=2)
    count = draw(st.integers(0, 4))
    twins = draw(st.booleans())
    for number in range(count):
        resources = draw(amounts)
        required, forbidden = draw(traits), draw(st.frozensets(st.sampled_from(TRAITS), max_size=1))
        if twins and groups:
            resources, required, forbidden = groups[-1].resources, groups[-1].required, groups[-1].forbidden
        required = [names for names in required if not names <= forbidden]
        groups.append(RequestGroup(f"_{number}", resources, tuple(required), forbidden))
    spread = draw(_amounts)
    if spread:
        forbidden = draw(st.frozensets(st.sampled_from(TRAITS), max_size=1))
        required = [names for names in draw(traits) if not names <= forbidden]
        groups.insert(0, RequestGroup("", spread, tuple(required), forbidden))
    named = [group.suffix for group in groups if group.suffix]
    subtrees = []
    empty = {group.suffix for group in groups if group.suffix and not group.resources}
    if named:
        subtrees = draw(st.lists(st.frozensets(st.sampled_from(named), min_size=1), max_size=3))
        if empty.difference(*subtrees):
            subtrees.append(empty | draw(st.frozensets(st.sampled_from(named), min_size=1)))
    if not any(group.resources for group in groups):
        groups.append(RequestGroup("_last", {"VCPU": 1}))
    return CandidateQuery(tuple(groups), isolate=draw(st.booleans()), same_subtree=tuple(map(frozenset, subtrees)))


def offered(trees: list[Any]) -> Any:
    """Amounts that providers of the trees have, or nearly have, so that queries nearly fit."""
    offers = [
        {name: max(1, item.total - item.reserved)}
        for tree in trees
        for _, items, *_ in tree
        for name, item in items.items()
    ]
    return _amounts | st.sampled_from(offers) if offers else _amounts


def spec_of(query: CandidateQuery) -> RequestSpec:
    """A request whose extra specs ask for the query."""
    specs: dict[str, str] = {"group_policy": "isolate" if query.isolate else "none"}
    for group in query.groups:
        specs |= {f"resources{group.suffix}:{name}": str(units) for name, units in group.resources.items()}
        specs |= {f"trait{group.suffix}:in:{','.join(sorted(names))}": "required" for names in group.required}
        specs |= {f"trait{group.suffix}:{name}": "forbidden" for name in group.forbidden}
    specs |= {f"same_subtree{number}": ",".join(sorted(each)) for number, each in enumerate(query.same_subtree)}
    body: Any = {"flavor": {"flavorid": "f", "resources": {}, "extra_specs": specs}}
    return RequestSpec(new_uuid(), Flavor("f", with_held_resources(body)["flavor"]["resources"], specs))


class Fleet:
    """Trees in a store, and the columns that a scheduler has of them."""

    def __init__(self, trees: list[Any], pool: Any, *, rule: str = "seed", store: FullStore | None = None) -> None:
        self.store, self.rule = store or memory_store(step_size_rule=rule), rule
        self.roots: list[str] = []
        aggregate = new_uuid()
        for tree in trees:
            uuids: list[str] = []
            for parent, *more in tree:
                uuids.append(self.create(uuids[parent % len(uuids)] if uuids else None, *more))
            self.roots.append(uuids[0])
            if pool is not None:
                self.store.set_aggregates(uuids[pool[0] % len(uuids)], {aggregate})
        if pool is not None:
            shared = self.create(None, *pool[1:])
            self.store.set_traits(shared, {SHARES, *pool[2]})
            self.store.set_aggregates(shared, {aggregate})

    def create(self, parent: str | None, items: Any, traits: Any, used: bool) -> str:
        uuid = new_uuid()
        named = tuple(
            InventoryItem(name, item.total, item.reserved, item.min_unit, item.max_unit, item.step_size)
            for name, item in items.items()
        )
        self.store.create_provider(ResourceProvider(uuid, uuid, parent=parent))
        self.store.set_inventories(uuid, named)
        self.store.set_traits(uuid, traits)
        for item in named if used else ():
            amount = -(-item.min_unit // item.step_size) * item.step_size
            if amount <= min(item.capacity, item.max_unit):
                self.store.claim(ClaimRequest(new_uuid(), {uuid: {item.resource_class: amount}}))
        return uuid

    def nodes(self) -> list[NodeState]:
        providers = read_providers(self.store, self.store.usages(providers=self.roots))
        return [
            NodeState(
                uuid, uuid, uuid, *offer(providers[uuid]), traits=providers[uuid][0].traits, providers=providers[uuid]
            )
            for uuid in sorted(self.roots)
        ]

    def candidates(self, query: CandidateQuery, nodes: list[NodeState]) -> dict[str, set[Any]]:
        """Root -> what may be taken of which providers, for roots that have candidates.

        The store names a candidate that takes of pools alone for its first anchor only.
        """
        found: dict[str, set[Any]] = {}
        for each in self.store.candidates(query).candidates:
            for node in nodes:
                shared = {provider.uuid for provider in node.providers if provider.shared}
                taken = {*each.allocations, *(uuid for uuids in each.mappings.values() for uuid in uuids)}
                if each.anchor == node.uuid or taken <= shared:
                    found.setdefault(node.uuid, set()).add(_frozen(each.allocations))
        return found


def _frozen(holds: Any) -> Any:
    return frozenset((uuid, name, units) for uuid, taken in holds.items() for name, units in taken.items())


def searched(query: CandidateQuery, node: NodeState, rule: str) -> Any:
    """What is found on one node, without the columns."""
    return Search(query, node.own_and_nested, lambda each, name: each.used.get(name, 0), rule).run()


class TestLaws(SqlCase, unittest.TestCase):
    @settings(max_examples=tests.cases(150), deadline=None)
    @given(
        st.lists(_tree, min_size=1, max_size=4),
        st.none() | _provider,
        st.data(),
        st.sampled_from(("seed", "modulo")),
    )
    def test_places_are_found_where_the_store_finds_candidates(
        self, trees: Any, pool: Any, data: Any, rule: str
    ) -> None:
        self.check(Fleet(trees, pool, rule=rule), trees, data)

    @settings(max_examples=tests.cases(15), deadline=None)
    @given(
        st.lists(_tree, min_size=1, max_size=3), st.none() | _provider, st.data(), st.sampled_from(("seed", "modulo"))
    )
    def test_places_are_found_where_the_sql_store_finds_candidates(
        self, trees: Any, pool: Any, data: Any, rule: str
    ) -> None:
        self.empty()
        self.check(Fleet(trees, pool, rule=rule, store=sql_store(self.database, step_size_rule=rule)), trees, data)

    def check(self, fleet: Fleet, trees: Any, data: Any) -> None:
        rule, nodes = fleet.rule, fleet.nodes()
        view = FleetView(step_rule=rule)
        view.set_nodes(nodes)
        snapshot = view.snapshot()
        for query in data.draw(st.lists(queries(offered(trees)), min_size=1, max_size=4)):
            expected = fleet.candidates(query, nodes)
            fits = snapshot._columns.fits(query, {}, rule)
            self.assertEqual([node.uuid in expected for node in nodes], fits.tolist(), query)
            named = [group for group in query.groups if group.suffix]
            # Extra specs cannot name a group that asks for nothing.
            if named and all(group.resources or group.required or group.forbidden for group in named):
                spec, everywhere = spec_of(query), snapshot.all_rows
                passed = CapacityFilter(conf=None).mask_rows(snapshot, everywhere, spec)
                passed = passed & RequiredTraitsFilter(conf=None).mask_rows(snapshot, everywhere, spec)
                self.assertEqual([node.uuid in expected for node in nodes], passed.tolist(), query)
            for node in nodes:
                found = searched(query, node, rule)
                if node.uuid in expected:
                    self.assertIn(_frozen(found), expected[node.uuid])
                else:
                    self.assertIsNone(found)


def tree(*providers: tuple[str, str | None, dict[str, int], frozenset[str]]) -> NodeState:
    """A node of providers: name, parent, totals, traits. Its own one stands first."""
    name = providers[0][0]
    states = tuple(
        ProviderState(each, parent, tuple(InventoryItem(of, units) for of, units in totals.items()), {}, traits)
        for each, parent, totals, traits in providers
    )
    return NodeState(name, name, name, {}, {}, providers=states)


def query_of(*groups: dict[str, int], isolate: bool = False, subtrees: tuple[str, ...] = ()) -> CandidateQuery:
    """Groups a, b, c, ..., and sets of them that stand in one subtree."""
    named = tuple(RequestGroup("abcdefgh"[number], resources) for number, resources in enumerate(groups))
    return CandidateQuery(named, isolate=isolate, same_subtree=tuple(map(frozenset, subtrees)))


class TestExamples(unittest.TestCase):
    """What groups ask of each other, where each of them alone finds a provider."""

    def check(self, expected: list[bool], query: CandidateQuery, *nodes: NodeState) -> None:
        for order in (1, -1):
            fits = ProviderColumns.of(nodes[::order]).fits(query, {}, "seed")
            self.assertEqual(expected[::order], fits.tolist())
        self.assertEqual(expected, [searched(query, node, "seed") is not None for node in nodes])

    def test_two_pairs_need_two_cells_that_have_both(self) -> None:
        query = query_of({"VCPU": 4}, {"PGPU": 1}, {"VCPU": 4}, {"PGPU": 1}, subtrees=("ab", "cd"))
        cells = (("c0", "n", {"VCPU": 4}, NONE), ("c1", "n", {"VCPU": 4}, NONE))
        gpu = ("g0", "c0", {"PGPU": 1}, NONE)
        apart = tree(("n", None, {}, NONE), *cells, gpu, ("g1", "c1", {"PGPU": 1}, NONE))
        beside = tree(("n", None, {}, NONE), *cells, gpu, ("g1", "c0", {"PGPU": 1}, NONE))
        self.check([True, False], query, apart, beside)

    def test_cells_are_equal_only_with_all_that_is_below_them(self) -> None:
        cells = (("c0", "n", {"VCPU": 4}, NONE), ("c1", "n", {"VCPU": 4}, NONE))
        gpus = ((f"g{number}", "c1", {"PGPU": 1}, NONE) for number in range(3))
        node = tree(("n", None, {}, NONE), *cells, *gpus)
        query = query_of({"VCPU": 4}, {"PGPU": 1}, subtrees=("ab",))
        self.check([True], query, node)

    def test_isolated_groups_that_differ_do_not_share_a_provider(self) -> None:
        plain, bound = RequestGroup("a", {"PGPU": 1}), RequestGroup("b", {"PGPU": 1}, (frozenset({TRAITS[0]}),))
        gpu = ("g0", "n", {"PGPU": 2}, frozenset({TRAITS[0]}))
        one, two = tree(("n", None, {}, NONE), gpu), tree(("n", None, {}, NONE), gpu, ("g1", "n", {"PGPU": 1}, NONE))
        self.check([False, True], CandidateQuery((plain, bound), isolate=True), one, two)
        self.check([True, True], CandidateQuery((plain, bound)), one, two)

    def test_equal_groups_of_a_subtree_do_not_pass_because_there_are_enough_providers(self) -> None:
        query = query_of({"PGPU": 1}, {"PGPU": 1}, isolate=True, subtrees=("ab",))
        beside = tree(("n", None, {}, NONE), ("g0", "n", {"PGPU": 1}, NONE), ("g1", "n", {"PGPU": 1}, NONE))
        below = tree(("n", None, {}, NONE), ("g0", "n", {"PGPU": 1}, NONE), ("g1", "g0", {"PGPU": 1}, NONE))
        self.check([False, True], query, beside, below)

    def test_subtrees_that_share_a_group_must_share_its_provider(self) -> None:
        query = query_of({"VCPU": 1}, {"PGPU": 1}, {"MEMORY_MB": 1}, subtrees=("ab", "ac"))
        cells = (("c0", "n", {"VCPU": 1}, NONE), ("c1", "n", {"VCPU": 1}, NONE), ("g", "c0", {"PGPU": 1}, NONE))
        apart = tree(("n", None, {}, NONE), *cells, ("m", "c1", {"MEMORY_MB": 1}, NONE))
        beside = tree(("n", None, {}, NONE), *cells, ("m", "c0", {"MEMORY_MB": 1}, NONE))
        self.check([False, True], query, apart, beside)

    def test_classes_of_the_group_without_a_suffix_have_its_traits_together(self) -> None:
        spread = RequestGroup("", {"VCPU": 1, "PGPU": 1}, (frozenset({TRAITS[0]}), frozenset({TRAITS[1]})))
        own = ("n", None, {"VCPU": 1}, NONE)
        one, other = frozenset({TRAITS[0]}), frozenset({TRAITS[1]})
        both = tree(own, ("c", "n", {"VCPU": 1}, one), ("g", "n", {"PGPU": 1}, other))
        rivals = tree(own, ("g0", "n", {"PGPU": 1}, one), ("g1", "n", {"PGPU": 1}, other))
        self.check([True, False], CandidateQuery((spread,)), both, rivals)

    def test_a_node_that_cannot_be_searched_in_the_steps_there_are_does_not_pass_and_harms_no_other(self) -> None:
        query = query_of({"PGPU": 1}, {"PGPU": 2}, {"PGPU": 2}, {"PGPU": 1})
        tight = tree(("n", None, {}, NONE), *((f"g{number}", "n", {"PGPU": 2}, NONE) for number in range(3)))
        roomy = tree(("m", None, {"PGPU": 9}, NONE))
        search = Search(query, tight.providers, lambda each, name: 0, "seed")
        self.assertIsNone(search.run(3))
        self.assertEqual((3, True), (search.steps, search.is_exhausted))
        self.assertIsNotNone(search.run())
        self.assertFalse(search.is_exhausted)
        columns = ProviderColumns.of([tight, roomy])
        with mock.patch.multiple(provider_columns, _STEPS=0, _LEAST=4):
            self.assertEqual([False, True], columns.fits(query, {}, "seed").tolist())
            # Where no node passes, the few steps are not believed.
            self.assertEqual([True], ProviderColumns.of([tight]).fits(query, {}, "seed").tolist())

    def test_a_refusal_names_the_group_and_what_it_lacks(self) -> None:
        has = frozenset({TRAITS[0]})
        node = tree(("n", None, {"VCPU": 4}, NONE), ("g0", "n", {"PGPU": 2}, has), ("g1", "n", {"MEMORY_MB": 1}, NONE))
        view = FleetView()
        view.set_nodes([replace(node, capacity=offer(node.providers)[0])])
        one: dict[str, str] = {"resources1:PGPU": "1"}
        for specs, text in (
            ({"resources1:PGPU": "3"}, "too little PGPU"),
            ({"resources:VCPU": "1", "resources1:VCPU": "4"}, "too little VCPU"),
            (one | {f"trait1:{TRAITS[1]}": "required"}, f"request group 1: no provider has {TRAITS[1]}"),
            (one | {"resources1:VCPU": "1"}, "request group 1: no provider has 1 PGPU and 1 VCPU together"),
            (one | {f"trait1:{TRAITS[0]}": "forbidden"}, "request group 1: no provider has 1 PGPU free"),
            (
                one | {"resources2:PGPU": "1", "group_policy": "isolate"},
                "each request group finds a provider of it, but not all of them together",
            ),
        ):
            body: Any = {"flavor": {"flavorid": "f", "resources": {}, "extra_specs": specs}}
            spec = RequestSpec("i", Flavor("f", with_held_resources(body)["flavor"]["resources"], specs))
            host = view.snapshot().host_state(0)
            self.assertFalse(CapacityFilter(conf=None).host_passes(host, spec))
            self.assertIn(text, CapacityFilter(conf=None).explain(host, spec))

    def test_many_pairs_are_found_and_refused_in_few_steps(self) -> None:
        cells = range(8)
        groups = [{"VCPU": 4} if number % 2 else {"PGPU": 1} for number in range(16)]
        named = tuple(RequestGroup(f"_{number}", resources) for number, resources in enumerate(groups))
        pairs = tuple(frozenset({f"_{number}", f"_{number + 1}"}) for number in range(0, 16, 2))
        query = CandidateQuery(named, isolate=True, same_subtree=pairs)
        own = [("n", None, {}, NONE), *((f"c{cell}", "n", {"VCPU": 16 + cell}, NONE) for cell in cells)]
        for missing in (0, 1, 2):
            gpus = ((f"g{cell}", f"c{cell}", {"PGPU": 2}, NONE) for cell in cells[missing:])
            search = Search(query, tree(*own, *gpus).providers, lambda each, name: 0, "seed")
            self.assertEqual(missing == 0, search.run() is not None)
            self.assertFalse(search.is_exhausted, missing)

    @settings(max_examples=tests.cases(100), deadline=None)
    @given(
        st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4), min_size=1),
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
    )
    def test_equal_subtrees_pass_where_a_search_finds_them(
        self, fleet: list[list[tuple[int, int]]], count: int, isolate: bool, third: bool
    ) -> None:
        """Cells with processors and as many GPUs below them as is drawn; pairs of both, and a group outside of them."""
        nodes = []
        for number, cells in enumerate(fleet):
            providers: list[Any] = [(f"n{number}", None, {"MEMORY_MB": 1}, NONE)]
            for cell, (processors, gpus) in enumerate(cells):
                name = f"n{number}c{cell}"
                own = {"VCPU": processors} if processors else {}
                providers.append((name, f"n{number}c0" if cell == 3 else f"n{number}", own, NONE))
                providers += [(f"{name}g{gpu}", name, {"PGPU": 1}, NONE) for gpu in range(gpus)]
            nodes.append(tree(*providers))
        groups = [{"VCPU": 1}, {"PGPU": 1}] * count + [{"MEMORY_MB": 1}] * third
        query = query_of(*groups, isolate=isolate, subtrees=("ab", "cd", "ef")[:count])
        expected = [searched(query, node, "seed") is not None for node in nodes]
        columns = ProviderColumns.of(nodes)
        self.assertEqual(expected, columns.fits(query, {}, "seed").tolist())
        # What was claimed since the reading counts as what was used before it.
        sums = {(node.providers[-1].uuid, "PGPU"): 1 for node in nodes if node.providers[-1].inventories}
        used = [
            replace(
                node,
                providers=tuple(
                    replace(each, used={name: units for (uuid, name), units in sums.items() if uuid == each.uuid})
                    for each in node.providers
                ),
            )
            for node in nodes
        ]
        self.assertEqual(
            ProviderColumns.of(used).fits(query, {}, "seed").tolist(), columns.fits(query, sums, "seed").tolist()
        )


class TestView(unittest.TestCase):
    @settings(max_examples=tests.cases(60), deadline=None)
    @given(st.lists(_tree, min_size=1, max_size=4), st.lists(queries(), min_size=1, max_size=3), st.data())
    def test_changes_of_use_end_where_a_whole_reading_ends(
        self, trees: Any, asked: list[CandidateQuery], data: Any
    ) -> None:
        fleet = Fleet(trees, None)
        view = FleetView()
        view.set_nodes(fleet.nodes())
        changed = []
        for node in fleet.nodes():
            found = searched(asked[0], node, "seed")
            if found is not None and data.draw(st.booleans()):
                fleet.store.claim(ClaimRequest(new_uuid(), found))
                changed.append(node.uuid)
        # Only now, so that columns that exist are changed.
        for query in asked:
            view.snapshot()._columns.fits(query, {}, "seed")
        nodes = fleet.nodes()
        view.change_nodes(FleetChanges(tuple(node for node in nodes if node.uuid in changed)))
        whole = ProviderColumns.of(nodes)
        columns = view.snapshot()._columns
        self.assertEqual([each.used for each in whole.providers], [each.used for each in columns.providers])
        for query in asked:
            self.assertEqual(whole.fits(query, {}, "seed").tolist(), columns.fits(query, {}, "seed").tolist())

    def test_what_is_claimed_counts_at_once_and_once(self) -> None:
        gpus = [ProviderState(f"gpu{number}", "node", (InventoryItem("PGPU", 1),), {}) for number in range(2)]
        own = ProviderState("node", None, (InventoryItem("VCPU", 8),), {})
        spec = RequestSpec("new", Flavor("f", {"PGPU": 1}))

        def node(*used: int) -> NodeState:
            states = [replace(gpu, used={"PGPU": units}) for gpu, units in zip(gpus, used, strict=True)]
            return NodeState("node", "n", "h", {"VCPU": 8, "PGPU": 2}, {}, providers=(own, *states))

        def proposed() -> Any:
            fleet = view.snapshot()
            fits = fleet.fits(spec)
            assert fits is not None
            propose = fleet.proposal(0, spec)
            assert propose is not None
            return set(propose(frozenset()) or {}) if fits[0] else None

        view = FleetView()
        view.set_nodes([node(0, 0)])
        self.assertEqual({"gpu0"}, proposed())
        record = InstanceRecord("i", "h", "n", "f", {"PGPU": 1}, holds={"gpu0": {"PGPU": 1}})
        view.put(record)
        self.assertEqual({"gpu1"}, proposed())
        # A reading that began before the claim does not have it.
        view.change_nodes(FleetChanges((node(0, 0),)))
        self.assertEqual({"gpu1"}, proposed())
        held = view.held()
        self.assertEqual(["i"], held)
        view.change_nodes(FleetChanges((node(1, 0),)), held=held)
        self.assertEqual({"gpu1"}, proposed())
        view.put(InstanceRecord("j", "h", "n", "f", {"PGPU": 1}, holds={"gpu1": {"PGPU": 1}}))
        self.assertIsNone(proposed())
        # Messages of agents do not say what is held.
        view.put(replace(record, holds=None))
        self.assertIsNone(proposed())
        view.drop("i")
        self.assertEqual({"gpu0"}, proposed())
        view.change_nodes(FleetChanges((node(0, 1),)), held=view.held())
        self.assertEqual({"gpu0"}, proposed())
        view.drop("j")
        self.assertEqual({"gpu0"}, proposed())
        self.assertEqual({}, {key: units for key, units in view.snapshot()._taken.items() if units > 0})


if __name__ == "__main__":
    unittest.main()
