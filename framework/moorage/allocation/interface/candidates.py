# SPDX-License-Identifier: Apache-2.0
"""Allocation candidates: combinations of providers on which a request fits now.

The terms and rules are those of OpenStack Placement's API reference (``GET /allocation_candidates``) at microversion 1.39:

* A *tree* is a root provider with all below it. A *sharing provider* has the trait ``MISC_SHARES_VIA_AGGREGATE``, and offers its
  resources to every tree of which a provider is in one of its aggregates. Every candidate has an *anchor*, a root: it takes of
  the anchor's tree and of sharing providers for it.
* What is asked for stands in :mod:`moorage.request_groups`.
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

    :param allocations: provider uuid -> class -> amount, as a claim takes it.
    :param mappings: suffix -> uuids of the providers that fulfil the group, sorted.
    """

    anchor: str
    allocations: Mapping[str, Mapping[str, int]]
    mappings: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ProviderSummary:
    """A provider that candidates name, or one of its tree.

    :param parent: uuid of the provider above it; None: it is the root.
    :param root: uuid of the root of its tree.
    :param capacity: resource class -> what may be used in all, in whole units; all classes that it has.
    :param used: the same classes -> what is used of it.
    :param traits: sorted by name.
    """

    parent: str | None
    root: str
    capacity: Mapping[str, int]
    used: Mapping[str, int]
    traits: tuple[str, ...] = ()


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
