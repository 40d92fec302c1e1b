# SPDX-License-Identifier: Apache-2.0
"""Claims of instances that are gone."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import OrphanDetector
from moorage.db import Database
from moorage_plugins.compute.tables import instances

__all__ = ["InstanceDetector"]

_THERE = sa.select(instances.c.uuid).where(instances.c.uuid.in_(sa.bindparam("uuids", expanding=True)))


class InstanceDetector(OrphanDetector):
    """Knows the instances that were placed here; a claim and its instance's row come and go in one transaction."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    consumer_types = frozenset({"INSTANCE"})

    def __init__(self, *, conf: Any, database: Database, clock: Any) -> None:
        self._database = database

    @override
    def missing(self, consumers: Sequence[str]) -> Set[str]:
        with self._database.read() as tx:
            return set(consumers) - set(tx.execute(_THERE, {"uuids": list(consumers)}).scalars())
