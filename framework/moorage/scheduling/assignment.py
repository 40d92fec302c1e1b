# SPDX-License-Identifier: Apache-2.0
"""Which providers of one node give what to the groups of a request, by Placement's rules (:mod:`moorage.request_groups`).

A search with backtracking that finds the first assignment, if there is any. The groups of one ``same_subtree`` stand together,
those that can take of few providers first, and a choice is given up as soon as a subtree or the traits can no longer come about.
Of choices that differ only in the names of equal groups, or of equal providers of which nothing is taken, one is tried.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from moorage.inventory import InventoryItem
from moorage.request_groups import CandidateQuery, RequestGroup
from moorage.scheduling.interface import Holds, Propose, ProviderState

__all__ = ["STEPS", "Demand", "Search", "proposal", "takes_amount"]

#: Options that are tried for one node at most.
STEPS = 50_000
#: ``[allocation] step_size_rule``: an amount passes also when it is ``min_unit``.
_SEED_RULE = "seed"


def takes_amount(item: InventoryItem, amount: int, rule: str) -> bool:
    """Returns whether an inventory takes the amount at all: by min_unit, max_unit and step_size, without regard to capacity."""
    stepped = amount % item.step_size == 0 or (rule == _SEED_RULE and amount == item.min_unit)
    return stepped and item.min_unit <= amount <= item.max_unit


def proposal(
    query: CandidateQuery, providers: Sequence[ProviderState], taken: Mapping[tuple[str, str], int], rule: str
) -> Propose | None:
    """Says of which providers of a node a claim may take; None: all of the only one.

    What a node has itself comes before pools. Of its own providers, the one with the least left comes first, so that whole devices
    stay free; of pools, the roomiest. A claim decides, so what does not fit is proposed nevertheless if it fits an empty node.

    :param providers: the node's own one first.
    :param taken: what is used beyond what the providers say, by provider and class.
    """
    if len(providers) < 2 and not any(group.suffix for group in query.groups):
        return None
    asked = {name: demand.whole for name, demand in Demand.of(query).items()}

    def used(provider: ProviderState, name: str) -> float:
        return provider.used.get(name, 0) + taken.get((provider.uuid, name), 0)

    def free(provider: ProviderState) -> float:
        """What is free of the asked classes, in parts of what is asked."""
        items = [item for item in provider.inventories if item.resource_class in asked]
        return sum((item.capacity - used(provider, item.resource_class)) / asked[item.resource_class] for item in items)

    pools = sorted((each for each in providers if each.shared), key=free, reverse=True)
    ordered = [*sorted((each for each in providers if not each.shared), key=free), *pools]

    def propose(refused: frozenset[tuple[str, str]]) -> Holds | None:
        found = Search(query, ordered, used, rule, refused).run()
        if found is None and not refused:
            found = Search(query, ordered, lambda provider, name: 0, rule).run()
        return found

    # The scheduler shows others what it is going to claim, then claims it.
    return functools.cache(propose)


@dataclass(frozen=True, slots=True)
class Demand:
    """What a query asks of one class: all its amounts together, the least, and what divides all of them."""

    whole: int
    least: int
    divisor: int

    @classmethod
    def of(cls, query: CandidateQuery) -> Mapping[str, Demand]:
        """Class -> demand."""
        amounts: dict[str, list[int]] = {}
        for group in query.groups:
            for name, amount in group.resources.items():
                amounts.setdefault(name, []).append(amount)
        return {name: cls(sum(each), min(each), math.gcd(*each)) for name, each in sorted(amounts.items())}

    def of_room(self, free: float) -> int:
        """What can be taken of so much that is free; equal results make no difference to a query."""
        room = min(math.floor(free), self.whole) // self.divisor * self.divisor
        return room if room >= self.least else 0


@dataclass(frozen=True, slots=True)
class _Part:
    """What takes of one provider: a group with a suffix, or one class of the group without.

    :param options: places of the providers that may give it, ascending.
    :param like: the place, among the parts, of the part before that stands for exactly the same; -1: none does.
    :param among: ``options`` as bits; ``below``: places that are among the options, or above one, as bits.
    """

    group: RequestGroup
    resources: Mapping[str, int]
    options: Sequence[int]
    like: int
    among: int
    below: int


class Search:
    """Searches one node's providers for an assignment.

    :param providers: those that stand first are preferred.
    :param used: what is used of a provider's class.
    :param rule: ``[allocation] step_size_rule``.
    :param refused: pairs (provider uuid, class) of which nothing is taken.
    """

    def __init__(
        self,
        query: CandidateQuery,
        providers: Sequence[ProviderState],
        used: Callable[[ProviderState, str], float],
        rule: str,
        refused: Collection[tuple[str, str]] = (),
    ) -> None:
        self._query, self._providers, self._rule = query, providers, rule
        demand = Demand.of(query)
        self._rooms = [_rooms(each, demand, used, refused) for each in providers]
        self._lines = _lines(providers)
        self._bits = [sum(1 << at for at in line) for line in self._lines]
        self._parts: Sequence[_Part] = ()
        self._subtrees: Sequence[Sequence[int]] = ()
        self._taken: dict[tuple[int, str], int] = {}
        #: How many parts take of a provider or one below it.
        self._touched = [0] * len(providers)
        self._chosen: list[int] = []
        self.steps = 0
        self.is_exhausted = False

    def run(self, steps: int = STEPS) -> Holds | None:
        """Returns what a claim may take of which providers; None: nothing was found.

        :param steps: how many options are tried at most. Afterwards ``steps`` says how many were, and ``is_exhausted`` whether that
            ended the search.
        """
        self._parts = self._find_parts()
        self._subtrees = [
            [number for number, part in enumerate(self._parts) if part.group.suffix in each]
            for each in self._query.same_subtree
        ]
        self._taken, self._chosen, self._touched = {}, [], [0] * len(self._providers)
        self.steps, self.is_exhausted = 0, False
        self._most = steps
        if not all(part.options for part in self._parts) or not self._choose():
            return None
        return self._holds()

    def shortage(self) -> str:
        """Says which group finds no provider, and for want of what; empty where an assignment is found."""
        lacking = [text for group in self._query.groups if (text := self._lacking(group))]
        if lacking:
            return "; ".join(lacking)
        if self.run() is not None:
            return ""
        if self.is_exhausted:
            return (
                "its providers can be combined in more ways than are looked at; ask for fewer request groups, or bind them with "
                "traits"
            )
        return "each request group finds a provider of it, but not all of them together"

    def _lacking(self, group: RequestGroup) -> str:
        """Returns why no provider fits a group, even if the other groups take nothing; empty: some provider fits."""
        name = f"request group {group.suffix}: " if group.suffix else ""
        usable = [place for place, each in enumerate(self._providers) if not group.forbidden & each.traits]
        if not usable:
            return f"{name}all of its providers have the forbidden {' or '.join(sorted(group.forbidden))}"
        for any_of in group.required:
            if not any(any_of & self._providers[place].traits for place in usable):
                return f"{name}no provider has {' or '.join(sorted(any_of))}"
        for of_class, amount in group.resources.items():
            if not any(self._has_room(place, {of_class: amount}) for place in usable):
                return f"{name}no provider has {amount} {of_class} free"
        if group.suffix and not self._fulfilling(group, group.resources):
            asked = [f"{amount} {of_class}" for of_class, amount in sorted(group.resources.items())]
            traits = [" or ".join(sorted(any_of)) for any_of in group.required]
            return f"{name}no provider has {' and '.join((*asked, *traits))} together"
        return ""

    # -- the providers --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _forms(self) -> list[int]:
        """Returns a number per provider. Two are equal if the providers, with all below them, differ in names and order only."""
        query = self._query
        named = frozenset().union(*(each for group in query.groups for each in (*group.required, group.forbidden)))
        below: list[list[int]] = [[] for _ in self._providers]
        numbers: dict[object, int] = {}
        forms = [0] * len(self._providers)
        for place in sorted(range(len(self._providers)), key=lambda each: -len(self._lines[each])):
            traits = tuple(sorted(self._providers[place].traits & named))
            rooms = tuple(
                (name, room, item.min_unit, item.max_unit, item.step_size)
                for name, (room, item) in self._rooms[place].items()
            )
            forms[place] = numbers.setdefault((traits, rooms, tuple(sorted(below[place]))), len(numbers))
            if len(self._lines[place]) > 1:
                below[self._lines[place][1]].append(forms[place])
        return forms

    def _fulfilling(self, group: RequestGroup, resources: Mapping[str, int]) -> list[int]:
        required, names = group.required if group.suffix else (), resources.keys()
        return [
            place
            for place, each in enumerate(self._providers)
            if names <= self._rooms[place].keys()
            and group.forbidden.isdisjoint(each.traits)
            and all(any_of & each.traits for any_of in required)
            and self._has_room(place, resources)
        ]

    def _has_room(self, place: int, resources: Mapping[str, int]) -> bool:
        """Returns whether a provider has room for more, beside what this search has taken of it."""
        rooms = self._rooms[place]
        for name, amount in resources.items():
            found = rooms.get(name)
            if found is None:
                return False
            together = self._taken.get((place, name), 0) + amount
            if together > min(found[0], found[1].max_unit) or not takes_amount(found[1], amount, self._rule):
                return False
        return True

    def _takes_all(self) -> bool:
        """Whether each provider takes what all parts together take of it; a sum may fit its steps where a part of it does not."""
        return all(
            takes_amount(self._rooms[place][name][1], amount, self._rule)
            for (place, name), amount in self._taken.items()
            if amount
        )

    # -- the parts ------------------------------------------------------------------------------------------------

    def _find_parts(self) -> list[_Part]:
        """Groups with a suffix, those of one subtree together, then the classes of the group without one."""
        parts: list[_Part] = []
        last: dict[object, int] = {}
        contents = {group.suffix: _content(group) for group in self._query.groups if group.suffix}
        for component, signature in self._components(contents):
            inner: dict[object, int] = {}
            like = last.get(signature, -1)
            last[signature] = len(parts)
            for group, options in component:
                content = contents[group.suffix], tuple(group.suffix in each for each in self._query.same_subtree)
                before = inner.get(content, like)
                like = -1
                inner[content] = len(parts)
                parts.append(self._part(group, group.resources, options, before))
        for group in self._query.groups:
            if not group.suffix:
                for name, amount in group.resources.items():
                    resources = {name: amount}
                    parts.append(self._part(group, resources, self._fulfilling(group, resources), -1))
        return parts

    def _part(self, group: RequestGroup, resources: Mapping[str, int], options: Sequence[int], like: int) -> _Part:
        below = 0
        for place in options:
            below |= self._bits[place]
        return _Part(group, resources, options, like, sum(1 << place for place in options), below)

    def _components(self, contents: Mapping[str, str]) -> list[tuple[list[tuple[RequestGroup, list[int]]], str]]:
        """Divides the request groups into components, the one with the fewest providers first.

        Groups belong to one component if ``same_subtree`` connects them. Each group comes with the indexes of the providers that
        fulfil it, and each component with a signature: components with equal signatures may exchange their providers.
        """
        query = self._query
        sets = {group.suffix: {group.suffix} for group in query.groups if group.suffix}
        for each in query.same_subtree:
            joined = set().union(*(sets[suffix] for suffix in each))
            sets |= dict.fromkeys(joined, joined)
        found = []
        for component in {id(each): each for each in sets.values()}.values():
            groups = [
                (each, self._fulfilling(each, each.resources)) for each in query.groups if each.suffix in component
            ]
            groups.sort(key=lambda each: (len(each[1]), contents[each[0].suffix]))
            places = {group.suffix: place for place, (group, _) in enumerate(groups)}
            subtrees = sorted(
                sorted(places[suffix] for suffix in each) for each in query.same_subtree if not each.isdisjoint(places)
            )
            signature = repr(([contents[group.suffix] for group, _ in groups], subtrees))
            found.append((groups, signature))
        found.sort(key=lambda each: (len(each[0][0][1]), each[1]))
        return found

    # -- the search -----------------------------------------------------------------------------------------------

    def _choose(self) -> bool:
        number = len(self._chosen)
        if number == len(self._parts):
            return self._takes_all()
        part = self._parts[number]
        least = self._chosen[part.like] if part.like >= 0 else 0
        barred = set(self._chosen) if part.group.suffix and self._query.isolate else ()
        tried: set[tuple[int, ...]] = set()
        for place in part.options:
            if self.steps >= self._most:
                self.is_exhausted = True
                return False
            self.steps += 1
            if place < least or place in barred or not self._has_room(place, part.resources):
                continue
            if tried and self._likeness(place) in tried:
                continue
            self._chosen.append(place)
            self._take(place, part.resources, 1)
            if self._is_possible(number) and self._choose():
                return True
            self._take(place, part.resources, -1)
            self._chosen.pop()
            tried.add(self._likeness(place))
        return False

    def _likeness(self, place: int) -> tuple[int, ...]:
        """What providers have in common that are exchangeable as long as nothing more is taken."""
        path: list[int] = []
        for at in self._lines[place]:
            if self._touched[at]:
                return (at, *path)
            path.append(self._forms[at])
        return (-1, *path)

    def _take(self, place: int, resources: Mapping[str, int], sign: int) -> None:
        for at in self._lines[place]:
            self._touched[at] += sign
        for name, amount in resources.items():
            self._taken[place, name] = self._taken.get((place, name), 0) + sign * amount

    def _is_possible(self, number: int) -> bool:
        """Returns whether the parts up to this one leave a top for each subtree, and a provider for each trait."""
        if self._parts[number].group.suffix:
            return all(self._has_top(each, number) for each in self._subtrees if number in each)
        return self._have_traits(number)

    def _has_top(self, subtree: Sequence[int], number: int) -> bool:
        """Returns whether a provider that is chosen, or may be, is above all others of a subtree that are chosen, or may be."""
        tops, above = 0, -1
        for each in subtree:
            if each <= number:
                place = self._chosen[each]
                tops |= 1 << place
                above &= self._bits[place]
            else:
                tops |= self._parts[each].among
                above &= self._parts[each].below
        return bool(tops & above)

    def _have_traits(self, number: int) -> bool:
        """Returns whether the providers of the group without a suffix have its traits together, or may have them."""
        group = self._parts[number].group
        if not group.required:
            return True
        places = {place for part, place in zip(self._parts, self._chosen, strict=False) if not part.group.suffix}
        places.update(place for part in self._parts[number + 1 :] for place in part.options)
        traits = frozenset().union(*(self._providers[place].traits for place in places))
        return all(any_of & traits for any_of in group.required)

    def _holds(self) -> Holds:
        holds: dict[str, dict[str, int]] = {}
        for (place, name), amount in self._taken.items():
            if amount:
                holds.setdefault(self._providers[place].uuid, {})[name] = amount
        return holds


def _rooms(
    provider: ProviderState,
    demand: Mapping[str, Demand],
    used: Callable[[ProviderState, str], float],
    refused: Collection[tuple[str, str]],
) -> dict[str, tuple[int, InventoryItem]]:
    """Class -> what can be taken of it, and its inventory; only what a query asks for and has any room."""
    items = {item.resource_class: item for item in provider.inventories}
    found = {}
    for name, asked in demand.items():
        item = items.get(name)
        if item is not None and (provider.uuid, name) not in refused:
            room = asked.of_room(math.floor(item.capacity) - used(provider, name))
            if room:
                found[name] = room, item
    return found


def _lines(providers: Sequence[ProviderState]) -> list[tuple[int, ...]]:
    """Returns the places of each provider and of all above it, upwards."""
    places = {each.uuid: place for place, each in enumerate(providers)}
    lines = []
    for place in range(len(providers)):
        line: dict[int, None] = {}
        at: int | None = place
        while at is not None and at not in line:
            line[at] = None
            at = places.get(providers[at].parent or "")
        lines.append(tuple(line))
    return lines


def _content(group: RequestGroup) -> str:
    """What groups that ask for the same have in common."""
    return repr(
        (
            sorted(group.resources.items()),
            sorted(sorted(each) for each in group.required),
            sorted(group.forbidden),
        )
    )
