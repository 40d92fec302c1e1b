# SPDX-License-Identifier: Apache-2.0
"""Finding candidates among providers that are known: the rules of Placement's ``GET /allocation_candidates``, without a store.

The terms are those of :mod:`moorage.allocation.interface.candidates`. Candidates are generated anchor by anchor and group by
group, and a combination that cannot become one is left as soon as that shows; so the work grows with what is asked for
(``limit``), not with all that would be possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moorage import errors
from moorage.allocation.interface import (
    Candidate,
    CandidateQuery,
    InventoryItem,
    ProviderSummary,
    RequestGroup,
)
from moorage_plugins.stores.checks import refusal

__all__ = ["SHARING", "STEPS", "ProviderForest", "ProviderNode", "Search", "find"]

#: The trait of a provider that offers its resources to all who are in one of its aggregates.
SHARING = "MISC_SHARES_VIA_AGGREGATE"
#: How many options are tried for one query.
STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class ProviderNode:
    """A provider with all that decides whether something fits there.

    :param items: resource class -> inventory, and what is used of it.
    """

    uuid: str
    parent: str | None
    root: str
    items: Mapping[str, tuple[InventoryItem, int]]
    traits: frozenset[str] = frozenset()
    aggregates: frozenset[str] = frozenset()

    @property
    def summary(self) -> ProviderSummary:
        """What an answer shows of it."""
        capacity = {name: int(item.capacity) for name, (item, _) in self.items.items()}
        used = {name: amount for name, (_, amount) in self.items.items()}
        return ProviderSummary(self.parent, self.root, capacity, used, tuple(sorted(self.traits)))

    def has_room(self, name: str, amount: int, rule: str) -> bool:
        """The amount of the class could be claimed of it now."""
        item, used = self.items.get(name, (None, 0))
        return refusal(self.uuid, name, amount, item, used, rule) is None

    def may_have_room(self, name: str, amount: int) -> bool:
        """The amount, or more than it, could be claimed of it now."""
        item, used = self.items[name]
        return amount <= item.max_unit and used + amount <= item.capacity

    def within(self, member_of: Sequence[frozenset[str]]) -> bool:
        """It is in one aggregate of each set."""
        return all(each & self.aggregates for each in member_of)


class ProviderForest:
    """Providers in trees, and who shares with whom. Whole trees, with all that share with one of them.

    :param places: in the order in which candidates shall name them.
    """

    def __init__(self, places: Iterable[ProviderNode]) -> None:
        self.places: dict[str, ProviderNode] = {each.uuid: each for each in places}
        self.trees: dict[str, list[ProviderNode]] = {}
        for each in self.places.values():
            self.trees.setdefault(each.root, []).append(each)
        self._sharing = [each for each in self.places.values() if SHARING in each.traits and each.aggregates]

    def sharing_with(self, root: str) -> list[ProviderNode]:
        """Sharing providers of other trees that a tree may take of."""
        if not self._sharing:
            return []
        aggregates = frozenset().union(*(each.aggregates for each in self.trees[root]))
        return [each for each in self._sharing if each.root != root and each.aggregates & aggregates]

    def summaries(self, candidates: Iterable[Candidate]) -> dict[str, ProviderSummary]:
        """Returns all providers of the trees that candidates take of."""
        roots = dict.fromkeys(self.places[uuid].root for each in candidates for uuid in each.allocations)
        return {each.uuid: each.summary for root in roots for each in self.trees[root]}

    def line(self, uuid: str) -> Iterator[str]:
        """Returns a provider and all above it."""
        at: str | None = uuid
        while at is not None:
            yield at
            at = self.places[at].parent


@dataclass(frozen=True, slots=True)
class _Option:
    """One way to fulfil one group: (provider, class) -> amount, and the providers that fulfil it."""

    taken: Mapping[tuple[str, str], int]
    providers: frozenset[str]


class Search:
    """What one query has found and done so far, for who looks in several steps."""

    def __init__(self, steps: int = STEPS) -> None:
        self.seen: set[tuple[object, ...]] = set()
        self._left = steps

    def step(self) -> None:
        """Something was tried.

        :raises InvalidInput: it is enough.
        """
        self._left -= 1
        if self._left < 0:
            raise errors.InvalidInput(
                "The groups can be combined in more ways than are looked at for one query; ask for fewer groups, or bind them "
                "with in_tree, member_of or required traits.",
                path="resources",
            )


def find(
    query: CandidateQuery, fleet: ProviderForest, anchors: Iterable[str], rule: str, search: Search | None = None
) -> Iterator[Candidate]:
    """Candidates anchor by anchor, without ``limit``; the same one of a second anchor is not named again.

    :param anchors: uuids of roots, in order.
    :param rule: ``[allocation] step_size_rule``.
    :raises InvalidInput: too much would have to be tried.
    """
    search = search or Search()
    for anchor in anchors:
        root = fleet.places[anchor]
        if query.root_required <= root.traits and not query.root_forbidden & root.traits:
            for candidate in _of_anchor(query, fleet, root, rule, search):
                key = (
                    frozenset((uuid, *pair) for uuid, taken in candidate.allocations.items() for pair in taken.items()),
                    frozenset(candidate.mappings.items()),
                )
                if key not in search.seen:
                    search.seen.add(key)
                    yield candidate


def _of_anchor(
    query: CandidateQuery, fleet: ProviderForest, root: ProviderNode, rule: str, search: Search
) -> Iterator[Candidate]:
    offered = [*fleet.trees[root.uuid], *fleet.sharing_with(root.uuid)]
    options: list[list[_Option]] = []
    spread: Iterator[_Option] | None = None
    for group in query.groups:
        if not group.suffix:
            spread = _spread(group, fleet, root, offered, rule, search)
            continue
        alone = [_alone(group, each) for each in offered if _fulfils(group, fleet, each, rule)]
        if not alone:
            return
        options.append(alone)
    suffixes = [group.suffix for group in query.groups if group.suffix]
    # The group that may be spread comes first in a combination, though it is looked at last: others are cheaper to rule out.
    for first in spread if spread is not None else (None,):
        start = {} if first is None else dict(first.taken)
        for chosen in _combine(query, fleet, options, start, (), rule, search):
            taken = dict(start)
            mappings = {} if first is None else {"": tuple(sorted(first.providers))}
            for suffix, option in zip(suffixes, chosen, strict=True):
                mappings[suffix] = tuple(sorted(option.providers))
                _add(taken, option)
            if _in_subtrees(query, fleet, mappings) and (query.nested or _flat(fleet, taken)):
                yield Candidate(root.uuid, _by_provider(taken), mappings)


def _spread(
    group: RequestGroup,
    fleet: ProviderForest,
    root: ProviderNode,
    offered: Sequence[ProviderNode],
    rule: str,
    search: Search,
) -> Iterator[_Option]:
    """Returns the group without a suffix: each class of any provider, and the traits of all of them together."""
    if group.in_tree is not None and not _same_tree(fleet, group.in_tree, root.uuid):
        return
    if group.not_member_of & root.aggregates:
        return
    whole_tree = root.within(group.member_of)
    usable = [
        each
        for each in offered
        if not (group.forbidden & each.traits or group.not_member_of & each.aggregates)
        # The aggregates of a root count for its tree, though not for who shares with it (Placement: bug 1792503).
        and (each.within(group.member_of) or (whole_tree and each.root == root.uuid))
        and (group.in_tree is None or each.root == root.uuid)
    ]
    choices = []
    for name, amount in group.resources.items():
        fitting = [each for each in usable if each.has_room(name, amount, rule)]
        if not fitting:
            return
        choices.append(fitting)
    for chosen in itertools.product(*choices):
        search.step()
        traits = frozenset().union(*(each.traits for each in chosen))
        if all(any_of & traits for any_of in group.required):
            pairs = zip(chosen, group.resources.items(), strict=True)
            taken = {(each.uuid, name): amount for each, (name, amount) in pairs}
            yield _Option(taken, frozenset(each.uuid for each in chosen))


def _fulfils(group: RequestGroup, fleet: ProviderForest, place: ProviderNode, rule: str) -> bool:
    """The provider alone fulfils a group with a suffix."""
    return (
        not group.forbidden & place.traits
        and not group.not_member_of & place.aggregates
        and all(any_of & place.traits for any_of in group.required)
        and place.within(group.member_of)
        and (group.in_tree is None or _same_tree(fleet, group.in_tree, place.root))
        and all(place.has_room(name, amount, rule) for name, amount in group.resources.items())
    )


def _alone(group: RequestGroup, place: ProviderNode) -> _Option:
    taken = {(place.uuid, name): amount for name, amount in group.resources.items()}
    return _Option(taken, frozenset({place.uuid}))


def _same_tree(fleet: ProviderForest, uuid: str, root: str) -> bool:
    place = fleet.places.get(uuid)
    return place is not None and place.root == root


def _combine(
    query: CandidateQuery,
    fleet: ProviderForest,
    options: Sequence[Sequence[_Option]],
    taken: Mapping[tuple[str, str], int],
    chosen: tuple[_Option, ...],
    rule: str,
    search: Search,
) -> Iterator[tuple[_Option, ...]]:
    """One option of each group, so that all together fit."""
    if len(chosen) == len(options):
        # A sum may fit the steps of an inventory where a part of it does not.
        if all(fleet.places[uuid].has_room(name, amount, rule) for (uuid, name), amount in taken.items()):
            yield chosen
        return
    used = frozenset().union(*(each.providers for each in chosen)) if query.isolate else frozenset()
    for option in options[len(chosen)]:
        search.step()
        if used & option.providers:
            continue
        together = dict(taken)
        if _add(together, option) and not all(
            fleet.places[uuid].may_have_room(name, together[uuid, name]) for uuid, name in option.taken
        ):
            continue
        yield from _combine(query, fleet, options, together, (*chosen, option), rule, search)


def _add(taken: dict[tuple[str, str], int], option: _Option) -> bool:
    """Add what an option takes; True when something of it was taken before."""
    overlaps = False
    for key, amount in option.taken.items():
        overlaps = overlaps or key in taken
        taken[key] = taken.get(key, 0) + amount
    return overlaps


def _in_subtrees(query: CandidateQuery, fleet: ProviderForest, mappings: Mapping[str, Sequence[str]]) -> bool:
    """Of the providers that ``same_subtree`` joins, one is above all the others."""
    for suffixes in query.same_subtree:
        uuids = {uuid for suffix in suffixes for uuid in mappings.get(suffix, ())}
        common = frozenset(uuids).intersection(*(frozenset(fleet.line(uuid)) for uuid in uuids))
        if uuids and not common:
            return False
    return True


def _flat(fleet: ProviderForest, taken: Iterable[tuple[str, str]]) -> bool:
    """Nothing is taken of two providers of one tree."""
    uuids = {uuid for uuid, _ in taken}
    return len({fleet.places[uuid].root for uuid in uuids}) == len(uuids)


def _by_provider(taken: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (uuid, name), amount in taken.items():
        found.setdefault(uuid, {})[name] = amount
    return found
