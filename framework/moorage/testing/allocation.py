# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of allocation stores: the contract that every store keeps.

Mix :class:`AllocationStoreTests` into a ``unittest.TestCase`` and say how a store is made; what a store does not declare in its
``capabilities`` is skipped::

    class MyStoreTests(AllocationStoreTests, unittest.TestCase):
        def make_store(self):
            return MyStore(...)

A store with further powers mixes in their kits too: :class:`moorage.testing.catalogue.CatalogueTests`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from moorage import errors
from moorage.allocation.interface import ClaimOutcome, ClaimRelease, ClaimRequest, InventoryItem, ResourceProvider
from moorage.testing.companions import CompanionTests
from moorage.testing.residents import ResidentsTests
from moorage.testing.store_kit import (
    LARGEST,
    THREADS,
    all_allocations,
    all_usages,
    held,
    inconsistencies,
    new_uuid,
    provider,
)

__all__ = ["AllocationStoreTests", "all_allocations", "all_usages", "held", "inconsistencies", "new_uuid", "provider"]

#: Inventory, then amounts that pass and amounts that are refused, with step_size_rule = seed.
_CONSTRAINTS = (
    ("min 5 step 10", {"min_unit": 5, "step_size": 10}, (5, 10, 20), (1, 4, 6, 7, 8, 15)),
    ("min 1 step 2", {"min_unit": 1, "step_size": 2}, (1, 2, 4), (3, 5)),
    ("max 4", {"max_unit": 4}, (1, 4), (5,)),
    ("min 3", {"min_unit": 3}, (3, 4), (1, 2)),
    ("step 7", {"step_size": 7, "min_unit": 7}, (7, 14), (8, 13)),
)
_WRONG_INVENTORIES: Sequence[Mapping[str, Any]] = (
    {"total": -1},
    {"total": LARGEST + 1},
    {"total": 1.5},
    {"total": True},
    {"reserved": -1},
    {"reserved": 101},
    {"min_unit": 0},
    {"max_unit": 0},
    {"max_unit": LARGEST + 1},
    {"step_size": 0},
    {"allocation_ratio": -0.5},
    {"allocation_ratio": float("nan")},
    {"allocation_ratio": float("inf")},
    {"resource_class": "NO_SUCH_STANDARD_CLASS"},
    {"resource_class": "CUSTOM_lower"},
    {"resource_class": "CUSTOM_"},
    {"resource_class": "CUSTOM_" + "X" * 255},
    {"resource_class": ""},
)


class AllocationStoreTests(CompanionTests, ResidentsTests):
    """The contract of :class:`moorage.allocation.interface.AllocationStore`."""

    # -- providers ------------------------------------------------------------------------------------------------

    def test_a_provider_is_stored_as_it_was_given(self) -> None:
        given = provider(
            "größe-節點 👍",
            can_host=False,
            VCPU=InventoryItem("VCPU", 64, 4, 2, 32, 2, 4.5),
            CUSTOM_FPGA=InventoryItem("CUSTOM_FPGA", LARGEST, 0, 1, LARGEST, 1, 1.0),
        )
        self.store.ensure_providers([given])
        found = self.usage(given.uuid)
        self.assertEqual(
            (given.uuid, given.name, False), (found.provider.uuid, found.provider.name, found.provider.can_host)
        )
        self.assertEqual(set(given.inventories), set(found.provider.inventories))
        self.assertEqual({"VCPU": 0, "CUSTOM_FPGA": 0}, dict(found.used))

    def test_ensuring_again_changes_nothing(self) -> None:
        given = [provider(VCPU=8, MEMORY_MB=1024), provider(CUSTOM_A=1), provider()]
        self.assertEqual(3, self.store.ensure_providers(given))
        before = all_usages(self.store)
        self.assertEqual(0, self.store.ensure_providers(given))
        self.assertEqual(0, self.another(self.store).ensure_providers(given))
        self.assertEqual(before, all_usages(self.store))

    def test_ensuring_no_provider_is_allowed(self) -> None:
        self.assertEqual(0, self.store.ensure_providers([]))

    def test_a_change_of_inventories_raises_the_generation(self) -> None:
        identity = self.ensured("changing", VCPU=8, DISK_GB=10)
        before = self.usage(identity).provider.generation
        changed = ResourceProvider(
            identity, "changed", True, inventories=(InventoryItem("VCPU", 16), InventoryItem("MEMORY_MB", 512))
        )
        self.assertEqual(1, self.store.ensure_providers([changed]))
        found = self.usage(identity).provider
        self.assertEqual("changed", found.name)
        self.assertEqual(set(changed.inventories), set(found.inventories))
        self.assertGreater(found.generation, before)

    def test_a_change_keeps_what_is_used(self) -> None:
        identity = self.ensured("kept", VCPU=8)
        self.claim({identity: {"VCPU": 3}})
        changed = ResourceProvider(identity, "kept", True, inventories=(InventoryItem("VCPU", 16),))
        self.store.ensure_providers([changed])
        self.assertEqual({"VCPU": 3}, dict(self.usage(identity).used))

    def test_two_providers_cannot_have_one_name(self) -> None:
        self.ensured("taken")
        other = provider()
        with self.assertRaises(errors.AlreadyExists) as caught:
            self.store.ensure_providers([other, provider("taken")])
        self.assertIn("taken", caught.exception.message)
        self.assertEqual(1, len(all_usages(self.store)))

    def test_names_differ_by_case(self) -> None:
        self.ensured("Node")
        self.ensured("node")

    def test_a_used_inventory_cannot_vanish_and_nothing_else_is_changed(self) -> None:
        identity = self.ensured("used", VCPU=8, DISK_GB=10)
        self.claim({identity: {"VCPU": 1}})
        wanted = ResourceProvider(identity, "renamed", True, inventories=(InventoryItem("DISK_GB", 20),))
        fresh = provider(VCPU=1)
        with self.assertRaises(errors.InUse) as caught:
            self.store.ensure_providers([fresh, wanted])
        self.assertEqual("VCPU", caught.exception.details["resource_class"])
        found = all_usages(self.store)
        self.assertEqual(["used"], [each.provider.name for each in found])
        self.assertEqual({"VCPU": 8, "DISK_GB": 10}, {i.resource_class: i.total for i in found[0].provider.inventories})

    def test_an_unused_inventory_can_vanish(self) -> None:
        identity = self.ensured("shrinking", VCPU=8, DISK_GB=10)
        consumer = self.claim({identity: {"VCPU": 1}}).consumer
        self.store.release(consumer)
        self.store.ensure_providers([ResourceProvider(identity, "shrinking")])
        self.assertEqual((), self.usage(identity).provider.inventories)

    def test_capacity_may_shrink_below_use_and_then_nothing_more_fits(self) -> None:
        self.shrunk = True
        identity = self.ensured("shrunk", VCPU=8)
        self.claim({identity: {"VCPU": 6}})
        self.store.ensure_providers(
            [ResourceProvider(identity, "shrunk", True, inventories=(InventoryItem("VCPU", 4),))]
        )
        with self.assertRaises(errors.CapacityExceeded) as caught:
            self.claim({identity: {"VCPU": 1}})
        self.assertEqual(0, caught.exception.details["free"])

    def test_wrong_inventories_are_refused(self) -> None:
        for wrong in _WRONG_INVENTORIES:
            with self.subTest(wrong=wrong):
                fields: dict[str, Any] = {"resource_class": "VCPU", "total": 100, **wrong}
                given = ResourceProvider(new_uuid(), "wrong", True, inventories=(InventoryItem(**fields),))
                with self.assertRaises(errors.InvalidInput) as caught:
                    self.store.ensure_providers([provider(VCPU=1), given])
                self.assertTrue(caught.exception.details.get("path"))
        self.assertEqual([], all_usages(self.store))

    def test_wrong_providers_are_refused(self) -> None:
        good, item = provider(), InventoryItem("VCPU", 1)
        for label, given in {
            "the same one twice": [good, good],
            "the same name twice": [provider("n"), provider("n")],
            "the same class twice": [ResourceProvider(new_uuid(), "n", True, inventories=(item, item))],
            "no uuid": [ResourceProvider("", "n")],
            "a long uuid": [ResourceProvider("u" * 37, "n")],
            "no name": [ResourceProvider(new_uuid(), "")],
            "a long name": [ResourceProvider(new_uuid(), "n" * 256)],
            "a space at the end of the name": [ResourceProvider(new_uuid(), "n ")],
            "a NUL in the name": [ResourceProvider(new_uuid(), "a\0b")],
        }.items():
            with self.subTest(label), self.assertRaises(errors.InvalidInput):
                self.store.ensure_providers(given)
        self.assertEqual([], all_usages(self.store))

    def test_ensuring_at_once_creates_each_provider_once(self) -> None:
        given = [provider(VCPU=8, CUSTOM_ONE=2) for _ in range(12)]
        results = self.at_once(lambda _: self.another(self.store).ensure_providers(given))
        self.assertEqual(len(given), sum(results), results)
        self.assertEqual({each.uuid for each in given}, {each.provider.uuid for each in all_usages(self.store)})

    def test_custom_classes_made_at_once_stay_apart(self) -> None:
        given = [
            provider("", can_host=True, **{f"CUSTOM_C{number}": number + 1, "CUSTOM_ALL": 100})
            for number in range(THREADS)
        ]
        results = self.at_once(lambda number: self.another(self.store).ensure_providers([given[number]]))
        self.assertEqual([1] * THREADS, results)
        for number, each in enumerate(given):
            found = {item.resource_class: item.total for item in self.usage(each.uuid).provider.inventories}
            self.assertEqual({f"CUSTOM_C{number}": number + 1, "CUSTOM_ALL": 100}, found)

    def test_pages_of_usages_show_every_provider_once_in_order(self) -> None:
        given = [provider(VCPU=1) for _ in range(23)]
        self.store.ensure_providers(given)
        self.assertEqual(
            sorted(each.uuid for each in given), [each.provider.uuid for each in all_usages(self.store, limit=5)]
        )
        self.assertEqual([], self.store.usages(providers=[]))

    def test_a_deleted_provider_is_gone_for_all(self) -> None:
        identity, other = self.ensured(VCPU=8), self.another(self.store)
        consumer = other.claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}})).consumer
        other.release(consumer)
        self.assertTrue(self.store.delete_provider(identity))
        self.assertFalse(self.store.delete_provider(identity))
        with self.assertRaises(errors.NotFound):
            other.claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}))

    def test_a_provider_that_follows_a_deleted_one_is_not_taken_for_it(self) -> None:
        first, other = self.ensured(VCPU=8), self.another(self.store)
        other.release(other.claim(ClaimRequest(new_uuid(), {first: {"VCPU": 1}})).consumer)
        self.store.delete_provider(first)
        self.ensured(VCPU=8)
        with self.assertRaises(errors.NotFound):
            other.claim(ClaimRequest(new_uuid(), {first: {"VCPU": 1}}))
        self.store.ensure_providers(
            [ResourceProvider(first, "made again", True, inventories=(InventoryItem("VCPU", 2),))]
        )
        other.claim(ClaimRequest(new_uuid(), {first: {"VCPU": 2}}))
        self.assertEqual({(first, "VCPU"): 2}, held(self.store))

    def test_a_provider_with_allocations_cannot_be_deleted(self) -> None:
        identity = self.ensured(VCPU=8)
        self.claim({identity: {"VCPU": 1}})
        with self.assertRaises(errors.InUse):
            self.store.delete_provider(identity)
        self.assertEqual({"VCPU": 1}, dict(self.usage(identity).used))

    # -- claims ---------------------------------------------------------------------------------------------------

    def test_a_claim_is_stored_and_counted(self) -> None:
        identity, consumer = self.ensured(VCPU=8, MEMORY_MB=1024), new_uuid()
        before = self.usage(identity).provider.generation
        outcome = self.claim({identity: {"VCPU": 2, "MEMORY_MB": 512}}, consumer, request_id="r", project="p", user="u")
        self.assertFalse(outcome.repeated)
        self.assertEqual((identity,), outcome.providers)
        self.assertEqual(set(outcome.allocations), set(self.store.allocations(consumers=[consumer])))
        self.assertEqual({(identity, "VCPU"): 2, (identity, "MEMORY_MB"): 512}, held(self.store))
        self.assertGreater(self.usage(identity).provider.generation, before)

    def test_a_claim_takes_of_a_host_and_of_a_shared_pool(self) -> None:
        hosts = [self.ensured(VCPU=8) for _ in range(2)]
        pool = self.ensured(DISK_GB=1000)
        for host in hosts:
            self.claim({host: {"VCPU": 2}, pool: {"DISK_GB": 400}})
        self.assertEqual({(hosts[0], "VCPU"): 2, (hosts[1], "VCPU"): 2, (pool, "DISK_GB"): 800}, held(self.store))
        with self.assertRaises(errors.CapacityExceeded) as caught:
            self.claim({hosts[0]: {"VCPU": 2}, pool: {"DISK_GB": 400}})
        self.assertEqual(
            {"provider": pool, "resource_class": "DISK_GB", "asked": 400, "free": 200}.items()
            - caught.exception.details.items(),
            set(),
        )
        self.assertEqual({(hosts[0], "VCPU"): 2, (hosts[1], "VCPU"): 2, (pool, "DISK_GB"): 800}, held(self.store))

    def test_a_refused_claim_leaves_nothing_and_may_be_tried_elsewhere(self) -> None:
        small, large, consumer = self.ensured(VCPU=1), self.ensured(VCPU=8), new_uuid()
        with self.assertRaises(errors.CapacityExceeded):
            self.claim({small: {"VCPU": 2}}, consumer, request_id="r")
        self.assertEqual({}, held(self.store))
        self.assertFalse(self.claim({large: {"VCPU": 2}}, consumer, request_id="r").repeated)

    def test_the_refusal_names_class_asked_and_free(self) -> None:
        identity = self.ensured(VCPU=InventoryItem("VCPU", 10, 3), MEMORY_MB=1024)
        self.claim({identity: {"VCPU": 5}})
        with self.assertRaises(errors.CapacityExceeded) as caught:
            self.claim({identity: {"MEMORY_MB": 1, "VCPU": 3}})
        self.assertEqual(
            {"provider": identity, "resource_class": "VCPU", "asked": 3, "free": 2}.items()
            - caught.exception.details.items(),
            set(),
        )

    def test_constraints_admit_and_refuse_the_amounts_of_the_seed(self) -> None:
        for label, fields, passes, refused in _CONSTRAINTS:
            identity = self.ensured(VCPU=InventoryItem("VCPU", 1000, **fields))
            for amount in passes:
                with self.subTest(label, passes=amount):
                    self.claim({identity: {"VCPU": amount}})
            for amount in refused:
                with self.subTest(label, refused=amount), self.assertRaises(errors.ConstraintViolated) as caught:
                    self.claim({identity: {"VCPU": amount}})
                self.assertEqual(amount, caught.exception.details["asked"])
            self.assertEqual(sum(passes), held(self.store)[identity, "VCPU"])

    def test_capacity_is_what_total_reserved_and_ratio_say(self) -> None:
        for total, reserved, ratio, fits in (
            (3, 0, 1.5, 4),
            (10, 4, 1.0, 6),
            (7, 0, 0.9, 6),
            (10, 0, 16.0, 160),
            (3, 0, 0.1, 0),
            (10, 10, 4.0, 0),
            (5, 0, 0.0, 0),
            # Ratios that have no exact double: all stores must round alike.
            (10, 0, 0.7, 7),
            (100, 0, 1.1, 110),
            (1000, 0, 0.29, 290),
            (LARGEST, 0, 1.0, LARGEST),
            (0, 0, 1.0, 0),
        ):
            with self.subTest(total=total, reserved=reserved, ratio=ratio):
                # The last digit of a rounded product may be below the whole number; then one less fits, everywhere.
                fits = min(fits, int((total - reserved) * ratio))
                identity = self.ensured(VCPU=InventoryItem("VCPU", total, reserved, allocation_ratio=ratio))
                if fits:
                    self.claim({identity: {"VCPU": fits}})
                with self.assertRaises(errors.CapacityExceeded):
                    self.claim({identity: {"VCPU": 1}})

    def test_the_largest_numbers_fit(self) -> None:
        item = InventoryItem("MEMORY_MB", LARGEST, allocation_ratio=4.0)
        identity = self.ensured(MEMORY_MB=item)
        for _ in range(4):
            self.claim({identity: {"MEMORY_MB": LARGEST}})
        with self.assertRaises(errors.CapacityExceeded):
            self.claim({identity: {"MEMORY_MB": 1}})

    def test_many_classes_are_taken_together(self) -> None:
        names = [f"CUSTOM_M{number}" for number in range(200)]
        identity = self.ensured("many", **dict.fromkeys(names, 2))
        self.claim({identity: dict.fromkeys(names, 1)})
        with self.assertRaises(errors.CapacityExceeded) as caught:
            self.claim({identity: dict.fromkeys(names, 1) | {names[13]: 2}})
        self.assertEqual(names[13], caught.exception.details["resource_class"])
        self.assertEqual({(identity, name): 1 for name in names}, held(self.store))
        with self.assertRaises(errors.InvalidInput):
            self.claim({identity: {f"CUSTOM_M{number}": 1 for number in range(201)}})

    def test_what_does_not_exist_is_named(self) -> None:
        identity, missing = self.ensured(VCPU=8), new_uuid()
        with self.assertRaises(errors.NotFound) as caught:
            self.claim({identity: {"VCPU": 1}, missing: {"VCPU": 1}})
        self.assertIn(missing, caught.exception.message)
        with self.assertRaises(errors.NotFound) as caught:
            self.claim({identity: {"VCPU": 1, "CUSTOM_NOWHERE": 1}})
        self.assertIn("CUSTOM_NOWHERE", caught.exception.message)
        with self.assertRaises(errors.CapacityExceeded) as refused:
            self.claim({identity: {"VCPU": 1, "DISK_GB": 1}})
        self.assertEqual(
            ("DISK_GB", 0), (refused.exception.details["resource_class"], refused.exception.details["free"])
        )
        self.assertEqual({}, held(self.store))

    def test_claims_that_can_never_be_right_are_refused(self) -> None:
        identity = self.ensured(VCPU=8)
        for amount in (0, -1, LARGEST + 1, 10**30, 1.0, "1", True, None):
            with self.subTest(amount=amount), self.assertRaises(errors.InvalidInput) as caught:
                self.claim({identity: {"VCPU": amount}})  # type: ignore[dict-item]
            self.assertIn("VCPU", caught.exception.details["path"])
        for label, request in {
            "nothing": ClaimRequest(new_uuid(), {}),
            "no class": ClaimRequest(new_uuid(), {identity: {}}),
            "a second provider without a class": ClaimRequest(new_uuid(), {identity: {"VCPU": 1}, new_uuid(): {}}),
            "no consumer": ClaimRequest("", {identity: {"VCPU": 1}}),
            "a long consumer": ClaimRequest("c" * 37, {identity: {"VCPU": 1}}),
            "a long request id": ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}, request_id="r" * 256),
            "a space at the end": ClaimRequest("c ", {identity: {"VCPU": 1}}),
            "a NUL": ClaimRequest("a\0b", {identity: {"VCPU": 1}}),
        }.items():
            with self.subTest(label), self.assertRaises(errors.InvalidInput):
                self.store.claim(request)
        self.assertEqual([], all_allocations(self.store))

    def test_a_repetition_is_answered_with_what_the_first_took(self) -> None:
        identity, consumer = self.ensured(VCPU=4), new_uuid()
        first = self.claim({identity: {"VCPU": 3}}, consumer, request_id="r")
        other = self.another(self.store)
        # The provider is full for it now, and it even asks for something else: it holds what the first took.
        for resources in ({identity: {"VCPU": 2}}, {new_uuid(): {"VCPU": 1}}, {identity: {"CUSTOM_NOWHERE": 1}}):
            again = other.claim(ClaimRequest(consumer, resources, request_id="r"))
            self.assertTrue(again.repeated)
            self.assertEqual(set(first.allocations), set(again.allocations))
        self.assertEqual({(identity, "VCPU"): 3}, held(self.store))

    def test_each_claim_of_a_set_has_an_outcome_of_its_own(self) -> None:
        identity, other = self.ensured(VCPU=3), self.ensured(VCPU=9)
        earlier = new_uuid()
        self.claim({identity: {"VCPU": 1}}, earlier, request_id="r")
        wanted = {
            "fits": ClaimRequest(new_uuid(), {identity: {"VCPU": 2}}, request_id="r"),
            "full": ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}, request_id="r"),
            "again": ClaimRequest(earlier, {identity: {"VCPU": 1}}, request_id="r"),
            "taken": ClaimRequest(earlier, {other: {"VCPU": 1}}, request_id="s"),
            "elsewhere": ClaimRequest(new_uuid(), {other: {"VCPU": 9}}, request_id="r"),
            "wrong": ClaimRequest(new_uuid(), {other: {"VCPU": 0}}, request_id="r"),
            "nowhere": ClaimRequest(new_uuid(), {new_uuid(): {"VCPU": 1}}, request_id="r"),
        }
        for names in (("fits", "elsewhere", "full", "nowhere"), tuple(wanted), ()):
            found = self.store.claim_many([(wanted[name], None) for name in names])
            outcomes = {
                name: ("repeated" if each.repeated else "made") if isinstance(each, ClaimOutcome) else type(each)
                for name, each in zip(names, found, strict=True)
            }
            if not names:
                self.assertEqual({}, outcomes)
            elif len(names) == 4:
                first = {"fits": "made", "elsewhere": "made"}
                refused = {"full": errors.CapacityExceeded, "nowhere": errors.NotFound}
                self.assertEqual({**first, **refused}, outcomes)
            else:
                self.assertTrue(issubclass(outcomes.pop("taken"), errors.Conflict))  # type: ignore[arg-type]
                repeated = dict.fromkeys(("fits", "again", "elsewhere"), "repeated")
                refused = {"full": errors.CapacityExceeded, "nowhere": errors.NotFound, "wrong": errors.InvalidInput}
                self.assertEqual({**repeated, **refused}, outcomes)
        self.assertEqual({(identity, "VCPU"): 3, (other, "VCPU"): 9}, held(self.store))

    def test_a_consumer_has_one_claim(self) -> None:
        identity, consumer = self.ensured(VCPU=4), new_uuid()
        self.claim({identity: {"VCPU": 1}}, consumer, request_id="r")
        for request_id in ("s", None):
            with self.subTest(request_id=request_id), self.assertRaises(errors.Conflict) as caught:
                self.claim({identity: {"VCPU": 1}}, consumer, request_id=request_id)
            self.assertIn(consumer, caught.exception.message)
            self.assertNotIsInstance(caught.exception, errors.CapacityExceeded)
        self.assertEqual({(identity, "VCPU"): 1}, held(self.store))

    def test_without_request_ids_nothing_is_a_repetition(self) -> None:
        identity, consumer = self.ensured(VCPU=4), new_uuid()
        self.claim({identity: {"VCPU": 1}}, consumer)
        with self.assertRaises(errors.Conflict):
            self.claim({identity: {"VCPU": 1}}, consumer)

    def test_after_a_release_the_same_request_takes_anew(self) -> None:
        identity, consumer = self.ensured(VCPU=4), new_uuid()
        self.claim({identity: {"VCPU": 1}}, consumer, request_id="r")
        self.store.release(consumer)
        self.assertFalse(self.claim({identity: {"VCPU": 2}}, consumer, request_id="r").repeated)
        self.assertEqual({(identity, "VCPU"): 2}, held(self.store))

    # -- claims at once -------------------------------------------------------------------------------------------

    def test_a_race_for_one_provider_ends_at_its_capacity(self) -> None:
        capacity, each = 30, 6
        identity = self.ensured(VCPU=capacity)
        stores = [self.another(self.store) for _ in range(THREADS)]

        def work(number: int) -> tuple[int, list[str]]:
            granted, unexpected = 0, []
            for _ in range(each):
                try:
                    stores[number].claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}))
                    granted += 1
                except errors.CapacityExceeded:
                    pass
                except errors.MoorageError as error:
                    unexpected.append(repr(error))
            return granted, unexpected

        results = self.at_once(work)
        self.assertEqual([], [error for _, found in results for error in found])
        self.assertEqual(capacity, sum(granted for granted, _ in results))
        self.assertEqual({(identity, "VCPU"): capacity}, held(self.store))

    def test_claims_of_the_same_providers_in_any_order_take_all_or_nothing(self) -> None:
        capacity = 12
        identities = [self.ensured(VCPU=capacity, DISK_GB=100) for _ in range(3)]

        def work(number: int) -> int:
            granted = 0
            for turn in range(4):
                order = identities[(number + turn) % 3 :] + identities[: (number + turn) % 3]
                with contextlib.suppress(errors.CapacityExceeded):
                    self.store.claim(
                        ClaimRequest(new_uuid(), {identity: {"DISK_GB": 1, "VCPU": 1} for identity in order})
                    )
                    granted += 1
            return granted

        results = self.at_once(work)
        self.assertEqual(capacity, sum(results), results)
        expected = {(identity, name): capacity for identity in identities for name in ("VCPU", "DISK_GB")}
        self.assertEqual(expected, held(self.store))

    def test_the_same_claim_at_once_is_taken_once(self) -> None:
        identity = self.ensured(VCPU=1)
        companions: list[Any] = []
        for turn in range(4):
            consumer = new_uuid()
            request = ClaimRequest(consumer, {identity: {"VCPU": 1}}, request_id="r")
            companions.clear()
            results = self.at_once(functools.partial(self._claim_beside, request, companions))
            with self.subTest(turn=turn):
                self.assertEqual([], [each for each in results if isinstance(each, Exception)])
                self.assertEqual(1, [each.repeated for each in results].count(False))
                self.assertEqual({(identity, "VCPU"): 1}, held(self.store))
                self.assertGreaterEqual(len(companions), 1)
            self.store.release(consumer)

    def _claim_beside(self, request: ClaimRequest, companions: list[Any], number: int) -> ClaimOutcome:
        return self.store.claim(request, companions.append)

    def test_claims_and_releases_at_once_leave_exact_counters(self) -> None:
        identities = [self.ensured(VCPU=5, MEMORY_MB=1000) for _ in range(2)]

        def work(number: int) -> int:
            kept = 0
            for turn in range(8):
                chosen = identities if turn % 2 else [identities[number % 2]]
                with contextlib.suppress(errors.CapacityExceeded):
                    outcome = self.store.claim(
                        ClaimRequest(new_uuid(), {identity: {"VCPU": 1, "MEMORY_MB": 7} for identity in chosen})
                    )
                    if turn < 7:
                        self.store.release(outcome.consumer)
                    else:
                        kept += 1
            return kept

        results = self.at_once(work)
        self.assertEqual([], [each for each in results if isinstance(each, Exception)])
        self.assertEqual(sum(results), len({item.consumer for item in all_allocations(self.store)}))

    def test_inventories_change_while_claims_run(self) -> None:
        identity = self.ensured("moving", VCPU=40)

        def work(number: int) -> int:
            if number == 0:
                for total in (38, 36, 34, 32, 30):
                    self.store.ensure_providers(
                        [ResourceProvider(identity, "moving", True, inventories=(InventoryItem("VCPU", total),))]
                    )
                return 0
            granted = 0
            for _ in range(6):
                with contextlib.suppress(errors.CapacityExceeded):
                    self.store.claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}))
                    granted += 1
            return granted

        self.shrunk = True
        results = self.at_once(work)
        self.assertEqual({(identity, "VCPU"): sum(results)}, held(self.store))
        self.assertGreaterEqual(sum(results), 30)
        with self.assertRaises(errors.CapacityExceeded):
            self.claim({identity: {"VCPU": 30}})

    # -- releases and reading -------------------------------------------------------------------------------------

    def test_a_release_gives_all_back_and_may_be_repeated(self) -> None:
        identities = [self.ensured(VCPU=4, MEMORY_MB=512) for _ in range(2)]
        kept = self.claim({identities[0]: {"VCPU": 1}}).consumer
        consumer = self.claim({identity: {"VCPU": 3, "MEMORY_MB": 512} for identity in identities}).consumer
        self.assertTrue(self.store.release(consumer))
        self.assertFalse(self.store.release(consumer))
        self.assertFalse(self.store.release(new_uuid()))
        self.assertEqual([kept], [item.consumer for item in all_allocations(self.store)])
        self.assertEqual({"VCPU": 0, "MEMORY_MB": 0}, dict(self.usage(identities[1]).used))

    def test_releases_of_several_consumers_give_all_back_and_may_be_repeated(self) -> None:
        identities = [self.ensured(VCPU=40, MEMORY_MB=512) for _ in range(3)]
        kept = self.claim({identities[0]: {"VCPU": 1}}).consumer
        gone = [
            self.claim({identity: {"VCPU": number, "MEMORY_MB": 2} for identity in identities[number:]}).consumer
            for number in (1, 2, 1)
        ]
        versions = [self.store.residents(each) for each in identities]
        generations = [self.usage(each).provider.generation for each in identities]
        # The first node has nothing of these consumers; the instance of one of them leaves it all the same.
        releases = [ClaimRelease(each, (identities[0], identities[2])) for each in (*gone, new_uuid())]
        self.store.release_many(releases)
        self.assertEqual([kept], [item.consumer for item in all_allocations(self.store)])
        used = [dict(self.usage(each).used) for each in identities]
        self.assertEqual([{"VCPU": 1, "MEMORY_MB": 0}, *[{"VCPU": 0, "MEMORY_MB": 0}] * 2], used)
        self.assertEqual(generations, [self.usage(each).provider.generation for each in identities])
        after = [self.store.residents(each) for each in identities]
        self.assertTrue(all(new > old for old, new in zip(versions, after, strict=True)), (versions, after))
        self.store.release_many(releases)
        self.assertEqual([kept], [item.consumer for item in all_allocations(self.store)])

    def test_a_release_keeps_the_generation_of_the_provider(self) -> None:
        identity, consumer = self.ensured(VCPU=8), new_uuid()
        self.claim({identity: {"VCPU": 2}}, consumer)
        before = self.usage(identity).provider
        self.assertTrue(self.store.release(consumer))
        self.assertEqual(before.generation, self.usage(identity).provider.generation)

    def test_of_releases_at_once_one_gives_back(self) -> None:
        identity = self.ensured(VCPU=4)
        consumer = self.claim({identity: {"VCPU": 3}}).consumer
        results = self.at_once(lambda _: self.store.release(consumer))
        self.assertEqual(1, results.count(True), results)
        self.assertEqual(THREADS - 1, results.count(False), results)

    def test_pages_of_allocations_show_each_once(self) -> None:
        identities = [self.ensured(VCPU=100, MEMORY_MB=100, CUSTOM_P=100) for _ in range(2)]
        expected = set()
        for number in range(9):
            resources = {identity: {"VCPU": 1, "MEMORY_MB": 2, "CUSTOM_P": 3} for identity in identities[number % 2 :]}
            expected |= set(self.claim(resources).allocations)
        for limit in (1, 4, 1000):
            with self.subTest(limit=limit):
                found = all_allocations(self.store, limit)
                self.assertEqual(len(expected), len(found))
                self.assertEqual(expected, set(found))
                self.assertEqual(sorted(item.consumer for item in found), [item.consumer for item in found])

    def test_allocations_are_found_by_consumer_and_by_provider(self) -> None:
        identities = [self.ensured(VCPU=100) for _ in range(2)]
        consumers = [self.claim({identity: {"VCPU": 1}}).consumer for identity in (*identities, identities[0])]
        self.assertEqual({consumers[1]}, {i.consumer for i in self.store.allocations(providers=[identities[1]])})
        self.assertEqual({identities[0]}, {i.provider for i in self.store.allocations(consumers=[consumers[2]])})
        both = self.store.allocations(consumers=consumers, providers=[identities[0]])
        self.assertEqual({consumers[0], consumers[2]}, {item.consumer for item in both})
        self.assertEqual([], self.store.allocations(consumers=[]))
        self.assertEqual([], self.store.allocations(providers=[new_uuid()]))
