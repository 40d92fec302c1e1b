# SPDX-License-Identifier: Apache-2.0
"""Limits of projects: how much of a resource class the consumers of a project may hold."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Quota", "QuotaDrift", "QuotaSource", "QuotaStore"]


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
    def set_quota(self, project: str, resource_class: str, limit: int, transaction: Any | None = None) -> Quota:
        """Sets a limit. The first limit of a class counts what the project holds of it already.

        :param transaction: an open one of the store's database to write in; None: one of its own.
        :raises StoreBusy: others changed the limits of the project meanwhile; begin a new transaction.
        :raises NotFound: there is no such resource class.
        :raises InvalidInput: no project, or a limit that is no whole number from 0 to 2**31 - 1.
        """

    @abc.abstractmethod
    def unset_quota(self, project: str, resource_class: str, transaction: Any | None = None) -> bool:
        """Removes a limit; False when there is none. ``transaction`` and StoreBusy as for :meth:`set_quota`."""

    @abc.abstractmethod
    def quota_drift(self) -> list[QuotaDrift]:
        """Returns every disagreement, as of one moment, ordered by project and class. Reads all allocations of these projects."""

    @abc.abstractmethod
    def recount_quotas(self, project: str) -> bool:
        """Sets the counters of a project to what its consumers hold, while none of them is changed; False without limits."""


class QuotaSource(abc.ABC):
    """Says which limits projects have, where another service keeps them. Built by the loader as ``plugin(conf=...)``.

    The periodic task ``read_quotas`` asks it in the background and writes the limits into the store. No claim and no transaction
    waits for a source. The constructor must not connect; it raises ConfigError for what can never work.
    """

    api_version: ClassVar[tuple[int, int]]

    @abc.abstractmethod
    def limits(self) -> Mapping[str, Mapping[str, int]]:
        """Returns all limits: project -> resource class -> units. What it leaves out is not limited.

        :raises Unavailable: the limits are not known now. The store keeps the last ones.
        """
