# SPDX-License-Identifier: Apache-2.0
"""Claims that come at the same time share transactions, and each gets the outcome that it would get alone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, cast
from unittest import mock

import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oslo_context import context as oslo_context
from sqlalchemy import event
from typing_extensions import override

import tests
from moorage import errors, threads
from moorage.allocation.interface import (
    AllocationChange,
    BatchCompanion,
    ClaimOutcome,
    ClaimRequest,
    Expect,
    GenerationConflict,
    InventoryItem,
    RefusedTogether,
    ResourceProvider,
)
from moorage.testing.allocation import all_allocations, held, inconsistencies, new_uuid, provider
from moorage_plugins.stores.combiner import Combiner, Member, is_combinable
from moorage_plugins.stores.sql import SqlStore
from moorage_plugins.stores.sql_claims import _Try
from tests import servers
from tests.conformance.allocation.stores import SqlCase, sql_store


def change(consumer: str, provider: str = "p") -> AllocationChange:
    return AllocationChange(consumer, {provider: {"VCPU": 1}}, Expect.NOTHING)


class CombinerTests(unittest.TestCase):
    """The combiner with a store that does what the test says."""

    def setUp(self) -> None:
        self.alone: list[str] = []
        self.together: list[list[str]] = []
        self.looked_up: list[list[str]] = []
        #: What each combined transaction does: an error, or the consumers that it leaves out.
        self.answers: list[BaseException | set[str]] = []
        self.committed: set[str] = set()
        self.gate = threading.Event()
        self.combiner = Combiner(self._alone, self._together, self._look_up, 3, 60)
        self.pool = ThreadPoolExecutor(12)
        self.addCleanup(self.pool.shutdown)
        self.addCleanup(self.gate.set)

    def _alone(self, member: Member) -> ClaimOutcome:
        self.alone.append(member.change.consumer)
        if member.change.consumer == "first":
            self.gate.wait(60)
        if member.change.consumer == "busy" and not member.alone:
            raise errors.StoreBusy("lost")
        if member.change.consumer == "bad":
            raise errors.CapacityExceeded("bad")
        return ClaimOutcome(member.change.consumer, 1, ())

    def _together(self, members: Sequence[Member]) -> None:
        self.together.append([each.change.consumer for each in members])
        answer = self.answers.pop(0) if self.answers else set()
        if isinstance(answer, BaseException):
            raise answer
        for each in members:
            each.alone = each.change.consumer in answer
            each.outcome = None if each.alone else ClaimOutcome(each.change.consumer, 1, ())

    def _look_up(self, members: Sequence[Member]) -> None:
        self.looked_up.append([each.change.consumer for each in members])
        if "nobody" in self.committed:
            raise errors.StoreUnavailable("still gone")
        for each in members:
            if each.change.consumer in self.committed:
                each.outcome = ClaimOutcome(each.change.consumer, 1, (), repeated=True)

    def behind(self, *consumers: str) -> dict[str, Future[ClaimOutcome]]:
        """One claim that is being made, and others that came meanwhile, in this order."""
        found = {"first": self.pool.submit(self.combiner.claim, change("first"), None)}
        servers.wait_until(lambda: self.alone == ["first"], "the first one leads", 60)
        for position, each in enumerate(consumers):
            name = each if each not in found else f"{each} again"
            found[name] = self.pool.submit(self.combiner.claim, change(each), None)
            servers.wait_until(
                lambda position=position: len(self.combiner._gathering._waiting) == position + 1,  # type: ignore[misc]
                "it waits",
                60,
            )
        self.gate.set()
        return found

    def idle(self) -> bool:
        return not self.combiner._gathering._leaders and not self.combiner._gathering._waiting

    def test_a_claim_that_meets_no_other_is_made_at_once(self) -> None:
        self.gate.set()
        self.assertEqual("a", self.combiner.claim(change("a"), None).consumer)
        self.assertEqual((["a"], []), (self.alone, self.together))
        self.assertTrue(self.idle())

    def test_claims_that_wait_share_the_next_transaction_up_to_the_limit(self) -> None:
        found = self.behind("a", "b", "c", "d")
        self.assertEqual(
            {name: name for name in found}, {name: each.result(60).consumer for name, each in found.items()}
        )
        self.assertEqual([["a", "b", "c"]], self.together)
        self.assertEqual(["first", "d"], self.alone)
        self.assertTrue(self.idle())

    def test_a_claim_that_is_left_out_is_told_its_own_reason_and_undoes_no_other(self) -> None:
        self.answers = [{"bad"}]
        found = self.behind("a", "bad", "b")
        self.assertEqual(["a", "b"], [found[name].result(60).consumer for name in ("a", "b")])
        self.assertIsInstance(found["bad"].exception(60), errors.CapacityExceeded)
        self.assertEqual((["first", "bad"], [["a", "bad", "b"]]), (self.alone, self.together))

    def test_a_claim_that_breaks_every_transaction_is_found_by_halves(self) -> None:
        self.answers = [ZeroDivisionError(), ZeroDivisionError()]
        found = self.behind("a", "bad", "b")
        self.assertEqual(["a", "b"], [found[name].result(60).consumer for name in ("a", "b")])
        self.assertIsInstance(found["bad"].exception(60), errors.CapacityExceeded)
        self.assertEqual([["a", "bad", "b"], ["bad", "b"]], self.together)
        self.assertEqual(["a", "b", "bad", "first"], sorted(self.alone))

    def test_a_repetition_waits_for_the_transaction_after(self) -> None:
        found = self.behind("a", "a", "b")
        for each in found.values():
            each.result(60)
        self.assertEqual(([["a", "b"]], ["first", "a"]), (self.together, self.alone))

    def test_a_store_that_fails_fails_all_claims_of_the_transaction(self) -> None:
        self.answers = [errors.StoreUnavailable("gone")]
        found = self.behind("a", "b")
        for name in ("a", "b"):
            self.assertIsInstance(found[name].exception(60), errors.StoreUnavailable)
        self.assertEqual((["first"], []), (self.alone, self.looked_up))
        self.assertTrue(self.idle())

    def test_after_a_commit_of_unknown_outcome_all_are_looked_up_before_any_is_answered(self) -> None:
        self.answers = [errors.StoreUnavailable("gone", outcome="unknown")]
        self.committed = {"a"}
        found = self.behind("a", "b")
        self.assertTrue(found["a"].result(60).repeated)
        error = cast(errors.StoreUnavailable, found["b"].exception(60))
        self.assertEqual(("unknown", [["a", "b"]]), (error.details["outcome"], self.looked_up))

    def test_each_thread_is_given_an_error_of_its_own(self) -> None:
        given = errors.StoreUnavailable("gone", outcome="unknown")
        self.answers = [given]
        found = self.behind("a", "b", "c")
        raised = [cast(errors.MoorageError, found[name].exception(60)) for name in ("a", "b", "c")]
        for each in raised:
            self.assertEqual((type(given), str(given), given.details), (type(each), str(each), each.details))
        for name, each in zip("abc", raised, strict=True):
            each.details["undone"] = name
            each.message += f" for {name}"
        self.assertEqual(["a", "b", "c"], [each.details["undone"] for each in raised])
        self.assertEqual(["gone for a", "gone for b", "gone for c"], list(map(str, raised)))
        self.assertNotIn("undone", given.details)

    def test_an_interrupted_thread_interrupts_no_other(self) -> None:
        self.answers = [KeyboardInterrupt("stop")]
        found = self.behind("a", "b")
        self.assertIsInstance(found["a"].exception(60), KeyboardInterrupt)
        error = cast(errors.StoreUnavailable, found["b"].exception(60))
        self.assertEqual("unknown", error.details["outcome"])
        self.assertTrue(self.idle())

    def test_a_batch_that_cannot_be_chosen_stops_no_other_claim(self) -> None:
        with (
            mock.patch.object(self.combiner._gathering, "_turn", side_effect=MemoryError),
            self.assertRaises(MemoryError),
        ):
            self.combiner.claim(change("a"), None)
        self.assertTrue(self.idle())
        self.assertEqual("a", self.combiner.claim(change("a"), None).consumer)

    def test_a_claim_that_waits_too_long_for_a_transaction_is_made_alone(self) -> None:
        first = self.pool.submit(self.combiner.claim, change("first"), None)
        servers.wait_until(lambda: self.alone == ["first"], "the first one leads", 60)
        self.combiner._gathering._patience = 0.01
        self.assertEqual("a", self.combiner.claim(change("a"), None).consumer)
        self.assertFalse(first.done())
        self.gate.set()
        first.result(60)
        self.assertEqual((["first", "a"], []), (self.alone, self.together))
        self.assertTrue(self.idle())

    def test_a_transaction_that_does_not_end_leaves_the_outcome_unknown(self) -> None:
        gathering = self.combiner._gathering
        gathering._patience = gathering._until_end = 0.01
        member, woken = Member(change("a"), None), threads.Latch()
        self.assertFalse(gathering._wait(member, woken))
        self.assertFalse(member.alone)
        woken.set()
        self.assertTrue(gathering._wait(member, woken))
        with (
            mock.patch.object(gathering, "_wait", return_value=False),
            mock.patch.object(gathering, "_leaders", 1),
            self.assertRaises(errors.StoreUnavailable) as caught,
        ):
            self.combiner.claim(change("a"), None)
        self.assertEqual("unknown", caught.exception.details["outcome"])
        gathering._waiting.clear()

    def test_a_forked_child_waits_for_no_thread_of_its_parent(self) -> None:
        first = self.pool.submit(self.combiner.claim, change("first"), None)
        servers.wait_until(lambda: self.alone == ["first"], "the first one leads", 60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            # The child has no other thread; a lead that nobody hands on would cost it the patience of 60 seconds.
            signal.alarm(30)
            os._exit(0 if self.combiner.claim(change("a"), None).consumer == "a" and self.idle() else 1)
        self.assertEqual(0, os.waitpid(child, 0)[1])
        self.gate.set()
        first.result(60)

    def test_a_lookup_that_fails_leaves_the_outcome_unknown(self) -> None:
        self.answers = [errors.StoreUnavailable("gone", outcome="unknown")]
        self.committed = {"nobody"}
        found = self.behind("a", "b")
        for name in ("a", "b"):
            error = cast(errors.StoreUnavailable, found[name].exception(60))
            self.assertEqual("unknown", error.details["outcome"])
        self.assertTrue(self.idle())

    def test_transactions_shrink_with_conflicts_and_grow_again(self) -> None:
        self.answers = [errors.StoreBusy("lost")]
        given = [Member(change(name), None) for name in "abc"]
        self.combiner._make(given)
        self.assertEqual(
            (1, [(True, False)] * 3), (self.combiner._size, [(each.alone, each.decided) for each in given])
        )
        self.combiner._make([Member(change("x"), None)])
        self.combiner._make([Member(change("x"), None), Member(change("y"), None)])
        self.assertEqual(3, self.combiner._size)

    def test_claims_that_lose_a_race_are_made_alone(self) -> None:
        self.answers = [errors.StoreBusy("lost")]
        found = self.behind("a", "b", "c", "d")
        for name, each in found.items():
            self.assertEqual(name, each.result(60).consumer)
        self.assertEqual([["a", "b", "c"]], self.together)
        self.assertEqual(["a", "b", "c", "d", "first"], sorted(self.alone))
        self.assertTrue(self.idle())

    def test_a_claim_that_was_given_up_is_never_made_by_a_later_transaction(self) -> None:
        """Its thread was told that the outcome is unknown while another thread had it in a transaction that lost a race then."""
        held, done = threading.Event(), threading.Event()
        self.addCleanup(held.set)
        together = self.combiner._together

        def late(members: Sequence[Member]) -> None:
            done.set()
            held.wait(60)
            together(members)

        self.combiner._together = late
        self.answers = [errors.StoreBusy("lost")]
        found = self.behind("a", "b")
        done.wait(60)
        member = Member(change("given up"), None)
        gathering = self.combiner._gathering
        gathering._patience = gathering._until_end = 0.01
        self.assertFalse(gathering._wait(member, threads.Latch()))
        held.set()
        for name, each in found.items():
            # One of the two gave up as well, if its wait has ended before.
            self.assertIn(type(each.exception(60)), (type(None), errors.StoreUnavailable), name)
        servers.wait_until(self.idle, "no thread leads any more", 60)
        self.assertEqual("z", self.combiner.claim(change("z"), None).consumer)

    def test_a_leader_tries_once_before_another_one_leads(self) -> None:
        self.gate.set()
        self.assertEqual("busy", self.combiner.claim(change("busy"), None).consumer)
        self.assertEqual(["busy", "busy"], self.alone)
        member = Member(change("busy"), None)
        self.combiner._make([member])
        self.assertEqual((True, None), (member.alone, member.error))

    def test_as_many_transactions_run_at_once_as_there_are_lanes(self) -> None:
        self.combiner._gathering._most_leaders = 2
        first = self.pool.submit(self.combiner.claim, change("first"), None)
        servers.wait_until(lambda: self.alone == ["first"], "the first one leads", 60)
        self.assertEqual("a", self.combiner.claim(change("a"), None).consumer)
        self.assertEqual(1, self.combiner._gathering._leaders)
        again = self.pool.submit(self.combiner.claim, change("first"), None)
        servers.wait_until(lambda: self.alone == ["first", "a", "first"], "the second one leads", 60)
        waiting = [self.pool.submit(self.combiner.claim, change(name), None) for name in "bc"]
        servers.wait_until(lambda: len(self.combiner._gathering._waiting) == 2, "the others wait", 60)
        self.gate.set()
        for each in (first, again, *waiting):
            each.result(60)
        servers.wait_until(self.idle, "all have ended", 60)

    def test_only_claims_of_new_consumers_are_combined(self) -> None:
        self.assertTrue(is_combinable(change("a"), None))
        self.assertTrue(is_combinable(change("a"), _Together([])))
        self.assertFalse(is_combinable(change("a"), lambda transaction: None))
        self.assertFalse(is_combinable(AllocationChange("a", {"p": {"VCPU": 1}}), None))
        self.assertFalse(is_combinable(AllocationChange("a", {}, Expect.NOTHING), None))


class _Together(BatchCompanion):
    """Notes by which request's thread it was called, and refuses what the test says."""

    def __init__(self, called: list[Any], *, refuse: bool = False) -> None:
        self.called = called
        self.refuse = refuse

    @override
    def __call__(self, transaction: Any) -> None:
        self.called.append((self,))
        if self.refuse:
            raise errors.ConstraintViolated("refused")

    @classmethod
    @override
    def together(cls, transaction: Any, companions: Sequence[Any]) -> None:
        companions[0].called.append(tuple(companions))
        refused = [each for each in companions if each.refuse]
        if refused:
            raise RefusedTogether(refused)


class CombinedClaimTests(SqlCase, unittest.TestCase):
    """The combined transaction of the sql store."""

    def setUp(self) -> None:
        self.empty()
        self.store = sql_store(self.database)

    def members(self, *wanted: Mapping[str, Mapping[str, int]], **more: Any) -> list[Member]:
        return [
            Member(AllocationChange(new_uuid(), each, Expect.NOTHING, request_id="r", **more), None) for each in wanted
        ]

    def made(self, members: Sequence[Member]) -> list[int]:
        """The places of the claims that are made together."""
        self.store._together(members)
        self.assertEqual([], inconsistencies(self.store))
        return [place for place, each in enumerate(members) if each.outcome is not None]

    def test_claims_of_several_providers_cost_one_transaction_of_few_statements(self) -> None:
        given = [provider(VCPU=6, DISK_GB=100) for _ in range(3)]
        self.store.ensure_providers(given)
        self.made(self.members(*({each.uuid: {"VCPU": 1, "DISK_GB": 5}} for each in given)))
        seen: list[str] = []
        commits: list[Any] = []

        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            seen.append(statement)

        for name, listener in (("before_cursor_execute", note), ("commit", commits.append)):
            event.listen(sa.Engine, name, listener)
            self.addCleanup(event.remove, sa.Engine, name, listener)
        wanted = [{each.uuid: {"VCPU": 1, "DISK_GB": 5}} for each in given for _ in range(4)]
        self.store._together(self.members(*wanted))
        statements = 4 if self.server is None else 5
        self.assertEqual((statements, 1), (sum(not each.startswith("BEGIN") for each in seen), len(commits)), seen)
        for each in given:
            self.assertEqual({"VCPU": 5, "DISK_GB": 25}, dict(self.store.inventories(each.uuid).used))
        self.assertEqual([], inconsistencies(self.store))

    def test_a_claim_without_room_undoes_no_other(self) -> None:
        one, two = provider(VCPU=3), provider(VCPU=10, MEMORY_MB=InventoryItem("MEMORY_MB", 64, step_size=2))
        self.store.ensure_providers([one, two])
        wanted: list[dict[str, dict[str, int]]] = [
            {one.uuid: {"VCPU": 2}}, {one.uuid: {"VCPU": 2}}, {one.uuid: {"VCPU": 1}, two.uuid: {"VCPU": 1}},
            {two.uuid: {"MEMORY_MB": 3}}, {two.uuid: {"MEMORY_MB": 2}}, {new_uuid(): {"VCPU": 1}},
            {two.uuid: {"VCPU": 4}}, {two.uuid: {"PCPU": 4}},
        ]  # fmt: skip
        self.assertEqual([0, 2, 4, 6], self.made(self.members(*wanted)))
        self.assertEqual({(one.uuid, "VCPU"): 3, (two.uuid, "VCPU"): 5, (two.uuid, "MEMORY_MB"): 2}, held(self.store))

    def test_a_consumer_that_holds_a_claim_undoes_no_other(self) -> None:
        given = provider(VCPU=6)
        self.store.ensure_providers([given])
        members = self.members(*({given.uuid: {"VCPU": 1}} for _ in range(4)))
        self.store.claim(ClaimRequest(members[1].change.consumer, {given.uuid: {"VCPU": 1}}, "r"))
        self.assertEqual([0, 2, 3], self.made(members))
        self.assertTrue(self.store._alone(members[1]).repeated)
        self.assertEqual({(given.uuid, "VCPU"): 4}, held(self.store))

    def test_of_claims_that_expect_one_version_of_residents_one_is_made(self) -> None:
        given, other = provider(VCPU=6), provider(VCPU=6)
        self.store.ensure_providers([given, other])
        version = self.store.residents(given.uuid)
        residents: list[dict[str, int | None]] = [
            {given.uuid: version}, {given.uuid: version}, {given.uuid: version + 7}, {given.uuid: None}, {},
        ]  # fmt: skip
        wanted = [{given.uuid: {"VCPU": 1}}] * 4 + [{other.uuid: {"VCPU": 1}}]
        members = [
            Member(AllocationChange(new_uuid(), one, Expect.NOTHING, residents=seen), None)
            for one, seen in zip(wanted, residents, strict=True)
        ]
        self.assertEqual([0, 3, 4], self.made(members))
        for each in members[1:3]:
            self.assertRaises(errors.ResidentsChanged, self.store._alone, each)
        self.assertLess(version, self.store.residents(given.uuid))

    def test_a_remembered_id_of_a_provider_that_was_made_again_is_forgotten(self) -> None:
        given, other = provider(VCPU=6), provider(VCPU=6)
        self.store.ensure_providers([given, other])
        self.made(self.members({given.uuid: {"VCPU": 1}}, {other.uuid: {"VCPU": 1}}))
        foreign = sql_store(self.database)
        for item in all_allocations(foreign):
            foreign.release(item.consumer)
        foreign.delete_provider(given.uuid)
        foreign.ensure_providers([given])
        members = self.members({given.uuid: {"VCPU": 1}}, {other.uuid: {"VCPU": 1}})
        try:
            self.store._together(members)
        except Exception:
            self.store._together(members)
        self.assertEqual({(given.uuid, "VCPU"): 1, (other.uuid, "VCPU"): 1}, held(self.store))

    def test_a_consumer_leaves_a_node_that_was_made_again(self) -> None:
        """The store remembers another id of the node, which is named by its residents alone."""
        left, entered = provider(VCPU=6), provider(VCPU=6)
        self.store.ensure_providers([entered, left])
        self.made(self.members({left.uuid: {"VCPU": 1}}, {entered.uuid: {"VCPU": 1}}))
        foreign = sql_store(self.database)
        for item in all_allocations(foreign):
            foreign.release(item.consumer)
        foreign.delete_provider(left.uuid)
        # On SQLite this one gets the id of the node that was deleted.
        foreign.ensure_providers([provider(VCPU=6)])
        foreign.ensure_providers([left])
        consumer = new_uuid()
        foreign.claim(ClaimRequest(consumer, {left.uuid: {"VCPU": 1}}, "r"))
        change = AllocationChange(
            consumer, {entered.uuid: {"VCPU": 1}}, Expect.ANYTHING, residents={left.uuid: None, entered.uuid: None}
        )
        self.store.replace([change])
        self.assertEqual({(entered.uuid, "VCPU"): 1}, held(self.store))

    def test_companions_of_one_kind_are_called_once_without_those_that_refuse(self) -> None:
        given = provider(VCPU=6)
        self.store.ensure_providers([given])
        called: list[Any] = []
        members = self.members(*({given.uuid: {"VCPU": 1}} for _ in range(4)))
        companions = [_Together(called, refuse=place == 2) for place in range(3)]
        for each, companion in zip(members, companions, strict=False):
            each.companion = companion
        self.assertEqual([0, 1, 3], self.made(members))
        self.assertEqual([tuple(companions), tuple(companions[:2])], called)

    def test_a_companion_alone_acts_for_its_own_request(self) -> None:
        given = provider(VCPU=6)
        self.store.ensure_providers([given])
        seen: list[str | None] = []

        def note(transaction: Any) -> None:
            seen.append(getattr(oslo_context.get_current(), "request_id", None))

        context = oslo_context.RequestContext(request_id="req-1", overwrite=False)
        self.store._alone(Member(self.members({given.uuid: {"VCPU": 1}})[0].change, note, context=context))
        self.assertEqual(["req-1"], seen)

    def test_a_commit_of_unknown_outcome_is_looked_up(self) -> None:
        given = provider(VCPU=9)
        self.store.ensure_providers([given])
        combiner = Combiner(self.store._alone, self.store._together, self.store._look_up, 8, 60)
        members = self.members(*({given.uuid: {"VCPU": 1}} for _ in range(3)))
        keyless = Member(AllocationChange(new_uuid(), {given.uuid: {"VCPU": 1}}, Expect.NOTHING), None)
        run = self.database.run
        for commits in (True, False):
            batch = [*self.members(*({given.uuid: {"VCPU": 1}} for _ in range(2))), Member(keyless.change, None)]

            def lost(work: Callable[[sa.Connection], Any], commits: bool = commits, **more: Any) -> Any:
                if commits:
                    run(work, **more)
                raise errors.StoreUnavailable("The connection ended at the commit.", outcome="unknown")

            with self.subTest(commits=commits), mock.patch.object(self.database, "run", lost):
                combiner._make(batch)
                for each in batch:
                    is_known = commits and each.change.request_id is not None
                    self.assertEqual(is_known, each.outcome is not None)
                    # The transaction of unknown outcome has made it, so it is no repetition.
                    self.assertFalse(each.outcome is not None and each.outcome.repeated)
                    self.assertEqual(not is_known, isinstance(each.error, errors.StoreUnavailable))
            self.store.release(keyless.change.consumer)
        self.assertEqual({(given.uuid, "VCPU"): 2}, held(self.store))
        combiner._make(members)
        self.assertEqual([False] * 3, [cast(ClaimOutcome, each.outcome).repeated for each in members])

    def test_a_repetition_that_is_looked_up_is_one(self) -> None:
        nodes = [provider(VCPU=9) for _ in range(2)]
        self.store.ensure_providers(nodes)
        combiner = Combiner(self.store._alone, self.store._together, self.store._look_up, 8, 60)
        run = self.database.run
        earlier, elsewhere = self.members(*({nodes[0].uuid: {"VCPU": 1}} for _ in range(2)))
        combiner._make([earlier])
        again = Member(earlier.change, None)
        # Another scheduler made the second one on another node, after the transaction was undone.
        moved = dataclasses.replace(elsewhere.change, resources={nodes[1].uuid: {"VCPU": 1}})

        def lost(work: Callable[[sa.Connection], Any], **more: Any) -> Any:
            if again.outcome is None and not again.written:
                run(work, **more)
            else:
                with contextlib.suppress(ZeroDivisionError):
                    run(lambda tx: (work(tx), 1 // 0), **more)
                run(lambda tx: self.store._change(tx, [moved], (), None, _Try.CHECKED))
            if again.written or elsewhere.written:
                raise errors.StoreUnavailable("The connection ended at the commit.", outcome="unknown")

        with mock.patch.object(self.database, "run", lost):
            combiner._make([again])
            combiner._make([elsewhere])
        for each in (again, elsewhere):
            self.assertTrue(cast(ClaimOutcome, each.outcome).repeated, each)
        self.assertEqual((nodes[1].uuid,), cast(ClaimOutcome, elsewhere.outcome).providers)

    def test_claims_through_replace_are_combined_too(self) -> None:
        store = sql_store(self.database, claims_per_transaction=8)
        given = provider(VCPU=6)
        store.ensure_providers([given])
        asked = mock.Mock(wraps=cast(Combiner, store._combiner).claim)
        with mock.patch.object(store._combiner, "claim", asked):
            new = AllocationChange(new_uuid(), {given.uuid: {"VCPU": 1}}, Expect.NOTHING)
            store.replace([new])
            store.replace([AllocationChange(new.consumer, {given.uuid: {"VCPU": 2}})])
        asked.assert_called_once_with(new, None)
        self.assertEqual({(given.uuid, "VCPU"): 2}, held(store))


class PostgresqlCombinedClaimTests(CombinedClaimTests):
    server = "postgresql"


class MariadbCombinedClaimTests(CombinedClaimTests):
    server = "mariadb"


class _PoisonError(Exception):
    pass


class _Poison(BatchCompanion):
    @override
    def __call__(self, transaction: Any) -> None:
        raise _PoisonError

    @classmethod
    @override
    def together(cls, transaction: Any, companions: Sequence[Any]) -> None:
        companions[0](transaction)


class _BrokenStatement(_Poison):
    @override
    def __call__(self, transaction: Any) -> None:
        transaction.execute(sa.text("SELECT no_such_column FROM consumers"))


_COMPANIONS: Mapping[str, BatchCompanion | None] = {
    "none": None, "poison": _Poison(), "broken statement": _BrokenStatement(),
}  # fmt: skip
#: Which consumer and providers, how much of which class, request, project, what the residents are expected to be, companion.
CLAIMS = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True),
        st.sampled_from([("VCPU", 1), ("VCPU", 2), ("VCPU", 5), ("MEMORY_MB", 2), ("MEMORY_MB", 3), ("PCPU", 1)]),
        st.sampled_from(["r1", "r1", "r2"]),
        st.sampled_from(["", "", "limited"]),
        st.sampled_from(["any", "any", "right", "wrong"]),
        st.sampled_from(["none", "none", "none", "poison", "broken statement"]),
    ),
    min_size=1,
    max_size=12,
)


class SameAsOneByOneTests(SqlCase, unittest.TestCase):
    """Claims that share transactions have the outcomes, and leave the rows, of claims made one by one in the order of commits."""

    def _begin(self) -> tuple[SqlStore, list[ResourceProvider]]:
        self.empty()
        store = sql_store(self.database)
        # The last provider is unknown to the store.
        nodes = [
            ResourceProvider(f"{number:08d}-0000-4000-8000-000000000000", f"n{number}", inventories=(
                InventoryItem("VCPU", 4), InventoryItem("MEMORY_MB", 16, step_size=2),
            ))
            for number in range(4)
        ]  # fmt: skip
        store.ensure_providers(nodes[:3])
        store.set_quota("limited", "VCPU", 3)
        return store, nodes

    def _members(self, store: SqlStore, nodes: Sequence[ResourceProvider], claims: Sequence[Any]) -> list[Member]:
        found = []
        for consumer, places, (name, amount), request, project, expects, companion in claims:
            residents: dict[str, int | None] = {}
            if expects != "any" and places[0] < 3:
                residents[nodes[places[0]].uuid] = store.residents(nodes[places[0]].uuid) + (expects == "wrong") * 5
            wanted = AllocationChange(
                f"c{consumer}", {nodes[place].uuid: {name: amount} for place in places}, Expect.NOTHING, project or None,
                request_id=request, residents=residents, enforce_quota=True,
            )  # fmt: skip
            found.append(Member(wanted, _COMPANIONS[companion]))
        return found

    def _answers(self, store: SqlStore, members: Sequence[Member]) -> tuple[Any, ...]:
        """What each claim was told, and all rows."""
        told = []
        for each in members:
            outcome = None if each.outcome is None else (each.outcome.allocations, each.outcome.repeated)
            told.append((each.change.consumer, outcome, type(each.error)))
        self.assertEqual([], inconsistencies(store))
        with self.database.read() as tx:
            rows = [
                tuple(row) for row in tx.execute(sa.text("SELECT uuid, project_id, request_id, counted FROM consumers"))
            ]
        quotas = [(each.project, each.resource_class, each.limit, each.used) for each in store.quotas()]
        return told, held(store), sorted(rows), quotas

    examples: ClassVar[int] = tests.cases(40)

    def test_outcomes_and_rows_are_those_of_claims_made_one_by_one(self) -> None:
        @settings(max_examples=self.examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(CLAIMS)
        @example([(1, [0], ("VCPU", 1), "r1", "", "any", "none"), (2, [0], ("VCPU", 1), "r1", "", "right", "none")])
        @example([(number, [0], ("VCPU", 1 + number // 2), "r1", "", "any", "none") for number in range(3)])
        def law(claims: list[Any]) -> None:
            self.check(claims)

        law()

    def check(self, claims: list[Any]) -> None:
        store, nodes = self._begin()
        order: list[Member] = []

        def alone(member: Member) -> ClaimOutcome:
            order.append(member)
            return store._alone(member)

        def together(batch: Sequence[Member]) -> None:
            store._together(batch)
            order.extend(each for each in batch if each.outcome is not None)

        members = self._members(store, nodes, claims)
        combiner = Combiner(alone, together, store._look_up, 64, 60)
        combiner._gathering._waiting = list(members)
        while combiner._gathering._waiting:
            batch = combiner._gathering._turn(combiner._gathering._waiting.pop(0))
            combiner._make(batch)
            for each in batch:
                if each.alone:
                    combiner._make([each])
        for each in members:
            self.assertNotEqual(each.outcome is None, each.error is None)
            self.assertIn(each, order)
        combined = self._answers(store, order)

        store, nodes = self._begin()
        again = dict(zip(map(id, members), self._members(store, nodes, claims), strict=True))
        one_by_one = [again[id(each)] for each in order]
        for each in one_by_one:
            try:
                each.outcome = store._alone(each)
            except Exception as error:
                each.error = error
        self.assertEqual(self._answers(store, one_by_one), combined)

    def test_the_comparison_knows_repetitions_and_conflicts(self) -> None:
        store, nodes = self._begin()
        given = [(1, [0], ("VCPU", 1), "r1", "", "any", "none"), (1, [0], ("VCPU", 1), "r2", "", "any", "none")]
        first, second = self._members(store, nodes, given)
        store._alone(first)
        self.assertTrue(store._alone(first).repeated)
        self.assertRaises(GenerationConflict, store._alone, second)


class PostgresqlSameAsOneByOneTests(SameAsOneByOneTests):
    server = "postgresql"
    examples = tests.cases(6)


class MariadbSameAsOneByOneTests(SameAsOneByOneTests):
    server = "mariadb"
    examples = tests.cases(6)
