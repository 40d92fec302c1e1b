# SPDX-License-Identifier: Apache-2.0
"""Defines allocation candidates: combinations of providers on which a request fits now.

The terms and rules are those of OpenStack Placement's API reference (``GET /allocation_candidates``) at microversion 1.39:

* A *tree* is a root provider with all providers below it. A *sharing provider* has the trait ``MISC_SHARES_VIA_AGGREGATE``, and
  offers its resources to every tree that has a provider in one of its aggregates. Every candidate has an *anchor*, a root: it
  takes resources from the anchor's tree, and from sharing providers for that tree.
* :mod:`moorage.request_groups` defines requests.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

from moorage.request_groups import CandidateQuery, RequestGroup

__all__ = ["Candidate", "CandidateQuery", "CandidateSet", "CandidateSource", "ProviderSummary", "RequestGroup"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to fulfil the request.

    :param allocations: amounts by provider uuid and class, for a claim.
    :param mappings: the uuids of the providers that fulfil each group, sorted, by the suffix of the group.
    """

    anchor: str
    allocations: Mapping[str, Mapping[str, int]]
    mappings: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ProviderSummary:
    """A provider in the trees of candidates.

    :param parent: the uuid of the provider above it; None: it is the root.
    :param root: the uuid of the root of its tree.
    :param capacity: the capacity of each of its classes, in whole units.
    :param used: the use of each of its classes.
    :param traits: sorted by name.
    """

    parent: str | None
    root: str
    capacity: Mapping[str, int]
    used: Mapping[str, int]
    traits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CandidateSet:
    """Candidates in a stable order, and all providers of their trees, by uuid."""

    candidates: tuple[Candidate, ...]
    summaries: Mapping[str, ProviderSummary]


class CandidateSource(abc.ABC):
    """A power of stores: finds candidates. It takes nothing; a claim decides."""

    @abc.abstractmethod
    def candidates(self, query: CandidateQuery) -> CandidateSet:
        """Returns the candidates at one moment.

        An unknown provider of ``in_tree`` and unknown aggregates find nothing.

        :raises NotFound: a resource class (``details['resource_class']``) or traits (``details['traits']``) do not exist.
        """
