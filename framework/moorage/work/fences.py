# SPDX-License-Identifier: Apache-2.0
"""The fences of resources: raises them, and purges those that were not raised for long.

A token must never be used twice for one resource. A new fence therefore starts above the floor of its type, and a purge raises the
floor to the highest token that it removes, in the same transaction. A fence is purged only where no operation is in progress.

Why the order of statements suffices: a fence that is inserted while its old row is being purged waits for the purge, since both
write the same key (Galera finds that conflict at COMMIT). The insert itself may have read the floor before it waited. A later
statement therefore compares the token with the floor again, and sees what the purge committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from moorage.clock import Clock
from moorage.db import MICROSECONDS, Database, Duplicate, now
from moorage.work.interface import ExistedBefore
from moorage.work.tables import fences, workers

__all__ = [
    "ABOVE_FLOOR",
    "BATCH",
    "FLOOR",
    "PAUSE",
    "RAISE_MANY",
    "FencePurge",
    "first_fence",
    "first_fences",
    "last_tokens",
    "lift_above_floor",
    "raise_fence",
    "raise_fences",
    "raise_unchecked",
]

#: The ``resource_id`` of the row with a type's floor.
FLOOR = ""
#: Fences that one step of a purge looks at.
BATCH = 1000
#: Seconds between two walks of a purge over all fences.
PAUSE = 6 * 3600.0
_DAY = 86_400 * MICROSECONDS

_OF_MANY = sa.and_(
    fences.c.resource_type == sa.bindparam("of_type"),
    fences.c.resource_id.in_(sa.bindparam("of_resources", expanding=True)),
)
RAISE_MANY = sa.update(fences).where(_OF_MANY).values(token=fences.c.token + 1, raised_at=now())
_START_ABOVE = sa.update(fences).where(_OF_MANY).values(token=sa.bindparam("to_token", type_=sa.BigInteger))
_OF_ONE = sa.and_(
    fences.c.resource_type == sa.bindparam("of_type"), fences.c.resource_id == sa.bindparam("of_resource")
)
_READ = sa.select(fences.c.token).where(_OF_ONE)
_FLOOR = fences.alias("floors")
_OF_FLOOR = sa.and_(_FLOOR.c.resource_type == sa.bindparam("of_type"), _FLOOR.c.resource_id == FLOOR)
#: Condition of a later statement of the same transaction: the token ``to_token`` is above the floor of the type.
ABOVE_FLOOR = sa.not_(sa.exists().where(_OF_FLOOR, _FLOOR.c.token >= sa.bindparam("to_token", type_=sa.BigInteger)))
_READ_FLOOR = sa.select(_FLOOR.c.token).where(_OF_FLOOR)
_FIRST = {
    "resource_type": sa.bindparam("of_type"), "resource_id": sa.bindparam("of_resource"), "raised_at": now(),
    "token": sa.func.coalesce(_READ_FLOOR.scalar_subquery(), 0) + 1,
}  # fmt: skip
_KEY = [fences.c.resource_type, fences.c.resource_id]
_HIGHER = {"token": fences.c.token + 1, "raised_at": now()}
#: MySQL and MariaDB start at 1 and are lifted above the floor afterwards.
_UPSERT_MYSQL = mysql.insert(fences).values({**_FIRST, "token": 1}).on_duplicate_key_update(_HIGHER)
#: Raise the fence of one resource, or insert it above the floor.
_RAISE: Mapping[str, sa.Insert] = {
    "sqlite": sqlite.insert(fences)
    .values(_FIRST)
    .on_conflict_do_update(index_elements=_KEY, set_=_HIGHER)
    .returning(fences.c.token),
    "postgresql": postgresql.insert(fences)
    .values(_FIRST)
    .on_conflict_do_update(index_elements=_KEY, set_=_HIGHER)
    .returning(fences.c.token),
    "mysql": _UPSERT_MYSQL,
}
#: Insert the fence of a resource that never had one.
_INSERT: Mapping[str, sa.Insert] = {
    "sqlite": sqlite.insert(fences).values(_FIRST).on_conflict_do_nothing().returning(fences.c.token),
    "postgresql": postgresql.insert(fences).values(_FIRST).on_conflict_do_nothing().returning(fences.c.token),
    "mysql": _UPSERT_MYSQL,
}
_INSERT_ABOVE = sa.insert(fences).values(
    resource_type=sa.bindparam("of_type"), resource_id=sa.bindparam("of_resource"), raised_at=now(),
    token=sa.bindparam("to_token", type_=sa.BigInteger),
)  # fmt: skip
_LAST = sa.select(fences.c.resource_id, fences.c.token).where(_OF_MANY)

_NEXT_TYPE = sa.select(sa.func.min(fences.c.resource_type)).where(fences.c.resource_type > sa.bindparam("of_type"))
_SAME_RESOURCE = sa.and_(
    workers.c.resource_type == fences.c.resource_type, workers.c.resource_id == fences.c.resource_id
)
_PAGE = (
    sa.select(
        fences.c.resource_id,
        fences.c.token,
        sa.case((fences.c.raised_at <= now() - sa.bindparam("age_micros", type_=sa.BigInteger), 1), else_=0).label(
            "old"
        ),
        workers.c.id.label("worker"),
    )
    .outerjoin(workers, _SAME_RESOURCE)
    # The floor's own key is the smallest of all.
    .where(fences.c.resource_type == sa.bindparam("of_type"), fences.c.resource_id > sa.bindparam("after"))
    .order_by(fences.c.resource_id)
    .limit(sa.bindparam("page", type_=sa.Integer))
)
_RAISE_FLOOR = (
    sa.update(fences)
    .where(_OF_ONE, fences.c.token < sa.bindparam("to_token", type_=sa.BigInteger))
    .values(token=sa.bindparam("to_token", type_=sa.BigInteger), raised_at=now())
)
#: The token was read together with the absence of a worker row. Whatever uses the resource since has raised the token.
_REMOVE = sa.delete(fences).where(_OF_MANY, fences.c.token == sa.bindparam("of_token", type_=sa.BigInteger))


def raise_fence(tx: sa.Connection, resource_type: str, resource_id: str) -> int:
    """Raises the fence of a resource: a token above any that the resource ever had.

    Other transactions that raise the fence wait until this one ends.
    """
    token = raise_unchecked(tx, resource_type, resource_id)
    return lift_above_floor(tx, resource_type, resource_id, token)


def raise_unchecked(tx: sa.Connection, resource_type: str, resource_id: str) -> int:
    """Raises the fence of a resource. One statement; two on MariaDB.

    The token is valid only if a later statement finds it above the floor: :data:`ABOVE_FLOOR` or :func:`lift_above_floor`.
    """
    key = {"of_type": resource_type, "of_resource": resource_id}
    result = tx.execute(_RAISE[tx.dialect.name], key)
    return int(result.scalar_one() if result.returns_rows else tx.execute(_READ, key).scalar_one())


def first_fence(tx: sa.Connection, resource_type: str, resource_id: str) -> int | None:
    """Inserts the fence of a new resource; None when the resource had a fence. One statement.

    The token is as valid as that of :func:`raise_unchecked`.
    """
    result = tx.execute(_INSERT[tx.dialect.name], {"of_type": resource_type, "of_resource": resource_id})
    if result.returns_rows:
        token: int | None = result.scalar()
        return token
    # MariaDB says 1 for an inserted row and 2 for an updated one.
    return 1 if result.rowcount == 1 else None


def first_fences(tx: sa.Connection, resource_type: str, resource_ids: Sequence[str]) -> dict[str, int]:
    """Inserts the fences of new resources, all with one token; returns the token of each. Two statements.

    The token is as valid as that of :func:`raise_unchecked`.

    :raises ExistedBefore: some of the resources had fences; ``details['resources']`` names them.
    :raises Duplicate: another transaction has just inserted one of the fences.
    """
    known = last_tokens(tx, resource_type, [FLOOR, *resource_ids])
    token = known.pop(FLOOR, 0) + 1
    if known:
        names = sorted(known)
        raise ExistedBefore(
            f"{len(names)} of {len(resource_ids)} new resources of type {resource_type} existed before and were deleted: "
            f"{', '.join(names[:3])}. Use new uuids.",
            resources=names,
        )
    return _insert_above(tx, resource_type, resource_ids, token)


def raise_fences(tx: sa.Connection, resource_type: str, resource_ids: Sequence[str]) -> dict[str, int]:
    """Raises the fences of several resources and returns the new token of each.

    The tokens are as valid as that of :func:`raise_unchecked`. Two statements; one more if some fences are below the floor, and one
    if some resources have none.

    :raises Duplicate: another transaction has just inserted one of the fences.
    """
    wanted = sorted(resource_ids)
    raised = tx.execute(RAISE_MANY, {"of_type": resource_type, "of_resources": wanted}).rowcount
    tokens = last_tokens(tx, resource_type, [FLOOR, *wanted])
    first = tokens.pop(FLOOR, 0) + 1
    if len(tokens) != raised:
        # The raise has not seen these fences, so their tokens are those of earlier operations.
        raise Duplicate(
            f"Another transaction has just inserted the fences of {len(tokens) - raised} of {len(wanted)} resources of type "
            f"{resource_type}; try again."
        )
    low = [each for each, token in tokens.items() if token < first]
    if low:
        tx.execute(_START_ABOVE, {"of_type": resource_type, "of_resources": sorted(low), "to_token": first})
        tokens.update(dict.fromkeys(low, first))
    missing = [each for each in wanted if each not in tokens]
    return tokens | _insert_above(tx, resource_type, missing, first) if missing else tokens


def _insert_above(tx: sa.Connection, resource_type: str, resource_ids: Sequence[str], token: int) -> dict[str, int]:
    """Inserts fences with a token that is above the floor; returns the token of each."""
    rows = [{"of_type": resource_type, "of_resource": each, "to_token": token} for each in sorted(resource_ids)]
    tx.execute(_INSERT_ABOVE, rows)
    return dict.fromkeys(resource_ids, token)


def lift_above_floor(tx: sa.Connection, resource_type: str, resource_id: str, token: int) -> int:
    """Compares the token of a fence that this transaction has raised with the floor, and raises it above the floor if need be."""
    key = {"of_type": resource_type, "of_resource": resource_id}
    floor = tx.execute(_READ_FLOOR, key).scalar()
    if floor is None or token > floor:
        return token
    tx.execute(_START_ABOVE, {"of_type": resource_type, "of_resources": [resource_id], "to_token": floor + 1})
    return int(floor + 1)


def last_tokens(tx: sa.Connection, resource_type: str, resource_ids: Sequence[str]) -> dict[str, int]:
    """Returns the last token of each resource that has a fence."""
    rows = tx.execute(_LAST, {"of_type": resource_type, "of_resources": list(resource_ids)})
    return {row.resource_id: row.token for row in rows}


class FencePurge:
    """Walks over all fences, a page at a time, and removes old ones of resources without an operation. For one thread."""

    def __init__(self, database: Database, clock: Clock, *, batch: int = BATCH) -> None:
        self._database = database
        self._clock = clock
        self._batch = batch
        self._type, self._after = "", ""
        self._resume_at = float("-inf")

    def step(self, days: float) -> bool:
        """Looks at one page; False when the walk has ended. The next walk begins :data:`PAUSE` seconds later.

        :param days: a fence is old when it was last raised at least so many days ago.
        """
        if self._clock.monotonic() < self._resume_at:
            return False
        with self._database.read() as tx:
            kind = self._type or tx.execute(_NEXT_TYPE, {"of_type": ""}).scalar()
            page = self._page(tx, kind, days) if kind else []
            following = kind if len(page) == self._batch else tx.execute(_NEXT_TYPE, {"of_type": kind or ""}).scalar()
        unused = {row.resource_id: row.token for row in page if row.old and row.worker is None}
        if unused and kind:
            try:
                self._database.run(lambda tx: _purge(tx, kind, unused))
            except Duplicate:
                # Another scheduler has inserted the floor in this moment.
                return True
        self._type, self._after = following or "", page[-1].resource_id if following == kind and page else ""
        if not following:
            self._resume_at = self._clock.monotonic() + PAUSE
        return bool(following)

    def _page(self, tx: sa.Connection, kind: str, days: float) -> Sequence[Any]:
        values = {"of_type": kind, "after": self._after, "page": self._batch, "age_micros": int(days * _DAY)}
        return tx.execute(_PAGE, values).all()


def _purge(tx: sa.Connection, kind: str, unused: Mapping[str, int]) -> None:
    """Removes fences that still have the token that was read, and raises the floor before."""
    floor, key = max(unused.values()), {"of_type": kind, "of_resource": FLOOR}
    raised = tx.execute(_RAISE_FLOOR, {**key, "to_token": floor}).rowcount
    if not raised and tx.execute(_READ, key).scalar() is None:
        tx.execute(sa.insert(fences).values(resource_type=kind, resource_id=FLOOR, token=floor, raised_at=now()))
    same: dict[int, list[str]] = {}
    for resource, token in sorted(unused.items()):
        same.setdefault(token, []).append(resource)
    for token, resources in sorted(same.items()):
        tx.execute(_REMOVE, {"of_type": kind, "of_resources": resources, "of_token": token})
