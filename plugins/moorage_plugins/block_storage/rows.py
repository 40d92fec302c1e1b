# SPDX-License-Identifier: Apache-2.0
"""Rows of volumes, snapshots, backups and images: every write carries the fence of the operation that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import now
from moorage.work import lease
from moorage_plugins.block_storage.tables import backups, images, snapshots, volumes

__all__ = ["BACKUP", "DELETED", "IMAGE", "SNAPSHOT", "TABLES", "VOLUME", "Rows"]

VOLUME, SNAPSHOT, BACKUP, IMAGE = "volume", "snapshot", "backup", "image"
TABLES: Mapping[str, sa.Table] = {VOLUME: volumes, SNAPSHOT: snapshots, BACKUP: backups, IMAGE: images}
#: The status of an image that is gone. Its row stays: an image has no worker row, so nothing else knows what was written for it.
DELETED = "deleted"
_FENCE = {"token": sa.bindparam("token", type_=sa.BigInteger)}


class Rows:
    """One table. Methods that take a transaction are single statements."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.table = TABLES[kind]
        of_uuid = self.table.c.uuid == sa.bindparam("of_uuid")
        self._write = lease.WRITE.update(self.table, of_uuid, _FENCE)

    def insert(self, tx: sa.Connection, uuid: str, status: str, token: int, **values: Any) -> None:
        """A new row; AlreadyExists (of the database) when the uuid is taken."""
        common = {"name": "", "size_bytes": 0, "path": "", "project_id": "", "fault": ""}
        written = {**common, **values, "uuid": uuid, "status": status, "fence": token}
        tx.execute(sa.insert(self.table).values(written | {"created_at": now(), "updated_at": now()}))

    def find(self, tx: sa.Connection, uuid: str) -> Any | None:
        """Returns the row, or None."""
        return tx.execute(sa.select(self.table).where(self.table.c.uuid == uuid)).first()

    def get(self, tx: sa.Connection, uuid: str) -> Any:
        """Returns the row.

        :raises NotFound: there is none.
        """
        row = self.find(tx, uuid)
        if row is None:
            raise errors.NotFound(f"There is no {self.kind} {uuid}.")
        return row

    def many(self, tx: sa.Connection, uuids: Sequence[str]) -> dict[str, Any]:
        """Rows by uuid."""
        return {row.uuid: row for row in tx.execute(sa.select(self.table).where(self.table.c.uuid.in_(uuids)))}

    def page(self, tx: sa.Connection, *, after: str, limit: int, project_id: str | None, **filters: Any) -> list[Any]:
        """Rows by uuid, a page of ``limit`` after the given one; not those that are only kept for their fence."""
        query = (
            sa.select(self.table)
            .where(self.table.c.uuid > after, self.table.c.status != DELETED)
            .order_by(self.table.c.uuid)
            .limit(limit)
        )
        wanted = {"project_id": project_id, **filters}
        for name, value in wanted.items():
            if value is not None:
                query = query.where(self.table.c[name] == value)
        return list(tx.execute(query))

    def write(self, tx: sa.Connection, uuid: str, token: int, *, expected: Sequence[str] = (), **values: Any) -> bool:
        """Write with the fence, only where the status is one of ``expected`` when given; False when it was not."""
        statement = self._write.values(updated_at=now(), **values)
        if expected:
            statement = statement.where(self.table.c.status.in_(expected))
        return tx.execute(statement, {"of_uuid": uuid, "token": token}).rowcount == 1

    def write_many(self, tx: sa.Connection, uuids: Sequence[str], token: int, **values: Any) -> int:
        """Write all of those with one fence, which several may share; how many were written."""
        statement = lease.WRITE.update(self.table, self.table.c.uuid.in_(uuids), {"token": token})
        return tx.execute(statement.values(updated_at=now(), **values)).rowcount

    def must_write_many(self, tx: sa.Connection, uuids: Sequence[str], token: int, **values: Any) -> None:
        """:meth:`write_many`.

        :raises Fenced: not all of them were written.
        """
        if self.write_many(tx, uuids, token, **values) != len(uuids):
            raise self._overtaken(" or ".join(uuids))

    def must_write(self, tx: sa.Connection, uuid: str, token: int, **values: Any) -> None:
        """:meth:`write`.

        :raises Fenced: it was not written: a later operation did, or the row is gone.
        """
        if not self.write(tx, uuid, token, **values):
            raise self._overtaken(uuid)

    def remove_many(self, tx: sa.Connection, uuids: Sequence[str], token: int) -> None:
        """Delete rows with one fence, which several may share.

        :raises Fenced: one was not deleted: a later operation wrote it, or it is gone.
        """
        statement = lease.REMOVE.delete(self.table, self.table.c.uuid.in_(uuids), {"token": token})
        if tx.execute(statement).rowcount != len(uuids):
            raise self._overtaken(" or ".join(uuids))

    def change(self, tx: sa.Connection, uuid: str, *conditions: Any, **values: Any) -> bool:
        """An immediate change that no operation stands behind: only where the conditions hold; False when they did not."""
        return self.change_many(tx, [uuid], *conditions, **values) == 1

    def change_many(self, tx: sa.Connection, uuids: Sequence[str], *conditions: Any, **values: Any) -> int:
        """The same for several; how many were changed."""
        statement = sa.update(self.table).where(self.table.c.uuid.in_(uuids), *conditions)
        return tx.execute(statement.values(updated_at=now(), **values)).rowcount

    def _overtaken(self, uuid: str) -> errors.Fenced:
        return errors.Fenced(f"The {self.kind} {uuid} was written by a later operation, or removed.")
