# SPDX-License-Identifier: Apache-2.0
"""From the query of ``GET /allocation_candidates`` to the groups that it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from moorage import errors
from moorage.allocation.interface import CandidateQuery, RequestGroup
from moorage.http.routes import Version
from moorage_plugins.api.placement import queries, schemas
from moorage_plugins.api.placement.error_codes import BadValue, DuplicateKey, MissingValue

__all__ = ["candidate_query"]

FORBIDDEN_TRAITS: Version = (1, 22)
NESTED: Version = (1, 29)
NAMED_SUFFIXES: Version = (1, 33)
SAME_SUBTREE: Version = (1, 36)

_KEYS = "resources|required|member_of|in_tree"
_NUMBERED = re.compile(rf"({_KEYS})([1-9][0-9]*)?")
_NAMED = re.compile(rf"({_KEYS})([a-zA-Z0-9_-]{{1,64}})?")
_Query = Mapping[str, list[str]]


def candidate_query(query: _Query, version: Version) -> CandidateQuery:
    """What a query asks for; it satisfies the schema of its version.

    :raises InvalidInput: values that are malformed or contradict each other.
    """
    limit = next(iter(query.get("limit", ())), None)
    root = _root(query)
    subtrees = _subtrees(query)
    groups = _groups(query, version)
    if version >= SAME_SUBTREE:
        _check_subtrees(groups, subtrees)
    else:
        _check_orphans(groups)
    if version >= FORBIDDEN_TRAITS:
        _check_traits(groups)
    policy = next(iter(query.get("group_policy", ())), None)
    if policy is None and sum(bool(suffix) for suffix in groups) > 1:
        raise errors.InvalidInput(
            'The "group_policy" parameter is required when specifying more than one "resources{N}" parameter.',
            path="group_policy",
        )
    return CandidateQuery(
        tuple(groups.values()),
        isolate=policy == "isolate",
        root_required=frozenset().union(*root.required),
        root_forbidden=root.forbidden,
        same_subtree=subtrees,
        limit=None if limit is None else min(int(limit), schemas.LARGEST),
        nested=version >= NESTED,
    )


def _root(query: _Query) -> queries.Traits:
    values = query.get("root_required", ())
    if len(values) > 1:
        raise DuplicateKey("Query parameter 'root_required' may be specified only once.", path="root_required")
    if not values:
        return queries.Traits()
    found = queries.root_traits(values[0])
    conflicts = frozenset().union(*found.required) & found.forbidden
    if conflicts:
        raise BadValue(
            f"Conflicting required and forbidden traits found in root_required: {', '.join(sorted(conflicts))}",
            path="root_required",
        )
    return found


def _subtrees(query: _Query) -> tuple[frozenset[str], ...]:
    found = tuple(frozenset(part.strip() for part in value.split(",")) for value in query.get("same_subtree", ()))
    if any("" in suffixes for suffixes in found):
        raise BadValue("Empty string (unsuffixed group) can not be specified in `same_subtree` ", path="same_subtree")
    return found


def _groups(query: _Query, version: Version) -> dict[str, RequestGroup]:
    """Groups by suffix, in the order of the query."""
    pattern = _NAMED if version >= NAMED_SUFFIXES else _NUMBERED
    found: dict[str, RequestGroup] = {}
    for key, values in query.items():
        matched = pattern.fullmatch(key)
        if matched is None:
            continue
        kind, suffix = matched[1], matched[2] or ""
        group = found.get(suffix) or RequestGroup(suffix)
        if kind == "resources":
            group = replace(group, resources=queries.resources(values[-1]))
        elif kind == "required":
            traits = queries.traits(values, version)
            group = replace(group, required=traits.required, forbidden=traits.forbidden)
        elif kind == "member_of":
            members = queries.aggregates(values, version, suffix)
            group = replace(group, member_of=members.required, not_member_of=members.forbidden)
        else:
            group = replace(group, in_tree=queries.in_tree(values[-1]))
        found[suffix] = group
    return found


def _check_subtrees(groups: Mapping[str, RequestGroup], subtrees: tuple[frozenset[str], ...]) -> None:
    empty = [suffix for suffix, group in groups.items() if not group.resources]
    if len(empty) == len(groups):
        raise MissingValue("There must be at least one resources or resources[$S] parameter.", path="resources")
    named = frozenset().union(*subtrees)
    bad = [suffix for suffix in empty if suffix not in named]
    if bad:
        raise BadValue(
            "Resourceless suffixed group request should be specified in `same_subtree` query param: bad group(s) - "
            f"{bad}.",
            path="same_subtree",
        )
    bad = sorted(suffix for suffix in named if suffix not in groups)
    if bad:
        raise BadValue(
            f"Real suffixes should be specified in `same_subtree`: {bad} not found in {list(groups)}.",
            path="same_subtree",
        )


def _check_orphans(groups: Mapping[str, RequestGroup]) -> None:
    """Before 1.36 a group without resources makes no sense."""
    orphans = [f"required{suffix}" for suffix, group in groups.items() if group.required and not group.resources]
    if orphans:
        raise errors.InvalidInput(
            "All traits parameters must be associated with resources.  Found the following orphaned traits keys: "
            + ", ".join(orphans),
            path="required",
        )
    orphans = [
        f"member_of{suffix}"
        for suffix, group in groups.items()
        if (group.member_of or group.not_member_of) and not group.resources
    ]
    if orphans:
        raise errors.InvalidInput(
            "All member_of parameters must be associated with resources. Found the following orphaned member_of keys: "
            + ", ".join(orphans),
            path="member_of",
        )
    if not all(group.resources for group in groups.values()):
        raise errors.InvalidInput("All request groups must specify resources.", path="resources")
    if not groups:
        raise errors.InvalidInput(
            "At least one request group (`resources` or `resources{$S}`) is required.", path="resources"
        )


def _check_traits(groups: Mapping[str, RequestGroup]) -> None:
    conflicts = sorted(
        f"required{suffix}: ({', '.join(sorted(any_of))})"
        for suffix, group in groups.items()
        for any_of in group.required
        if any_of <= group.forbidden
    )
    if conflicts:
        raise errors.InvalidInput(
            "Conflicting required and forbidden traits found in the following traits keys: " + ", ".join(conflicts),
            path="required",
        )
