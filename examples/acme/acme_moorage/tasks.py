# SPDX-License-Identifier: Apache-2.0
"""Taking back licences whose time is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import sqlalchemy as sa

from acme_moorage.tables import licences
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.db import now
from moorage.work import lease as leases

__all__ = ["ExpireLicences"]

_OVER = sa.and_(licences.c.status == "held", licences.c.held_until <= now())


class ExpireLicences(PeriodicTask):
    """Makes licences available again that somebody holds longer than was agreed, by the database's clock."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self.spacing = float(tools.conf.acme_licences.interval)

    def list_objects(self) -> Sequence[str]:
        """Licences whose time is over; one query."""
        with self.tools.database.read() as tx:
            return list(tx.execute(sa.select(licences.c.uuid).where(_OVER)).scalars())

    def handle(self, object_id: str, lease: TaskLease) -> object:
        """One statement says both that its time is over and that nobody with a later token has written it."""
        write = leases.WRITE.update(licences, sa.and_(licences.c.uuid == object_id, _OVER), {"token": lease.token})
        free = write.values(status="available", holder="", held_until=0)

        def work(tx: Any) -> bool:
            return bool(tx.execute(free).rowcount)

        return lease.finish_with(work)
