# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The part of the conformance kit of allocation stores that is about writes in one transaction with others."""

from __future__ import annotations

from typing import Any

from moorage import errors
from moorage.allocation.interface import ClaimRequest, StoreCapability
from moorage.testing.store_kit import StoreKit, all_usages, held, new_uuid, provider

__all__ = ["CompanionTests"]


class _CompanionError(Exception):
    """What a companion of a test raises."""


class CompanionTests(StoreKit):
    """Companions of claims, and transactions that are given to a store."""

    # -- companions -----------------------------------------------------------------------------------------------

    def test_a_companion_is_called_with_the_transaction_or_none(self) -> None:
        identity = self.ensured(VCPU=4)
        seen: list[Any] = []
        self.store.claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}), seen.append)
        self.assertEqual(1, len(seen))
        self.assertEqual(StoreCapability.SHARED_TRANSACTION in self.store.capabilities, seen[0] is not None)

    def test_the_error_of_a_companion_undoes_the_claim(self) -> None:
        identity, consumer = self.ensured(VCPU=4), new_uuid()
        before = self.usage(identity).used
        for error in (_CompanionError("no"), errors.AlreadyExists("there is one"), KeyError("x")):

            def companion(_: Any, raised: Exception = error) -> None:
                raise raised

            with self.subTest(error=error), self.assertRaises(type(error)) as caught:
                self.store.claim(ClaimRequest(consumer, {identity: {"VCPU": 1}}, request_id="r"), companion)
            self.assertIs(error, caught.exception)
            self.assertEqual({}, held(self.store))
            self.assertEqual(before, self.usage(identity).used)
        self.assertFalse(self.claim({identity: {"VCPU": 4}}, consumer, request_id="r").repeated)

    def test_a_repetition_does_not_call_the_companion(self) -> None:
        identity, consumer = self.ensured(VCPU=4), new_uuid()
        seen: list[Any] = []
        request = ClaimRequest(consumer, {identity: {"VCPU": 1}}, request_id="r")
        for _ in range(3):
            self.store.claim(request, seen.append)
        self.assertEqual(1, len(seen))

    def test_what_a_companion_writes_commits_with_the_claim(self) -> None:
        self.needs(StoreCapability.SHARED_TRANSACTION)
        identity, beside = self.ensured(VCPU=4), provider(VCPU=1)

        def write(transaction: Any) -> None:
            self.store.ensure_providers([beside], transaction)

        def write_and_fail(transaction: Any) -> None:
            write(transaction)
            raise _CompanionError

        with self.assertRaises(_CompanionError):
            self.store.claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}), write_and_fail)
        self.assertEqual([], self.store.usages(providers=[beside.uuid]))
        self.store.claim(ClaimRequest(new_uuid(), {identity: {"VCPU": 1}}), write)
        self.assertEqual(beside.name, self.usage(beside.uuid).provider.name)

    def test_writes_join_a_transaction_that_is_given(self) -> None:
        self.needs(StoreCapability.SHARED_TRANSACTION)
        identity, gone, made = self.ensured(VCPU=4), self.ensured(VCPU=1), provider(CUSTOM_UNDONE=1)
        consumer = self.claim({identity: {"VCPU": 1}}).consumer

        def write(transaction: Any) -> None:
            self.assertEqual(1, self.store.ensure_providers([made], transaction))
            self.assertTrue(self.store.release(consumer, transaction))
            self.assertFalse(self.store.release(consumer, transaction))
            self.assertTrue(self.store.delete_provider(gone, transaction))

        with self.assertRaises(_CompanionError), self.transaction(self.store) as transaction:
            write(transaction)
            raise _CompanionError
        self.assertEqual({identity, gone}, {each.provider.uuid for each in all_usages(self.store)})
        self.assertEqual({(identity, "VCPU"): 1}, held(self.store))
        with self.transaction(self.store) as transaction:
            write(transaction)
        self.assertEqual({identity, made.uuid}, {each.provider.uuid for each in all_usages(self.store)})
        self.assertEqual({}, held(self.store))

    def test_a_class_of_a_transaction_that_was_undone_is_not_mistaken_for_another(self) -> None:
        self.needs(StoreCapability.SHARED_TRANSACTION)
        undone, other = provider(CUSTOM_UNDONE=1), self.another(self.store)
        with self.assertRaises(_CompanionError), self.transaction(self.store) as transaction:
            self.store.ensure_providers([undone], transaction)
            raise _CompanionError
        first = provider(CUSTOM_FIRST=3)
        other.ensure_providers([first])
        second = self.ensured(CUSTOM_UNDONE=5)
        for store in (self.store, other):
            found = {each.provider.uuid: each.provider.inventories for each in all_usages(store)}
            self.assertEqual("CUSTOM_FIRST", found[first.uuid][0].resource_class)
            self.assertEqual("CUSTOM_UNDONE", found[second][0].resource_class)
            with self.assertRaises(errors.CapacityExceeded):
                store.claim(ClaimRequest(new_uuid(), {first.uuid: {"CUSTOM_UNDONE": 1}}))
