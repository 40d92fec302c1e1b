# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The part of the conformance kit of allocation stores that is about the version of a node's residents."""

from __future__ import annotations

from moorage import errors
from moorage.allocation.interface import AllocationChange, AllocationLedger, ClaimOutcome, ClaimRequest, StoreCapability
from moorage.testing.store_kit import THREADS, StoreKit, held, new_uuid

__all__ = ["ResidentsTests"]


class ResidentsTests(StoreKit):
    """Versions of residents: what raises them, and claims that expect one."""

    def claim_at(
        self, node: str, version: int | None, consumer: str = "", request_id: str | None = None
    ) -> ClaimOutcome:
        wanted = {node: {"VCPU": 1}}
        request = ClaimRequest(consumer or new_uuid(), wanted, request_id, residents={node: version})
        return self.store.claim(request)

    def test_claims_and_releases_raise_the_version_of_residents(self) -> None:
        node, other = self.ensured(VCPU=4), self.ensured(VCPU=4)
        before, beside = self.store.residents(node), self.store.residents(other)
        consumer = self.claim({node: {"VCPU": 1}}).consumer
        claimed = self.store.residents(node)
        self.store.release(consumer)
        self.assertLess(before, claimed)
        self.assertLess(claimed, self.store.residents(node))
        self.assertEqual(beside, self.store.residents(other))

    def test_a_change_raises_the_versions_of_the_old_and_the_new_node(self) -> None:
        if not isinstance(self.store, AllocationLedger):
            self.skipTest("the store cannot change claims")
        first, second = self.ensured(VCPU=4), self.ensured(VCPU=4)
        consumer = self.claim({first: {"VCPU": 1}}).consumer
        before = [self.store.residents(each) for each in (first, second)]
        self.store.replace([AllocationChange(consumer, {second: {"VCPU": 1}})])
        after = [self.store.residents(each) for each in (first, second)]
        self.assertTrue(all(new > old for old, new in zip(before, after, strict=True)), (before, after))

    def test_a_node_is_written_although_all_comes_from_a_pool(self) -> None:
        node, pool, consumer = self.ensured(VCPU=4), self.ensured(DISK_GB=10), new_uuid()
        versions = [self.store.residents(node)]
        self.store.claim(ClaimRequest(consumer, {pool: {"DISK_GB": 1}}, residents={node: None}))
        versions.append(self.store.residents(node))
        with self.assertRaises(errors.ResidentsChanged):
            self.store.claim(ClaimRequest(new_uuid(), {pool: {"DISK_GB": 1}}, residents={node: versions[0]}))
        self.store.release(consumer, residents=[node])
        versions.append(self.store.residents(node))
        self.store.release(consumer, residents=[node, new_uuid()])
        versions.append(self.store.residents(node))
        self.assertEqual(sorted(set(versions)), versions)
        self.assertEqual({}, held(self.store))

    def test_a_claim_that_expects_an_older_version_takes_nothing(self) -> None:
        node = self.ensured(VCPU=8)
        seen = self.store.residents(node)
        kept = self.claim_at(node, seen).consumer
        for disturb in (lambda: self.claim_at(node, None), lambda: self.store.release(kept)):
            seen = self.store.residents(node)
            disturb()
            before = held(self.store)
            with self.assertRaises(errors.ResidentsChanged) as caught:
                self.claim_at(node, seen)
            self.assertEqual(node, caught.exception.details["provider"])
            self.assertEqual(before, held(self.store))
        self.claim_at(node, self.store.residents(node))

    def test_a_repetition_is_recognised_although_the_version_has_changed(self) -> None:
        node, consumer = self.ensured(VCPU=8), new_uuid()
        seen = self.store.residents(node)
        self.assertFalse(self.claim_at(node, seen, consumer, "r").repeated)
        self.assertTrue(self.claim_at(node, seen, consumer, "r").repeated)

    def test_of_claims_at_once_that_expect_one_version_one_holds(self) -> None:
        node = self.ensured(VCPU=100)
        for _ in range(5):
            seen = self.store.residents(node)
            results = self.at_once(lambda _, seen=seen: self.claim_at(node, seen))  # type: ignore[misc]
            changed = [each for each in results if isinstance(each, errors.ResidentsChanged)]
            self.assertEqual(THREADS - 1, len(changed), results)
        self.assertEqual({(node, "VCPU"): 5}, held(self.store))

    def test_a_version_of_no_provider_is_refused(self) -> None:
        node, missing = self.ensured(VCPU=8), new_uuid()
        with self.assertRaises(errors.NotFound):
            self.store.residents(missing)
        with self.assertRaises(errors.NotFound):
            self.store.claim(ClaimRequest(new_uuid(), {node: {"VCPU": 1}}, residents={missing: 0}))
        self.store.claim(ClaimRequest(new_uuid(), {node: {"VCPU": 1}}, residents={missing: None}))

    def test_a_version_is_read_in_a_transaction(self) -> None:
        self.needs(StoreCapability.SHARED_TRANSACTION)
        node = self.ensured(VCPU=8)
        with self.transaction(self.store) as transaction:
            before = self.store.residents(node, transaction)
            self.store.release(new_uuid(), transaction, residents=[node])
            self.assertEqual(before + 1, self.store.residents(node, transaction))
