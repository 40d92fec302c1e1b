# SPDX-License-Identifier: Apache-2.0
"""Limits of projects: how much of a resource class the consumers of a project may hold."""

from __future__ import annotations

import abc
from dataclasses import dataclass

__all__ = ["Quota", "QuotaDrift", "QuotaStore"]


@dataclass(frozen=True, slots=True)
class Quota:
    """A limit of a project.

    :param limit: how many units of the class its consumers may hold. It may be lower than ``used``: nothing is taken from them.
    :param used: how many units its consumers hold. Consumers that count together count once, with the larger amount.
    """

    project: str
    resource_class: str
    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class QuotaDrift:
    """A counter of a limit that disagrees with the stored allocations.

    :param counted: the ``used`` that claims are decided by.
    :param held: what the consumers of the project hold, which is the truth.
    """

    project: str
    resource_class: str
    counted: int
    held: int


class QuotaStore(abc.ABC):
    """A power of stores: limits of projects, checked in the transaction of the claim.

    A claim that began before a limit was set may exceed it; it is counted. No other claim with ``enforce_quota`` exceeds it.
    """

    @abc.abstractmethod
    def quotas(self, project: str | None = None) -> list[Quota]:
        """Limits with what is used, ordered by project and class; None: of all projects."""

    @abc.abstractmethod
    def set_quota(self, project: str, resource_class: str, limit: int) -> Quota:
        """Sets a limit. The first limit of a class counts what the project holds of it already.

        :raises NotFound: there is no such resource class.
        :raises InvalidInput: no project, or a limit that is no whole number from 0 to 2**31 - 1.
        """

    @abc.abstractmethod
    def unset_quota(self, project: str, resource_class: str) -> bool:
        """Removes a limit; False when there is none."""

    @abc.abstractmethod
    def quota_drift(self) -> list[QuotaDrift]:
        """Returns every disagreement, as of one moment, ordered by project and class. Reads all allocations of these projects."""

    @abc.abstractmethod
    def recount_quotas(self, project: str) -> bool:
        """Sets the counters of a project to what its consumers hold, while none of them is changed; False without limits."""
