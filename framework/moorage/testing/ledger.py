# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of stores whose claims change: replaced, moved, leased, summed by project.

Mix :class:`LedgerTests` in beside :class:`moorage.testing.allocation.AllocationStoreTests`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    AllocationLedger,
    AllocationStore,
    ClaimOutcome,
    ClaimRequest,
    ConsumerHolding,
    Expect,
    GenerationConflict,
    InventoryChange,
    InventoryItem,
    ProviderCatalogue,
    ResourceProvider,
    UsageTotal,
)
from moorage.testing.store_kit import THREADS, StoreKit, all_allocations, held, new_uuid

__all__ = ["LedgerTests"]


class _Store(AllocationStore, AllocationLedger, ProviderCatalogue):
    """What the tests of this kit need."""


class _UndoneError(Exception):
    """What a companion of a test raises."""


class LedgerTests(StoreKit):
    """The contract of :class:`moorage.allocation.interface.AllocationLedger`."""

    @property
    def ledger(self) -> _Store:
        """The store of the test."""
        return cast(_Store, self.store)

    def change(self, consumer: str, resources: Mapping[str, Mapping[str, int]], **more: Any) -> ClaimOutcome:
        """Replace what one consumer holds."""
        (outcome,) = self.ledger.replace([AllocationChange(consumer, resources, **more)])
        return outcome

    def holding(self, consumer: str) -> ConsumerHolding:
        """What a consumer holds, which must be something."""
        found = self.ledger.consumer(consumer)
        self.assertIsNotNone(found)
        return cast(ConsumerHolding, found)

    def generation(self, consumer: str) -> int | None:
        """Returns the generation of a consumer; None: it holds nothing."""
        found = self.ledger.consumer(consumer)
        return None if found is None else found.consumer.generation

    def shrink(self, uuid: str, total: int) -> None:
        """Make the VCPUs of a provider fewer than are held."""
        self.shrunk = True
        self.ledger.set_inventories(uuid, [InventoryItem("VCPU", total)])

    # -- replacing ------------------------------------------------------------------------------------------------

    def test_what_is_held_is_replaced_as_a_whole(self) -> None:
        one, two, consumer = self.ensured(VCPU=4, DISK_GB=10), self.ensured(VCPU=4), new_uuid()
        first = self.change(consumer, {one: {"VCPU": 3, "DISK_GB": 10}}, project="p", user="u", consumer_type="T")
        self.assertEqual((1, False), (first.consumer_generation, first.repeated))
        second = self.change(consumer, {one: {"VCPU": 4}, two: {"VCPU": 1}})
        self.assertEqual(2, second.consumer_generation)
        self.assertEqual({(one, "VCPU"): 4, (two, "VCPU"): 1}, held(self.store))
        found = self.holding(consumer)
        self.assertEqual(
            (2, "p", "u", "T"),
            (
                found.consumer.generation,
                found.consumer.project,
                found.consumer.user,
                found.consumer.consumer_type,
            ),
        )
        self.assertEqual(set(second.allocations), set(found.allocations))
        self.assertEqual({one, two}, set(found.providers))
        self.assertEqual(
            {each: self.ledger.provider(each).generation for each in (one, two)},
            {uuid: each.generation for uuid, each in found.providers.items()},
        )

    def test_a_change_to_a_provider_that_is_gone_takes_nothing_of_the_one_that_followed_it(self) -> None:
        other = cast(_Store, self.another(self.store))
        gone = self.ensured(VCPU=8)
        other.release(other.claim(ClaimRequest(new_uuid(), {gone: {"VCPU": 1}})).consumer)
        self.store.delete_provider(gone)
        present, consumer = self.ensured(VCPU=8), new_uuid()
        self.claim({present: {"VCPU": 2}}, consumer)
        for resources in ({gone: {"VCPU": 7}}, {gone: {"VCPU": 1}, present: {"VCPU": 1}}):
            with self.assertRaises(errors.NotFound):
                other.replace([AllocationChange(consumer, resources)])
        self.assertEqual({(present, "VCPU"): 2}, held(self.store))

    def test_a_provider_that_was_made_anew_is_met_as_it_is_now_by_every_change(self) -> None:
        other = cast(_Store, self.another(self.store))

        def reshape(uuid: str, consumer: str) -> None:
            items = (InventoryItem("VCPU", 4),)
            change = InventoryChange(uuid, items, self.ledger.provider(uuid).generation)
            other.reshape([change], [AllocationChange(consumer, {uuid: {"VCPU": 4}})])

        changes: list[Callable[[str, str], object]] = [
            lambda uuid, consumer: other.claim(ClaimRequest(consumer, {uuid: {"VCPU": 4}})),
            lambda uuid, consumer: other.replace([AllocationChange(consumer, {uuid: {"VCPU": 4}})]),
            reshape,
        ]
        for change in changes:
            uuid = self.ensured(VCPU=4)
            # The other store knows the provider, and others come and go, so that its number may be used again.
            other.release(other.claim(ClaimRequest(new_uuid(), {uuid: {"VCPU": 1}})).consumer)
            self.store.delete_provider(uuid)
            self.ensured(VCPU=4)
            made = ResourceProvider(uuid, f"made again {uuid}", inventories=(InventoryItem("VCPU", 4),))
            self.store.ensure_providers([made])
            consumer = new_uuid()
            change(uuid, consumer)
            self.assertEqual({"VCPU": 4}, dict(self.usage(uuid).used))
            self.assertEqual(
                {(uuid, "VCPU"): 4}, {key: used for key, used in held(self.store).items() if key[0] == uuid}
            )
            with self.assertRaises(errors.CapacityExceeded):
                self.claim({uuid: {"VCPU": 1}})

    def test_a_change_may_name_other_owners(self) -> None:
        one, consumer = self.ensured(VCPU=4), new_uuid()
        self.change(consumer, {one: {"VCPU": 1}})
        self.change(consumer, {one: {"VCPU": 1}}, project="größe 👍", user="u", consumer_type="T")
        found = self.holding(consumer)
        self.assertEqual(
            ("größe 👍", "u", "T"), (found.consumer.project, found.consumer.user, found.consumer.consumer_type)
        )

    def test_nothing_held_means_no_consumer(self) -> None:
        one, consumer = self.ensured(VCPU=4), new_uuid()
        for expected in (Expect.ANYTHING, Expect.NOTHING):
            outcome = self.change(consumer, {}, expected=expected)
            self.assertEqual((0, ()), (outcome.consumer_generation, outcome.allocations))
        self.assertIsNone(self.ledger.consumer(consumer))
        self.change(consumer, {one: {"VCPU": 4}})
        self.assertEqual(0, self.change(consumer, {}, expected=1).consumer_generation)
        self.assertIsNone(self.ledger.consumer(consumer))
        self.assertFalse(self.store.release(consumer))
        self.assertEqual(1, self.change(consumer, {one: {"VCPU": 4}}, expected=Expect.NOTHING).consumer_generation)

    def test_a_generation_that_is_not_the_expected_one_refuses_the_change(self) -> None:
        one, consumer, other = self.ensured(VCPU=4), new_uuid(), new_uuid()
        self.change(consumer, {one: {"VCPU": 1}})
        for of_consumer, expected, present in (
            (consumer, 0, 1),
            (consumer, 2, 1),
            (consumer, Expect.NOTHING, 1),
            (other, 1, None),
            (other, 0, None),
        ):
            for resources in ({one: {"VCPU": 2}}, {}):
                with self.subTest(expected=expected), self.assertRaises(GenerationConflict) as caught:
                    self.change(of_consumer, resources, expected=expected)
                self.assertEqual(
                    (of_consumer, present), tuple(caught.exception.details[key] for key in ("consumer", "present"))
                )
        self.assertEqual(2, self.change(consumer, {one: {"VCPU": 2}}, expected=1).consumer_generation)
        self.assertEqual({(one, "VCPU"): 2}, held(self.store))

    def test_a_change_that_does_not_fit_leaves_what_was(self) -> None:
        one, two, consumer = self.ensured(VCPU=4), self.ensured(VCPU=4), new_uuid()
        self.change(consumer, {one: {"VCPU": 3}})
        self.change(new_uuid(), {two: {"VCPU": 3}})
        before = self.generation(consumer)
        for resources, asked, free in (({two: {"VCPU": 2}}, 2, 1), ({one: {"VCPU": 5}}, 5, 4)):
            with self.assertRaises(errors.CapacityExceeded) as caught:
                self.change(consumer, resources)
            details = caught.exception.details
            self.assertEqual((consumer, asked, free), (details["consumer"], details["asked"], details["free"]))
        with self.assertRaises(errors.NotFound):
            self.change(consumer, {new_uuid(): {"VCPU": 1}})
        with self.assertRaises(errors.NotFound):
            self.change(consumer, {one: {"CUSTOM_NOWHERE": 1}})
        self.assertEqual(before, self.generation(consumer))
        self.assertEqual({(one, "VCPU"): 3, (two, "VCPU"): 3}, held(self.store))

    def test_a_move_between_consumers_is_one_step(self) -> None:
        old, new = self.ensured(VCPU=4), self.ensured(VCPU=4)
        instance, migration = new_uuid(), new_uuid()
        self.change(instance, {old: {"VCPU": 4}})
        outcomes = self.ledger.replace(
            [AllocationChange(migration, {old: {"VCPU": 4}}), AllocationChange(instance, {new: {"VCPU": 4}})]
        )
        self.assertEqual([migration, instance], [each.consumer for each in outcomes])
        self.assertEqual([1, 2], [each.consumer_generation for each in outcomes])
        self.assertEqual(
            {(migration, old): 4, (instance, new): 4},
            {(item.consumer, item.provider): item.used for item in all_allocations(self.store)},
        )
        # And back: what the one gives, the other takes, whatever their order.
        self.ledger.replace([AllocationChange(instance, {old: {"VCPU": 4}}), AllocationChange(migration, {})])
        self.assertEqual({(old, "VCPU"): 4}, held(self.store))

    def test_changes_of_several_consumers_are_all_or_nothing(self) -> None:
        one, consumers = self.ensured(VCPU=5), [new_uuid() for _ in range(3)]
        with self.assertRaises(errors.CapacityExceeded) as caught:
            self.ledger.replace([AllocationChange(each, {one: {"VCPU": 2}}) for each in consumers])
        self.assertEqual((consumers[2], 1), tuple(caught.exception.details[key] for key in ("consumer", "free")))
        self.change(consumers[0], {one: {"VCPU": 1}})
        with self.assertRaises(GenerationConflict):
            self.ledger.replace(
                [
                    AllocationChange(consumers[1], {one: {"VCPU": 2}}, Expect.NOTHING),
                    AllocationChange(consumers[0], {one: {"VCPU": 2}}, Expect.NOTHING),
                ]
            )
        self.assertEqual({(one, "VCPU"): 1}, held(self.store))
        with self.assertRaises(errors.InvalidInput):
            self.ledger.replace([AllocationChange(consumers[0], {}), AllocationChange(consumers[0], {})])

    def test_the_amounts_of_one_request_are_summed(self) -> None:
        one = self.ensured(VCPU=InventoryItem("VCPU", 10, max_unit=4))
        self.ledger.replace([AllocationChange(new_uuid(), {one: {"VCPU": 4}}) for _ in range(2)])
        with self.assertRaises(errors.CapacityExceeded):
            self.ledger.replace([AllocationChange(new_uuid(), {one: {"VCPU": 2}}) for _ in range(2)])
        with self.assertRaises(errors.ConstraintViolated):
            self.change(new_uuid(), {one: {"VCPU": 5}})

    def test_a_provider_that_shrank_can_be_left_step_by_step_and_never_filled(self) -> None:
        one, consumers = self.ensured(VCPU=8), [new_uuid() for _ in range(2)]
        for each in consumers:
            self.change(each, {one: {"VCPU": 4}})
        self.shrink(one, 2)
        self.change(consumers[0], {one: {"VCPU": 4}})
        self.change(consumers[0], {one: {"VCPU": 3}})
        for resources in ({one: {"VCPU": 4}},):
            with self.assertRaises(errors.CapacityExceeded):
                self.change(consumers[0], resources)
        with self.assertRaises(errors.CapacityExceeded):
            self.change(new_uuid(), {one: {"VCPU": 1}})
        # Of what the two hold together, one may give to the other; not more.
        self.ledger.replace(
            [AllocationChange(consumers[0], {one: {"VCPU": 1}}), AllocationChange(consumers[1], {one: {"VCPU": 6}})]
        )
        with self.assertRaises(errors.CapacityExceeded):
            self.ledger.replace(
                [AllocationChange(consumers[0], {one: {"VCPU": 2}}), AllocationChange(consumers[1], {one: {"VCPU": 6}})]
            )
        self.assertEqual({(one, "VCPU"): 7}, held(self.store))

    def test_wrong_changes_are_refused(self) -> None:
        one = self.ensured(VCPU=4)
        for change in (
            AllocationChange("", {one: {"VCPU": 1}}),
            AllocationChange(new_uuid(), {one: {}}),
            AllocationChange(new_uuid(), {one: {"VCPU": 0}}),
            AllocationChange(new_uuid(), {one: {"VCPU": 2**40}}),
            AllocationChange(new_uuid(), {one: {"VCPU": 1}}, project="p" * 256),
            AllocationChange(new_uuid(), {one: {"VCPU": 1}}, lifetime=-1.0),
            AllocationChange(new_uuid(), {one: {"VCPU": 1}}, lifetime=float("nan")),
        ):
            with self.subTest(change=change), self.assertRaises(errors.InvalidInput):
                self.ledger.replace([change])
        self.assertEqual((), self.ledger.replace([]))
        self.assertEqual({}, held(self.store))

    # -- repeating ------------------------------------------------------------------------------------------------

    def test_a_repetition_of_a_change_is_answered_with_what_it_did(self) -> None:
        one, two, consumer = self.ensured(VCPU=4), self.ensured(VCPU=4), new_uuid()
        self.change(consumer, {one: {"VCPU": 4}}, request_id="r")
        for expected in (Expect.ANYTHING, 1):
            moved = AllocationChange(consumer, {two: {"VCPU": 4}}, expected, request_id=f"move {expected}")
            for repeated in (False, True, True):
                (outcome,) = cast(_Store, self.another(self.store)).replace([moved])
                self.assertEqual(repeated, outcome.repeated)
                self.assertEqual([(two, 4)], [(item.provider, item.used) for item in outcome.allocations])
            present = self.generation(consumer)
            self.assertEqual(2, present)
            if expected is Expect.ANYTHING:
                self.change(consumer, {})
                self.change(consumer, {one: {"VCPU": 4}}, request_id="r")
        self.assertEqual({(two, "VCPU"): 4}, held(self.store))

    def test_a_repetition_is_known_by_any_of_its_changes(self) -> None:
        provider, gone, made = self.ensured(VCPU=4), new_uuid(), new_uuid()
        self.change(gone, {provider: {"VCPU": 1}})
        several = [AllocationChange(gone, {}, 1), AllocationChange(made, {provider: {"VCPU": 2}}, request_id="r")]
        self.assertEqual([False, False], [each.repeated for each in self.ledger.replace(several)])
        self.assertEqual([True, True], [each.repeated for each in self.ledger.replace(several)])
        self.assertEqual({(provider, "VCPU"): 2}, held(self.store))

    def test_a_repetition_of_several_changes_counts_as_one(self) -> None:
        old, new = self.ensured(VCPU=4), self.ensured(VCPU=4)
        instance, migration = new_uuid(), new_uuid()
        self.change(instance, {old: {"VCPU": 4}}, request_id="boot")
        move = [
            AllocationChange(migration, {old: {"VCPU": 4}}, Expect.NOTHING, request_id="move"),
            AllocationChange(instance, {new: {"VCPU": 4}}, 1, request_id="move"),
        ]
        self.assertEqual([False, False], [each.repeated for each in self.ledger.replace(move)])
        self.assertEqual([True, True], [each.repeated for each in self.ledger.replace(move)])
        self.store.release(migration)
        with self.assertRaises(errors.Conflict):
            self.ledger.replace(move)
        self.assertEqual({(new, "VCPU"): 4}, held(self.store))

    def test_the_same_change_at_once_is_made_once(self) -> None:
        for expected in (1, Expect.ANYTHING):
            with self.subTest(expected=expected):
                one, two, consumer = self.ensured(VCPU=4), self.ensured(VCPU=4), new_uuid()
                self.change(consumer, {one: {"VCPU": 4}}, request_id="boot")
                move = AllocationChange(consumer, {two: {"VCPU": 4}}, expected, request_id="move")
                results = self.at_once(functools.partial(self._repeated, move))
                self.assertEqual([True] * (THREADS - 1), sorted(results)[1:], results)
                self.assertEqual(2, self.generation(consumer))
                self.assertEqual(
                    {(two, "VCPU"): 4}, {key: used for key, used in held(self.store).items() if key[0] in (one, two)}
                )

    def _repeated(self, change: AllocationChange, _: int) -> bool:
        return cast(_Store, self.another(self.store)).replace([change])[0].repeated

    # -- at once --------------------------------------------------------------------------------------------------

    def test_of_changes_that_expect_the_same_generation_one_wins(self) -> None:
        one, consumer = self.ensured(VCPU=100), new_uuid()
        self.change(consumer, {one: {"VCPU": 1}})
        results = self.at_once(
            lambda number: (
                cast(_Store, self.another(self.store))
                .replace([AllocationChange(consumer, {one: {"VCPU": 10 + number}}, expected=1)])[0]
                .consumer_generation
            )
        )
        self.assertEqual(1, results.count(2), results)
        self.assertEqual(THREADS - 1, sum(isinstance(each, GenerationConflict) for each in results), results)
        self.assertEqual(2, self.generation(consumer))

    def test_changes_of_one_consumer_without_expectation_all_happen(self) -> None:
        one, consumer = self.ensured(VCPU=100), new_uuid()
        results = self.at_once(
            lambda number: (
                cast(_Store, self.another(self.store))
                .replace([AllocationChange(consumer, {one: {"VCPU": 1 + number}})])[0]
                .consumer_generation
            )
        )
        self.assertEqual(list(range(1, THREADS + 1)), sorted(results))

    def test_moves_at_once_leave_exact_counters(self) -> None:
        uuids = [self.ensured(VCPU=12) for _ in range(3)]
        pairs = [(new_uuid(), new_uuid()) for _ in range(4)]
        for number, (instance, _) in enumerate(pairs):
            self.change(instance, {uuids[number % 3]: {"VCPU": 3}})

        def work(number: int) -> int:
            instance, migration = pairs[number % 4]
            store, moved = cast(_Store, self.another(self.store)), 0
            for turn in range(5):
                old, new = uuids[(number + turn) % 3], uuids[(number + turn + 1) % 3]
                with contextlib.suppress(errors.CapacityExceeded):
                    store.replace(
                        [
                            AllocationChange(migration, {old: {"VCPU": 3}}),
                            AllocationChange(instance, {new: {"VCPU": 3}}),
                        ]
                    )
                    moved += 1
            return moved

        results = self.at_once(work)
        self.assertEqual([], [each for each in results if isinstance(each, Exception)])
        for each in held(self.store).values():
            self.assertLessEqual(each, 12)

    # -- companions, reshapes -------------------------------------------------------------------------------------

    def test_the_error_of_a_companion_undoes_the_change(self) -> None:
        one, two, consumer = self.ensured(VCPU=4), self.ensured(VCPU=4), new_uuid()
        self.change(consumer, {one: {"VCPU": 4}}, project="p")

        def companion(_: Any) -> None:
            raise _UndoneError

        before = self.ledger.consumer(consumer)
        for resources in ({two: {"VCPU": 4}}, {}):
            with self.assertRaises(_UndoneError):
                self.ledger.replace([AllocationChange(consumer, resources, project="q")], companion)
            self.assertEqual(before, self.ledger.consumer(consumer))
        self.assertEqual({(one, "VCPU"): 4}, held(self.store))

    def test_a_reshape_moves_inventories_with_what_is_held_of_them(self) -> None:
        root, consumer, other = self.ensured("root", VCPU=8, DISK_GB=10), new_uuid(), new_uuid()
        cells = [new_uuid() for _ in range(2)]
        for number, cell in enumerate(cells):
            self.ledger.create_provider(ResourceProvider(cell, f"cell {number}", parent=root))
        self.change(consumer, {root: {"VCPU": 3, "DISK_GB": 1}})
        self.change(other, {root: {"VCPU": 2}})
        generation = self.ledger.provider(root).generation
        inventories = [
            InventoryChange(root, (InventoryItem("DISK_GB", 10),), generation),
            *(InventoryChange(cell, (InventoryItem("VCPU", 4),), 0) for cell in cells),
        ]
        moved = AllocationChange(consumer, {cells[0]: {"VCPU": 3}, root: {"DISK_GB": 1}}, 1)
        with self.assertRaises(errors.InUse) as caught:
            self.ledger.reshape(inventories, [moved])
        self.assertEqual("VCPU", caught.exception.details["resource_class"])
        with self.assertRaises(GenerationConflict):
            self.ledger.reshape([InventoryChange(root, (), generation + 1)], [])
        self.assertEqual({(root, "VCPU"): 5, (root, "DISK_GB"): 1}, held(self.store))
        self.ledger.reshape(inventories, [moved, AllocationChange(other, {cells[1]: {"VCPU": 2}}, 1)])
        self.assertEqual({(cells[0], "VCPU"): 3, (cells[1], "VCPU"): 2, (root, "DISK_GB"): 1}, held(self.store))
        self.assertEqual(["DISK_GB"], list(self.ledger.inventories(root).used))
        self.assertEqual([generation + 3, 3, 3], [self.ledger.provider(each).generation for each in (root, *cells)])

    def test_a_reshape_is_checked_against_the_new_inventories(self) -> None:
        one, consumer = self.ensured(VCPU=8), new_uuid()
        self.change(consumer, {one: {"VCPU": 2}})
        with self.assertRaises(errors.CapacityExceeded) as caught:
            self.ledger.reshape(
                [InventoryChange(one, (InventoryItem("VCPU", 4),))], [AllocationChange(consumer, {one: {"VCPU": 5}})]
            )
        self.assertEqual(4, caught.exception.details["free"])
        with self.assertRaises(errors.NotFound):
            self.ledger.reshape([InventoryChange(new_uuid(), ())], [])
        self.assertEqual((InventoryItem("VCPU", 8),), self.ledger.inventories(one).provider.inventories)
        self.ledger.reshape(
            [InventoryChange(one, (InventoryItem("VCPU", 40),))], [AllocationChange(consumer, {one: {"VCPU": 40}})]
        )
        self.assertEqual({(one, "VCPU"): 40}, held(self.store))

    # -- reading --------------------------------------------------------------------------------------------------

    def test_who_holds_of_a_provider_is_told(self) -> None:
        one, two, consumers = self.ensured(VCPU=9, DISK_GB=9), self.ensured(VCPU=9), [new_uuid() for _ in range(2)]
        self.change(consumers[0], {one: {"VCPU": 1, "DISK_GB": 2}, two: {"VCPU": 3}}, project="p")
        self.change(consumers[1], {one: {"VCPU": 4}}, user="u")
        found = self.ledger.provider_holding(one)
        self.assertEqual((one, 2), (found.provider.uuid, found.provider.generation))
        self.assertEqual(
            {(consumers[0], "VCPU", 1), (consumers[0], "DISK_GB", 2), (consumers[1], "VCPU", 4)},
            {(item.consumer, item.resource_class, item.used) for item in found.allocations},
        )
        self.assertEqual(set(consumers), set(found.consumers))
        self.assertEqual("p", found.consumers[consumers[0]].project)
        with self.assertRaises(errors.NotFound):
            self.ledger.provider_holding(new_uuid())

    def test_pages_of_consumers_show_each_once_in_order(self) -> None:
        one, consumers = self.ensured(VCPU=100), sorted(new_uuid() for _ in range(7))
        for each in consumers:
            self.change(each, {one: {"VCPU": 1}}, project="p", consumer_type="T")
        found: list[str] = []
        while page := self.ledger.consumers(after=found[-1] if found else "", limit=3):
            self.assertLessEqual(len(page), 3)
            self.assertEqual({("p", "T", 1)}, {(each.project, each.consumer_type, each.generation) for each in page})
            found += [each.uuid for each in page]
        self.assertEqual(consumers, found)

    def test_usages_of_a_project_are_summed_by_type(self) -> None:
        one = self.ensured(VCPU=100, DISK_GB=100)
        for project, user, kind, amount in (
            ("p", "u", "INSTANCE", 1),
            ("p", "v", "INSTANCE", 2),
            ("p", "u", "MIGRATION", 4),
            ("p", "u", "", 8),
            ("q", "u", "INSTANCE", 16),
        ):
            resources = {one: {"VCPU": amount} | ({"DISK_GB": 1} if user == "v" else {})}
            self.change(new_uuid(), resources, project=project, user=user, consumer_type=kind)
        usages = self.ledger.project_usages
        self.assertEqual(
            [
                UsageTotal("", 1, {"VCPU": 8}),
                UsageTotal("INSTANCE", 2, {"VCPU": 3, "DISK_GB": 1}),
                UsageTotal("MIGRATION", 1, {"VCPU": 4}),
            ],
            usages("p"),
        )
        self.assertEqual(
            [("", 8), ("INSTANCE", 1), ("MIGRATION", 4)],
            [(e.consumer_type, e.used["VCPU"]) for e in usages("p", user="u")],
        )
        self.assertEqual([UsageTotal("INSTANCE", 1, {"VCPU": 16})], usages("q", consumer_type="INSTANCE"))
        self.assertEqual([], usages("p", user="nobody"))

    # -- leases ---------------------------------------------------------------------------------------------------

    def test_a_claim_that_is_not_confirmed_expires(self) -> None:
        one, two = self.ensured(VCPU=9), self.ensured(VCPU=9)
        kept, confirmed, short, moved = (new_uuid() for _ in range(4))
        self.change(kept, {one: {"VCPU": 1}})
        for each in (confirmed, short, moved):
            # By its own clock no store is as quick as this.
            self.store.claim(ClaimRequest(each, {one: {"VCPU": 1}, two: {"VCPU": 1}}, lifetime=0.000_001))
        self.assertTrue(self.ledger.renew(confirmed, None))
        self.change(moved, {two: {"VCPU": 2}})
        long = new_uuid()
        self.change(long, {one: {"VCPU": 1}}, lifetime=3600.0)
        leased = self.holding(long).consumer
        self.assertGreater(leased.expires_at or 0, leased.updated_at)
        self.assertEqual([short], self.expired())
        self.assertEqual([], self.ledger.expire())
        self.assertEqual({(one, "VCPU"): 3, (two, "VCPU"): 3}, held(self.store))
        self.assertFalse(self.ledger.renew(short, 10.0))
        self.assertTrue(self.ledger.renew(long, 0.000_001))
        self.assertEqual([long], self.expired())

    def expired(self) -> list[str]:
        """What expires; the store's clock may have a grain of a millisecond."""
        for _ in range(100_000):
            if found := self.ledger.expire():
                return found
        return []

    def test_of_reapers_at_once_one_releases(self) -> None:
        one, consumers = self.ensured(VCPU=9), [new_uuid() for _ in range(6)]
        for each in consumers:
            self.change(each, {one: {"VCPU": 1}}, lifetime=0.000_001)
        results = self.at_once(lambda _: cast(_Store, self.another(self.store)).expire(4))
        reaped = [uuid for each in results for uuid in each] + self.ledger.expire()
        self.assertEqual(sorted(consumers), sorted(reaped))
        self.assertEqual({}, held(self.store))
