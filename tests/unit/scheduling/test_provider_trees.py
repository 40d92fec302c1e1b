# SPDX-License-Identifier: Apache-2.0
"""Nodes with several providers: the scheduler finds places where the store finds candidates, and the same ones."""

from __future__ import annotations

import unittest
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import tests
from moorage.allocation.interface import (
    SHARES,
    CandidateQuery,
    ClaimRequest,
    InventoryItem,
    RequestGroup,
    ResourceProvider,
)
from moorage.instances.providers import read_providers
from moorage.scheduling.assignment import Search
from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Flavor, FleetChanges, InstanceRecord, NodeState, ProviderState, RequestSpec
from moorage.scheduling.provider_columns import ProviderColumns
from moorage.testing.allocation import new_uuid
from tests.conformance.allocation.stores import memory_store

CLASSES = ("VCPU", "MEMORY_MB", "PGPU")
TRAITS = ("HW_CPU_X86_AVX2", "HW_CPU_X86_SSE", "HW_CPU_X86_MMX")
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
def queries(draw: Any) -> CandidateQuery:
    """A query by the rules of the request language."""
    groups: list[RequestGroup] = []
    traits = st.lists(st.frozensets(st.sampled_from(TRAITS), min_size=1, max_size=2), max_size=2)
    count = draw(st.integers(0, 4))
    twins = draw(st.booleans())
    for number in range(count):
        resources = draw(_amounts)
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


class Fleet:
    """Trees in a memory store, and the columns that a scheduler has of them."""

    def __init__(self, trees: list[Any], pool: Any, *, rule: str = "seed") -> None:
        self.store, self.rule = memory_store(step_size_rule=rule), rule
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
            NodeState(uuid, uuid, uuid, {}, {}, traits=providers[uuid][0].traits, providers=providers[uuid])
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


class TestLaws(unittest.TestCase):
    @settings(max_examples=tests.cases(250), deadline=None)
    @given(
        st.lists(_tree, min_size=1, max_size=4),
        st.none() | _provider,
        st.lists(queries(), min_size=1, max_size=4),
        st.sampled_from(("seed", "modulo")),
    )
    def test_places_are_found_where_the_store_finds_candidates(
        self, trees: Any, pool: Any, asked: list[CandidateQuery], rule: str
    ) -> None:
        fleet = Fleet(trees, pool, rule=rule)
        nodes = fleet.nodes()
        columns = ProviderColumns.of(nodes)
        for query in asked:
            expected = fleet.candidates(query, nodes)
            fits = columns.fits(query, {}, rule)
            self.assertEqual([node.uuid in expected for node in nodes], fits.tolist(), query)
            for node in nodes:
                found = searched(query, node, rule)
                if node.uuid in expected:
                    self.assertIn(_frozen(found), expected[node.uuid])
                else:
                    self.assertIsNone(found)


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
