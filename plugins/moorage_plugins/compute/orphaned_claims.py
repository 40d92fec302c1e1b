# SPDX-License-Identifier: Apache-2.0
"""Finds claims of instances and of moves that are gone."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage.allocation.interface import OrphanDetector
from moorage.db import Database
from moorage.instances.interface import move_consumer
from moorage_plugins.compute.instances import MOVING
from moorage_plugins.compute.tables import instances

__all__ = ["InstanceDetector"]

_MOVING = sa.select(instances.c.uuid).where(instances.c.status.in_(MOVING))
_THERE = sa.select(instances.c.uuid).where(instances.c.uuid.in_(sa.bindparam("uuids", expanding=True)))


class InstanceDetector(OrphanDetector):
    """Knows the instances that were placed here, and the moves of them.

    The claim of an instance comes and goes with the instance's row in one transaction, that of a move with the instance's status.
    What the source of a move holds (``MIGRATION_SOURCE``) goes by an operation of its own, and is no orphan before.
    """

    api_version: ClassVar[tuple[int, int]] = (2, 0)
    consumer_types = frozenset({"INSTANCE", "MIGRATION"})

    def __init__(self, *, conf: Any, database: Database, clock: Any) -> None:
        self._database = database

    @override
    def missing(self, consumers: Sequence[str]) -> Set[str]:
        with self._database.read() as tx:
            there = set(tx.execute(_THERE, {"uuids": list(consumers)}).scalars())
            there |= set(map(move_consumer, tx.execute(_MOVING).scalars()))
        return set(consumers) - there
