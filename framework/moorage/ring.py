# SPDX-License-Identifier: Apache-2.0
"""The hash ring: which member owns which key, as a pure function of the set of members.

The construction is that of Sahara's ``HashRing`` (sahara/service/coordinator.py): member ``m`` has
the points ``md5("m:0")``, ``md5("m:1")``, ... read as 128-bit numbers, and a key belongs to the
first point that is strictly greater than the key's own md5, wrapping at the end. With
``hash_function="md5"`` the owners are exactly Sahara's; ``"xxh3"`` is the same ring over the first
63 bits of XXH3-64, about five times as quick.

Places on the ring are *positions*: the first 63 bits of a hash, so that they fit into a signed
64-bit column and can be stored beside an object and indexed. The 65 bits of an md5 that a position
leaves out decide only when a key's position equals that of a point. :meth:`Ring.owner`,
:meth:`Ring.owners` and :meth:`Ring.subset` then compare the whole hash, so they are exact.
:meth:`Ring.ranges`, which knows positions only, counts such a position to both sides: what was
fetched by ranges is passed through :meth:`Ring.subset` once, and is then exact too.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from moorage import errors

__all__ = ["HASH_FUNCTIONS", "POSITION_BITS", "POSITION_COUNT", "Ring", "position_of"]

Member = TypeVar("Member", str, bytes)
Item = TypeVar("Item")
Positions = npt.NDArray[np.uint64]

POSITION_BITS = 63
#: Positions are 0 <= p < POSITION_COUNT.
POSITION_COUNT = 1 << POSITION_BITS


@dataclass(frozen=True, slots=True)
class _HashFunction:
    """``one`` hashes a label to a number of ``bits`` bits; ``positions`` hashes many keys to positions."""

    bits: int
    one: Callable[[bytes], int]
    positions: Callable[[Sequence[str | bytes]], Positions]


def _encoded(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


def _md5(label: bytes) -> int:
    return int.from_bytes(hashlib.md5(label, usedforsecurity=False).digest(), "big")


def _md5_positions(keys: Sequence[str | bytes]) -> Positions:
    md5 = hashlib.md5
    joined = b"".join([md5(_encoded(key), usedforsecurity=False).digest() for key in keys])
    # Every second big-endian word is the upper half of a digest.
    return np.frombuffer(joined, dtype=">u8")[::2].astype(np.uint64) >> np.uint64(64 - POSITION_BITS)


def _xxh3(label: bytes) -> int:
    return xxhash.xxh3_64_intdigest(label) >> (64 - POSITION_BITS)


def _xxh3_positions(keys: Sequence[str | bytes]) -> Positions:
    hash_one = xxhash.xxh3_64_intdigest
    hashes = np.fromiter([hash_one(_encoded(key)) for key in keys], np.uint64, len(keys))
    return hashes >> np.uint64(64 - POSITION_BITS)


_FUNCTIONS: Mapping[str, _HashFunction] = {
    "md5": _HashFunction(128, _md5, _md5_positions),
    "xxh3": _HashFunction(POSITION_BITS, _xxh3, _xxh3_positions),
}
#: What ``hash_function`` may be.
HASH_FUNCTIONS: tuple[str, ...] = tuple(_FUNCTIONS)


def _function(name: str) -> _HashFunction:
    if name not in _FUNCTIONS:
        raise errors.InvalidInput(
            f"The hash function of a ring cannot be {name!r}; use one of {', '.join(HASH_FUNCTIONS)}.",
            path="hash_function",
        )
    return _FUNCTIONS[name]


def position_of(key: str | bytes, hash_function: str = "md5") -> int:
    """Returns the position of a key, the same on every ring of that hash function; may be stored with the object."""
    function = _function(hash_function)
    return function.one(_encoded(key)) >> (function.bits - POSITION_BITS)


class Ring(Generic[Member]):
    """An immutable ring. Two rings with the same ``digest`` give every key to the same member.

    Building costs ``members * replicas`` hashes and a sort (1.3 ms for 100 members of 40 points).

    :param members: names, or name -> weight; a member of weight 2 has twice the points.
        Order does not matter.
    :param replicas: points of a member of weight 1. 40 is Sahara's; the busiest of 100 members then
        has 1.5 times the mean, with 160 it has 1.2 times.
    :param hash_function: ``md5`` or ``xxh3``; all members must use the same.
    :raises InvalidInput: a member occurs twice, a weight is not a positive number, replicas is
        below 1.
    """

    def __init__(
        self,
        members: Mapping[Member, float] | Sequence[Member],
        replicas: int = 40,
        hash_function: str = "md5",
    ) -> None:
        self._function = _function(hash_function)
        self._hash_name = hash_function
        if replicas < 1:
            raise errors.InvalidInput(
                f"A ring needs at least 1 point for each member, not {replicas}.", path="replicas"
            )
        self._replicas = replicas
        self._weights: dict[Member, float] = _checked_weights(members)
        self._members: tuple[Member, ...] = tuple(self._weights)
        self._index: dict[Member, int] = {member: number for number, member in enumerate(self._members)}
        self._build()

    def _build(self) -> None:
        points: list[tuple[int, int]] = []
        for number, (member, weight) in enumerate(self._weights.items()):
            label = _encoded(member)
            count = max(1, round(self._replicas * weight))
            points += [(self._function.one(b"%b:%d" % (label, replica)), number) for replica in range(count)]
        # Sorted by (hash, member number): of two equal points the first one owns, in each process
        # that builds the ring.
        points.sort()
        self._shift = self._function.bits - POSITION_BITS
        self._hashes = [point for point, _ in points]
        self._points = np.array([point >> self._shift for point in self._hashes], dtype=np.uint64)
        owners = [number for _, number in points]
        # One entry more: what lies behind the last point belongs to the first.
        self._owners = np.array(owners + owners[:1], dtype=np.int32)

    @property
    def members(self) -> tuple[Member, ...]:
        """The members, sorted by their bytes."""
        return self._members

    @property
    def weights(self) -> Mapping[Member, float]:
        """Member -> weight, sorted as ``members``."""
        return dict(self._weights)

    @property
    def hash_function(self) -> str:
        """``md5`` or ``xxh3``."""
        return self._hash_name

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that name members, weights, replicas and hash function."""
        summary = hashlib.blake2b(f"ring/1/{self._hash_name}/{self._replicas}".encode(), digest_size=16)
        for member, weight in self._weights.items():
            label = _encoded(member)
            # Lengths keep two different sets from running together into the same bytes.
            summary.update(b"/%d:%b=%b" % (len(label), label, repr(weight).encode()))
        return summary.hexdigest()

    def position(self, key: str | bytes) -> int:
        """Returns the key's position on this ring, 0 <= p < POSITION_COUNT."""
        return self._function.one(_encoded(key)) >> self._shift

    def positions(self, keys: Sequence[str | bytes]) -> Positions:
        """Returns the positions of many keys, in their order."""
        return self._function.positions(keys)

    def owner(self, key: str | bytes) -> Member:
        """Returns the member that owns the key.

        :raises Unavailable: the ring has no members.
        """
        self._need_members()
        return self._members[int(self._owners[self._place(key)])]

    def owner_numbers(self, keys: Sequence[str | bytes]) -> npt.NDArray[np.int32]:
        """For every key the number of its owner, an index into ``members``. Nothing is done per member.

        :raises Unavailable: the ring has no members.
        """
        self._need_members()
        if not len(keys):
            return np.empty(0, dtype=np.int32)
        positions = self._function.positions(keys)
        places = np.searchsorted(self._points, positions, side="right")
        if self._shift:
            # A key at the very position of a point: the bits that a position leaves out decide.
            tied = np.flatnonzero((places > 0) & (self._points[places - 1] == positions))
            for number in tied.tolist():
                places[number] = self._place(keys[number])
        return self._owners[places]

    def owners(self, keys: Sequence[str | bytes]) -> list[Member]:
        """Returns the owners of the keys, in their order.

        :raises Unavailable: the ring has no members.
        """
        return [self._members[number] for number in self.owner_numbers(keys).tolist()]

    def subset(
        self, items: Sequence[Item], member: Member, key: Callable[[Item], str | bytes] | None = None
    ) -> list[Item]:
        """Returns the items that the member owns, in their order; none when it is not a member.

        :param key: gives an item's key; without it the items are the keys.
        """
        if member not in self._index or not items:
            return []
        keys = items if key is None else [key(item) for item in items]
        mine = self.owner_numbers(keys) == self._index[member]  # type: ignore[arg-type]  # items are keys then
        return [items[number] for number in np.flatnonzero(mine).tolist()]

    def ranges(self, member: Member) -> list[tuple[int, int]]:
        """Where keys of the member can lie: sorted, separate half-open ranges of positions (first, end).

        No key of the member lies elsewhere. A key of another member lies inside only at the position
        of a point, where the position alone does not decide: pass what was fetched through
        :meth:`subset`. Nothing when it is not a member.
        """
        number = self._index.get(member)
        if number is None:
            return []
        if len(self._members) == 1:
            return [(0, POSITION_COUNT)]
        owned = np.flatnonzero(self._owners == number).tolist()
        found: list[tuple[int, int]] = []
        for place in owned:
            first = int(self._points[place - 1]) if place else 0
            end = self._end(place)
            if found and first <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            elif first < end:
                found.append((first, end))
        return found

    def shares(self) -> dict[Member, float]:
        """Returns the part of the positions that each member owns; the parts add up to 1 (none without members)."""
        if not self._members:
            return {}
        edges = [0, *self._points.tolist(), POSITION_COUNT]
        arcs = [after - before for before, after in zip(edges, edges[1:], strict=False)]
        sums = [0] * len(self._members)
        for arc, number in zip(arcs, self._owners.tolist(), strict=True):
            sums[number] += arc
        return {member: total / POSITION_COUNT for member, total in zip(self._members, sums, strict=True)}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ring) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Ring of {len(self)} members, {self._replicas} replicas, {self._hash_name}, {self.digest}>"

    def _place(self, key: str | bytes) -> int:
        return bisect.bisect_right(self._hashes, self._function.one(_encoded(key)))

    def _end(self, place: int) -> int:
        if place == len(self._points):
            return POSITION_COUNT
        # The point's own position may hold keys of both sides when a position is not the whole
        # hash.
        return int(self._points[place]) + (1 if self._shift else 0)

    def _need_members(self) -> None:
        if not self._members:
            raise errors.Unavailable(
                "The ring has no members, so nothing has an owner; wait until at least one member has joined."
            )


def _checked_weights(members: Mapping[Member, float] | Sequence[Member]) -> dict[Member, float]:
    """Member -> weight, sorted by the member's bytes, so that the order of the arguments cannot matter."""
    pairs = list(members.items()) if isinstance(members, Mapping) else [(member, 1.0) for member in members]
    weights: dict[Member, float] = {}
    for member, weight in sorted(pairs, key=lambda pair: _encoded(pair[0])):
        if member in weights:
            raise errors.InvalidInput(
                f"Member {member!r} is named twice; each member needs a name of its own.", path="members"
            )
        if not (math.isfinite(weight) and weight > 0):
            raise errors.InvalidInput(
                f"The weight of member {member!r} is {weight!r}; it must be a number above 0.", path="members"
            )
        weights[member] = float(weight)
    return weights
