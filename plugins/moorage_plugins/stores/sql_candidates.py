# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that finds candidates: anchors page by page in SQL, then the rules on what was read.

One statement looks at some roots, in the order of their creation, and says of each whether it may anchor a candidate, by what
every candidate needs; that it does decides :mod:`moorage_plugins.stores.candidates`. Pages begin small and grow, so that who wants
ten of ten thousand pays for about ten. The roots of a page are fixed first, in a subquery with a limit: databases take the many
conditions for so rare that they would rather join the whole fleet for every page.

Most trees of most fleets are one provider that takes from no sharing provider. For a query with one group, the conditions of the
statement and the room decide about such a tree. Its candidate and its summary are made of the rows; the general rules are not
asked.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import (
    Candidate,
    CandidateQuery,
    CandidateSet,
    CandidateSource,
    InventoryItem,
    ProviderSummary,
    RequestGroup,
)
from moorage_plugins.stores import sql_filters
from moorage_plugins.stores.candidates import SHARING, ProviderForest, ProviderNode, Search, find
from moorage_plugins.stores.checks import candidate_limit, has_room
from moorage_plugins.stores.classes import FIRST_CUSTOM
from moorage_plugins.stores.sql_names import check_traits
from moorage_plugins.stores.sql_part import SqlPart
from moorage_plugins.stores.tables import inventories, provider_aggregates, provider_traits, resource_providers

__all__ = ["SqlCandidates"]

_SMALLEST_PAGE, _LARGEST_PAGE = 16, 4096
#: Rows are read by a range of ids when at least this share of the ids in it is wanted, otherwise by a list of ids: databases read a
#: range several times as fast.
_DENSE = 0.25

#: Inventories that are in memory at once as rows.
_ROWS = 1000

#: (id, uuid, parent, root) of a provider.
_Row = tuple[int, str, str | None, str]

_ANY_ROOT = resource_providers.alias("any_root")
_MEMBER = resource_providers.alias("member")
_MEMBERS = sa.select(_MEMBER.c.id, _MEMBER.c.uuid, _MEMBER.c.parent_uuid, _MEMBER.c.root_uuid).order_by(_MEMBER.c.id)
_OF_TREES = _MEMBERS.where(_MEMBER.c.root_uuid.in_(sa.bindparam("roots", expanding=True)))
#: Providers below the roots of a range of ids.
_BELOW = _MEMBERS.where(
    _MEMBER.c.parent_uuid.is_not(None),
    _MEMBER.c.root_uuid.in_(
        sa.select(_ANY_ROOT.c.uuid).where(
            _ANY_ROOT.c.parent_uuid.is_(None), _ANY_ROOT.c.id.between(sa.bindparam("first"), sa.bindparam("last"))
        )
    ),
)


def _readings(chosen: Callable[[sa.ColumnElement[int]], sa.ColumnElement[bool]]) -> tuple[sa.Select[Any], ...]:
    """Statements that read inventories, traits and aggregates of the providers with chosen ids."""
    item, trait, member = inventories.c, provider_traits.c, provider_aggregates.c
    of_item = (item.resource_provider_id, item.resource_class_id)
    of_trait = (trait.resource_provider_id, trait.trait)
    return (
        sa.select(
            *of_item,
            item.total,
            item.reserved,
            item.min_unit,
            item.max_unit,
            item.step_size,
            item.allocation_ratio,
            item.used,
        )
        .where(chosen(item.resource_provider_id))
        .order_by(*of_item),
        sa.select(*of_trait).where(chosen(trait.resource_provider_id)).order_by(*of_trait),
        sa.select(member.resource_provider_id, member.aggregate_uuid).where(chosen(member.resource_provider_id)),
    )


_OF_RANGE = _readings(lambda number: number.between(sa.bindparam("first"), sa.bindparam("last")))
_OF_NUMBERS = _readings(lambda number: number.in_(sa.bindparam("numbers", expanding=True)))
#: The trees of those that share with others.
_SHARING_ROOTS = (
    sa.select(resource_providers.c.root_uuid)
    .join_from(provider_traits, resource_providers, provider_traits.c.resource_provider_id == resource_providers.c.id)
    .where(
        provider_traits.c.trait == SHARING,
        sa.exists().where(provider_aggregates.c.resource_provider_id == resource_providers.c.id),
    )
    .distinct()
)
_ROOT_OF = sa.select(resource_providers.c.root_uuid).where(resource_providers.c.uuid == sa.bindparam("of_uuid"))


class _Anchors:
    """A page of roots, each with whether it fulfils the conditions.

    :param roots: what a root must be to be looked at at all, over ``_ANY_ROOT``.
    """

    def __init__(self, roots: Sequence[sa.ColumnElement[bool]]) -> None:
        self._root = (
            sa.select(_ANY_ROOT.c.id, _ANY_ROOT.c.uuid)
            .where(_ANY_ROOT.c.parent_uuid.is_(None), _ANY_ROOT.c.id > sa.bindparam("of_after"), *roots)
            .order_by(_ANY_ROOT.c.id)
            .limit(sa.bindparam("of_size", type_=sa.Integer))
            .subquery("root")
        )
        self.conditions: list[sa.ColumnElement[bool]] = []

    @property
    def page(self) -> sa.Select[Any]:
        """The statement; parameters ``of_after`` (an id) and ``of_size``."""
        root = self._root
        fits = sa.and_(sa.true(), *self.conditions).label("fits")
        return sa.select(root.c.id, root.c.uuid, fits).order_by(root.c.id)

    def in_tree(self, condition: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        """A provider of the root's tree fulfils it.

        Not EXISTS, of which PostgreSQL would make a hash of the whole fleet for every page.
        """
        one = sa.select(_MEMBER.c.id).where(_MEMBER.c.root_uuid == self._root.c.uuid, condition).limit(1)
        return one.correlate(self._root).scalar_subquery().is_not(None)

    def shared_with(self, givers: Iterable[ProviderNode]) -> sa.ColumnElement[bool]:
        """A provider of the root's tree is in an aggregate of one of them."""
        aggregates = frozenset().union(*(each.aggregates for each in givers))
        return self.in_tree(sql_filters.has_aggregate(aggregates, _MEMBER)) if aggregates else sa.false()


class SqlCandidates(SqlPart, CandidateSource):
    """Candidates; about six statements a page of anchors."""

    @override
    def candidates(self, query: CandidateQuery) -> CandidateSet:
        limit = candidate_limit(query, self._max_candidates)
        return self._database.read_run(lambda tx: self._find_candidates(tx, query, limit))

    def _find_candidates(self, tx: sa.Connection, query: CandidateQuery, limit: int) -> CandidateSet:
        numbers = self._classes.numbers(tx, {name for group in query.groups for name in group.resources})
        named = (each for group in query.groups for each in (group.forbidden, *group.required))
        check_traits(tx, query.root_required.union(query.root_forbidden, *named))
        names = self._classes.names(tx, {FIRST_CUSTOM})
        roots = tx.execute(_SHARING_ROOTS).scalars().all()
        nothing = _RowRules(None, (), self._step_rule)
        sharing = _Trees(tx, self._few(tx, roots), names, nothing).nodes() if roots else []
        page = self._anchors(tx, query, numbers, sharing)
        rules = _RowRules(query, sharing, self._step_rule)
        finder = _Finder(query, sharing, rules, limit)
        for anchors in self._anchor_pages(tx, page, query.limit):
            rows = self._many(tx, anchors) if _dense(anchors) else self._few(tx, [row[1] for row in anchors])
            finder.look(_Trees(tx, rows, names, rules), [row[1] for row in anchors])
            if len(finder.found) >= limit:
                break
        return CandidateSet(tuple(finder.found), finder.summaries)

    def _anchor_pages(self, tx: sa.Connection, anchors: _Anchors, limit: int | None) -> Iterator[Sequence[_Row]]:
        """Roots that may anchor a candidate, in the order of their creation."""
        size = _LARGEST_PAGE if limit is None else min(max(limit, _SMALLEST_PAGE), _LARGEST_PAGE)
        after = 0
        while True:
            rows = tx.execute(anchors.page, {"of_after": after, "of_size": size}).all()
            found = [(number, uuid, None, uuid) for number, uuid, fits in rows if fits]
            if found:
                yield found
            if len(rows) < size:
                return
            after, size = rows[-1].id, min(2 * size, _LARGEST_PAGE)

    def _anchors(
        self, tx: sa.Connection, query: CandidateQuery, numbers: Mapping[str, int], sharing: Sequence[ProviderNode]
    ) -> _Anchors:
        """What every anchor fulfils; who is shared with may fulfil more of it through others."""
        roots = [sql_filters.has_trait((name,), _ANY_ROOT) for name in sorted(query.root_required)]
        if query.root_forbidden:
            roots.append(~sql_filters.has_trait(query.root_forbidden, _ANY_ROOT))
        for group in query.groups:
            if not group.suffix:
                if group.not_member_of:
                    roots.append(~sql_filters.has_aggregate(group.not_member_of, _ANY_ROOT))
                if group.in_tree is not None:
                    root = tx.execute(_ROOT_OF, {"of_uuid": group.in_tree}).scalar_one_or_none()
                    roots.append(sa.false() if root is None else _ANY_ROOT.c.uuid == root)
        page = _Anchors(roots)
        shared_with = page.shared_with(each for each in sharing if SHARING in each.traits)
        for group in query.groups:
            if query.limit is not None:
                page.conditions += self._room_conditions(page, group, numbers, sharing)
            page.conditions += self._anchor_group_conditions(page, group, shared_with)
        return page

    def _room_conditions(
        self, page: _Anchors, group: RequestGroup, numbers: Mapping[str, int], sharing: Sequence[ProviderNode]
    ) -> Iterator[sa.ColumnElement[bool]]:
        """There is room, so that a limited query reads few trees in which there is none.

        A query for everything reads the inventories of all trees at once. That costs less than these conditions.
        """
        for name, amount in group.resources.items():
            givers = [
                each for each in sharing if SHARING in each.traits and each.has_room(name, amount, self._step_rule)
            ]
            fits = sql_filters.fits(numbers[name], amount, self._step_rule, _MEMBER)
            yield sa.or_(page.in_tree(fits), page.shared_with(givers))

    def _anchor_group_conditions(
        self, page: _Anchors, group: RequestGroup, shared_with: sa.ColumnElement[bool]
    ) -> Iterator[sa.ColumnElement[bool]]:
        for traits in group.required:
            yield sa.or_(page.in_tree(sql_filters.has_trait(traits, _MEMBER)), shared_with)
        for aggregates in group.member_of:
            yield sa.or_(page.in_tree(sql_filters.has_aggregate(aggregates, _MEMBER)), shared_with)

    def _few(self, tx: sa.Connection, roots: Sequence[str]) -> Sequence[Any]:
        """Returns all providers of the trees."""
        return tx.execute(_OF_TREES, {"roots": roots}).all()

    def _many(self, tx: sa.Connection, roots: Sequence[_Row]) -> Sequence[_Row]:
        """Returns all providers of the trees with the given roots."""
        below = tx.execute(_BELOW, {"first": roots[0][0], "last": roots[-1][0]}).all()
        uuids = {row[1] for row in roots} if below else ()
        return sorted([*roots, *(row for row in below if row.root_uuid in uuids)], key=operator.itemgetter(0))


def _dense(rows: Sequence[_Row]) -> bool:
    """The rows are a large part of the rows between the first and the last, by their ids."""
    return len(rows) >= _DENSE * (rows[-1][0] - rows[0][0] + 1)


class _Trees:
    """Whole trees, read.

    :param rows: their providers, in the order of the ids.
    :param names: resource classes by number.
    """

    def __init__(self, tx: sa.Connection, rows: Sequence[_Row], names: Mapping[int, str], rules: _RowRules) -> None:
        values: dict[str, Any]
        if _dense(rows):
            readings, values = _OF_RANGE, {"first": rows[0][0], "last": rows[-1][0]}
        else:
            readings, values = _OF_NUMBERS, {"numbers": [row[0] for row in rows]}
        of_items, of_traits, of_aggregates = readings
        self._rows = rows
        self._traits = _grouped(tx.execute(of_traits, values))
        self._aggregates = _grouped(tx.execute(of_aggregates, values))
        self._items: dict[int, dict[str, tuple[InventoryItem, int]]] = {}
        #: Root -> what an answer shows of the tree's only provider; None: there is no room. Other trees are not in it.
        self.decided: dict[str, ProviderSummary | None] = {}
        members = collections.Counter(row[3] for row in rows)
        capacity: dict[int, dict[str, int]] = {}
        amounts: dict[int, dict[str, int]] = {}
        lacking: dict[int, int] = {}
        for number, _, parent, root in rows:
            traits = self._traits.get(number, ())
            if members[root] == 1 and rules.decide(traits, self._aggregates.get(number, ())):
                capacity[number], amounts[number] = {}, {}
                lacking[number] = len(rules.wanted)
                self.decided[root] = ProviderSummary(parent, root, capacity[number], amounts[number], tuple(traits))
        for part in tx.execute(of_items, values).partitions(_ROWS):
            for number, of_class, total, reserved, low, high, step, ratio, used in part:
                name = names[of_class]
                if number in lacking:
                    capacity[number][name], amounts[number][name] = int((total - reserved) * ratio), used
                    amount = rules.wanted.get(name)
                    if amount and has_room(amount, total, reserved, low, high, step, ratio, used, rules.step_rule):
                        lacking[number] -= 1
                else:
                    item = InventoryItem(name, total, reserved, low, high, step, ratio)
                    self._items.setdefault(number, {})[name] = item, used
        for number, _, _, root in rows:
            if lacking.get(number):
                self.decided[root] = None

    def nodes(self) -> list[ProviderNode]:
        """Returns the providers of the trees that are not decided."""
        return [
            ProviderNode(
                uuid,
                parent,
                root,
                self._items.get(number, {}),
                frozenset(self._traits.get(number, ())),
                frozenset(self._aggregates.get(number, ())),
            )
            for number, uuid, parent, root in self._rows
            if root not in self.decided
        ]


class _RowRules:
    """What the rows of a tree decide by themselves.

    :param sharing: all providers of trees in which one shares.
    """

    def __init__(self, query: CandidateQuery | None, sharing: Sequence[ProviderNode], step_rule: str) -> None:
        self.step_rule = step_rule
        self.group = None if query is None else _only_group(query)
        self.wanted: Mapping[str, int] = {} if self.group is None else self.group.resources
        # Of a provider in one of these aggregates, the general rules have more to say.
        shared = (each.aggregates for each in sharing if SHARING in each.traits)
        self._foreign = frozenset().union(*shared, self.group.not_member_of if self.group else ())

    def decide(self, traits: Iterable[str], aggregates: Iterable[str]) -> bool:
        """Room alone decides whether the only provider of an anchor's tree, with these, is its candidate."""
        group = self.group
        return group is not None and group.forbidden.isdisjoint(traits) and self._foreign.isdisjoint(aggregates)


class _Finder:
    """Candidates that were found so far, page by page.

    :param sharing: all providers of trees in which one shares.
    """

    def __init__(self, query: CandidateQuery, sharing: Sequence[ProviderNode], rules: _RowRules, limit: int) -> None:
        self._query, self._sharing, self._rules, self._limit = query, sharing, rules, limit
        self._sharing_uuids = frozenset(each.uuid for each in sharing)
        self._search = Search()
        self.found: list[Candidate] = []
        self.summaries: dict[str, ProviderSummary] = {}

    def look(self, trees: _Trees, anchors: Sequence[str]) -> None:
        """Add the candidates of these anchors, up to the limit."""
        fleet = ProviderForest(
            [*self._sharing, *(each for each in trees.nodes() if each.uuid not in self._sharing_uuids)]
        )
        group, rule = self._rules.group, self._rules.step_rule
        for uuid in anchors:
            left = self._limit - len(self.found)
            if left <= 0:
                return
            if group is not None and uuid in trees.decided:
                summary = trees.decided[uuid]
                if summary is not None:
                    self.found.append(Candidate(uuid, {uuid: group.resources}, {group.suffix: (uuid,)}))
                    self.summaries[uuid] = summary
            else:
                more = list(itertools.islice(find(self._query, fleet, (uuid,), rule, self._search), left))
                self.found += more
                self.summaries |= fleet.summaries(more)


def _only_group(query: CandidateQuery) -> RequestGroup | None:
    """Returns the group of a query about which a page's conditions and room decide in a tree of one provider.

    None: there are several groups, whose amounts add up, or the group says more than those conditions.
    """
    if len(query.groups) != 1:
        return None
    group = query.groups[0]
    return group if group.resources and not (group.suffix and group.in_tree) else None


def _grouped(rows: Iterable[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for number, value in rows:
        found.setdefault(number, []).append(value)
    return found
