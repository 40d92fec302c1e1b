# SPDX-License-Identifier: Apache-2.0
"""Members in the database, which live as long as their service does.

A process beats once, in the table of services; there is no second heartbeat. If a member sees no beat of another member's service
for ``[services] service_down_time``, it removes that member. A member that only slept finds its row
gone, and joins again. By its own clock it stopped working before, at nine tenths of that time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.coordination.interface import (
    MEMBER_PREFIX,
    BackendCapability,
    BackendTools,
    CoordinationBackend,
    NotMember,
    ServiceLives,
    View,
    stays_of,
)
from moorage.db import Database, now
from moorage_plugins.coordination.tables import members

__all__ = ["DatabaseBackend"]

T = TypeVar("T")
_NEVER = float("-inf")
#: Seconds for which a reading of this member's row counts.
_FRESH = 1.5
_ROWS = sa.select(members.c.member, members.c.service, members.c.epoch).where(
    members.c.group_name == sa.bindparam("of_group")
)


class DatabaseBackend(CoordinationBackend):
    """Members in Moorage's own database; nothing else to install."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: BackendTools) -> None:
        super().__init__(tools)
        self.capabilities = frozenset(
            {
                BackendCapability.ACROSS_PROCESSES,
                BackendCapability.ACROSS_HOSTS,
                BackendCapability.SURVIVES_RESTART,
                BackendCapability.READS_DATABASE,
            }
        )
        if tools.database is None or tools.services is None:
            raise errors.ConfigError(
                "The coordination backend 'database' lives on the heartbeats of a service and its database, which are not here; "
                "give the URL of a coordination server instead (zookeeper://host:2181)."
            )
        self._database: Database = tools.database
        self._services: ServiceLives = tools.services
        self._group = ""
        self._member = b""
        #: When :meth:`members` has read this member's row, from before the reading, and what could be promised then.
        self._seen = _NEVER
        self._promised = _NEVER

    @override
    def start(self) -> None:
        self._guarded(lambda: self._services.living())

    @override
    def join(self, group: str, member_id: bytes) -> float:
        row = {
            "group_name": group, "member": member_id.decode("ascii"), "service": self._services.uuid,
            "epoch": self._services.epoch, "joined_at": now(),
        }  # fmt: skip
        # An earlier stay that could not be left, since the database was away, would live as long as this service does.
        stays = members.c.member.startswith(stays_of(member_id).decode("ascii"), autoescape=True)
        earlier = sa.delete(members).where(members.c.group_name == group, stays)

        def enter(tx: sa.Connection) -> None:
            tx.execute(earlier)
            tx.execute(sa.insert(members).values(row))

        self._guarded(lambda: self._database.run(enter))
        self._group, self._member = group, member_id
        return self._services.valid_until()

    @override
    def renew(self) -> float:
        # The ring asks for the members as often as this is called, so the row was read a moment ago.
        if self.tools.clock.monotonic() - self._seen < _FRESH:
            return self._promised
        until = self._services.valid_until()
        if self._member not in self._read()[0]:
            raise NotMember(f"{self._member.decode()} was removed from {self._group}: its service was silent too long.")
        return until

    @override
    def members(self) -> View:
        began, until = self.tools.clock.monotonic(), self._services.valid_until()
        self._seen = _NEVER
        rows, living = self._read(living=True)
        if self._member in rows:
            self._promised, self._seen = until, began
        gone = [member for member, life in rows.items() if life not in living]
        if gone and self._database.is_reading:
            raise errors.Unavailable("Members have to be removed, and this transaction only reads; ask again after it.")
        if gone:
            self._guarded(lambda: self._remove(gone))
        found = rows.keys() - set(gone)
        return View(frozenset(member for member in found if member.startswith(MEMBER_PREFIX)), began)

    @override
    def leave(self) -> None:
        self._seen = _NEVER
        self._guarded(lambda: self._remove([self._member]))

    @override
    def close(self) -> None:
        self._group, self._seen = "", _NEVER

    def _read(self, *, living: bool = False) -> tuple[dict[bytes, tuple[str, int]], frozenset[tuple[str, int]]]:
        """Returns the service of each member, and the services that live if they are asked for."""
        if not self._group:
            raise errors.Unavailable("This client is in no group.")

        def read() -> tuple[dict[bytes, tuple[str, int]], frozenset[tuple[str, int]]]:
            with self._database.read() as tx:
                found = tx.execute(_ROWS, {"of_group": self._group})
                rows = {row.member.encode("ascii"): (row.service, row.epoch) for row in found}
                return rows, self._services.living(tx) if living else frozenset()

        return self._guarded(read)

    def _remove(self, gone: list[bytes]) -> None:
        names = [member.decode("ascii") for member in gone]
        statement = sa.delete(members).where(members.c.group_name == self._group, members.c.member.in_(names))
        self._database.run(lambda tx: tx.execute(statement), idempotent=True)

    @staticmethod
    def _guarded(work: Callable[[], T]) -> T:
        """What else may go wrong in a database is no reason to end the heartbeat."""
        try:
            return work()
        except (errors.Unavailable, errors.ConfigError):
            raise
        except errors.MoorageError as error:
            raise errors.Unavailable(f"The members cannot be read from the database: {error.message}") from error
