# SPDX-License-Identifier: Apache-2.0
"""Licences whose agent died in the middle of taking or returning them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa

from acme_moorage.tables import licences
from moorage import errors
from moorage.cleanup.interface import SetCleanupHandler
from moorage.work import lease as leases
from moorage.work.interface import Lease

__all__ = ["LicenceHandler"]


class LicenceHandler(SetCleanupHandler):
    """taking -> available, returning -> available: whose agent died holds no licence."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    cleanable = frozenset({"taking", "returning"})

    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        """The licences by uuid; one statement."""
        found = transaction.execute(sa.select(licences).where(licences.c.uuid.in_(resource_ids)))
        return {row.uuid: row for row in found}

    def finish_batch(self, transaction: Any, leases_of: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        """All of them in the transaction that has ended their rows; each write carries its lease's token."""
        for uuid, held in sorted(leases_of.items()):
            write = leases.WRITE.update(licences, licences.c.uuid == uuid, {"token": held.token})
            if transaction.execute(write.values(status="available", holder="", held_until=0)).rowcount != 1:
                raise errors.Fenced(f"Licence {uuid} was written by a later operation, or removed.")
