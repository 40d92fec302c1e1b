# SPDX-License-Identifier: Apache-2.0
"""The providers of all nodes as columns, sorted by the row of their node, and which nodes can fulfil the groups of a request.

A few array operations decide nearly every node. They say no where a group finds no provider, and yes where the groups cannot get in
each other's way. Only the nodes between the two are searched (:mod:`moorage.scheduling.assignment`), those that are equal once.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moorage.inventory import InventoryItem
from moorage.read_only import frozen_array
from moorage.request_groups import CandidateQuery, RequestGroup
from moorage.scheduling.assignment import STEPS, Demand, Search, takes_amount
from moorage.scheduling.interface import Mask, NodeState, ProviderState, Rows

__all__ = ["ProviderColumns", "ProviderUse"]

Floats = npt.NDArray[np.float64]
_ALL: npt.NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
#: min_unit, max_unit and step_size of an inventory.
_Shape = tuple[int, int, int]
#: Masks of traits and amounts that are kept.
_KEPT = 256
#: Answers about room that are kept between two readings.
_ROOMS = 64
#: Levels of a tree that are distinguished.
_DEEPEST = 64
#: Steps that the searches of one decision share; the least that each of them has; and how many are repeated if no row has passed.
_STEPS, _LEAST, _AGAIN = 100_000, 200, 4


@dataclass(frozen=True, slots=True, eq=False)
class _Inventories:
    """All inventories of one class, by the number of their provider.

    :param at: the numbers of the providers, ascending. The other columns have one value for each.
    :param starts: where the providers of each node that has the class begin; ``rows``: the rows of these nodes.
    """

    at: Rows
    rows: Rows
    starts: Rows
    capacity: Floats
    used: Floats
    shapes: npt.NDArray[np.intp]

    def count(self, inventories: Mask, size: int) -> npt.NDArray[Any]:
        """Returns how many of these inventories each of so many rows has."""
        single = len(self.rows) == len(self.at)
        if single and len(self.rows) == size:
            return inventories
        counts = np.zeros(size, dtype=np.intp)
        counts[self.rows] = inventories if single else _summed(inventories, self.starts)
        return counts


@dataclass(frozen=True, slots=True, eq=False)
class _Room:
    """Which inventories of a class may give an amount, by the last reading of the store.

    :param room: yes or no for each inventory; ``counts``: how many may give it by row.
    :param allowed: which take the amount and have the traits, whatever is used; None: all.
    """

    room: Mask
    counts: npt.NDArray[Any]
    allowed: Mask | None


class ProviderUse:
    """What was claimed or released since the store was last read, by provider and class. Written by one thread at a time.

    The reading of the store does not have it yet, or has it already: what was held when a reading began counts as read.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Mapping[str, Mapping[str, int]]] = {}
        self._read: dict[str, Mapping[str, Mapping[str, int]]] = {}
        self._gone: dict[str, Mapping[str, Mapping[str, int]]] = {}
        self.sums: Mapping[tuple[str, str], int] = {}

    def hold(self, uuid: str, holds: Mapping[str, Mapping[str, int]]) -> None:
        """A consumer has just claimed this, in place of what it claimed before."""
        self._read.pop(uuid, None)
        self._add_up([(-1, self._pending.get(uuid)), (1, holds)])
        self._pending[uuid] = holds

    def release(self, uuid: str) -> bool:
        """A consumer holds nothing any more; False when nothing was known of it."""
        pending = self._pending.pop(uuid, None)
        if pending is not None:
            self._add_up([(-1, pending)])
            return True
        read = self._read.pop(uuid, None)
        if read is None:
            return False
        self._add_up([(1, self._gone.get(uuid)), (-1, read)])
        self._gone[uuid] = read
        return True

    def held(self) -> list[str]:
        """Returns the consumers whose changes the next reading has."""
        return [*self._pending, *self._gone]

    def read(self, uuids: Collection[str]) -> None:
        """Marks the changes of these consumers as read: the store was read after them."""
        changes: list[tuple[int, Mapping[str, Mapping[str, int]] | None]] = []
        for uuid in uuids:
            held = self._pending.pop(uuid, None)
            if held is not None:
                self._read[uuid] = held
            changes += [(-1, held), (1, self._gone.pop(uuid, None))]
        self._add_up(changes)

    def _add_up(self, changes: Iterable[tuple[int, Mapping[str, Mapping[str, int]] | None]]) -> None:
        """Adds or takes away what consumers hold. Snapshots keep the sums that they have."""
        sums = dict(self.sums)
        for sign, holds in changes:
            for provider, taken in (holds or {}).items():
                for name, amount in taken.items():
                    total = sums.pop((provider, name), 0) + sign * amount
                    if total:
                        sums[provider, name] = total
        self.sums = sums


@dataclass(frozen=True, slots=True, eq=False)
class ProviderColumns:
    """Providers have numbers: those of row 0 first, each node's in the order of :attr:`NodeState.providers`.

    :param starts: the number of the first provider of each row, which is the node's own.
    :param row: the row of each provider; ``parent``: the number of the provider above it, or its own.
    :param nested: rows with several providers.
    :param numbers: uuid -> numbers; a pool has one for each node that takes of it.
    """

    providers: Sequence[ProviderState]
    starts: Rows
    row: Rows
    parent: Rows
    traits: npt.NDArray[np.intp]
    trait_sets: Sequence[frozenset[str]]
    inventories: Mapping[str, _Inventories]
    shapes: Sequence[_Shape]
    nested: Mask
    numbers: Mapping[str, Sequence[int]]
    _kept: dict[Hashable, Any] = field(default_factory=dict)
    #: What follows from use too, and is computed again after a reading that found other use.
    _rooms: dict[Hashable, _Room] = field(default_factory=dict)

    @classmethod
    def of(cls, nodes: Sequence[NodeState]) -> ProviderColumns:
        """Returns the columns of all nodes."""
        of_row = [node.own_and_nested for node in nodes]
        counts = np.array([len(each) for each in of_row], dtype=np.intp)
        starts = np.concatenate((np.zeros(1, dtype=np.intp), np.cumsum(counts)))[:-1]
        providers = list(itertools.chain.from_iterable(of_row))
        numbers: dict[str, list[int]] = {}
        for number, each in enumerate(providers):
            numbers.setdefault(each.uuid, []).append(number)
        row = np.repeat(np.arange(len(nodes), dtype=np.intp), counts)
        parent = np.arange(len(providers), dtype=np.intp)
        for start, mine in zip(starts.tolist(), of_row, strict=True):
            if len(mine) > 1:
                place = {each.uuid: start + number for number, each in enumerate(mine)}
                for number, each in enumerate(mine, start):
                    parent[number] = place.get(each.parent or "", number)
        trait_sets: dict[frozenset[str], int] = {}
        traits = np.array([trait_sets.setdefault(each.traits, len(trait_sets)) for each in providers], dtype=np.intp)
        shapes: dict[_Shape, int] = {}
        return cls(
            providers,
            frozen_array(starts),
            frozen_array(row),
            frozen_array(parent),
            frozen_array(traits),
            tuple(trait_sets),
            _inventories(providers, row, shapes),
            tuple(shapes),
            frozen_array(counts > 1),
            numbers,
        )

    def changed(self, rows: Rows, nodes: Sequence[NodeState]) -> ProviderColumns | None:
        """Returns the columns with other use of the providers of some rows; None: more than use has changed."""
        numbers: list[int] = []
        states: list[ProviderState] = []
        for row, node in zip(rows.tolist(), nodes, strict=True):
            mine = node.own_and_nested
            start = int(self.starts[row])
            before = self.providers[start : start + len(mine)]
            end = int(self.starts[row + 1]) if row + 1 < len(self.starts) else len(self.providers)
            if end - start != len(mine) or not all(map(_differ_in_use, before, mine)):
                return None
            numbers += range(start, end)
            states += mine
        providers = list(self.providers)
        for number, state in zip(numbers, states, strict=True):
            providers[number] = state
        inventories = dict(self.inventories)
        changed = np.array(numbers, dtype=np.intp)
        for name, table in self.inventories.items():
            places = np.searchsorted(table.at, changed)
            here = places < len(table.at)
            here[here] = table.at[places[here]] == changed[here]
            if here.any():
                used = table.used.copy()
                used[places[here]] = [states[each].used.get(name, 0) for each in np.flatnonzero(here).tolist()]
                inventories[name] = replace(table, used=frozen_array(used))
        return replace(self, providers=providers, inventories=inventories, _rooms={})

    def of_row(self, row: int) -> Sequence[ProviderState]:
        """Returns the providers of a node."""
        end = int(self.starts[row + 1]) if row + 1 < len(self.starts) else len(self.providers)
        return self.providers[int(self.starts[row]) : end]

    def depths(self) -> Rows:
        """Returns how many providers are above each one."""
        found: Rows | None = self._kept.get("depths")
        if found is None:
            up = np.arange(len(self.providers), dtype=np.intp)
            found = np.zeros(len(up), dtype=np.intp)
            for _ in range(_DEEPEST):
                above = self.parent[up]
                moved = above != up
                if not moved.any():
                    break
                found += moved
                up = above
            self._kept["depths"] = found = frozen_array(found)
        return found

    def changes(self, name: str, sums: Mapping[tuple[str, str], int]) -> tuple[Rows, Floats]:
        """Returns the inventories of a class that something was claimed from since the reading, and how much."""
        table = self.inventories[name]
        places: list[int] = []
        amounts: list[float] = []
        for (uuid, of_class), amount in sums.items():
            if of_class == name and amount:
                for number in self.numbers.get(uuid, ()):
                    place = bisect.bisect_left(table.at, number)
                    if place < len(table.at) and table.at[place] == number:
                        places.append(place)
                        amounts.append(amount)
        return np.array(places, dtype=np.intp), np.array(amounts, dtype=np.float64)

    def used(self, name: str, sums: Mapping[tuple[str, str], int]) -> Floats:
        """What is used of a class by its inventories, with what was claimed since the reading."""
        places, amounts = self.changes(name, sums)
        if not len(places):
            return self.inventories[name].used
        used = self.inventories[name].used.copy()
        used[places] += amounts
        return used

    def room(
        self, name: str, amount: int, required: tuple[frozenset[str], ...], forbidden: frozenset[str], rule: str
    ) -> _Room:
        """Which inventories of a class may give an amount with these traits, by the reading."""
        key = (name, amount, required, forbidden, rule)
        found = self._rooms.get(key)
        if found is None:
            table = self.inventories[name]
            allowed = self.of_class(amount, name, rule)
            if required or forbidden:
                having = self.with_class_and_traits(name, required, forbidden)
                allowed = having if allowed is None else allowed & having
            room: Mask = table.capacity - table.used >= amount
            if allowed is not None:
                room &= allowed
            if len(self._rooms) >= _ROOMS:
                self._rooms.clear()
            counts = table.count(room, len(self.starts))
            found = self._rooms[key] = _Room(frozen_array(room), frozen_array(counts), allowed)
        return found

    def fits(self, query: CandidateQuery, sums: Mapping[tuple[str, str], int], rule: str) -> Mask:
        """Which rows can fulfil all groups of a query."""
        return _Fit(self, query, sums, rule).run()

    def of_class(self, amount: int, name: str, rule: str) -> Mask | None:
        """Which inventories of a class take the amount at all; None: all."""
        key = (amount, name, rule)
        found: Mask | None = self._kept.get(key)
        if found is None:
            items = [InventoryItem(name, 1, 0, *shape) for shape in self.shapes]
            takes = np.array([takes_amount(item, amount, rule) for item in items], dtype=np.bool_)
            found = self._keep(key, takes[self.inventories[name].shapes])
            if found.all():
                # An empty array stands for all, which need not be looked at.
                found = self._keep(key, _ALL)
        return found if len(found) else None

    def with_class_and_traits(self, name: str, required: Sequence[frozenset[str]], forbidden: frozenset[str]) -> Mask:
        """As :meth:`with_traits`, for the inventories of a class."""
        key = (name, tuple(required), forbidden)
        found: Mask | None = self._kept.get(key)
        if found is None:
            found = self._keep(key, self.with_traits(required, forbidden)[self.inventories[name].at])
        return found

    def with_traits(self, required: Sequence[frozenset[str]], forbidden: frozenset[str] = frozenset()) -> Mask:
        """Which providers have one trait of each set, and no forbidden one."""
        key = (tuple(required), forbidden)
        found: Mask | None = self._kept.get(key)
        if found is None:
            answers = [all(each & traits for each in required) and not forbidden & traits for traits in self.trait_sets]
            found = self._keep(key, np.array(answers, dtype=np.bool_)[self.traits])
        return found

    def rows_with_trait(self, names: frozenset[str]) -> Mask:
        """Which rows have one of the traits on any provider."""
        found: Mask | None = self._kept.get(names)
        if found is None:
            has = self.with_traits((names,))
            found = self._keep(names, np.logical_or.reduceat(has, self.starts) if len(self.starts) else self.nested)
        return found

    def _keep(self, key: Hashable, value: Mask) -> Mask:
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        value = self._kept[key] = frozen_array(value)
        return value


def _differ_in_use(before: ProviderState, after: ProviderState) -> bool:
    return before.used is after.used and before is after or replace(before, used=after.used) == after


def _inventories(
    providers: Sequence[ProviderState], row: Rows, shapes: dict[_Shape, int]
) -> Mapping[str, _Inventories]:
    found: dict[str, tuple[list[int], list[float], list[float], list[int]]] = {}
    for number, each in enumerate(providers):
        for item in each.inventories:
            at, capacity, used, of_shape = found.setdefault(item.resource_class, ([], [], [], []))
            at.append(number)
            capacity.append(item.capacity)
            used.append(each.used.get(item.resource_class, 0))
            # What an inventory says beside its total; few differ.
            shape = (item.min_unit, item.max_unit, item.step_size)
            of_shape.append(shapes.setdefault(shape, len(shapes)))
    tables = {}
    for name, (numbers, capacity, used, of_shape) in found.items():
        places = np.array(numbers, dtype=np.intp)
        rows, starts = np.unique(row[places], return_index=True)
        tables[name] = _Inventories(
            frozen_array(places),
            frozen_array(rows),
            frozen_array(starts.astype(np.intp)),
            frozen_array(np.array(capacity, dtype=np.float64)),
            frozen_array(np.array(used, dtype=np.float64)),
            frozen_array(np.array(of_shape, dtype=np.intp)),
        )
    return tables


@dataclass(slots=True, eq=False)
class _Answer:
    """Which providers may give some resources, and how many each row has.

    :param table: where ``room`` says it of the inventories of one class; None: ``room`` says it of all providers.
    """

    table: _Inventories | None
    room: Mask
    counts: npt.NDArray[Any]
    providers: int
    _may: Mask | None = None

    @property
    def may(self) -> Mask:
        """Which of all providers."""
        if self.table is None:
            return self.room
        if self._may is None:
            self._may = np.zeros(self.providers, dtype=np.bool_)
            self._may[self.table.at] = self.room
        return self._may


@dataclass(frozen=True, slots=True, eq=False)
class _Want:
    """A group with a suffix, or a class of the group without one."""

    suffix: str
    resources: Mapping[str, int]
    answer: _Answer

    @property
    def may(self) -> Mask:
        """Which providers may give it."""
        return self.answer.may

    @property
    def counts(self) -> npt.NDArray[Any]:
        """How many providers of each row may give it."""
        return self.answer.counts


class _Fit:
    """Decides one query on all rows."""

    def __init__(
        self, columns: ProviderColumns, query: CandidateQuery, sums: Mapping[tuple[str, str], int], rule: str
    ) -> None:
        self._columns = columns
        self._query = query
        self._sums = sums
        self._rule = rule
        self._size = len(columns.starts)
        self._changed: dict[str, tuple[Rows, Floats]] = {}
        self._answers: dict[object, _Answer] = {}
        self._found_tops: dict[frozenset[int], Mask] = {}

    def run(self) -> Mask:
        """Which rows pass."""
        nothing = np.zeros(self._size, dtype=np.bool_)
        names = {name for group in self._query.groups for name in group.resources}
        if not self._size or not names <= self._columns.inventories.keys():
            return nothing
        wants = [self._want(group, dict(part)) for group in self._query.groups for part in _parts(group)]
        # Wants that ask for the same share an answer.
        possible = functools.reduce(np.logical_and, (each.counts > 0 for each in self._answers.values()))
        sure = possible.copy()
        self._spread_traits(wants, possible, sure)
        self._subtrees(wants, possible)
        self._together(wants, possible, sure)
        sure &= possible
        return self._searched(possible, sure)

    def _want(self, group: RequestGroup, resources: Mapping[str, int]) -> _Want:
        # The traits of the group without a suffix are those of all of its providers together.
        required = group.required if group.suffix else ()
        content = (tuple(sorted(resources.items())), required, group.forbidden)
        answer = self._answers.get(content)
        if answer is None:
            answer = self._answers[content] = self._answer(resources, required, group.forbidden)
        return _Want(group.suffix, resources, answer)

    def _answer(
        self, resources: Mapping[str, int], required: tuple[frozenset[str], ...], forbidden: frozenset[str]
    ) -> _Answer:
        columns, size = self._columns, len(self._columns.providers)
        if len(resources) == 1:
            ((name, amount),) = resources.items()
            room, counts = self._room(name, amount, required, forbidden)
            return _Answer(columns.inventories[name], room, counts, size)
        any_trait = not (required or forbidden)
        may = np.ones(size, dtype=np.bool_) if any_trait else columns.with_traits(required, forbidden)
        for name, amount in resources.items():
            here = np.zeros(size, dtype=np.bool_)
            here[columns.inventories[name].at] = self._room(name, amount)[0]
            may = may & here
        return _Answer(None, may, _summed(may, columns.starts), size)

    def _room(
        self,
        name: str,
        amount: int,
        required: tuple[frozenset[str], ...] = (),
        forbidden: frozenset[str] = frozenset(),
    ) -> tuple[Mask, npt.NDArray[Any]]:
        """Which inventories of the class may give the amount with these traits, and how many of each row."""
        columns, table = self._columns, self._columns.inventories[name]
        read = columns.room(name, amount, required, forbidden, self._rule)
        places, more = self._changes(name)
        if not len(places):
            return read.room, read.counts
        now = table.capacity[places] - table.used[places] - more >= amount
        if read.allowed is not None:
            now &= read.allowed[places]
        room = read.room.copy()
        room[places] = now
        if read.counts.dtype == np.bool_:
            # Each row has one inventory of the class.
            return room, room
        counts = read.counts.copy()
        np.add.at(counts, columns.row[table.at[places]], now.astype(counts.dtype) - read.room[places])
        return room, counts

    def _changes(self, name: str) -> tuple[Rows, Floats]:
        found = self._changed.get(name)
        if found is None:
            found = self._changed[name] = self._columns.changes(name, self._sums)
        return found

    def _use(self, name: str) -> Floats:
        return self._columns.used(name, self._sums)

    def _any(self, providers: Mask) -> Mask:
        """Rows that have any of the providers."""
        answer: Mask = np.logical_or.reduceat(providers, self._columns.starts)
        return answer

    def _spread_traits(self, wants: Sequence[_Want], possible: Mask, sure: Mask) -> None:
        """The traits of the group without a suffix: each set needs a provider that gives something; one with all sets does."""
        group: RequestGroup | None = next(
            (each for each in self._query.groups if not each.suffix and each.required), None
        )
        if group is None:
            return
        giving: Mask = np.logical_or.reduce([want.may for want in wants if not want.suffix])
        for names in group.required:
            has = self._columns.with_traits((names,))
            possible &= self._any(giving & has)
        if len(group.required) > 1:
            sure &= self._any(giving & self._columns.with_traits(group.required))

    def _subtrees(self, wants: Sequence[_Want], possible: Mask) -> None:
        """Of each ``same_subtree`` one group must have a provider below which all the others have one."""
        for of_set in self._sets(wants):
            possible &= self._any(self._tops(of_set))

    def _sets(self, wants: Iterable[_Want]) -> list[list[_Want]]:
        """Returns the wants of each ``same_subtree``."""
        return [[want for want in wants if want.suffix in suffixes] for suffixes in self._query.same_subtree]

    def _tops(self, wants: Iterable[_Want]) -> Mask:
        """Providers that may give one of the wants, and below which, or at which, all of them find one."""
        answers = {id(want.answer): want.answer for want in wants}
        found = self._found_tops.get(frozenset(answers))
        if found is None:
            everything: Mask = np.logical_and.reduce([self._below(each) for each in answers.values()])
            top: Mask = np.logical_or.reduce([each.may for each in answers.values()])
            found = self._found_tops[frozenset(answers)] = top & everything
        return found

    def _below(self, answer: _Answer) -> Mask:
        """Providers that are among those of an answer, or above one of them."""
        found = answer.may.copy()
        self._mark_above(np.flatnonzero(found), found)
        return found

    def _mark_above(self, at: Rows, found: Mask) -> None:
        """Marks all providers above these, upwards until one is marked already."""
        parent = self._columns.parent
        while len(at):
            above = parent[at]
            # Brothers have one parent, so that a number may stand there several times.
            at = above[~found[above]]
            found[at] = True

    def _together(self, wants: Sequence[_Want], possible: Mask, sure: Mask) -> None:
        """Whether the wants can get in each other's way: never, only where there are few providers, or as a search shows."""
        groups = [want for want in wants if want.suffix]
        classes = {name for want in groups for name in want.resources}
        rivals = [*groups, *(want for want in wants if not want.suffix and want.resources.keys() & classes)]
        if len(rivals) < 2:
            return
        if self._are_independent(rivals):
            if len(self._query.same_subtree) > 1:
                sure[:] = False
            return
        spread_traits = any(each.required for each in self._query.groups if not each.suffix)
        if self._query.same_subtree or (spread_traits and len(rivals) > len(groups)):
            sure &= self._apart(rivals)
            sure = np.zeros_like(sure)
        self._count(rivals, len(groups), possible, sure)

    def _count(self, rivals: Sequence[_Want], groups: int, possible: Mask, sure: Mask) -> None:
        """Whether rows have enough providers for wants that can get in each other's way."""
        alike = all(want.answer is rivals[0].answer for want in rivals)
        if alike and not self._query.isolate and len(rivals[0].resources) == 1:
            self._alike(rivals, possible, sure)
            return
        # With as many providers for each want as there are wants with fewer, each finds one of its own (Hall's theorem).
        if alike:
            enough: Any = rivals[0].counts >= len(rivals)
        else:
            counts = np.sort(np.stack([want.counts for want in rivals]), axis=0)
            enough = (counts >= np.arange(1, len(rivals) + 1)[:, None]).all(axis=0)
        sure &= enough
        if self._query.isolate and alike and len(rivals) == groups:
            possible &= enough

    def _apart(self, wants: Sequence[_Want]) -> Mask:
        """Rows where each ``same_subtree`` finds a subtree that no other one needs; none, unless all of them ask for the same."""
        sets = self._sets(wants)
        suffixes = sorted(want.suffix for of_set in sets for want in of_set)
        kinds = {tuple(sorted(id(want.answer) for want in of_set)) for of_set in sets}
        if len(kinds) != 1 or suffixes != sorted(want.suffix for want in wants) or not self._are_independent(sets[0]):
            return np.zeros(self._size, dtype=np.bool_)
        tops = self._tops(sets[0])
        # A top that is above another one stands for no other subtree.
        above = np.zeros_like(tops)
        parent, at = self._columns.parent, np.flatnonzero(tops)
        first = parent[at][parent[at] != at]
        above[first] = True
        self._mark_above(first, above)
        answer: Mask = _summed(tops & ~above, self._columns.starts) >= len(sets)
        return answer

    def _are_independent(self, wants: Sequence[_Want]) -> bool:
        return all(self._independent(*pair) for pair in itertools.combinations(wants, 2))

    def _independent(self, one: _Want, other: _Want) -> bool:
        apart = one.resources.keys().isdisjoint(other.resources) and not (
            self._query.isolate and one.suffix and other.suffix
        )
        if one.answer is other.answer:
            return apart
        return apart or not bool((one.may & other.may).any())

    def _alike(self, wants: Sequence[_Want], possible: Mask, sure: Mask) -> None:
        """Narrows the rows by equal wants of one class; one provider may serve several of them."""
        ((name, amount),) = wants[0].resources.items()
        table, whole = self._columns.inventories[name], len(wants)
        fitting = np.minimum((table.capacity - self._use(name)) // amount, whole)
        sums: npt.NDArray[Any] = np.zeros(self._size)
        sums[table.rows] = np.add.reduceat(np.where(wants[0].answer.room, fitting, 0), table.starts)
        possible &= sums >= whole
        if any(self._columns.of_class(amount * times, name, self._rule) is not None for times in range(2, whole + 1)):
            sure &= wants[0].counts >= whole

    def _searched(self, possible: Mask, sure: Mask) -> Mask:
        """Returns the rows that fit: those that certainly do, and those for which a search finds an assignment.

        Rows that are equal for the query are searched once. All searches share the steps of the decision. Where these run out, rows
        do not pass; as long as no row has passed, the search goes on with as many steps as one node may take.
        """
        passed = sure
        kinds = self._kinds(np.flatnonzero(possible & ~sure)) if (possible & ~sure).any() else []
        left, again = _STEPS, []
        for number, (search, rows) in enumerate(kinds):
            found = search.run(min(STEPS, max(_LEAST, left // (len(kinds) - number))))
            left -= search.steps
            passed[rows] = found is not None
            if search.is_exhausted:
                again.append((search, rows))
        for search, rows in again[:_AGAIN]:
            if passed.any():
                break
            passed[rows] = search.run() is not None
        return passed

    def _kinds(self, rows: Rows) -> list[tuple[Search, Rows]]:
        """Returns the rows, grouped by kinds that are equal for the query, and a search for each kind."""
        _, first, kind = np.unique(self._forms(rows), return_index=True, return_inverse=True)
        same = np.split(rows[np.argsort(kind, kind="stable")], np.cumsum(np.bincount(kind))[:-1])
        searches = [
            Search(self._query, self._columns.of_row(row), self._used_of, self._rule) for row in rows[first].tolist()
        ]
        return list(zip(searches, same, strict=True))

    def _forms(self, rows: Rows) -> npt.NDArray[np.uint64]:
        """Returns a hash for each of the rows, which is equal where providers differ in names and order alone.

        One of 64 bits: should two kinds ever share it, a claim refuses what does not fit.
        """
        columns = self._columns
        wanted = np.zeros(self._size, dtype=np.bool_)
        wanted[rows] = True
        numbers = np.flatnonzero(wanted[columns.row])
        own = np.zeros(len(numbers), dtype=np.uint64)
        for code in self._codes(numbers):
            own = _mixed(own ^ code.astype(np.uint64))
        depth, parent = columns.depths()[numbers], np.searchsorted(numbers, columns.parent[numbers])
        # Providers below the levels that are distinguished each get a value of their own.
        deep = depth >= _DEEPEST
        own[deep] = numbers[deep]
        below = np.zeros_like(own)
        for level in range(int(depth.max()), 0, -1):
            at = np.flatnonzero(depth == level)
            np.add.at(below, parent[at], _mixed(own[at] ^ _mixed(below[at])))
        whole = _mixed(own ^ _mixed(below))
        whole[depth > 0] = 0
        forms: npt.NDArray[np.uint64] = np.add.reduceat(whole, np.searchsorted(numbers, columns.starts[rows]))
        return forms

    def _codes(self, numbers: Rows) -> list[npt.NDArray[np.int64]]:
        """Codes of these providers: what their traits are for the query, and their room of each class."""
        columns, groups = self._columns, self._query.groups
        named = frozenset().union(*(each for group in groups for each in (*group.required, group.forbidden)))
        known: dict[frozenset[str], int] = {}
        traits = np.array([known.setdefault(each & named, len(known)) for each in columns.trait_sets], dtype=np.int64)
        codes = [traits[columns.traits[numbers]]]
        for name, demand in Demand.of(self._query).items():
            table = columns.inventories[name]
            places = np.flatnonzero(np.isin(table.at, numbers, assume_unique=True))
            free = np.minimum(np.floor(table.capacity[places]) - self._use(name)[places], demand.whole)
            room = np.floor_divide(free, demand.divisor) * demand.divisor
            code = np.zeros(len(numbers), dtype=np.int64)
            code[np.searchsorted(numbers, table.at[places])] = (
                np.where(room >= demand.least, room, 0).astype(np.int64) * len(columns.shapes) + table.shapes[places]
            )
            codes.append(code)
        return codes

    def _used_of(self, provider: ProviderState, name: str) -> float:
        return provider.used.get(name, 0) + self._sums.get((provider.uuid, name), 0)


def _summed(mask: Mask, starts: Rows) -> npt.NDArray[Any]:
    """Returns how many are true from each start to the next. ``np.add.reduceat`` takes twice as long."""
    sums = np.cumsum(mask, dtype=np.int32)
    counts = np.append(sums[starts[1:] - 1], sums[-1:])
    counts[1:] -= counts[:-1].copy()
    return counts


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spreads the bits of numbers (the finalizer of splitmix64)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _parts(group: RequestGroup) -> list[Mapping[str, int]]:
    return [group.resources] if group.suffix else [{name: amount} for name, amount in group.resources.items()]
