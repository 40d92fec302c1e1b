# SPDX-License-Identifier: Apache-2.0
"""Compares the limits of a quota source with the limits in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from moorage.allocation.interface import Quota

__all__ = ["QuotaChange", "quota_changes"]


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """A limit to write.

    :param limit: None removes it.
    """

    project: str
    resource_class: str
    limit: int | None


def quota_changes(
    wanted: Mapping[str, Mapping[str, int]], present: Sequence[Quota], classes: Set[str] | None
) -> tuple[list[QuotaChange], frozenset[str]]:
    """Returns the changes that give the store the wanted limits, ordered by project and class, and the classes that do not exist.

    :param classes: those that exist; None: all.
    """
    target = {(project, name): limit for project, limits in wanted.items() for name, limit in limits.items()}
    unknown = frozenset(name for _, name in target if classes is not None and name not in classes)
    has = {(each.project, each.resource_class): each.limit for each in present}
    changes = [
        QuotaChange(*key, target.get(key))
        for key in sorted(target.keys() | has.keys())
        if key[1] not in unknown and target.get(key) != has.get(key)
    ]
    return changes, unknown
