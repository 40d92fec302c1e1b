# SPDX-License-Identifier: Apache-2.0
"""Kept weights are those of a new sum over all rows, to the last bit, whatever changed before."""

from __future__ import annotations

import random
import unittest
from unittest import mock

import numpy as np

from moorage.scheduling.weights import KeptWeights, Weighing, best_of, sum_of
from tests import cases, seeded


class KeptWeightsTests(unittest.TestCase):
    def setUp(self) -> None:
        self.random = seeded()

    def raws(self, size: int) -> list[float]:
        """Raw weights with many equal ones, or hardly any."""
        steps = self.random.choice((2, 5, 1000))
        return [self.random.randrange(steps) / self.random.choice((1, 3)) for _ in range(size)]

    def weighing(self, size: int) -> Weighing:
        chance = self.random
        multipliers = chance.choice((1.0, -1.0, 2.5, np.array([chance.uniform(-1, 2) for _ in range(size)])))
        lowest, highest = chance.choice(((None, None), (0.0, None), (1.0, 3.0), (5.0, 2.0)))
        return Weighing(np.array(self.raws(size)), multipliers, lowest, highest)

    def changed(self, weighings: list[Weighing], size: int) -> list[Weighing]:
        return [Weighing(np.array(self.raws(size)), each.multiplier, each.minval, each.maxval) for each in weighings]

    def test_they_are_those_of_a_new_sum(self) -> None:
        for _ in range(cases(150)):
            size = self.random.choice((2, 9, 300))
            weighings = [self.weighing(size) for _ in range(self.random.randrange(4))]
            kept = KeptWeights(weighings, size)
            now = [each.own() for each in weighings]
            most = self.random.choice((1, 3, None))
            for _ in range(40):
                later = self.changed(now, size)
                places = kept.best(3)[0].tolist()
                place = self.random.choice((places[0], places[-1], self.random.randrange(size)))
                kept.change(place, [float(each.raw[place]) for each in later])
                for mine, theirs in zip(now, later, strict=True):
                    mine.raw[place] = theirs.raw[place]
                wanted = sum_of([each.weights() for each in now], size)
                best = best_of(wanted, most)
                places, weights = kept.best(most)
                self.assertEqual(places.tolist(), best.tolist())
                self.assertEqual(weights.tolist(), wanted[best].tolist())

    def test_several_rows_change_and_rows_go(self) -> None:
        for _ in range(cases(60)):
            size = self.random.choice((5, 9, 15, 300))
            now = [self.weighing(size) for _ in range(self.random.randrange(4))]
            kept = KeptWeights(now, size)
            for _ in range(min(8, size - 1)):
                count = min(size, self.random.choice((2, 7, 8, 40)))
                places = np.array(sorted(self.random.sample(range(size), count)), dtype=np.intp)
                if self.random.random() < 0.5:
                    # The best rows are those that change most often.
                    places = np.union1d(places[2:], kept.best(2)[0])
                now = [each.own() for each in now]
                later = [Weighing(np.array(self.raws(len(places))), 1.0) for _ in now]
                for mine, other in zip(now, later, strict=True):
                    mine.raw[places] = other.raw
                kept.change_all(places, later)
                wanted = sum_of([each.weights() for each in now], size)
                best = best_of(wanted, 3)
                found, weights = kept.best(3)
                self.assertEqual(best.tolist(), found.tolist())
                self.assertEqual(wanted[best].tolist(), weights.tolist())
                gone = np.array([self.random.randrange(size)], dtype=np.intp)
                now, size = [each.without(gone) for each in now], size - 1
                kept.drop(gone)
                best = best_of(sum_of([each.weights() for each in now], size), 3)
                self.assertEqual(best.tolist(), kept.best(3)[0].tolist())

    def test_the_weighings_stay_as_they_are(self) -> None:
        raw = np.array([1.0, 2.0, 3.0])
        raw.flags.writeable = False
        KeptWeights([Weighing(raw, 1.0)], 3).change(1, [6.0])
        self.assertEqual(raw.tolist(), [1.0, 2.0, 3.0])

    def test_a_change_between_the_extremes_costs_no_new_sum(self) -> None:
        size = 1000
        weighing = Weighing(
            np.array([0.0, *(float(random.Random(7).randrange(1, 9)) for _ in range(size - 2)), 9.0]), 1.0
        )
        kept = KeptWeights([weighing], size)
        lower = [Weighing(np.maximum(weighing.raw - 1.0, 0.0), 1.0)]
        with mock.patch.object(Weighing, "range", side_effect=AssertionError("a sum over all rows")):
            for place in range(1, size - 1):
                kept.change(place, [float(lower[0].raw[place])])
        self.assertEqual(kept.best(2)[0].tolist(), [size - 1, int(np.argmax(lower[0].raw[:-1]))])


class NonsenseTests(unittest.TestCase):
    def test_a_weight_that_is_no_finite_number_is_refused(self) -> None:
        for nonsense in (float("nan"), float("inf"), -float("inf")):
            with self.assertRaisesRegex(ValueError, "finite"):
                Weighing(np.array([1.0, nonsense]), 1.0).weights()
