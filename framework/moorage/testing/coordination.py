# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of coordination backends, to be run against the real server.

Mix it into a ``unittest.TestCase`` and say how clients are made; each client is for one stay of one member::

    class MyBackendTests(CoordinationBackendTests, unittest.TestCase):
        def make_client(self, session_timeout):
            return MyBackend(BackendTools(conf=None, url=URL, clock=SystemClock(), session_timeout=session_timeout, ...))

A test waits for conditions, never for a time, with one exception: that a member which is kept alive outlives its session.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import secrets
import threading
import time
import unittest
from collections.abc import Callable
from typing import TYPE_CHECKING

from moorage import errors
from moorage.clock import SystemClock
from moorage.coordination.interface import MEMBER_PREFIX, CoordinationBackend, NotMember
from moorage.coordination.membership import MemberId, Membership, MembershipState, Timing

__all__ = ["SOON", "CoordinationBackendTests", "wait_for"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

#: Seconds within which what must happen happens, on a machine that has much else to do.
SOON = 60.0


def wait_for(condition: Callable[[], object], what: str, seconds: float = SOON) -> None:
    """Poll until it holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)


class CoordinationBackendTests(_Base):
    """What every backend must do."""

    #: Seconds; a backend whose sessions cannot be so short says what they can be.
    session_timeout = 2.0

    def make_client(self, session_timeout: float) -> CoordinationBackend:
        """Returns a new client, not started. Clients of one test must see each other."""
        raise NotImplementedError

    def end_session(self, client: CoordinationBackend) -> None:
        """Make the client fall silent without leaving, as the death of its process would.

        Nothing is to be done where a client beats by ``renew`` alone.
        """

    # -- helpers --------------------------------------------------------------------------------------------------

    def setUp(self) -> None:
        super().setUp()
        self.group = f"kit-{secrets.token_hex(6)}"

    def client(self) -> CoordinationBackend:
        made = self.make_client(self.session_timeout)
        self.addCleanup(made.close)
        made.start()
        return made

    def member(self, name: str) -> tuple[CoordinationBackend, bytes]:
        """Returns a client that has joined, and its id."""
        made, member_id = self.client(), MEMBER_PREFIX + f"{name}-{secrets.token_hex(4)}".encode()
        made.join(self.group, member_id)
        return made, member_id

    def keep(self, *clients: CoordinationBackend) -> None:
        """Renew them until the test ends, each in a thread of its own, as memberships do."""
        stop = threading.Event()

        def work(client: CoordinationBackend) -> None:
            while not stop.wait(self.session_timeout / 8):
                # The test looks for what follows from an error.
                with contextlib.suppress(errors.MoorageError):
                    client.renew()

        threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in clients]
        for thread in threads:
            thread.start()
            self.addCleanup(thread.join, SOON)
        self.addCleanup(stop.set)

    def membership(self, worker: int = 0, timing: Timing | None = None) -> Membership:
        """Returns the production code over this backend, running."""
        timing = timing or Timing(interval=self.session_timeout / 8, margin=0.2, reset_after=self.session_timeout)
        base = MemberId(f"kit{secrets.token_hex(4)}", 1, worker)
        made = Membership(
            lambda changed: self.make_client(self.session_timeout), self.group, base, SystemClock(), timing
        )
        self.addCleanup(made.stop)
        made.begin()
        made.start()
        return made

    # -- the law --------------------------------------------------------------------------------------------------

    def test_members_see_each_other_under_the_very_ids_that_they_gave(self) -> None:
        (one, first), (two, second) = self.member("a"), self.member("b")
        self.keep(one, two)
        for client in (one, two):
            wait_for(lambda client=client: client.members().members == {first, second}, "both")  # type: ignore[misc]

    def test_groups_are_apart(self) -> None:
        one, first = self.member("a")
        self.group += "-other"
        two, second = self.member("b")
        self.keep(one, two)
        self.assertEqual(({first}, {second}), (one.members().members, two.members().members))

    def test_a_view_is_as_old_as_the_question(self) -> None:
        one, _ = self.member("a")
        before = time.monotonic()
        view = one.members()
        self.assertTrue(before <= view.observed_at <= time.monotonic())

    def test_a_renewal_holds_for_no_longer_than_the_session(self) -> None:
        one, _ = self.member("a")
        until = one.renew()
        self.assertLessEqual(until, time.monotonic() + self.session_timeout)
        self.assertGreater(until, time.monotonic() - self.session_timeout)

    def test_who_leaves_is_gone_at_once_and_told_so(self) -> None:
        (one, first), (two, _) = self.member("a"), self.member("b")
        two.leave()
        wait_for(lambda: one.members().members == {first}, "one alone", self.session_timeout)
        with self.assertRaises(NotMember):
            two.renew()

    def test_who_renews_outlives_the_session_and_who_falls_silent_is_gone_after_it(self) -> None:
        (one, first), (two, second) = self.member("a"), self.member("b")
        self.keep(one)
        certain = two.renew()
        self.end_session(two)
        last_seen = time.monotonic()

        def gone() -> bool:
            nonlocal last_seen
            asked = time.monotonic()
            if second in one.members().members:
                last_seen = asked
                return False
            return True

        wait_for(gone, "the silent one to go")
        # The promised time was kept: no server dropped it earlier, but for the second to which some servers round.
        self.assertGreater(time.monotonic(), certain - 1.0)
        wait_for(lambda: time.monotonic() > last_seen + self.session_timeout / 2, "more than a session's time")
        self.assertEqual(one.members().members, {first})

    def test_many_that_join_a_new_group_at_once_are_all_in_it(self) -> None:
        clients = [self.client() for _ in range(8)]
        barrier = threading.Barrier(len(clients))

        def join(number: int) -> bytes:
            member_id = MEMBER_PREFIX + b"m%d-" % number + secrets.token_hex(4).encode()
            barrier.wait(SOON)
            clients[number].join(self.group, member_id)
            self.keep(clients[number])
            return member_id

        with concurrent.futures.ThreadPoolExecutor(len(clients)) as pool:
            ids = frozenset(pool.map(join, range(len(clients))))
        wait_for(lambda: clients[0].members().members == ids, "all eight")

    def test_a_membership_whose_session_is_taken_away_joins_again_as_somebody_else(self) -> None:
        membership = self.membership()
        first = membership.member_id
        watcher, _ = self.member("watcher")
        self.keep(watcher)
        membership._client.leave()  # type: ignore[union-attr]  # the test's own hand on it
        wait_for(
            lambda: membership.member_id not in (None, first) and membership.state is MembershipState.CONNECTED, "again"
        )
        self.assertFalse(membership.holds(first))
        wait_for(lambda: membership.member_id in watcher.members().members, "the others see it")
        self.assertNotIn(first, watcher.members().members)

    def test_closing_never_fails(self) -> None:
        never_started = self.make_client(self.session_timeout)
        never_started.close()
        one, _ = self.member("a")
        for _ in range(2):
            one.close()
        with self.assertRaises(errors.MoorageError):
            one.renew()
