# SPDX-License-Identifier: Apache-2.0
"""The ring's row, who proposes it, who adopts it when."""

from __future__ import annotations

import unittest
from collections.abc import Sequence

from moorage.coordination.ring_ledger import RingRow
from moorage.coordination.ring_manager import RingSettings, RingSnapshot
from tests.unit.coordination.worlds import GROUP, Member, World

KEYS = [f"object-{number}" for number in range(200)]


class KeeperCase(unittest.TestCase):
    settings = RingSettings()

    def setUp(self) -> None:
        self.world = World()

    def members(self, count: int, start: int = 1) -> list[Member]:
        made = [Member(self.world, number, self.settings) for number in range(start, start + count)]
        for each in made:
            each.membership.begin()
        return made

    def together(self, members: Sequence[Member]) -> None:
        self.world.pass_time(5, members)

    def snapshot(self, member: Member) -> RingSnapshot:
        found = member.keeper.current()
        assert found is not None
        return found

    def owned(self, members: Sequence[Member]) -> list[str]:
        snapshots = [member.keeper.current() for member in members]
        return sorted(key for each in snapshots if each is not None for key in each.subset(KEYS))


class KeeperTests(KeeperCase):
    def test_members_that_start_together_split_everything_under_one_token(self) -> None:
        members = self.members(3)
        self.together(members)
        self.assertEqual(self.owned(members), sorted(KEYS))
        self.assertEqual(len({self.snapshot(each).token for each in members}), 1)

    def test_the_first_member_owns_everything_at_once(self) -> None:
        (member,) = self.members(1)
        member.look()
        self.assertEqual(self.owned([member]), sorted(KEYS))

    def test_newcomers_are_taken_in_together_after_they_have_settled(self) -> None:
        first = self.members(1)
        self.together(first)
        token = self.snapshot(first[0]).token
        members = first + self.members(4, start=2)
        for each in members:
            each.look()
        self.assertEqual(self.snapshot(first[0]).token, token)
        self.together(members)
        self.assertEqual({self.snapshot(each).token for each in members}, {token + 1})

    def test_who_is_gone_is_dropped_at_the_next_look(self) -> None:
        one, two = self.members(2)
        self.together([one, two])
        two.membership.stop()
        one.look()
        self.assertEqual(self.owned([one]), sorted(KEYS))

    def test_what_was_read_before_a_newer_look_is_not_acted_on(self) -> None:
        one, two = self.members(2)
        self.together([one, two])
        began = one.clock.monotonic()
        late = one.keeper.look(began)
        assert late is not None
        self.world.clock.advance(0.5)
        two.membership.stop()
        one.look()
        newer = self.snapshot(one)
        late()
        self.assertIs(newer, self.snapshot(one))
        # Its transaction may not see what another thread has read since it began.
        self.assertIsNone(one.keeper.look(began))
        self.assertIs(newer, self.snapshot(one))
        # A look alone acts as well.
        (three,) = self.members(1, start=3)
        self.together([three])
        for _ in range(3):
            one.membership.step()
            act = one.keeper.look(one.clock.monotonic())
            assert act is not None
            act()
        self.together([one, three])
        self.assertEqual(self.owned([one, three]), sorted(KEYS))
        self.assertGreater(self.snapshot(one).token, newer.token)

    def test_the_row_goes_before_what_a_member_sees(self) -> None:
        one, two = self.members(2)
        self.together([one, two])
        before = self.snapshot(two).token
        two.cut = {"members"}
        one.membership.stop()
        two.look()
        self.assertEqual(self.snapshot(two).token, before)
        row = self.world.ledger.row
        assert row is not None
        self.world.ledger.propose(GROUP, row, RingRow(0, (two.membership.member_id or b"",), 40, "md5"))
        two.cut = set()
        two.look()
        self.assertEqual(self.snapshot(two).token, before + 1)

    def test_settings_that_differ_do_not_make_members_quarrel(self) -> None:
        one = Member(self.world, 1, RingSettings(replicas=40))
        two = Member(self.world, 2, RingSettings(replicas=100, hash_function="xxh3"))
        for each in (one, two):
            each.membership.begin()
        self.together([one, two])
        token = self.snapshot(one).token
        self.together([one, two])
        self.assertEqual(self.snapshot(two).token, token)
        self.assertEqual(self.snapshot(one).digest, self.snapshot(two).digest)

    def test_a_member_that_is_no_longer_certain_has_no_ring(self) -> None:
        (member,) = self.members(1)
        member.look()
        snapshot = self.snapshot(member)
        self.assertTrue(member.keeper.is_current(snapshot))
        self.world.clock.advance(9.5)
        self.assertFalse(member.keeper.is_current(snapshot))
        self.assertIsNone(member.keeper.current())

    def test_after_another_stay_the_old_ring_is_not_current(self) -> None:
        (member,) = self.members(1)
        member.look()
        snapshot = self.snapshot(member)
        self.world.server.wipe()
        member.beat()
        self.assertFalse(member.keeper.is_current(snapshot))
        self.together([member])
        self.assertNotEqual(self.snapshot(member).me, snapshot.me)

    def test_adoptions_of_the_gone_are_forgotten(self) -> None:
        one, two = self.members(2)
        self.together([one, two])
        gone = two.membership.member_id
        self.assertIn(gone, self.world.ledger.adoptions)
        two.membership.stop()
        self.together([one])
        self.assertNotIn(gone, self.world.ledger.adoptions)

    def test_weights_change_shares(self) -> None:
        one, two = Member(self.world, 1, self.settings), Member(self.world, 2, self.settings, weight=4.0)
        for each in (one, two):
            each.membership.begin()
        self.together([one, two])
        small, large = (len(self.snapshot(each).subset(KEYS)) for each in (one, two))
        self.assertLess(2 * small, large)

    def test_whatever_goes_wrong_after_the_row_was_read_the_old_ring_is_over(self) -> None:
        one, two = self.members(2)
        self.together([one, two])
        old = self.snapshot(one)

        def broken(*_: object) -> RingSnapshot:
            raise LookupError("a mistake")

        one.keeper._snapshot = broken  # type: ignore[method-assign, assignment]
        two.membership.stop()
        with self.assertRaises(LookupError):
            one.keeper.step()
        self.assertFalse(one.keeper.is_current(old))
        self.assertIsNone(one.keeper.current())

    def test_a_row_that_was_lost_ends_the_ring_until_there_is_another(self) -> None:
        (member,) = self.members(1)
        member.look()
        old = self.snapshot(member)
        self.world.ledger.row = None
        member.cut = {"members"}
        member.look()
        self.assertFalse(member.keeper.is_current(old))
        member.cut = set()
        member.look()
        self.assertEqual(self.owned([member]), sorted(KEYS))

    def test_a_keeper_that_has_stopped_owns_nothing(self) -> None:
        (member,) = self.members(1)
        member.look()
        member.keeper.stop()
        self.assertIsNone(member.keeper.current())
        member.look()
        self.assertIsNone(member.keeper.current())


class DrainTests(KeeperCase):
    settings = RingSettings(drain=True)

    def test_a_newcomer_waits_until_the_old_owner_has_ended_what_it_handles(self) -> None:
        first = self.members(1)
        self.together(first)
        old = self.snapshot(first[0])
        work = first[0].keeper.working(old)
        self.assertTrue(work.__enter__())
        both = first + self.members(1, start=2)
        self.together(both)
        self.assertEqual([each.keeper.current() for each in both], [None, None])
        work.__exit__(None, None, None)
        self.together(both)
        self.assertEqual(self.owned(both), sorted(KEYS))
        self.assertEqual({self.snapshot(each).token for each in both}, {old.token + 1})

    def test_nothing_begins_under_a_ring_that_was_left(self) -> None:
        first = self.members(1)
        self.together(first)
        old = self.snapshot(first[0])
        self.together(first + self.members(1, start=2))
        with first[0].keeper.working(old) as allowed:
            self.assertFalse(allowed)

    def test_the_dead_are_not_waited_for(self) -> None:
        one, two = self.members(2)
        self.together([one, two])
        one.keeper.working(self.snapshot(one)).__enter__()
        self.world.pass_time(12, [two])
        self.assertEqual(self.owned([two]), sorted(KEYS))
