# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that finds candidates: anchors page by page in SQL, then the rules on what was read.

One statement looks at some roots, in the order of their creation, and says of each whether it may anchor a candidate, by what
every candidate needs; that it does decides :mod:`moorage_plugins.stores.candidates`. Pages begin small and grow, so that who wants
ten of ten thousand pays for about ten. The roots of a page are fixed first, in a subquery with a limit: databases take the many
conditions for so rare that they would rather join the whole fleet for every page.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import (
    Candidate,
    CandidateQuery,
    CandidateSet,
    CandidateSource,
    ProviderSummary,
    RequestGroup,
)
from moorage_plugins.stores import sql_filters, statements
from moorage_plugins.stores.candidates import SHARING, ProviderForest, ProviderNode, Search, find
from moorage_plugins.stores.checks import candidate_limit
from moorage_plugins.stores.sql_names import check_traits
from moorage_plugins.stores.sql_part import SqlPart, shown
from moorage_plugins.stores.tables import provider_aggregates, provider_traits, resource_providers

__all__ = ["SqlCandidates"]

_SMALLEST_PAGE, _LARGEST_PAGE = 16, 512

_ANY_ROOT = resource_providers.alias("any_root")
_MEMBER = resource_providers.alias("member")
_OF_TREES = (
    sa.select(*statements.provider_columns)
    .where(resource_providers.c.root_uuid.in_(sa.bindparam("roots", expanding=True)))
    .order_by(resource_providers.c.id)
)
_TRAITS_OF = (
    sa.select(provider_traits.c.resource_provider_id, provider_traits.c.trait)
    .where(provider_traits.c.resource_provider_id.in_(sa.bindparam("numbers", expanding=True)))
    .order_by(provider_traits.c.resource_provider_id, provider_traits.c.trait)
)
_AGGREGATES_OF = sa.select(provider_aggregates.c.resource_provider_id, provider_aggregates.c.aggregate_uuid).where(
    provider_aggregates.c.resource_provider_id.in_(sa.bindparam("numbers", expanding=True))
)
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
        sharing = self._places(tx, tx.execute(_SHARING_ROOTS).scalars().all())
        page = self._anchors(tx, query, numbers, sharing)
        found: list[Candidate] = []
        summaries: dict[str, ProviderSummary] = {}
        search = Search()
        for anchors in self._anchor_pages(tx, page, query.limit):
            known = {each.uuid for each in sharing}
            fleet = ProviderForest([*sharing, *(each for each in self._places(tx, anchors) if each.uuid not in known)])
            left = limit - len(found)
            more = list(itertools.islice(find(query, fleet, anchors, self._step_rule, search), left))
            found += more
            summaries |= fleet.summaries(more)
            if len(found) >= limit:
                break
        return CandidateSet(tuple(found), summaries)

    def _anchor_pages(self, tx: sa.Connection, anchors: _Anchors, limit: int | None) -> Iterator[list[str]]:
        """Uuids of roots that may anchor a candidate, in the order of their creation."""
        size = _LARGEST_PAGE if limit is None else min(max(limit, _SMALLEST_PAGE), _LARGEST_PAGE)
        after = 0
        while True:
            rows = tx.execute(anchors.page, {"of_after": after, "of_size": size}).all()
            found = [row.uuid for row in rows if row.fits]
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
            page.conditions += self._anchor_group_conditions(page, group, numbers, sharing, shared_with)
        return page

    def _anchor_group_conditions(
        self,
        page: _Anchors,
        group: RequestGroup,
        numbers: Mapping[str, int],
        sharing: Sequence[ProviderNode],
        shared_with: sa.ColumnElement[bool],
    ) -> Iterator[sa.ColumnElement[bool]]:
        for name, amount in group.resources.items():
            givers = [
                each for each in sharing if SHARING in each.traits and each.has_room(name, amount, self._step_rule)
            ]
            fits = sql_filters.fits(numbers[name], amount, self._step_rule, _MEMBER)
            yield sa.or_(page.in_tree(fits), page.shared_with(givers))
        for traits in group.required:
            yield sa.or_(page.in_tree(sql_filters.has_trait(traits, _MEMBER)), shared_with)
        for aggregates in group.member_of:
            yield sa.or_(page.in_tree(sql_filters.has_aggregate(aggregates, _MEMBER)), shared_with)

    def _places(self, tx: sa.Connection, roots: Sequence[str]) -> list[ProviderNode]:
        """All providers of the trees."""
        if not roots:
            return []
        rows = tx.execute(_OF_TREES, {"roots": list(roots)}).all()
        numbers = {"numbers": [row.id for row in rows]}
        inventories = self._inventory_rows(tx, numbers["numbers"])
        traits = _grouped(tx.execute(_TRAITS_OF, numbers))
        aggregates = _grouped(tx.execute(_AGGREGATES_OF, numbers))
        found = []
        for row in rows:
            items = inventories.get(row.id, [])
            used = {item.resource_class: amount for item, amount in items}
            summary = ProviderSummary(shown(row, items), used, tuple(traits.get(row.id, ())))
            found.append(ProviderNode(summary, frozenset(aggregates.get(row.id, ()))))
        return found


def _grouped(rows: Iterable[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for number, value in rows:
        found.setdefault(number, []).append(value)
    return found
