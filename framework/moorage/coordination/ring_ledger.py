# SPDX-License-Identifier: Apache-2.0
"""The ring's row: one token for one set of members, whichever member proposed it.

Members see joins and departures at different moments. So a member proposes its view by a compare-and-update of the row's token, and
adopts what the row says. Equal tokens mean equal rings, and a ring assigns each object to one member. Tokens rise.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from typing_extensions import override

from moorage.coordination.tables import adoptions, claims, rings
from moorage.db import Database, Duplicate, now

__all__ = ["Adoption", "Ledger", "RingRow", "SqlRingLedger"]


@dataclass(frozen=True, slots=True)
class RingRow:
    """The row of a group. ``members`` are ids (bytes), sorted; ``changed_at`` microseconds of the database's clock."""

    token: int
    members: tuple[bytes, ...]
    replicas: int
    hash_function: str
    changed_at: int = 0


@dataclass(frozen=True, slots=True)
class Adoption:
    """The newest token that a member works under."""

    member: bytes
    token: int
    adopted_at: int = 0


class Ledger(abc.ABC):
    """The rows of rings and adoptions. Safe for use by several threads."""

    @abc.abstractmethod
    def read(self, group: str) -> tuple[RingRow | None, Mapping[bytes, int]]:
        """Returns the row of a group, and token by member of its adoptions, as of one moment."""

    @abc.abstractmethod
    def propose(self, group: str, seen: RingRow | None, proposed: RingRow) -> bool:
        """Write the row where its token is still that of ``seen`` (None: where there is no row); False when it is not.

        The token becomes larger than any that a group has, whatever ``proposed`` says; that of a first row larger than any that
        work was done under: a group that was renamed, or lost its row, goes on where the one before it was.
        """

    @abc.abstractmethod
    def adopt(self, group: str, member: bytes, token: int) -> None:
        """Write that the member works under this token now; one that is smaller than what is written changes nothing."""

    @abc.abstractmethod
    def forget(self, group: str, members: Collection[bytes]) -> None:
        """Remove the adoptions of members that are gone."""


_READ = sa.select(rings.c.token, rings.c.members, rings.c.replicas, rings.c.hash_function, rings.c.changed_at).where(
    rings.c.group_name == sa.bindparam("of_group")
)
_ADOPTIONS = (
    sa.select(adoptions.c.member, adoptions.c.token, adoptions.c.adopted_at)
    .where(adoptions.c.group_name == sa.bindparam("of_group"))
    .order_by(adoptions.c.member)
)
_MOVE = (
    sa.update(rings)
    .where(rings.c.group_name == sa.bindparam("of_group"), rings.c.token == sa.bindparam("seen"))
    .values(
        token=sa.bindparam("to_token", type_=sa.BigInteger),
        members=sa.bindparam("to_members", type_=rings.c.members.type),
        replicas=sa.bindparam("to_replicas"),
        hash_function=sa.bindparam("to_hash"),
        changed_at=now(),
    )
)
_ADOPT = (
    sa.update(adoptions)
    .where(
        adoptions.c.group_name == sa.bindparam("of_group"),
        adoptions.c.member == sa.bindparam("of_member"),
        adoptions.c.token < sa.bindparam("to_token", type_=sa.BigInteger),
    )
    .values(token=sa.bindparam("to_token", type_=sa.BigInteger), adopted_at=now())
)


class SqlRingLedger(Ledger):
    """The rows in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @override
    def read(self, group: str) -> tuple[RingRow | None, Mapping[bytes, int]]:
        with self._database.read() as tx:
            row = tx.execute(_READ, {"of_group": group}).first()
            found = {each.member.encode(): each.token for each in tx.execute(_ADOPTIONS, {"of_group": group})}
        return (None if row is None else _row(row)), found

    def groups(self) -> Sequence[tuple[str, RingRow, Sequence[Adoption]]]:
        """Returns all groups with their rings and adoptions; for the API."""
        with self._database.read() as tx:
            found = []
            for name in tx.execute(sa.select(rings.c.group_name).order_by(rings.c.group_name)).scalars().all():
                row = tx.execute(_READ, {"of_group": name}).one()
                adopted = [Adoption(each.member.encode(), each.token, each.adopted_at)
                           for each in tx.execute(_ADOPTIONS, {"of_group": name})]  # fmt: skip
                found.append((name, _row(row), adopted))
        return found

    @override
    def propose(self, group: str, seen: RingRow | None, proposed: RingRow) -> bool:
        members = [member.decode() for member in sorted(proposed.members)]
        if seen is None:
            values = {
                "group_name": group, "members": members, "replicas": proposed.replicas,
                "hash_function": proposed.hash_function, "changed_at": now(),
            }  # fmt: skip

            def first(tx: sa.Connection) -> None:
                token = 1 + max(_newest(tx, rings.c.token), _newest(tx, claims.c.token))
                tx.execute(sa.insert(rings).values(token=token, **values))

            try:
                self._database.run(first)
            except Duplicate:
                return False
            return True
        parameters = {
            "of_group": group, "seen": seen.token, "to_members": members, "to_replicas": proposed.replicas,
            "to_hash": proposed.hash_function,
        }  # fmt: skip

        def move(tx: sa.Connection) -> bool:
            token = 1 + max(seen.token, _newest(tx, rings.c.token))
            return tx.execute(_MOVE, {**parameters, "to_token": token}).rowcount == 1

        return self._database.run(move)

    @override
    def adopt(self, group: str, member: bytes, token: int) -> None:
        key = {"of_group": group, "of_member": member.decode()}

        def work(tx: sa.Connection) -> None:
            if tx.execute(_ADOPT, {**key, "to_token": token}).rowcount:
                return
            there = sa.select(adoptions.c.token).where(
                adoptions.c.group_name == group, adoptions.c.member == member.decode()
            )
            if tx.execute(there).first() is None:
                tx.execute(
                    sa.insert(adoptions).values(group_name=group, member=member.decode(), token=token, adopted_at=now())
                )

        # No other process writes this member's row, so the second look cannot go wrong, and doing it twice does no harm.
        self._database.run(work, idempotent=True)

    @override
    def forget(self, group: str, members: Collection[bytes]) -> None:
        names = [member.decode() for member in members]
        statement = sa.delete(adoptions).where(adoptions.c.group_name == group, adoptions.c.member.in_(names))
        self._database.run(lambda tx: tx.execute(statement), idempotent=True)


def _newest(tx: sa.Connection, column: Any) -> int:
    return int(tx.execute(sa.select(sa.func.coalesce(sa.func.max(column), 0))).scalar_one())


def _row(row: Any) -> RingRow:
    return RingRow(
        row.token, tuple(member.encode() for member in row.members), row.replicas, row.hash_function, row.changed_at
    )
