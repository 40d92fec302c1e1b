# SPDX-License-Identifier: Apache-2.0
"""Listings: what a query may ask for, as conditions that are all combined, and pages that nothing falls between.

A page begins after a marker and is ordered by the sort key and then by the thing's immutable number, so that a thing which does not
change while pages are read is in exactly one of them. The link to the next page keeps every filter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import sqlalchemy as sa

from moorage import errors
from moorage.fleet.tables import nodes
from moorage.http.routes import Request, Version
from moorage_plugins.api.baremetal.failures import needs_version
from moorage_plugins.api.baremetal.fields import Field, Kind, Resource

__all__ = [
    "MAX_LIMIT",
    "NODE_FILTERS",
    "Filter",
    "Listing",
    "chosen_fields",
    "either",
    "equals",
    "flag",
    "next_link",
    "read",
    "restricted",
    "shard_filters",
    "texts",
    "visible",
]

#: The largest page, and the one for who asks for none.
MAX_LIMIT = 1000
_YES = frozenset({"1", "t", "true", "on", "y", "yes"})
_NO = frozenset({"0", "f", "false", "off", "n", "no"})
_NO_SHARD = frozenset({"none", "null"})
_PAGING = {"limit", "marker", "sort_key", "sort_dir", "fields", "detail"}
Condition = sa.ColumnElement[bool]


@dataclass(frozen=True, slots=True)
class Filter:
    """A parameter of a listing.

    :param condition: from its values (as often as it was given) to what must hold.
    """

    since: Version
    condition: Callable[[Sequence[str]], Condition]


@dataclass(frozen=True, slots=True)
class Listing:
    """A query that was understood.

    :param order: the column of the sort key; None: the number alone.
    :param chosen: the names of ``fields``, None: those of the listing.
    """

    conditions: tuple[Condition, ...]
    limit: int
    marker: str | None
    order: Any
    descending: bool
    fields: tuple[Field, ...]
    chosen: bool
    detail: bool

    def statement(self, resource: Resource, columns: Sequence[Any], after: Any | None) -> sa.Select[Any]:
        """Returns the page.

        :param after: the marker's row (number, sort value); None: the first page.
        """
        found = sa.select(*columns).select_from(resource.source).where(*self.conditions)
        ident = resource.ident
        if after is not None:
            found = found.where(self._beyond(ident, after))
        step = sa.desc if self.descending else sa.asc
        if self.order is not None:
            # NULL comes first on some databases and last on others, unless the statement orders it.
            found = found.order_by(step(_is_set(self.order)), step(self.order))
        return found.order_by(step(ident)).limit(self.limit)

    def _beyond(self, ident: Any, after: Any) -> Condition:
        number, value = after
        further: Condition = ident < number if self.descending else ident > number
        if self.order is None:
            return further
        if value is None:
            same = sa.and_(self.order.is_(None), further)
            # Ascending, all that is set comes after what is not; descending, nothing does.
            return same if self.descending else sa.or_(same, self.order.is_not(None))
        beyond = self.order < value if self.descending else self.order > value
        same = sa.and_(self.order == value, further)
        if self.descending:
            return sa.or_(beyond, same, self.order.is_(None))
        return sa.or_(beyond, same)


def _is_set(column: Any) -> Any:
    return sa.case((column.is_(None), 0), else_=1)


def read(resource: Resource, request: Request, filters: Mapping[str, Filter], *, detail: bool) -> Listing:
    """Understand the query of a listing.

    :param detail: the path itself asks for details.
    :raises InvalidInput: a parameter is unknown, or has a value that is none.
    :raises NotAcceptable: a parameter is not there yet in this microversion.
    """
    query = request.query
    unknown = sorted(query.keys() - filters.keys() - _PAGING)
    if unknown:
        raise errors.InvalidInput(f"Unexpected arguments: {', '.join(unknown)}", path=unknown[0])
    for name in query:
        if name in filters and request.version < filters[name].since:
            raise needs_version(filters[name].since, name)
    conditions = tuple(filters[name].condition(values) for name, values in query.items() if name in filters)
    chosen = _fields(resource, request)
    if "detail" in query:
        if request.version < (1, 43):
            raise needs_version((1, 43), "detail")
        wants = flag("detail", query["detail"])
        if wants and chosen is not None:
            raise errors.InvalidInput("Can't fetch a subset of fields with 'detail' set", path="fields")
        detail = detail or wants
    if detail and chosen is not None:
        raise errors.InvalidInput("Can't fetch a subset of fields with 'detail' set", path="fields")
    shown = visible(resource, request.version)
    fields = chosen or tuple(field for field in shown if detail or field.basic)
    return Listing(
        conditions,
        _limit(query),
        _last(query, "marker"),
        _sort_key(resource, request),
        _direction(query),
        fields,
        chosen is not None,
        detail,
    )


def visible(resource: Resource, version: Version) -> tuple[Field, ...]:
    """Returns the fields that a microversion has."""
    return tuple(field for field in resource.fields if field.since <= version)


def chosen_fields(resource: Resource, request: Request) -> tuple[Field, ...] | None:
    """Returns the fields that the query of a single thing names; None: all."""
    unknown = sorted(request.query.keys() - {"fields"})
    if unknown:
        raise errors.InvalidInput(f"Unexpected arguments: {', '.join(unknown)}", path=unknown[0])
    return _fields(resource, request)


def next_link(request: Request, listing: Listing, last: str) -> str:
    """Returns the address of the page after the thing ``last``: the query as it was, with another marker."""
    kept = [
        (name, value) for name, values in request.query.items() if name not in ("marker", "limit") for value in values
    ]
    return (
        f"{request.base_url}{request.path.rstrip('/')}?{urlencode([*kept, ('limit', listing.limit), ('marker', last)])}"
    )


def flag(name: str, values: Sequence[str]) -> bool:
    """Returns a truth value in one of the many words for it."""
    word = values[-1].strip().lower()
    if word in _YES | _NO:
        return word in _YES
    raise errors.InvalidInput(f"Invalid value for {name}: {values[-1]!r} is neither true nor false.", path=name)


def texts(values: Sequence[str]) -> list[str]:
    """Comma-separated and repeated values as one list; the case of letters stays."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def shard_filters(since: Version) -> Mapping[str, Filter]:
    """Returns the filters ``shard`` and ``sharded``, for nodes and for tables that are joined with them."""
    return {"shard": Filter(since, _of_shards), "sharded": Filter(since, _is_sharded)}


def _of_shards(values: Sequence[str]) -> Condition:
    wanted = texts(values)
    named = sorted({value for value in wanted if value.lower() not in _NO_SHARD})
    conditions: list[Condition] = []
    if named:
        conditions.append(nodes.c.shard == named[0] if len(named) == 1 else nodes.c.shard.in_(named))
    if len(named) < len(set(wanted)):
        conditions.append(nodes.c.shard.is_(None))
    # Who names no shard gets no node, and never the whole fleet.
    return sa.or_(*conditions) if conditions else sa.false()


def _is_sharded(values: Sequence[str]) -> Condition:
    return nodes.c.shard.is_not(None) if flag("sharded", values) else nodes.c.shard.is_(None)


def equals(column: Any, since: Version = (1, 1)) -> Filter:
    """The column has the value that was given last."""
    return Filter(since, lambda values: column == values[-1])


def either(column: Any, since: Version = (1, 1)) -> Filter:
    """The column has one of the values; the empty text is one too."""
    return Filter(since, lambda values: column.in_([part.strip() for value in values for part in value.split(",")]))


def _project(values: Sequence[str]) -> Condition:
    return sa.or_(nodes.c.owner == values[-1], nodes.c.lessee == values[-1])


def _associated(values: Sequence[str]) -> Condition:
    return nodes.c.instance_uuid.is_not(None) if flag("associated", values) else nodes.c.instance_uuid.is_(None)


def _maintenance(values: Sequence[str]) -> Condition:
    # Not "IS true", which MariaDB answers without its index.
    wanted = flag("maintenance", values)
    return nodes.c.maintenance == (sa.true() if wanted else sa.false())


def _description(values: Sequence[str]) -> Condition:
    found: Condition = nodes.c.description.contains(values[-1], autoescape=True)
    return found


def _never(name: str) -> Callable[[Sequence[str]], Condition]:
    """Returns a filter for something that no node here is or has."""
    return lambda values: sa.false() if flag(name, values) else sa.true()


NODE_FILTERS: Mapping[str, Filter] = {
    "instance_uuid": equals(nodes.c.instance_uuid),
    "associated": Filter((1, 1), _associated),
    "maintenance": Filter((1, 1), _maintenance),
    "provision_state": equals(nodes.c.provision_state, (1, 9)),
    "driver": equals(nodes.c.driver, (1, 16)),
    "resource_class": equals(nodes.c.resource_class, (1, 21)),
    "fault": equals(nodes.c.fault, (1, 42)),
    "conductor_group": either(nodes.c.conductor_group, (1, 46)),
    "conductor": equals(nodes.c.host, (1, 49)),
    "owner": equals(nodes.c.owner, (1, 50)),
    "description_contains": Filter((1, 51), _description),
    "retired": Filter((1, 61), _never("retired")),
    "lessee": equals(nodes.c.lessee, (1, 65)),
    "project": Filter((1, 65), _project),
    # No node is the child of another one.
    "include_children": Filter((1, 83), lambda values: sa.or_(sa.true(), sa.literal(flag("include_children", values)))),
    "parent_node": Filter((1, 83), lambda values: sa.false()),
    **shard_filters((1, 82)),
}


def _fields(resource: Resource, request: Request) -> tuple[Field, ...] | None:
    if "fields" not in request.query:
        return None
    if request.version < (1, 8):
        raise needs_version((1, 8), "fields")
    names = list(dict.fromkeys(texts(request.query["fields"])))
    known = resource.by_name
    unknown = sorted(set(names) - known.keys() - {"links"})
    if unknown:
        raise errors.InvalidInput(f'Field(s) "{", ".join(unknown)}" are not valid', path="fields")
    for name in names:
        if name in known and known[name].since > request.version:
            raise needs_version(known[name].since, name)
    if not names:
        raise errors.InvalidInput("fields names no field", path="fields")
    return tuple(known[name] for name in names if name in known)


def _limit(query: Mapping[str, Sequence[str]]) -> int:
    given = _last(query, "limit")
    if given is None:
        return MAX_LIMIT
    try:
        limit = int(given)
    except ValueError:
        raise errors.InvalidInput(f"Limit must be a whole number, not {given!r}", path="limit") from None
    if limit <= 0:
        raise errors.InvalidInput("Limit must be positive", path="limit")
    return min(limit, MAX_LIMIT)


def _last(query: Mapping[str, Sequence[str]], name: str) -> str | None:
    values = query.get(name)
    return values[-1] if values else None


def _sort_key(resource: Resource, request: Request) -> Any:
    name = _last(request.query, "sort_key")
    if name in (None, "id"):
        return None
    field = resource.by_name.get(str(name))
    if field is None or not field.sortable:
        raise errors.InvalidInput(f'The sort_key value "{name}" is invalid for sorting', path="sort_key")
    if field.since > request.version:
        raise needs_version(field.since, str(name))
    # Truth values have no order on every database.
    return sa.case((field.column, 1), else_=0) if field.kind is Kind.FLAG else field.column


def _direction(query: Mapping[str, Sequence[str]]) -> bool:
    given = _last(query, "sort_dir") or "asc"
    if given not in ("asc", "desc"):
        raise errors.InvalidInput(
            f"Invalid sort direction: {given}. Acceptable values are 'asc' or 'desc'", path="sort_dir"
        )
    return given == "desc"


def restricted(listing: Listing, condition: Condition) -> Listing:
    """Returns a listing with one more condition."""
    return replace(listing, conditions=(*listing.conditions, condition))
