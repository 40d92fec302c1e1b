# SPDX-License-Identifier: Apache-2.0
"""The uuids that the API gives to instances."""

from __future__ import annotations

import unittest
import uuid

from hypothesis import given
from hypothesis import strategies as st

from moorage import randomness
from moorage.instances.api import uuids_of_set

MOMENTS = st.floats(0, 4e9)


class UuidTests(unittest.TestCase):
    """Laws of both."""

    @given(st.lists(st.uuids(), min_size=1, max_size=5, unique=True), st.integers(1, 200))
    def test_those_of_a_set_are_repeatable_and_lie_beside_each_other(self, firsts: list[uuid.UUID], count: int) -> None:
        found = [each for first in firsts for each in uuids_of_set(str(first).upper(), count)]
        again = [each for first in firsts for each in uuids_of_set(str(first), count)]
        self.assertEqual(found, again)
        self.assertEqual(found[::count], [str(first) for first in firsts])
        self.assertEqual(len(set(found)), len(firsts) * count)
        self.assertEqual(found, [str(uuid.UUID(each)) for each in found])
        self.assertEqual({each[:14] for each in found}, {str(first)[:14] for first in firsts})
        self.assertEqual(found[:count], uuids_of_set(found[0], count + 1)[:count])

    @given(MOMENTS, MOMENTS)
    def test_ordered_ones_sort_by_the_millisecond_in_which_they_were_made(self, one: float, other: float) -> None:
        first, second = randomness.new_ordered_uuid(one), randomness.new_ordered_uuid(other)
        self.assertNotEqual(first, second)
        if int(one * 1000) != int(other * 1000):
            self.assertEqual(first < second, one < other)
        for each, moment in ((first, one), (second, other)):
            made = uuid.UUID(each)
            self.assertEqual((str(made), made.version, made.variant), (each, 7, uuid.RFC_4122))
            self.assertEqual(made.int >> 80, int(moment * 1000))
