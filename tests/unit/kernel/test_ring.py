# SPDX-License-Identifier: Apache-2.0
"""The ring: every key has one owner, Sahara's; few keys move; vectors and bisection agree."""

from __future__ import annotations

import bisect
import hashlib
import random
import unittest
import uuid
from collections import Counter

import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from moorage import errors
from moorage.db.ranges import within
from moorage.ring import HASH_FUNCTIONS, POSITION_COUNT, Ring, position_of

NAMES = st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
WEIGHTED = st.dictionaries(st.binary(min_size=1, max_size=12), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.7]), min_size=1)
KEYS = st.lists(st.text(max_size=12), max_size=60)
REPLICAS = st.integers(1, 50)
HASH = st.sampled_from(HASH_FUNCTIONS)

#: Owners that Sahara's HashRing (40 replicas) gives to "object-0" ... "object-39" among engine-0 ... engine-6, as digits.
SAHARA_MEMBERS = [f"engine-{number}" for number in range(7)]
SAHARA_OWNERS = "1256330232234354442223506423615446001020"


class SaharasRing:
    """The construction of the specification, in its plainest form: an oracle that shares no line with the production code."""

    def __init__(self, members: list[str], replicas: int) -> None:
        self.points: dict[int, str] = {}
        for member in members:
            for number in range(replicas):
                self.points[self.hash(f"{member}:{number}")] = member
        self.sorted = sorted(self.points)

    @staticmethod
    def hash(text: str) -> int:
        return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest(), 16)

    def owner(self, key: str) -> str:
        place = bisect.bisect(self.sorted, self.hash(key))
        return self.points[self.sorted[place if place < len(self.sorted) else 0]]


class OwnerTests(unittest.TestCase):
    def test_owners_are_saharas(self) -> None:
        ring = Ring(SAHARA_MEMBERS, 40)
        keys = [f"object-{number}" for number in range(len(SAHARA_OWNERS))]
        self.assertEqual("".join(owner[-1] for owner in ring.owners(keys)), SAHARA_OWNERS)

    @given(st.lists(st.text("abcdef0123", min_size=1, max_size=8), min_size=1, max_size=9, unique=True), KEYS, REPLICAS)
    def test_owners_are_those_of_the_plain_construction(
        self, members: list[str], keys: list[str], replicas: int
    ) -> None:
        ring, oracle = Ring(members, replicas), SaharasRing(members, replicas)
        self.assertEqual(ring.owners(keys), [oracle.owner(key) for key in keys])

    @given(WEIGHTED, KEYS, REPLICAS, HASH)
    def test_subsets_are_disjoint_and_cover(
        self, members: dict[bytes, float], keys: list[str], replicas: int, function: str
    ) -> None:
        ring = Ring(members, replicas, function)
        parts = [each for member in members for each in ring.subset(keys, member)]
        self.assertEqual(Counter(parts), Counter(keys))

    @given(WEIGHTED, KEYS, REPLICAS, HASH)
    def test_vectors_and_bisection_agree(
        self, members: dict[bytes, float], keys: list[str], replicas: int, function: str
    ) -> None:
        ring = Ring(members, replicas, function)
        self.assertEqual(ring.owners(keys), [ring.owner(key) for key in keys])

    @given(NAMES, REPLICAS, HASH, st.randoms(use_true_random=False))
    def test_the_order_of_the_members_does_not_matter(
        self, members: list[bytes], replicas: int, function: str, chance: random.Random
    ) -> None:
        other = list(members)
        chance.shuffle(other)
        self.assertEqual(Ring(members, replicas, function).digest, Ring(other, replicas, function).digest)

    @given(NAMES, NAMES, REPLICAS, HASH)
    def test_equal_digests_are_equal_members(
        self, one: list[bytes], two: list[bytes], replicas: int, function: str
    ) -> None:
        same = Ring(one, replicas, function).digest == Ring(two, replicas, function).digest
        self.assertEqual(same, set(one) == set(two))

    def test_nobody_owns_anything_of_an_empty_ring(self) -> None:
        ring: Ring[str] = Ring([])
        self.assertEqual(ring.subset(["a"], "me"), [])
        for ask in (lambda: ring.owner("a"), lambda: ring.owners(["a"])):
            with self.assertRaises(errors.Unavailable):
                ask()

    def test_what_makes_no_ring_is_refused(self) -> None:
        for make in (
            lambda: Ring(["a", "a"]),
            lambda: Ring({"a": 0.0}),
            lambda: Ring({"a": float("nan")}),
            lambda: Ring(["a"], 0),
            lambda: Ring(["a"], 1, "sha1"),
        ):
            with self.assertRaises(errors.InvalidInput):
                make()


class RangeTests(unittest.TestCase):
    @given(WEIGHTED, KEYS, st.integers(1, 12), HASH)
    def test_ranges_hold_every_key_of_the_member_and_a_query_of_them_finds_it(
        self, members: dict[bytes, float], keys: list[str], replicas: int, function: str
    ) -> None:
        ring = Ring(members, replicas, function)
        table = sa.table("objects", sa.column("key"), sa.column("position"))
        engine = sa.create_engine("sqlite://")
        self.addCleanup(engine.dispose)
        unique = sorted(set(keys))
        with engine.begin() as tx:
            tx.exec_driver_sql("CREATE TABLE objects (key TEXT, position BIGINT)")
            if unique:
                tx.execute(sa.insert(table), [{"key": key, "position": position_of(key, function)} for key in unique])
            for member in members:
                query = sa.select(table.c.key).where(within(table.c.position, ring.ranges(member)))
                found = sorted(tx.execute(query).scalars())
                self.assertEqual(sorted(ring.subset(found, member)), sorted(ring.subset(unique, member)))

    @given(WEIGHTED, REPLICAS, HASH)
    def test_shares_are_what_the_ranges_hold(self, members: dict[bytes, float], replicas: int, function: str) -> None:
        ring = Ring(members, replicas, function)
        self.assertAlmostEqual(sum(ring.shares().values()), 1.0)
        for member, share in ring.shares().items():
            length = sum(end - first for first, end in ring.ranges(member))
            self.assertAlmostEqual(length / POSITION_COUNT, share, places=9)


class MovementTests(unittest.TestCase):
    """With numbers that repeat themselves: the ids are from a seeded source."""

    def setUp(self) -> None:
        chance = random.Random(7)
        self.keys = [str(uuid.UUID(int=chance.getrandbits(128))) for _ in range(20000)]
        self.names = [f"{chance.getrandbits(64):x}".encode() for _ in range(101)]

    def test_a_join_or_a_leave_moves_at_most_twice_the_ideal_and_nothing_else(self) -> None:
        for function in HASH_FUNCTIONS:
            for count in (2, 3, 10, 100):
                before = Ring(self.names[:count], 40, function).owners(self.keys)
                after = Ring(self.names[: count + 1], 40, function).owners(self.keys)
                moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
                with self.subTest(function=function, members=count):
                    self.assertEqual({new for _, new in moved}, {self.names[count]})
                    self.assertLessEqual(len(moved) / len(self.keys), 2 / (count + 1))

    def test_forty_points_keep_the_busiest_below_twice_the_mean(self) -> None:
        for function in HASH_FUNCTIONS:
            for count in (3, 10, 100):
                load = Counter(Ring(self.names[:count], 40, function).owners(self.keys))
                with self.subTest(function=function, members=count):
                    self.assertLess(max(load.values()), 2 * len(self.keys) / count)

    def test_twice_the_weight_is_about_twice_the_share(self) -> None:
        weights = {name: 2.0 if number == 0 else 1.0 for number, name in enumerate(self.names[:10])}
        share = Ring(weights, 160).shares()[self.names[0]]
        self.assertTrue(1.5 / 11 < share < 2.5 / 11, share)
