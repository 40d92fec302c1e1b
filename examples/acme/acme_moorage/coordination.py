# SPDX-License-Identifier: Apache-2.0
"""Members as rows with a lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import sqlalchemy as sa

from acme_moorage.tables import members
from moorage import errors
from moorage.coordination.interface import (
    MEMBER_PREFIX,
    BackendCapability,
    BackendTools,
    CoordinationBackend,
    NotMember,
    View,
)
from moorage.db import MICROSECONDS, Database, now

__all__ = ["LeaseBackend"]

T = TypeVar("T")


class LeaseBackend(CoordinationBackend):
    """A member is a row that says when its session ends, by the database's clock; it has to renew that before."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = frozenset(
        {BackendCapability.ACROSS_PROCESSES, BackendCapability.ACROSS_HOSTS, BackendCapability.SURVIVES_RESTART}
    )

    def __init__(self, tools: BackendTools) -> None:
        super().__init__(tools)
        if tools.database is None:
            raise errors.ConfigError(
                "The coordination backend 'leases' keeps its members in a database, which is not here."
            )
        self._database: Database = tools.database
        self._lease = int(tools.session_timeout * MICROSECONDS)
        self._group = ""
        self._member = b""

    def start(self) -> None:
        """See whether the database answers."""
        self._do(lambda tx: tx.execute(sa.select(sa.func.count()).select_from(members)).scalar_one())

    def join(self, group: str, member_id: bytes) -> float:
        """A new row; nobody ever used the id before."""
        began = self.tools.clock.monotonic()
        row = {"group_name": group, "member": member_id.decode("ascii"), "expires_at": now() + self._lease}
        self._do(lambda tx: tx.execute(sa.insert(members).values(row)))
        self._group, self._member = group, member_id
        return began + self.tools.session_timeout

    def renew(self) -> float:
        """One statement: a session that is over cannot be renewed, whoever looks at the same moment."""
        began = self.tools.clock.monotonic()
        statement = sa.update(members).where(self._mine(), members.c.expires_at > now())
        if not self._do(lambda tx: tx.execute(statement.values(expires_at=now() + self._lease)).rowcount):
            raise NotMember(f"The session of {self._member.decode()} is over.")
        return began + self.tools.session_timeout

    def members(self) -> View:
        """Whose sessions last; those that are long over are removed on the way."""
        began = self.tools.clock.monotonic()
        self._mine()
        of_group = members.c.group_name == self._group
        long_ago = now() - 10 * self._lease

        def work(tx: Any) -> frozenset[bytes]:
            found = tx.execute(sa.select(members.c.member).where(of_group, members.c.expires_at > now())).scalars()
            living = frozenset(member.encode("ascii") for member in found)
            if tx.execute(sa.select(sa.func.count()).where(of_group, members.c.expires_at < long_ago)).scalar_one():
                tx.execute(sa.delete(members).where(of_group, members.c.expires_at < long_ago))
            return living

        found = self._do(work)
        return View(frozenset(member for member in found if member.startswith(MEMBER_PREFIX)), began)

    def leave(self) -> None:
        """The row goes."""
        self._do(lambda tx: tx.execute(sa.delete(members).where(self._mine())))

    def close(self) -> None:
        """Nothing is open; the row goes with its lease."""
        self._group = ""

    def _mine(self) -> sa.ColumnElement[bool]:
        if not self._group:
            raise errors.Unavailable("This client is in no group.")
        return sa.and_(members.c.group_name == self._group, members.c.member == self._member.decode("ascii"))

    def _do(self, work: Callable[[Any], T]) -> T:
        """Whatever else goes wrong in a database may work later."""
        try:
            return self._database.run(work)
        except (errors.Unavailable, errors.ConfigError):
            raise
        except errors.MoorageError as error:
            raise errors.Unavailable(f"The members cannot be read or written: {error.message}") from error
