# SPDX-License-Identifier: Apache-2.0
"""Telling new, repeated, late and lost messages apart."""

from __future__ import annotations

import unittest

from hypothesis import given
from hypothesis import strategies as st

from moorage.rpc.interface import Origin
from moorage.rpc.sequence import OriginFilter, Verdict

WINDOW = 8
ORIGINS = st.builds(Origin, st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 30))


def judged(arrivals: list[Origin]) -> list[Verdict]:
    """What a plain reading of the rules says, from the whole history each time."""
    verdicts = []
    for index, origin in enumerate(arrivals):
        mine = [past for past in arrivals[:index] if past.service == origin.service]
        epoch = max((past.epoch for past in mine), default=None)
        same = [past.sequence for past in mine if past.epoch == epoch]
        if epoch is None:
            verdicts.append(Verdict.NEW)
        elif origin.epoch < epoch:
            verdicts.append(Verdict.OLD_EPOCH)
        elif origin.epoch > epoch:
            verdicts.append(Verdict.NEW if origin.sequence == 1 else Verdict.GAP)
        elif origin.sequence > max(same):
            verdicts.append(Verdict.NEW if origin.sequence == max(same) + 1 else Verdict.GAP)
        elif origin.sequence in same or max(same) - origin.sequence >= WINDOW:
            verdicts.append(Verdict.DUPLICATE)
        else:
            verdicts.append(Verdict.LATE)
    return verdicts


class OriginFilterTests(unittest.TestCase):
    @given(st.lists(ORIGINS, max_size=60))
    def test_any_arrivals_are_judged_by_the_rules(self, arrivals: list[Origin]) -> None:
        judge = OriginFilter(window=WINDOW)
        self.assertEqual(judged(arrivals), [judge.accept(origin) for origin in arrivals])

    @given(st.lists(ORIGINS, max_size=60))
    def test_no_message_is_taken_twice(self, arrivals: list[Origin]) -> None:
        judge = OriginFilter(window=WINDOW)
        taken = [origin for origin in arrivals if judge.accept(origin) in (Verdict.NEW, Verdict.GAP, Verdict.LATE)]
        self.assertEqual(len(set(taken)), len(taken))

    @given(st.integers(1, 50), st.sets(st.integers(1, 50)))
    def test_a_stream_with_losses_shows_each_gap_once(self, length: int, lost: set[int]) -> None:
        judge = OriginFilter()
        arrived = [number for number in range(1, length + 1) if number not in lost]
        verdicts = {number: judge.accept(Origin("a", 1, number)) for number in arrived}
        for number in arrived[1:]:
            expected = Verdict.NEW if number - 1 in verdicts else Verdict.GAP
            self.assertIs(expected, verdicts[number])

    def test_a_huge_jump_costs_no_memory(self) -> None:
        judge = OriginFilter()
        judge.accept(Origin("a", 1, 1))
        self.assertIs(Verdict.GAP, judge.accept(Origin("a", 1, 10**18)))
        self.assertIs(Verdict.DUPLICATE, judge.accept(Origin("a", 1, 1)))
        self.assertIs(Verdict.LATE, judge.accept(Origin("a", 1, 10**18 - 5)))

    def test_only_the_newest_word_is_fresh(self) -> None:
        self.assertEqual({Verdict.NEW, Verdict.GAP}, {verdict for verdict in Verdict if verdict.fresh})

    def test_the_one_not_heard_for_longest_is_forgotten(self) -> None:
        judge = OriginFilter(services=2)
        for service in "abac":
            judge.accept(Origin(service, 1, 1))
        self.assertEqual(2, len(judge))
        self.assertIs(Verdict.DUPLICATE, judge.accept(Origin("a", 1, 1)))
        self.assertIs(Verdict.NEW, judge.accept(Origin("b", 1, 1)))

    def test_a_forgotten_service_starts_anew(self) -> None:
        judge = OriginFilter()
        judge.accept(Origin("a", 5, 9))
        judge.forget("a")
        judge.forget("never heard of")
        self.assertIs(Verdict.NEW, judge.accept(Origin("a", 4, 2)))
