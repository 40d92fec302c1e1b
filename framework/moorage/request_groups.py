# SPDX-License-Identifier: Apache-2.0
"""Request groups: the resources and traits that a request asks of providers. Stores find candidates by them, schedulers nodes.

The terms and rules are those of OpenStack Placement's ``GET /allocation_candidates`` at microversion 1.39:

* The group without a suffix may be spread over several providers. Each provider that it takes of has none of the forbidden
  traits, and all of them together have the required ones. The aggregates of a root count for its whole tree.
* A group with a suffix takes all of one provider, which alone has the traits and is in the aggregates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CandidateQuery", "RequestGroup"]


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Resources and traits that are asked for together.

    :param suffix: empty for the group that may be spread; else it is unique in the query.
    :param resources: class -> amount; a group with a suffix may have none, when ``same_subtree`` names it.
    :param required: of each set at least one trait; ``forbidden``: none of these traits.
    :param member_of: of each set at least one aggregate (uuids); ``not_member_of``: none of these aggregates.
    :param in_tree: uuid of any provider of the tree that all must come from.
    """

    suffix: str = ""
    resources: Mapping[str, int] = field(default_factory=dict)
    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()
    member_of: tuple[frozenset[str], ...] = ()
    not_member_of: frozenset[str] = frozenset()
    in_tree: str | None = None


@dataclass(frozen=True, slots=True)
class CandidateQuery:
    """All groups of one request, and how they relate.

    :param isolate: groups with a suffix take of different providers (``group_policy=isolate``).
    :param root_required: traits that the anchor itself must have; ``root_forbidden``: must not have.
    :param same_subtree: of the providers of these groups (suffixes) one must be the ancestor of all the others.
    :param limit: at most so many candidates; None: all. The work done grows with it.
    :param nested: False: leave out candidates that take of several providers of one tree (Placement before 1.29).
    """

    groups: tuple[RequestGroup, ...]
    isolate: bool = False
    root_required: frozenset[str] = frozenset()
    root_forbidden: frozenset[str] = frozenset()
    same_subtree: tuple[frozenset[str], ...] = ()
    limit: int | None = None
    nested: bool = True
