# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of stores that let providers be edited one by one, and keep names.

Mix :class:`CatalogueTests` in beside :class:`moorage.testing.allocation.AllocationStoreTests`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any, cast

from moorage import errors
from moorage.allocation.interface import (
    MOST_LEVELS,
    AllocationStore,
    ClaimRequest,
    GenerationConflict,
    HasChildren,
    InventoryItem,
    NameCatalogue,
    ProviderCatalogue,
    ProviderFilter,
    ResourceProvider,
    TreeTooDeep,
)
from moorage.testing.store_kit import LARGEST, THREADS, StoreKit, held, new_uuid, provider

__all__ = ["CatalogueTests"]


class _Store(AllocationStore, ProviderCatalogue, NameCatalogue):
    """What the tests of this kit need."""


def any_of(*names: str) -> tuple[frozenset[str], ...]:
    """One requirement: at least one of the names."""
    return (frozenset(names),)


class CatalogueTests(StoreKit):
    """The contract of :class:`ProviderCatalogue` and :class:`NameCatalogue`."""

    @property
    def catalogue(self) -> _Store:
        """The store of the test."""
        return cast(_Store, self.store)

    def made(self, name: str = "", parent: str | None = None, **totals: Any) -> str:
        """Create a provider; its uuid."""
        given = provider(name, **totals)
        for item in given.inventories:
            self.catalogue.create_resource_class(item.resource_class)
        stored = self.catalogue.create_provider(
            ResourceProvider(given.uuid, given.name, inventories=given.inventories, parent=parent)
        )
        return stored.uuid

    def found(self, **query: Any) -> set[str]:
        """Returns the uuids that a filter finds."""
        return {each.uuid for each in self.catalogue.find_providers(ProviderFilter(**query))}

    def root(self, uuid: str) -> str:
        """Returns the root of a provider's tree."""
        return self.catalogue.provider(uuid).root

    # -- providers ------------------------------------------------------------------------------------------------

    def test_a_created_provider_is_its_own_root_and_begins_at_generation_zero(self) -> None:
        given = provider("created", VCPU=4)
        stored = self.catalogue.create_provider(given)
        self.assertEqual((given.uuid, "created", 0, None), (stored.uuid, stored.name, stored.generation, stored.parent))
        self.assertEqual(given.uuid, stored.root)
        self.assertEqual(given.inventories, stored.inventories)
        self.assertGreater(stored.updated_at, 0)
        read = self.catalogue.provider(given.uuid)
        self.assertEqual((), read.inventories)
        self.assertEqual(stored.updated_at, read.updated_at)

    def test_a_taken_uuid_and_a_taken_name_are_told_apart(self) -> None:
        uuid = self.made("taken")
        for given, field in (
            (ResourceProvider(uuid, "other"), "uuid"),
            (ResourceProvider(uuid, "taken"), "uuid"),
            (ResourceProvider(new_uuid(), "taken"), "name"),
        ):
            with self.subTest(given=given), self.assertRaises(errors.AlreadyExists) as caught:
                self.catalogue.create_provider(given)
            self.assertEqual(field, caught.exception.details["field"])
        self.assertEqual({uuid}, self.found())

    def test_a_provider_is_created_once_by_many_at_once(self) -> None:
        given = provider("once")
        results = self.at_once(lambda _: cast(_Store, self.another(self.store)).create_provider(given).uuid)
        self.assertEqual(1, results.count(given.uuid), results)
        self.assertEqual(THREADS - 1, sum(isinstance(each, errors.AlreadyExists) for each in results), results)

    def test_what_does_not_exist_is_not_found(self) -> None:
        uuid, store = new_uuid(), self.catalogue
        for work in (
            lambda: store.provider(uuid),
            lambda: store.inventories(uuid),
            lambda: store.update_provider(uuid, name="x"),
            lambda: store.set_inventories(uuid, ()),
            lambda: store.remove_inventory(uuid, "VCPU"),
            lambda: store.provider_traits(uuid),
            lambda: store.set_traits(uuid, set(), 0),
            lambda: store.provider_aggregates(uuid),
            lambda: store.set_aggregates(uuid, set()),
            lambda: store.set_aggregates(uuid, set(), 0),
        ):
            with self.assertRaises(errors.NotFound) as caught:
                work()
            self.assertEqual(uuid, caught.exception.details["provider"])
        self.assertFalse(store.delete_provider(uuid))
        self.assertEqual(set(), self.found(uuid=uuid))
        self.assertEqual(set(), self.found(in_tree=uuid))

    def test_a_rename_keeps_the_generation_and_refuses_a_taken_name(self) -> None:
        uuid, other = self.made("before"), self.made("other")
        renamed = self.catalogue.update_provider(uuid, name="größe 節點 👍", can_host=False)
        self.assertEqual(("größe 節點 👍", 0, False), (renamed.name, renamed.generation, renamed.can_host))
        self.assertEqual({uuid}, self.found(name="größe 節點 👍"))
        self.assertEqual(set(), self.found(name="before"))
        for work in (lambda: self.catalogue.update_provider(uuid, name="other"), lambda: self.made("other")):
            with self.assertRaises(errors.AlreadyExists) as caught:
                work()
            self.assertEqual("name", caught.exception.details["field"])
        self.catalogue.update_provider(other, name="other")
        self.made("before")

    # -- trees ----------------------------------------------------------------------------------------------------

    def test_children_have_the_root_of_their_tree(self) -> None:
        root = self.made("root")
        child = self.made("child", root)
        leaf = self.made("leaf", child)
        alone = self.made("alone")
        self.assertEqual([root] * 3, [self.root(each) for each in (root, child, leaf)])
        self.assertEqual(child, self.catalogue.provider(leaf).parent)
        for member in (root, child, leaf):
            self.assertEqual({root, child, leaf}, self.found(in_tree=member))
        self.assertEqual({alone}, self.found(in_tree=alone))

    def test_ensured_providers_may_be_trees_too(self) -> None:
        root, child = provider("root"), new_uuid()
        self.store.ensure_providers([root, ResourceProvider(child, "child", parent=root.uuid)])
        leaf = new_uuid()
        self.store.ensure_providers([ResourceProvider(leaf, "leaf", parent=child)])
        self.assertEqual({root.uuid, child, leaf}, self.found(in_tree=leaf))
        self.assertEqual(0, self.store.ensure_providers([ResourceProvider(leaf, "leaf", parent=child)]))
        with self.assertRaises(errors.InvalidInput):
            self.store.ensure_providers([ResourceProvider(new_uuid(), "orphan", parent=new_uuid())])

    def test_a_parent_must_exist_and_be_another(self) -> None:
        uuid = new_uuid()
        for parent in (new_uuid(), uuid):
            with self.assertRaises(errors.InvalidInput) as caught:
                self.catalogue.create_provider(ResourceProvider(uuid, "x", parent=parent))
            self.assertEqual("parent", caught.exception.details["path"])
        self.assertEqual(set(), self.found())

    def test_a_subtree_moves_as_a_whole(self) -> None:
        first, second = self.made("first"), self.made("second")
        child = self.made("child", first)
        leaves = [self.made(f"leaf{number}", child) for number in range(3)]
        moved = self.catalogue.update_provider(child, parent=second)
        self.assertEqual((second, second), (moved.parent, moved.root))
        self.assertEqual({second, child, *leaves}, self.found(in_tree=second))
        self.assertEqual({first}, self.found(in_tree=first))
        self.assertEqual(child, self.catalogue.update_provider(child, parent=None).root)
        self.assertEqual({child, *leaves}, self.found(in_tree=leaves[0]))
        self.assertEqual({second}, self.found(in_tree=second))

    def test_loops_are_refused(self) -> None:
        root = self.made("root")
        child = self.made("child", root)
        leaf = self.made("leaf", child)
        for uuid, parent in ((root, leaf), (root, root), (child, leaf), (root, new_uuid())):
            with self.subTest(uuid=uuid), self.assertRaises(errors.InvalidInput) as caught:
                self.catalogue.update_provider(uuid, parent=parent)
            self.assertEqual("parent", caught.exception.details["path"])
        self.assertEqual([root] * 3, [self.root(each) for each in (root, child, leaf)])

    def test_without_reparent_only_a_root_gets_a_parent(self) -> None:
        root, other = self.made("root"), self.made("other")
        child = self.made("child")
        update = self.catalogue.update_provider
        self.assertEqual(root, update(child, parent=root, reparent=False).parent)
        self.assertEqual(root, update(child, name="renamed", parent=root, reparent=False).parent)
        for parent in (other, None):
            with self.subTest(parent=parent), self.assertRaises(errors.InvalidInput):
                update(child, parent=parent, reparent=False)
        self.assertEqual(root, self.catalogue.provider(child).parent)

    def test_a_parent_stays_while_it_has_children(self) -> None:
        root = self.made("root")
        child = self.made("child", root)
        with self.assertRaises(HasChildren):
            self.store.delete_provider(root)
        self.assertTrue(self.store.delete_provider(child))
        self.assertTrue(self.store.delete_provider(root))

    def test_opposite_moves_at_once_make_no_loop(self) -> None:
        for _ in range(3):
            first, second = self.made(), self.made()
            leaves = [self.made("", parent) for parent in (first, second)]
            pairs = [(first, second), (second, first)]

            def work(number: int, pairs: list[tuple[str, str]] = pairs) -> str:
                uuid, parent = pairs[number % 2]
                store = cast(_Store, self.another(self.store))
                with contextlib.suppress(errors.InvalidInput):
                    return str(store.update_provider(uuid, parent=parent).uuid)
                return ""

            results = self.at_once(work, 4)
            self.assertEqual(1, len(set(results) - {""}), results)
            roots = {self.root(each) for each in (first, second, *leaves)}
            self.assertEqual(1, len(roots))
            self.assertIsNone(self.catalogue.provider(roots.pop()).parent)

    def chain(self, levels: int, parent: str | None = None) -> list[str]:
        """Create providers, each below the one before; their uuids."""
        uuids = [new_uuid() for _ in range(levels)]
        parents = [parent, *uuids]
        self.store.ensure_providers(
            [ResourceProvider(uuid, uuid, parent=above) for uuid, above in zip(uuids, parents, strict=False)]
        )
        return uuids

    def test_a_tree_has_a_limited_number_of_levels(self) -> None:
        deepest = self.chain(MOST_LEVELS)[-1]
        short = self.chain(2)
        before = self.found()
        for refused in (
            lambda: self.made("", deepest),
            lambda: self.store.ensure_providers([ResourceProvider(new_uuid(), "too deep", parent=deepest)]),
            lambda: self.chain(MOST_LEVELS + 1),
            lambda: self.chain(MOST_LEVELS - 1, short[-1]),
            lambda: self.catalogue.update_provider(short[0], parent=deepest),
        ):
            with self.assertRaises(TreeTooDeep) as caught:
                refused()
            self.assertEqual("parent", caught.exception.details["path"])
            self.assertIn(f"the most is {MOST_LEVELS}", caught.exception.message)
        self.assertEqual(before, self.found())
        self.assertEqual(short[0], self.root(short[1]))
        # What lies below a provider counts.
        above = self.catalogue.provider(str(self.catalogue.provider(deepest).parent)).parent
        self.catalogue.update_provider(short[0], parent=above)
        with self.assertRaises(TreeTooDeep):
            self.made("", short[1])

    def test_moves_at_once_make_no_tree_with_too_many_levels(self) -> None:
        chains = [self.chain(MOST_LEVELS // 2 - 1) for _ in range(3)]
        moves = [(below[0], above[-1]) for below, above in itertools.pairwise(chains)]

        def work(number: int) -> str:
            uuid, parent = moves[number % 2]
            store = cast(_Store, self.another(self.store))
            with contextlib.suppress(TreeTooDeep):
                return str(store.update_provider(uuid, parent=parent).uuid)
            return ""

        results = self.at_once(work, 4)
        self.assertEqual(1, len(set(results) - {""}), results)
        self.assertEqual(2, len({self.root(uuid) for chain in chains for uuid in chain}))

    def test_children_and_the_end_of_their_parent_at_once(self) -> None:
        for _ in range(3):
            parent = self.made()

            def work(number: int, parent: str = parent) -> str:
                if number:
                    with contextlib.suppress(errors.InvalidInput):
                        return self.made("", parent)
                    return ""
                with contextlib.suppress(HasChildren):
                    self.store.delete_provider(parent)
                return ""

            children = {each for each in self.at_once(work, 4) if each}
            left = self.found()
            self.assertEqual(bool(children), parent in left)
            self.assertTrue(children <= left)
            for each in children:
                self.assertEqual(parent, self.root(each))

    # -- inventories ----------------------------------------------------------------------------------------------

    def test_inventories_are_edited_one_by_one(self) -> None:
        uuid, store = self.made(VCPU=4), self.catalogue
        self.assertEqual(1, store.add_inventory(uuid, InventoryItem("DISK_GB", 100), 0).generation)
        self.assertEqual(2, store.change_inventory(uuid, InventoryItem("VCPU", 8, 2), 1).generation)
        usage = store.inventories(uuid)
        self.assertEqual((InventoryItem("VCPU", 8, 2), InventoryItem("DISK_GB", 100)), usage.provider.inventories)
        self.assertEqual({"VCPU": 0, "DISK_GB": 0}, dict(usage.used))
        self.assertEqual(3, store.remove_inventory(uuid, "DISK_GB").generation)
        self.assertEqual((), store.set_inventories(uuid, (), 3).inventories)
        self.assertEqual(4, store.provider(uuid).generation)

    def test_what_is_edited_must_be_there_and_what_is_added_not(self) -> None:
        uuid, store = self.made(VCPU=4), self.catalogue
        with self.assertRaises(errors.AlreadyExists):
            store.add_inventory(uuid, InventoryItem("VCPU", 1))
        missing: list[Callable[[], object]] = [
            lambda: store.change_inventory(uuid, InventoryItem("DISK_GB", 1)),
            lambda: store.remove_inventory(uuid, "DISK_GB"),
        ]
        for work in missing:
            with self.assertRaises(errors.NotFound) as caught:
                work()
            self.assertEqual("DISK_GB", caught.exception.details["inventory"])
        unknown = InventoryItem("CUSTOM_NOWHERE", 1)
        nameless: list[Callable[[], object]] = [
            lambda: store.add_inventory(uuid, unknown),
            lambda: store.set_inventories(uuid, [unknown]),
        ]
        for work in nameless:
            with self.assertRaises(errors.NotFound) as caught:
                work()
            self.assertEqual("CUSTOM_NOWHERE", caught.exception.details["resource_class"])
        for item in (InventoryItem("VCPU", -1), InventoryItem("VCPU", 1, 2), InventoryItem("VCPU", LARGEST + 1)):
            with self.assertRaises(errors.InvalidInput):
                store.change_inventory(uuid, item)
        self.assertEqual(0, store.provider(uuid).generation)

    def test_a_generation_that_moved_refuses_every_write(self) -> None:
        uuid, store = self.made(VCPU=4), self.catalogue
        store.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": 1}}))
        present = store.provider(uuid).generation
        self.assertEqual(1, present)
        for work in (
            lambda: store.set_inventories(uuid, [InventoryItem("VCPU", 9)], 0),
            lambda: store.add_inventory(uuid, InventoryItem("DISK_GB", 9), 0),
            lambda: store.change_inventory(uuid, InventoryItem("VCPU", 9), 2),
            lambda: store.remove_inventory(uuid, "VCPU", 7),
            lambda: store.set_traits(uuid, {"HW_CPU_X86_AVX"}, 0),
            lambda: store.set_aggregates(uuid, {new_uuid()}, 0),
        ):
            with self.assertRaises(GenerationConflict) as caught:
                work()
            self.assertEqual((uuid, present), tuple(caught.exception.details[key] for key in ("provider", "present")))
        usage = store.inventories(uuid)
        self.assertEqual((InventoryItem("VCPU", 4),), usage.provider.inventories)
        self.assertEqual(present, usage.provider.generation)
        self.assertEqual((), store.provider_traits(uuid)[1] + store.provider_aggregates(uuid)[1])

    def test_of_writers_that_expect_the_same_generation_one_wins(self) -> None:
        uuid = self.made(VCPU=4)

        def work(number: int) -> str:
            store = cast(_Store, self.another(self.store))
            if number % 2:
                store.set_traits(uuid, {"HW_CPU_X86_AVX"}, 0)
            else:
                store.set_inventories(uuid, [InventoryItem("VCPU", 10 + number)], 0)
            return "ok"

        results = self.at_once(work)
        self.assertEqual(1, results.count("ok"), results)
        self.assertEqual(THREADS - 1, sum(isinstance(each, GenerationConflict) for each in results), results)
        self.assertEqual(1, self.catalogue.provider(uuid).generation)

    def test_an_inventory_in_use_stays(self) -> None:
        uuid, store = self.made(VCPU=4, DISK_GB=10), self.catalogue
        consumer = store.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": 1}})).consumer
        edits: list[Callable[[], object]] = [
            lambda: store.remove_inventory(uuid, "VCPU"),
            lambda: store.set_inventories(uuid, ()),
        ]
        for work in edits:
            with self.assertRaises(errors.InUse) as caught:
                work()
            self.assertEqual("VCPU", caught.exception.details["resource_class"])
        store.remove_inventory(uuid, "DISK_GB")
        store.release(consumer)
        store.remove_inventory(uuid, "VCPU")
        self.assertEqual({}, dict(store.inventories(uuid).used))

    # -- traits and aggregates ------------------------------------------------------------------------------------

    def test_traits_of_a_provider_are_a_set(self) -> None:
        uuid, bare, store = self.made(), self.made(), self.catalogue
        self.assertTrue(store.create_trait("CUSTOM_GOLD"))
        row, names = store.set_traits(uuid, {"HW_CPU_X86_AVX", "CUSTOM_GOLD"}, 0)
        self.assertEqual((1, ("CUSTOM_GOLD", "HW_CPU_X86_AVX")), (row.generation, names))
        self.assertEqual((row, names), store.provider_traits(uuid))
        # One without traits, and one that does not exist, are left out.
        self.assertEqual({uuid: frozenset(names)}, store.traits_of([uuid, bare, new_uuid()]))
        row, names = store.set_traits(uuid, {"CUSTOM_GOLD"}, None)
        self.assertEqual((2, ("CUSTOM_GOLD",)), (row.generation, names))
        with self.assertRaises(errors.NotFound) as caught:
            store.set_traits(uuid, {"CUSTOM_GOLD", "CUSTOM_B", "NO_SUCH"}, 2)
        self.assertEqual(["CUSTOM_B", "NO_SUCH"], caught.exception.details["traits"])
        self.assertEqual((row, names), store.provider_traits(uuid))
        # One without traits, and one that does not exist, are left out.
        self.assertEqual({uuid: frozenset(names)}, store.traits_of([uuid, bare, new_uuid()]))
        self.assertEqual(((),), store.set_traits(uuid, frozenset())[1:])

    def test_traits_are_given_and_taken_and_the_others_stay(self) -> None:
        uuid, store = self.made(), self.catalogue
        store.set_traits(uuid, {"HW_CPU_X86_AVX"}, 0)
        self.assertTrue(store.change_traits(uuid, {"HW_CPU_X86_SSE", "CUSTOM_NEW"}))
        self.assertEqual(("CUSTOM_NEW", "HW_CPU_X86_AVX", "HW_CPU_X86_SSE"), store.provider_traits(uuid)[1])
        self.assertEqual(["CUSTOM_NEW"], [each.name for each in store.traits(prefix="CUSTOM_")])
        before = store.provider(uuid)
        for added, removed in (({"CUSTOM_NEW"}, {"HW_CPU_X86_SSE2"}), (frozenset(), frozenset())):
            self.assertFalse(store.change_traits(uuid, added, removed))
        self.assertEqual(before.generation, store.provider(uuid).generation)
        self.assertTrue(store.change_traits(uuid, {"HW_CPU_X86_SSE"}, {"CUSTOM_NEW", "HW_CPU_X86_AVX"}))
        self.assertEqual(("HW_CPU_X86_SSE",), store.provider_traits(uuid)[1])
        self.assertEqual(before.generation + 1, store.provider(uuid).generation)
        for names, error in (({"NO_SUCH"}, errors.NotFound), ({"CUSTOM_a"}, errors.InvalidInput)):
            with self.subTest(names=names), self.assertRaises(error):
                store.change_traits(uuid, {*names, "CUSTOM_OTHER"})
        self.assertEqual(("HW_CPU_X86_SSE",), store.provider_traits(uuid)[1])
        with self.assertRaises(errors.NotFound):
            store.change_traits(new_uuid(), {"HW_CPU_X86_SSE"})

    def test_traits_that_are_given_at_once_are_all_there(self) -> None:
        uuid = self.made()
        results = self.at_once(
            lambda number: cast(_Store, self.another(self.store)).change_traits(
                uuid, {f"CUSTOM_T{number}", "CUSTOM_ALL"}
            )
        )
        wanted = {"CUSTOM_ALL", *(f"CUSTOM_T{number}" for number in range(len(results)))}
        self.assertEqual(wanted, set(self.catalogue.provider_traits(uuid)[1]))

    def test_aggregates_of_a_provider_are_a_set(self) -> None:
        uuid, store = self.made(), self.catalogue
        wanted = {new_uuid(), new_uuid()}
        row, names = store.set_aggregates(uuid, wanted)
        self.assertEqual((0, tuple(sorted(wanted))), (row.generation, names))
        self.assertEqual((row, names), store.provider_aggregates(uuid))
        fewer = {wanted.pop()}
        row, names = store.set_aggregates(uuid, fewer, 0)
        self.assertEqual((1, tuple(fewer)), (row.generation, names))
        self.assertEqual(((),), store.set_aggregates(uuid, frozenset(), 1)[1:])
        with self.assertRaises(errors.InvalidInput):
            store.set_aggregates(uuid, {"x" * 37})

    def test_a_deleted_provider_leaves_no_traits_and_aggregates_to_the_next(self) -> None:
        uuid, store = self.made("again", VCPU=1), self.catalogue
        store.set_traits(uuid, {"HW_CPU_X86_AVX"})
        store.set_aggregates(uuid, {new_uuid()})
        store.delete_provider(uuid)
        self.assertEqual([], store.traits(associated=True))
        store.create_provider(ResourceProvider(uuid, "again"))
        self.assertEqual(((), ()), (store.provider_traits(uuid)[1], store.provider_aggregates(uuid)[1]))

    # -- finding --------------------------------------------------------------------------------------------------

    def test_filters_find_what_they_say(self) -> None:
        store, (one, two, three) = self.catalogue, sorted(self.made(VCPU=4, DISK_GB=10) for _ in range(3))
        aggregates = [new_uuid() for _ in range(2)]
        store.set_traits(one, {"HW_CPU_X86_AVX", "HW_CPU_X86_SSE"})
        store.set_traits(two, {"HW_CPU_X86_SSE"})
        store.set_aggregates(one, {aggregates[0]})
        store.set_aggregates(two, set(aggregates))
        store.claim(ClaimRequest(new_uuid(), {one: {"VCPU": 3}}))
        for query, expected in (
            ({}, {one, two, three}),
            ({"uuid": two}, {two}),
            ({"required": any_of("HW_CPU_X86_AVX")}, {one}),
            ({"required": any_of("HW_CPU_X86_AVX", "HW_CPU_X86_SSE")}, {one, two}),
            ({"required": any_of("HW_CPU_X86_AVX") + any_of("HW_CPU_X86_SSE")}, {one}),
            ({"forbidden": frozenset({"HW_CPU_X86_AVX", "HW_CPU_X86_AVX2"})}, {two, three}),
            ({"member_of": any_of(aggregates[0])}, {one, two}),
            ({"member_of": any_of(*aggregates)}, {one, two}),
            ({"member_of": any_of(aggregates[0]) + any_of(aggregates[1])}, {two}),
            ({"member_of": any_of(new_uuid())}, set()),
            ({"not_member_of": frozenset({aggregates[1], new_uuid()})}, {one, three}),
            ({"resources": {"VCPU": 2}}, {two, three}),
            ({"resources": {"VCPU": 1, "DISK_GB": 10}}, {one, two, three}),
            ({"resources": {"VCPU": 1, "DISK_GB": 11}}, set()),
            ({"resources": {"MEMORY_MB": 1}}, set()),
            ({"resources": {"VCPU": 1}, "forbidden": frozenset({"HW_CPU_X86_SSE"})}, {three}),
        ):
            with self.subTest(query=query):
                self.assertEqual(expected, self.found(**query))
        self.assertEqual([one, two], [each.uuid for each in store.find_providers(limit=2)])
        self.assertEqual([two, three], [each.uuid for each in store.find_providers(after=one)])

    def test_filters_obey_units_and_steps(self) -> None:
        uuid = self.made(DISK_GB=InventoryItem("DISK_GB", 100, min_unit=5, max_unit=40, step_size=10))
        for amount, fits in ((4, False), (5, True), (6, False), (10, True), (40, True), (50, False)):
            with self.subTest(amount=amount):
                self.assertEqual({uuid} if fits else set(), self.found(resources={"DISK_GB": amount}))

    def test_a_filter_with_an_unknown_name_is_refused(self) -> None:
        for query, key, name in (
            ({"required": any_of("HW_CPU_X86_AVX", "CUSTOM_NO")}, "trait", "CUSTOM_NO"),
            ({"forbidden": frozenset({"CUSTOM_NO"})}, "trait", "CUSTOM_NO"),
            ({"resources": {"CUSTOM_NO": 1}}, "resource_class", "CUSTOM_NO"),
        ):
            with self.subTest(query=query), self.assertRaises(errors.NotFound) as caught:
                self.found(**query)
            self.assertEqual(name, caught.exception.details[key])

    # -- names ----------------------------------------------------------------------------------------------------

    def test_custom_classes_come_and_go(self) -> None:
        store = self.catalogue
        self.assertEqual("VCPU", store.resource_classes()[0].name)
        self.assertTrue(all(each.standard for each in store.resource_classes()))
        self.assertTrue(store.create_resource_class("CUSTOM_B"))
        self.assertTrue(store.create_resource_class("CUSTOM_A"))
        for name in ("CUSTOM_A", "VCPU"):
            self.assertFalse(store.create_resource_class(name))
        self.assertEqual(
            ["CUSTOM_B", "CUSTOM_A"], [each.name for each in store.resource_classes() if not each.standard]
        )
        for name in ("custom_a", "CUSTOM_", "OTHER", "CUSTOM_A-B", "", "CUSTOM_" + "X" * 255):
            with self.subTest(name=name), self.assertRaises(errors.InvalidInput):
                store.create_resource_class(name)
        store.delete_resource_class("CUSTOM_B")
        with self.assertRaises(errors.NotFound):
            store.delete_resource_class("CUSTOM_B")
        with self.assertRaises(errors.InvalidInput):
            store.delete_resource_class("VCPU")

    def test_a_class_in_use_stays(self) -> None:
        store, uuid = self.catalogue, self.made(CUSTOM_A=1)
        with self.assertRaises(errors.InUse):
            store.delete_resource_class("CUSTOM_A")
        store.remove_inventory(uuid, "CUSTOM_A")
        store.delete_resource_class("CUSTOM_A")

    def test_a_class_that_follows_a_deleted_one_is_not_taken_for_it(self) -> None:
        store, other = self.catalogue, cast(_Store, self.another(self.store))
        uuid = self.made(CUSTOM_A=4)
        store.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_A": 1}}))
        other.release(other.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_A": 1}})).consumer)
        store.create_resource_class("CUSTOM_OLD")
        with self.assertRaises(errors.CapacityExceeded):
            other.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_OLD": 1}}))
        store.delete_resource_class("CUSTOM_OLD")
        store.create_resource_class("CUSTOM_NEW")
        second = self.made(CUSTOM_NEW=4)
        with self.assertRaises(errors.NotFound):
            other.claim(ClaimRequest(new_uuid(), {second: {"CUSTOM_OLD": 1}}))
        store.create_resource_class("CUSTOM_OLD")
        store.add_inventory(second, InventoryItem("CUSTOM_OLD", 2))
        other.claim(ClaimRequest(new_uuid(), {second: {"CUSTOM_OLD": 2, "CUSTOM_NEW": 1}}))
        self.assertEqual(
            {(uuid, "CUSTOM_A"): 1, (second, "CUSTOM_OLD"): 2, (second, "CUSTOM_NEW"): 1}, held(self.store)
        )

    def test_a_renamed_class_has_its_new_name_everywhere(self) -> None:
        store, other = self.catalogue, cast(_Store, self.another(self.store))
        uuid = self.made(CUSTOM_BEFORE=4)
        other.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_BEFORE": 1}}))
        store.rename_resource_class("CUSTOM_BEFORE", "CUSTOM_AFTER")
        for each in (store, other):
            self.assertEqual({(uuid, "CUSTOM_AFTER"): 1}, held(each))
            self.assertEqual({"CUSTOM_AFTER": 1}, dict(each.inventories(uuid).used))
        other.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_AFTER": 2}}))
        with self.assertRaises(errors.NotFound):
            other.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_BEFORE": 1}}))
        # Another class may have the name afterwards.
        store.create_resource_class("CUSTOM_BEFORE")
        store.add_inventory(uuid, InventoryItem("CUSTOM_BEFORE", 2))
        for each in (other, store):
            each.claim(ClaimRequest(new_uuid(), {uuid: {"CUSTOM_BEFORE": 1}}))
        self.assertEqual({(uuid, "CUSTOM_AFTER"): 3, (uuid, "CUSTOM_BEFORE"): 2}, held(store))
        store.rename_resource_class("CUSTOM_BEFORE", "CUSTOM_LATER")
        store.create_resource_class("CUSTOM_THIRD")
        for name, new, error in (
            ("CUSTOM_AFTER", "CUSTOM_THIRD", errors.AlreadyExists),
            ("CUSTOM_AFTER", "VCPU", errors.AlreadyExists),
            ("CUSTOM_AFTER", "lower", errors.InvalidInput),
            ("VCPU", "CUSTOM_X", errors.InvalidInput),
            ("CUSTOM_BEFORE", "CUSTOM_X", errors.NotFound),
        ):
            with self.subTest(name=name, new=new), self.assertRaises(error):
                store.rename_resource_class(name, new)

    def test_a_class_that_is_given_and_deleted_at_once_is_never_half_there(self) -> None:
        for turn in range(4):
            name = f"CUSTOM_T{turn}"
            self.catalogue.create_resource_class(name)
            uuids = [self.made() for _ in range(3)]

            def work(number: int, name: str = name, uuids: list[str] = uuids) -> None:
                store = cast(_Store, self.another(self.store))
                if number:
                    store.add_inventory(uuids[number - 1], InventoryItem(name, 1))
                else:
                    store.delete_resource_class(name)

            results = self.at_once(work, 4)
            exists = name in {each.name for each in self.catalogue.resource_classes()}
            have = [uuid for uuid in uuids if self.catalogue.inventories(uuid).provider.inventories]
            self.assertEqual(exists, isinstance(results[0], errors.InUse), results)
            self.assertEqual(exists, bool(have), results)

    def test_traits_are_listed_by_name_prefix_and_use(self) -> None:
        store, uuid = self.catalogue, self.made()
        self.assertTrue(store.create_trait("CUSTOM_B"))
        self.assertTrue(store.create_trait("CUSTOM_A"))
        for name in ("CUSTOM_A", "HW_CPU_X86_AVX"):
            self.assertFalse(store.create_trait(name))
        self.assertEqual(["CUSTOM_A", "CUSTOM_B"], [each.name for each in store.traits(prefix="CUSTOM")])
        self.assertEqual(
            ["CUSTOM_B", "HW_CPU_X86_AVX"],
            [each.name for each in store.traits(names={"HW_CPU_X86_AVX", "CUSTOM_B", "CUSTOM_NO"})],
        )
        store.set_traits(uuid, {"CUSTOM_B", "HW_CPU_X86_AVX"})
        self.assertEqual(["CUSTOM_B", "HW_CPU_X86_AVX"], [each.name for each in store.traits(associated=True)])
        unused = [each.name for each in store.traits(associated=False)]
        self.assertIn("CUSTOM_A", unused)
        self.assertNotIn("CUSTOM_B", unused)
        self.assertEqual([False, True], [each.standard for each in store.traits(associated=True)])
        for name in ("custom_a", "CUSTOM_", "OTHER", "CUSTOM_A-B", "", "CUSTOM_" + "X" * 255):
            with self.subTest(name=name), self.assertRaises(errors.InvalidInput):
                store.create_trait(name)

    def test_a_trait_in_use_stays(self) -> None:
        store, uuid = self.catalogue, self.made()
        store.create_trait("CUSTOM_A")
        store.set_traits(uuid, {"CUSTOM_A"})
        with self.assertRaises(errors.InUse):
            store.delete_trait("CUSTOM_A")
        store.set_traits(uuid, frozenset())
        store.delete_trait("CUSTOM_A")
        for name, error in (("CUSTOM_A", errors.NotFound), ("HW_CPU_X86_AVX", errors.InvalidInput)):
            with self.subTest(name=name), self.assertRaises(error):
                store.delete_trait(name)

    def test_a_trait_that_is_given_and_deleted_at_once_is_never_half_there(self) -> None:
        for turn in range(4):
            name = f"CUSTOM_T{turn}"
            self.catalogue.create_trait(name)
            uuids = [self.made() for _ in range(3)]

            def work(number: int, name: str = name, uuids: list[str] = uuids) -> None:
                store = cast(_Store, self.another(self.store))
                if number:
                    store.set_traits(uuids[number - 1], {name})
                else:
                    store.delete_trait(name)

            self.at_once(work, 4)
            exists = bool(self.catalogue.traits(names={name}))
            have = [uuid for uuid in uuids if self.catalogue.provider_traits(uuid)[1]]
            self.assertEqual(exists, bool(have))
