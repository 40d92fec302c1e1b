# SPDX-License-Identifier: Apache-2.0
"""Where would a request fit: combinations of providers that could be claimed now.

The terms and rules are those of OpenStack Placement's API reference (``GET /allocation_candidates``) at microversion 1.39:

* A *tree* is a root provider with all below it. A *sharing provider* has the trait ``MISC_SHARES_VIA_AGGREGATE``, and offers its
  resources to every tree of which a provider is in one of its aggregates. Every candidate has an *anchor*, a root: it takes of
  the anchor's tree and of sharing providers for it.
* The group without a suffix may be spread over several providers. Each provider that it takes of has none of the forbidden
  traits, and all of them together have the required ones. The aggregates of a root count for its whole tree.
* A group with a suffix takes all of one provider, which alone has the traits and is in the aggregates.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field

from moorage.allocation.interface.claims import ResourceProvider

__all__ = ["Candidate", "CandidateQuery", "CandidateSet", "CandidateSource", "ProviderSummary", "RequestGroup"]


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """What is asked for together; the terms are those of :class:`ProviderFilter`.

    :param suffix: empty for the group that may be spread; else it is unique in the query.
    :param resources: class -> amount; a group with a suffix may have none, when ``same_subtree`` names it.
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
    """What is asked.

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to fulfil the request.

    :param allocations: provider uuid -> class -> amount, as a claim takes it.
    :param mappings: suffix -> uuids of the providers that fulfil the group, sorted.
    """

    anchor: str
    allocations: Mapping[str, Mapping[str, int]]
    mappings: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ProviderSummary:
    """A provider that candidates name, or one of its tree, with inventories (all classes), use and sorted traits."""

    provider: ResourceProvider
    used: Mapping[str, int]
    traits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Candidates in a stable order, and all providers of the trees they take of, by uuid."""

    candidates: tuple[Candidate, ...]
    summaries: Mapping[str, ProviderSummary]


class CandidateSource(abc.ABC):
    """A power of stores: finding candidates. Nothing is taken; a claim decides."""

    @abc.abstractmethod
    def candidates(self, query: CandidateQuery) -> CandidateSet:
        """Candidates as of one moment.

        An unknown provider of ``in_tree`` and unknown aggregates find nothing.

        :raises NotFound: a resource class (``details['resource_class']``) or traits (``details['traits']``) do not exist.
        """
