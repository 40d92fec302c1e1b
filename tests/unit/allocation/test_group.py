# SPDX-License-Identifier: Apache-2.0
"""Claims that come at once: who makes which, and what each is told."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy import event

from moorage import errors
from moorage.allocation.interface import (
    AllocationChange,
    ClaimOutcome,
    ClaimRequest,
    Companion,
    Expect,
    InventoryItem,
)
from moorage.testing.allocation import all_allocations, held, inconsistencies, new_uuid, provider
from moorage_plugins.stores.sql_group import Group, Member, groupable
from tests import servers
from tests.conformance.allocation.stores import SqlCase, sql_store


def change(consumer: str, provider: str = "p") -> AllocationChange:
    return AllocationChange(consumer, {provider: {"VCPU": 1}}, Expect.NOTHING)


class GroupTests(unittest.TestCase):
    def setUp(self) -> None:
        self.alone: list[str] = []
        self.together: list[list[str]] = []
        self.answer: Any = "granted"
        self.gate = threading.Event()
        self.group = Group(self._alone, self._together, 3)
        self.pool = ThreadPoolExecutor(12)
        self.addCleanup(self.pool.shutdown)
        self.addCleanup(self.gate.set)

    def _alone(self, member: Member) -> ClaimOutcome:
        self.alone.append(member.change.consumer)
        if member.change.consumer == "first":
            self.gate.wait(60)
        if member.change.consumer == "bad":
            raise errors.CapacityExceeded("bad")
        return ClaimOutcome(member.change.consumer, 1, ())

    def _together(self, members: Sequence[Member]) -> Sequence[ClaimOutcome] | None:
        self.together.append([each.change.consumer for each in members])
        if isinstance(self.answer, Exception):
            raise self.answer
        return [ClaimOutcome(each.change.consumer, 1, ()) for each in members] if self.answer else None

    def behind(self, *consumers: str) -> dict[str, Future[ClaimOutcome]]:
        """One claim that is being made, and others that came meanwhile, in this order."""
        found = {"first": self.pool.submit(self.group.claim, change("first"), None)}
        servers.wait_until(lambda: self.alone == ["first"], "the first one leads", 60)
        for position, each in enumerate(consumers):
            found[each] = self.pool.submit(self.group.claim, change(each), None)
            (line,) = self.group._lines.values()
            servers.wait_until(lambda line=line, position=position: len(line) == position + 1, "it waits", 60)  # type: ignore[misc]
        self.gate.set()
        return found

    def test_a_claim_that_meets_nobody_is_made_at_once(self) -> None:
        self.gate.set()
        self.assertEqual("a", self.group.claim(change("a"), None).consumer)
        self.assertEqual((["a"], []), (self.alone, self.together))
        self.assertEqual({}, self.group._lines)

    def test_those_that_come_meanwhile_are_made_together_up_to_the_limit(self) -> None:
        found = self.behind("a", "b", "c", "d")
        self.assertEqual(
            {name: name for name in found}, {name: each.result(60).consumer for name, each in found.items()}
        )
        self.assertEqual([["a", "b", "c"]], self.together)
        self.assertEqual(["first", "d"], self.alone)
        self.assertEqual({}, self.group._lines)

    def test_when_all_are_refused_each_is_told_its_own_reason(self) -> None:
        self.answer = None
        found = self.behind("a", "bad", "b")
        self.assertEqual(["a", "b"], [found[name].result(60).consumer for name in ("a", "b")])
        self.assertIsInstance(found["bad"].exception(60), errors.CapacityExceeded)
        self.assertEqual("first", self.alone[0])
        self.assertEqual(["a", "b", "bad"], sorted(self.alone[1:]))

    def test_a_store_that_fails_fails_all_who_wait(self) -> None:
        self.answer = errors.StoreUnavailable("gone")
        found = self.behind("a", "b")
        for name in ("a", "b"):
            self.assertIsInstance(found[name].exception(60), errors.StoreUnavailable)
        self.assertEqual(["first"], self.alone)
        self.assertEqual({}, self.group._lines)

    def test_claims_of_other_providers_do_not_wait(self) -> None:
        first = self.pool.submit(self.group.claim, change("first"), None)
        servers.wait_until(lambda: self.alone == ["first"], "the first one leads", 60)
        self.assertEqual("other", self.group.claim(change("other", "q"), None).consumer)
        self.gate.set()
        first.result(60)

    def test_only_new_claims_are_grouped(self) -> None:
        self.assertTrue(groupable(change("a")))
        self.assertFalse(groupable(AllocationChange("a", {"p": {"VCPU": 1}})))
        self.assertFalse(groupable(AllocationChange("a", {}, Expect.NOTHING)))


class GroupCommitTests(SqlCase, unittest.TestCase):
    def test_claims_made_together_cost_one_transaction_of_four_statements(self) -> None:
        self.empty()
        store = sql_store(self.database, group_commit=8)
        given = provider(VCPU=6, DISK_GB=100)
        store.ensure_providers([given])
        seen: list[str] = []
        commits: list[Any] = []

        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            seen.append(statement)

        for name, listener in (("before_cursor_execute", note), ("commit", commits.append)):
            event.listen(sa.Engine, name, listener)
            self.addCleanup(event.remove, sa.Engine, name, listener)

        def members(count: int) -> list[Member]:
            resources = {given.uuid: {"VCPU": 1, "DISK_GB": 5}}
            requests = [ClaimRequest(new_uuid(), resources, "r") for _ in range(count)]
            return [
                Member(AllocationChange(each.consumer, each.resources, Expect.NOTHING, request_id="r"), None)
                for each in requests
            ]

        store._together(members(1))
        seen.clear()
        commits.clear()
        outcomes = store._together(members(4))
        self.assertEqual(4, len(outcomes or ()))
        self.assertEqual((4, 1), (sum(not each.startswith("BEGIN") for each in seen), len(commits)), seen)
        self.assertEqual({(given.uuid, "VCPU"): 5, (given.uuid, "DISK_GB"): 25}, held(store))
        self.assertIsNone(store._together(members(2)), "one of them would fit, both do not")
        self.assertEqual(5, len({item.consumer for item in all_allocations(store)}))
        self.assertEqual([], inconsistencies(store))

    def test_different_amounts_are_taken_together_up_to_what_is_there(self) -> None:
        self.empty()
        store = sql_store(self.database, group_commit=8)
        given = [
            provider(VCPU=10, DISK_GB=100, MEMORY_MB=InventoryItem("MEMORY_MB", 64, step_size=2)) for _ in range(2)
        ]
        store.ensure_providers(given)

        def made(*wanted: dict[str, int]) -> Sequence[ClaimOutcome] | None:
            resources = [{each.uuid: one for each in given} for one in wanted]
            changes = [AllocationChange(new_uuid(), one, Expect.NOTHING) for one in resources]
            return store._together([Member(each, None) for each in changes])

        self.assertEqual(4, len(made({"VCPU": 1}, {"VCPU": 2, "DISK_GB": 5}, {"VCPU": 1}, {"DISK_GB": 7}) or ()))
        for each in given:
            self.assertEqual({"VCPU": 4, "DISK_GB": 12, "MEMORY_MB": 0}, dict(store.inventories(each.uuid).used))
        self.assertIsNone(made({"VCPU": 4}, {"VCPU": 3}), "each would fit, both do not")
        self.assertIsNone(made({"MEMORY_MB": 2}, {"MEMORY_MB": 3}), "one of them breaks a constraint")
        self.assertEqual([], inconsistencies(store))

    def test_claims_through_replace_are_grouped_too(self) -> None:
        self.empty()
        store = sql_store(self.database, group_commit=8)
        given = provider(VCPU=6)
        store.ensure_providers([given])
        asked: list[AllocationChange] = []
        group = cast(Group, store._group)
        made = group.claim

        def note(change: AllocationChange, companion: Companion | None) -> ClaimOutcome:
            asked.append(change)
            return made(change, companion)

        group.claim = note  # type: ignore[method-assign]
        change = AllocationChange(new_uuid(), {given.uuid: {"VCPU": 1}}, Expect.NOTHING)
        store.replace([change])
        self.assertEqual([change], asked)
        store.replace([AllocationChange(change.consumer, {given.uuid: {"VCPU": 2}})])
        self.assertEqual(([change], {(given.uuid, "VCPU"): 2}), (asked, held(store)))
