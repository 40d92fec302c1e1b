# SPDX-License-Identifier: Apache-2.0
"""Which providers of one node give what to the groups of a request, by Placement's rules (:mod:`moorage.request_groups`).

A search with backtracking. Groups that can take of few providers come first, and of groups that ask for the same, each takes of
the provider of the one before or a later one, so that no combination is looked at twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moorage import errors
from moorage.inventory import InventoryItem
from moorage.request_groups import CandidateQuery, RequestGroup
from moorage.scheduling.interface import Holds, Propose, ProviderState

__all__ = ["STEPS", "assignments", "proposal", "takes_amount"]

#: Options that are tried for one node at most.
STEPS = 50_000
#: ``[allocation] step_size_rule``: an amount passes also when it is ``min_unit``.
_SEED_RULE = "seed"


def takes_amount(item: InventoryItem, amount: int, rule: str) -> bool:
    """Whether an inventory takes the amount at all: by min_unit, max_unit and step_size, without regard to capacity."""
    stepped = amount % item.step_size == 0 or (rule == _SEED_RULE and amount == item.min_unit)
    return stepped and item.min_unit <= amount <= item.max_unit


def assignments(
    query: CandidateQuery,
    providers: Sequence[ProviderState],
    used: Callable[[ProviderState, str], float],
    rule: str,
    refused: Collection[tuple[str, str]] = (),
) -> Iterator[Holds]:
    """Yields what a claim of the request may take of which of a node's providers, those that stand first preferred.

    :param used: what is used of a provider's class.
    :param rule: ``[allocation] step_size_rule``.
    :param refused: pairs (provider uuid, class) of which nothing is taken.
    :raises InvalidInput: too much would have to be tried.
    """
    return _Search(query, providers, used, rule, frozenset(refused)).run()


def proposal(
    query: CandidateQuery, providers: Sequence[ProviderState], taken: Mapping[tuple[str, str], int], rule: str
) -> Propose | None:
    """Says of which providers of a node a claim may take; None: all of the only one.

    What a node has itself comes before pools, of which the roomiest comes first. A claim decides, so what does not fit is proposed
    nevertheless if it fits an empty node.

    :param providers: the node's own one first.
    :param taken: what is used beyond what the providers say, by provider and class.
    """
    if len(providers) < 2 and not any(group.suffix for group in query.groups):
        return None
    names = {name for group in query.groups for name in group.resources}

    def used(provider: ProviderState, name: str) -> float:
        return provider.used.get(name, 0) + taken.get((provider.uuid, name), 0)

    def free(pool: ProviderState) -> float:
        items = (item for item in pool.inventories if item.resource_class in names)
        return sum(item.capacity - used(pool, item.resource_class) for item in items)

    pools = sorted((each for each in providers if each.shared), key=free, reverse=True)
    ordered = [*(each for each in providers if not each.shared), *pools]

    def propose(refused: frozenset[tuple[str, str]]) -> Holds | None:
        found = next(assignments(query, ordered, used, rule, refused), None)
        if found is None and not refused:
            found = next(assignments(query, ordered, lambda provider, name: 0, rule), None)
        return found

    # The scheduler shows others what it is going to claim, then claims it.
    return functools.cache(propose)


@dataclass(frozen=True, slots=True)
class _Part:
    """What takes of one provider: a group with a suffix, or one class of the group without.

    :param options: places of the providers that may give it.
    :param like: the place, among the parts, of the part before that asks for exactly the same; -1: none does.
    """

    suffix: str
    resources: Mapping[str, int]
    options: Sequence[int]
    like: int = -1


@dataclass(slots=True)
class _Search:
    query: CandidateQuery
    providers: Sequence[ProviderState]
    used: Callable[[ProviderState, str], float]
    rule: str
    refused: frozenset[tuple[str, str]]
    _items: list[dict[str, InventoryItem]] = field(init=False)
    _steps: int = STEPS
    _taken: dict[tuple[int, str], int] = field(default_factory=dict)
    _chosen: list[int] = field(default_factory=list)

    def run(self) -> Iterator[Holds]:
        self._items = [{item.resource_class: item for item in each.inventories} for each in self.providers]
        parts = self._parts()
        if all(part.options for part in parts):
            yield from self._choose(parts)

    def _parts(self) -> list[_Part]:
        """Groups with a suffix, those with few options first, then the classes of the group without one."""
        groups = [group for group in self.query.groups if group.suffix]
        alone: list[tuple[RequestGroup, list[int]]] = [(group, self._fulfilling(group)) for group in groups]
        alone.sort(key=lambda each: (len(each[1]), _content(each[0], self.query)[0]))
        parts: list[_Part] = []
        last: dict[object, int] = {}
        for group, options in alone:
            content = _content(group, self.query)
            parts.append(_Part(group.suffix, group.resources, options, last.get(content, -1)))
            last[content] = len(parts) - 1
        spread = (group for group in self.query.groups if not group.suffix)
        for group in spread:
            usable = [place for place, each in enumerate(self.providers) if not group.forbidden & each.traits]
            for name, amount in group.resources.items():
                part = {name: amount}
                parts.append(_Part("", part, [place for place in usable if self._has_room(place, part)]))
        return parts

    def _fulfilling(self, group: RequestGroup) -> list[int]:
        return [
            place
            for place, each in enumerate(self.providers)
            if not group.forbidden & each.traits
            and all(any_of & each.traits for any_of in group.required)
            and self._has_room(place, group.resources)
        ]

    def _has_room(self, place: int, resources: Mapping[str, int]) -> bool:
        """Whether a provider has room for more, beside what this search has taken of it."""
        provider, items = self.providers[place], self._items[place]
        for name, amount in resources.items():
            item = items.get(name)
            if item is None or (provider.uuid, name) in self.refused:
                return False
            together = self._taken.get((place, name), 0) + amount
            if not takes_amount(item, together, self.rule):
                return False
            if self.used(provider, name) + together > item.capacity:
                return False
        return True

    def _choose(self, parts: Sequence[_Part]) -> Iterator[Holds]:
        number = len(self._chosen)
        if number == len(parts):
            if self._is_allowed(parts):
                yield self._holds()
            return
        part = parts[number]
        least = self._chosen[part.like] if part.like >= 0 else 0
        barred = set(self._chosen) if part.suffix and self.query.isolate else ()
        for place in part.options:
            self._steps -= 1
            if self._steps < 0:
                raise errors.InvalidInput(
                    "The request groups can be combined in more ways than are looked at for one node; ask for fewer groups, or "
                    "bind them with traits.",
                    path="body/flavor/extra_specs",
                )
            if place < least or place in barred or not self._has_room(place, part.resources):
                continue
            self._chosen.append(place)
            self._take(place, part.resources, 1)
            yield from self._choose(parts)
            self._take(place, part.resources, -1)
            self._chosen.pop()

    def _take(self, place: int, resources: Mapping[str, int], sign: int) -> None:
        for name, amount in resources.items():
            self._taken[place, name] = self._taken.get((place, name), 0) + sign * amount

    def _is_allowed(self, parts: Sequence[_Part]) -> bool:
        """What only all parts together show: the traits of the group without a suffix, and same_subtree."""
        for group in self.query.groups:
            if not group.suffix:
                places = [place for part, place in zip(parts, self._chosen, strict=True) if not part.suffix]
                traits = frozenset().union(*(self.providers[place].traits for place in places))
                if not all(any_of & traits for any_of in group.required):
                    return False
        of_suffix = {part.suffix: place for part, place in zip(parts, self._chosen, strict=True) if part.suffix}
        return all(self._is_subtree({of_suffix[suffix] for suffix in each}) for each in self.query.same_subtree)

    def _is_subtree(self, places: Collection[int]) -> bool:
        """Whether one of the providers is above all the others."""
        uuids = {self.providers[place].uuid for place in places}
        common = set(uuids).intersection(*(self._line(place) for place in places))
        return bool(common)

    def _line(self, place: int) -> set[str]:
        """The uuids of a provider and of all above it."""
        above = {each.uuid: each.parent for each in self.providers}
        line: set[str] = set()
        at: str | None = self.providers[place].uuid
        while at is not None and at not in line:
            line.add(at)
            at = above.get(at)
        return line

    def _holds(self) -> Holds:
        holds: dict[str, dict[str, int]] = {}
        for (place, name), amount in self._taken.items():
            if amount:
                holds.setdefault(self.providers[place].uuid, {})[name] = amount
        return holds


def _content(group: RequestGroup, query: CandidateQuery) -> tuple[str, object]:
    """What two groups must have in common to be exchangeable; the text orders them so that equal groups stand together."""
    subtrees = tuple(number for number, each in enumerate(query.same_subtree) if group.suffix in each)
    content = (
        tuple(sorted(group.resources.items())),
        tuple(sorted(tuple(sorted(each)) for each in group.required)),
        tuple(sorted(group.forbidden)),
        subtrees,
    )
    return repr(content), content
