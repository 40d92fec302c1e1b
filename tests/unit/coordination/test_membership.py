# SPDX-License-Identifier: Apache-2.0
"""Being a member, on a clock that stands still: what is certain, what ends it, how it begins again."""

from __future__ import annotations

import unittest

from moorage import errors
from moorage.coordination.interface import NotMember, View
from moorage.coordination.membership import DRIFT, MemberId, MembershipState
from moorage.coordination.ring_manager import RingSettings
from tests.unit.coordination.worlds import GROUP, Member, World

SESSION = 10.0


class MembershipTests(unittest.TestCase):
    def setUp(self) -> None:
        self.world = World(SESSION)
        self.member = Member(self.world, 1, RingSettings())
        self.membership = self.member.membership
        self.membership.begin()
        self.first = self.membership.member_id

    def test_it_is_certain_from_before_the_renewal_less_drift_and_margin(self) -> None:
        self.assertAlmostEqual(self.membership.valid_until, self.member.clock.monotonic() + SESSION * (1 - DRIFT) - 1.0)
        self.assertTrue(self.membership.holds(self.first))

    def test_without_renewals_it_stops_before_the_server_drops_it(self) -> None:
        self.member.cut = {"renew"}
        while self.membership.holds(self.first):
            self.assertIn(self.first, self.world.server.members(GROUP))
            self.world.clock.advance(0.1)
        self.assertIn(self.first, self.world.server.members(GROUP))

    def test_one_failed_heartbeat_suspends_and_the_next_good_one_connects_without_a_new_id(self) -> None:
        self.member.cut = {"renew"}
        self.member.beat()
        self.assertIs(self.membership.state, MembershipState.SUSPENDED)
        self.assertFalse(self.membership.holds(self.first))
        self.member.cut = set()
        self.member.beat()
        self.assertIs(self.membership.state, MembershipState.CONNECTED)
        self.assertTrue(self.membership.holds(self.first))

    def test_an_answer_that_is_lost_after_the_renewal_was_made_is_no_renewal(self) -> None:
        until = self.membership.valid_until
        self.world.clock.advance(2)
        self.member.cut = {"renewed"}
        self.member.beat()
        self.assertEqual(self.membership.valid_until, until)

    def test_a_server_that_knows_nothing_of_it_any_more_is_away_for_the_ring_until_the_heartbeat_has_joined_again(
        self,
    ) -> None:
        def lost() -> View:
            raise NotMember("the group is gone")

        client = self.membership._client
        assert client is not None
        client.members = lost  # type: ignore[method-assign]
        with self.assertRaisesRegex(errors.Unavailable, "the group is gone"):
            self.membership.view()
        self.assertTrue(self.membership._wake.is_set())

    def test_a_backend_that_raises_what_it_may_not_is_replaced_like_one_that_does_not_answer(self) -> None:
        client = self.membership._client
        assert client is not None

        def broken() -> float:
            raise SystemExit("a mistake of its author")

        client.renew = broken  # type: ignore[method-assign]
        client.leave = client.close = broken  # type: ignore[method-assign,assignment]
        with self.assertLogs("moorage.coordination", "ERROR"):
            self.world.pass_time(SESSION + 3, [self.member])
        self.assertGreater(self.member.clients, 1)
        self.assertIs(self.membership.state, MembershipState.CONNECTED)
        self.assertNotEqual(self.membership.member_id, self.first)

    def test_ids_that_this_release_does_not_know_are_nobody(self) -> None:
        """Another release's, or somebody else's on the same server: a ring with them could not be built by anybody."""
        for strange in (b"moorage.v2:other", b"moorage.a.1.0.1.0", b"moorage.a.1.0.1.-5", b"moorage.a.b.c.d.e"):
            self.world.server.put(GROUP, strange, 1e9)
        self.assertEqual(self.membership.view().members, {self.first})
        self.member.look()
        self.member.look()
        current = self.member.keeper.current()
        assert current is not None
        self.assertEqual(current.members, (self.first,))

    def test_a_session_that_ended_is_followed_by_a_stay_under_another_id(self) -> None:
        self.world.server.remove(GROUP, self.first or b"")
        self.member.beat()
        self.assertIs(self.membership.state, MembershipState.CONNECTED)
        self.assertNotEqual(self.membership.member_id, self.first)
        self.assertEqual(self.world.server.members(GROUP), {self.membership.member_id})
        self.assertFalse(self.membership.holds(self.first))

    def test_a_client_that_gets_no_answer_for_long_is_replaced(self) -> None:
        self.member.cut = {"all"}
        for _ in range(60):
            self.world.clock.advance(0.5)
            self.member.beat()
        self.assertIs(self.membership.state, MembershipState.LOST)
        self.member.cut = set()
        for _ in range(20):
            self.world.clock.advance(0.5)
            self.member.beat()
        self.assertIs(self.membership.state, MembershipState.CONNECTED)
        self.assertNotEqual(self.membership.member_id, self.first)

    def test_a_server_that_lost_its_data_is_joined_again(self) -> None:
        self.world.server.wipe()
        self.member.beat()
        self.assertEqual(self.world.server.members(GROUP), {self.membership.member_id})

    def test_a_pause_beyond_the_session_ends_the_right_to_work_at_once(self) -> None:
        self.world.clock.advance(2 * SESSION)
        self.assertFalse(self.membership.holds(self.first))

    def test_tries_to_join_get_rarer(self) -> None:
        self.world.server.wipe()
        self.member.cut = {"start"}
        before = self.member.clients
        for _ in range(300):
            self.world.clock.advance(0.1)
            self.member.beat()
        self.assertLess(self.member.clients - before, 15)
        self.assertIn("the fault start", self.membership.problem)

    def test_stopping_leaves_the_group(self) -> None:
        self.membership.stop()
        self.assertEqual(self.world.server.members(GROUP), frozenset())
        self.assertFalse(self.membership.holds(self.first))
        self.member.beat()
        self.assertIs(self.membership.state, MembershipState.STOPPED)

    def test_a_start_that_fails_is_told(self) -> None:
        other = Member(self.world, 2, RingSettings())
        other.cut = {"join"}
        with self.assertRaises(errors.Unavailable):
            other.membership.begin()
        with self.assertRaises(errors.Unavailable):
            other.membership.view()


class MemberIdTests(unittest.TestCase):
    def test_an_id_says_its_parts(self) -> None:
        whole = MemberId("0f2b", 3, 1, 7, 2.5)
        self.assertEqual(MemberId.parse(bytes(whole)), whole)
        self.assertTrue(bytes(whole).startswith(b"moorage."))

    def test_what_is_no_id_is_refused(self) -> None:
        for text in (b"leader", b"moorage.", b"moorage.a.b.c.d.e", b"moorage.a.1.2"):
            with self.assertRaises(errors.InvalidInput):
                MemberId.parse(text)
