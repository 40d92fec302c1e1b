# SPDX-License-Identifier: Apache-2.0
"""Normalizes, sums and orders the weights of nodes; no plugin is called here.

A weigher gives each node a raw weight. The raw weights of a weigher are normalized to 0..1 (Nova's rule), multiplied, and added to
those of the other weighers. The best nodes have the largest sums; equal ones keep their order.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.scheduling.interface import Rows

__all__ = ["KeptWeights", "Weighing", "best_of", "sum_of"]

#: Rows in a block. The best row of each block gives a lower bound for the best rows of all.
_BLOCK = 64
#: How many times as many of the best rows are kept in order as are wanted. Most changes of a row take one of them away.
_SPARE = 4
#: Below so many rows, changes one by one cost less: 16 to 50 us, where arrays take 57 us for any number up to 16.
_FEW = 8


@dataclass(frozen=True, slots=True)
class _Range:
    """Defines how the raw weights of a weigher are normalized to 0..1.

    :param lowest: the smallest raw weight. :param highest: the largest one.
    :param low: the raw weight that becomes 0. :param high: the one that becomes 1. If it is not larger, no weight counts.
    """

    lowest: float
    highest: float
    low: float
    high: float


@dataclass(slots=True)
class Weighing:
    """Holds the raw weights that one weigher gives to some rows.

    :param minval: a bound that the weigher gives; None: the smallest raw weight. :param maxval: the same for the largest one.
    :param multiplier: a number, or one for each row.
    :raises ValueError: a weight is no finite number.
    """

    raw: npt.NDArray[np.float64]
    multiplier: Any
    minval: float | None = None
    maxval: float | None = None

    def __post_init__(self) -> None:
        if not np.isfinite(self.raw).all():
            raise ValueError("weigh_rows must answer one finite number for each row")

    def own(self) -> Weighing:
        """Returns a copy that may be changed. The arrays of a weigher may be columns of the fleet."""
        return Weighing(self.raw.copy(), self.multiplier, self.minval, self.maxval)

    def of(self, places: Rows) -> Weighing:
        """Returns a copy with some of the rows."""
        multiplier = self.multiplier
        return Weighing(
            self.raw[places],
            multiplier[places] if isinstance(multiplier, np.ndarray) else multiplier,
            self.minval,
            self.maxval,
        )

    def without(self, places: Rows) -> Weighing:
        """Returns a copy without some rows."""
        return self.of(np.delete(np.arange(len(self.raw)), places))

    def range(self) -> _Range:
        """Returns the smallest and the largest of the raw weights, and between which values they are normalized."""
        # The methods of arrays for these are Python.
        lowest, highest = float(np.minimum.reduce(self.raw)), float(np.maximum.reduce(self.raw))
        low = lowest if self.minval is None else self.minval
        return _Range(lowest, highest, low, highest if self.maxval is None else self.maxval)

    def weights(self, found: _Range | None = None) -> npt.NDArray[np.float64] | None:
        """Returns the normalized, multiplied weights as a new array; None if the weigher does not tell the rows apart."""
        found = found or self.range()
        return _normalized(self.raw, found, self.multiplier) if found.high > found.low else None

    def weight(self, found: _Range, place: int) -> float:
        """Returns the element at ``place`` of :meth:`weights`, to the last bit; 0 if the weigher does not tell the rows apart."""
        if found.high <= found.low:
            return 0.0
        multiplier = self.multiplier[place] if isinstance(self.multiplier, np.ndarray) else self.multiplier
        return float(_normalized(float(self.raw[place]), found, multiplier))

    def at_ends(self, found: _Range) -> list[int]:
        """Returns how many rows have the smallest and the largest of the raw weights."""
        return [int(np.count_nonzero(self.raw == extreme)) for extreme in (found.lowest, found.highest)]

    def moves(self, found: _Range, at_ends: list[int], place: int, raw: float) -> bool:
        """Gives one row another raw weight; returns whether that may change the weights of other rows.

        :param found: the range before. :param at_ends: by :meth:`at_ends`; this method keeps it right while the range stays.
        """
        before = float(self.raw[place])
        if before == raw:
            return False
        self.raw[place] = raw
        if not found.lowest <= raw <= found.highest:
            return True
        for end, extreme in enumerate((found.lowest, found.highest)):
            at_ends[end] += (raw == extreme) - (before == extreme)
        return not all(at_ends)

    def all_move(self, found: _Range, at_ends: list[int], places: Rows, raw: npt.NDArray[np.float64]) -> bool:
        """Gives several rows other raw weights; otherwise as :meth:`moves`."""
        before = self.raw[places]
        self.raw[places] = raw
        if np.minimum.reduce(raw) < found.lowest or np.maximum.reduce(raw) > found.highest:
            return True
        for end, extreme in enumerate((found.lowest, found.highest)):
            at_ends[end] += int(np.count_nonzero(raw == extreme)) - int(np.count_nonzero(before == extreme))
        return not all(at_ends)


class KeptWeights:
    """Keeps the summed weights of rows and their order while the raw weights of single rows change. Used by one thread.

    The weights are those of a new sum over all rows, to the last bit. A change costs the same for any number of rows, unless it
    moves the range of a weigher.
    """

    def __init__(self, weighings: Sequence[Weighing], size: int) -> None:
        self._weighings = [each.own() for each in weighings]
        self._size = size
        #: The best rows with their negated weights, in order. No other row comes before the last of them.
        self._order: list[tuple[float, int]] = []
        self._sum()

    @property
    def weighers(self) -> int:
        """Returns how many weighers there are."""
        return len(self._weighings)

    def change(self, place: int, raw: Sequence[float]) -> None:
        """Gives a row other raw weights, one by each weigher."""
        moved = [
            each.moves(found, at_ends, place, weight)
            for each, found, at_ends, weight in zip(self._weighings, self._ranges, self._at_ends, raw, strict=True)
        ]
        if any(moved):
            self._sum()
            return
        weights = [each.weight(found, place) for each, found in zip(self._weighings, self._ranges, strict=True)]
        self._reorder(place, sum(weights, 0.0))

    def change_all(self, places: Rows, others: Sequence[Weighing]) -> None:
        """Gives rows the raw weights that other weighings by the same weighers have, in the order of the rows."""
        differ = np.zeros(len(places), dtype=np.bool_)
        for each, other in zip(self._weighings, others, strict=True):
            differ |= each.raw[places] != other.raw
        indexes = np.flatnonzero(differ)
        if len(indexes) < _FEW:
            for index in indexes.tolist():
                self.change(int(places[index]), [float(other.raw[index]) for other in others])
            return
        places = places[indexes]
        moved = [
            each.all_move(found, at_ends, places, other.raw[indexes])
            for each, found, at_ends, other in zip(self._weighings, self._ranges, self._at_ends, others, strict=True)
        ]
        if any(moved):
            self._sum()
            return
        changed = [each.of(places).weights(found) for each, found in zip(self._weighings, self._ranges, strict=True)]
        self._reorder_all(places, sum_of(changed, len(places)))

    def drop(self, places: Rows) -> None:
        """Removes rows. The rows after a removed row get smaller indexes."""
        self._weighings = [each.without(places) for each in self._weighings]
        self._size -= len(places)
        self._sum()

    def best(self, most: int | None) -> tuple[Rows, npt.NDArray[np.float64]]:
        """Returns the indexes of the best rows, best first, and their weights; of all rows if ``most`` is None."""
        if most is None:
            places = best_of(self._weights, None)
            return places, self._weights[places]
        if len(self._order) < min(most, self._size):
            places = best_of(self._weights, most * _SPARE)
            self._order = list(zip((-self._weights[places]).tolist(), places.tolist(), strict=True))
        found = self._order[:most]
        return np.array([place for _, place in found], dtype=np.intp), np.array([-weight for weight, _ in found])

    def _sum(self) -> None:
        self._ranges = [each.range() for each in self._weighings]
        self._at_ends = [each.at_ends(found) for each, found in zip(self._weighings, self._ranges, strict=True)]
        weights = [each.weights(found) for each, found in zip(self._weighings, self._ranges, strict=True)]
        self._weights = sum_of(weights, self._size)
        self._order.clear()

    def _reorder_all(self, places: Rows, weights: npt.NDArray[np.float64]) -> None:
        self._weights[places] = weights
        if not self._order:
            return
        # Unchanged rows that are not in the list come after its last entry, so it lacks nothing up to that entry but changed rows.
        last, changed = self._order[-1], set(places.tolist())
        kept = [each for each in self._order if each[1] not in changed]
        moved = [each for each in zip((-weights).tolist(), places.tolist(), strict=True) if each <= last]
        self._order = sorted(kept + moved)

    def _reorder(self, place: int, weight: float) -> None:
        before, after = (-float(self._weights[place]), place), (-weight, place)
        self._weights[place] = weight
        index = bisect.bisect_left(self._order, before)
        if index < len(self._order) and self._order[index] == before:
            del self._order[index]
        if self._order and after < self._order[-1]:
            bisect.insort(self._order, after)


def _normalized(raw: Any, found: _Range, multiplier: Any) -> Any:
    """Normalizes and multiplies raw weights: an array, or one number."""
    if found.lowest < found.low or found.highest > found.high:
        raw = np.clip(raw, found.low, found.high)
    if found.low:
        raw = raw - found.low
    weights = raw / (found.high - found.low)
    if isinstance(multiplier, np.ndarray) or multiplier != 1.0:
        weights *= multiplier
    return weights


def sum_of(weights: Sequence[npt.NDArray[np.float64] | None], size: int) -> npt.NDArray[np.float64]:
    """Returns the sum of the weights of all weighers; zeros if there are none. Changes the first array."""
    total = None
    for each in weights:
        if each is not None:
            total = each if total is None else np.add(total, each, out=total)
    return np.zeros(size) if total is None else total


def best_of(weights: npt.NDArray[np.float64], most: int | None) -> Rows:
    """Returns the indexes of the largest weights, largest first, equal ones in their order; sorts only as many as it must."""
    count = len(weights)
    if count <= 1 or most == 0:
        return np.arange(count, dtype=np.intp)[:most]
    if most is None or most * _BLOCK >= count:
        return np.argsort(-weights, kind="stable")[:most]
    # The best of each block (rows that lie equally far from each other): as many of them as are wanted are at least as good as
    # the worst of these.
    blocks = weights[: count - count % _BLOCK].reshape(_BLOCK, -1).max(axis=0)
    bound = np.partition(blocks, -most)[-most]
    better = np.flatnonzero(weights > bound)
    better = better[np.argsort(-weights[better], kind="stable")]
    if len(better) >= most:
        return better[:most]
    return np.concatenate((better, np.flatnonzero(weights == bound)[: most - len(better)]))
