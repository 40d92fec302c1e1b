# SPDX-License-Identifier: Apache-2.0
"""Idempotency keys: a request that a client repeats is done once, and the repetition gets the first answer.

A key belongs to one user of one project and one route. The first request with a key inserts a row; the unique scope decides who is
first. The row keeps a fingerprint of the request and, when it is done, the answer, for 24 hours of the database's time.

The row also names the operation behind the request (:attr:`Begun.operation`). If a process dies between the operation and its
answer, the next request with the key takes the row over after ``busy_seconds`` and finds the operation done. After an error that
leaves open whether the operation was done, the next request takes the row over at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.control_plane.tables import idempotency_keys
from moorage.db import MICROSECONDS, Database, Duplicate, now

__all__ = ["Begun", "IdempotencyKeys", "KeptAnswer"]

#: Seconds for which an answer is kept.
KEPT = 86_400
_BATCH = 1000
#: How often a row that changes meanwhile is looked at again.
_LOOKS = 5
_KEY = re.compile(r"[!-~]{1,255}")
_C = idempotency_keys.c
_OF_SCOPE = _C.scope == sa.bindparam("of_scope")
_EXPIRED = _C.created_at < now() - KEPT * MICROSECONDS
_LOOK = sa.select(
    _C.fingerprint,
    _C.operation,
    _C.status,
    _C.answer,
    (_C.busy_until <= now()).label("lapsed"),
    _EXPIRED.label("expired"),
).where(_OF_SCOPE)
_OWNED = sa.and_(_OF_SCOPE, _C.owner == sa.bindparam("of_owner"), _C.status.is_(None))
_BUSY = now() + sa.bindparam("busy_micros", type_=sa.BigInteger)
_INSERT = sa.insert(idempotency_keys).values(busy_until=_BUSY, created_at=now())
_KEEP = (
    sa.update(idempotency_keys)
    .where(_OWNED)
    .values(
        status=sa.bindparam("to_status", type_=_C.status.type), answer=sa.bindparam("to_answer", type_=_C.answer.type)
    )
)
_RELEASE = sa.update(idempotency_keys).where(_OWNED).values(busy_until=now())
_FORGET = sa.delete(idempotency_keys).where(_OWNED)
_DROP_EXPIRED = sa.delete(idempotency_keys).where(_OF_SCOPE, _EXPIRED)
_TAKE_OVER = (
    sa.update(idempotency_keys)
    .where(_OF_SCOPE, _C.status.is_(None), _C.busy_until <= now())
    .values(owner=sa.bindparam("to_owner", type_=_C.owner.type), busy_until=_BUSY)
)


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer of an earlier request with the key."""

    status: int
    body: Any
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Begun:
    """The right to do the request of a key. ``operation`` names the work; it is the same in every try with the key."""

    scope: str
    owner: str
    operation: str


class IdempotencyKeys:
    """The keys of the store. Safe for use by several threads.

    :param busy_seconds: after this time without an answer the first request is taken for dead.
    """

    def __init__(self, database: Database, *, busy_seconds: float) -> None:
        self._database = database
        self._busy = int(busy_seconds * MICROSECONDS)

    def begin(self, key: str, caller: tuple[str, str], route: str, request: Any, operation: str) -> Begun | KeptAnswer:
        """Claim the key, or return the answer that it has.

        :param caller: project and user.
        :param request: JSON data: everything that tells this request from another one of the route.
        :param operation: a new UUID, which names the work if no earlier request has begun it.
        :raises InvalidInput: the key is empty, longer than 255 characters or not printable ASCII.
        :raises Conflict: the key belongs to another request, or its first request is still in progress.
        """
        if not _KEY.fullmatch(key):
            raise errors.InvalidInput(
                "Idempotency-Key must have 1 to 255 printable ASCII characters without blanks.", path="Idempotency-Key"
            )
        scope = _digest([*caller, route, key])
        begun = Begun(scope, randomness.new_uuid(), operation)
        fingerprint = _digest(request)
        for _ in range(_LOOKS):
            if self._insert(begun, fingerprint):
                return begun
            found = self._look(begun, key, fingerprint)
            if found is not None:
                return found
        raise errors.Conflict(f"The Idempotency-Key {key} is being used by other requests; try again.")

    def keep(self, begun: Begun, answer: KeptAnswer) -> None:
        """Write the answer; nothing when another process has taken the key over."""
        data = {"body": answer.body, "headers": dict(answer.headers)}
        values = {**_owned(begun), "to_status": answer.status, "to_answer": data}
        self._database.run(lambda tx: tx.execute(_KEEP, values), idempotent=True)

    def release(self, begun: Begun) -> None:
        """Let the next request with the key go on with the operation: whether it was done is not known."""
        self._database.run(lambda tx: tx.execute(_RELEASE, _owned(begun)), idempotent=True)

    def forget(self, begun: Begun) -> None:
        """Free the key: nothing was done."""
        self._database.run(lambda tx: tx.execute(_FORGET, _owned(begun)), idempotent=True)

    def purge(self) -> int:
        """Remove rows that are older than 24 hours, at most 1,000; returns how many."""
        query = sa.select(_C.id).where(_EXPIRED).order_by(_C.created_at).limit(_BATCH)
        with self._database.read() as tx:
            ids = tx.execute(query).scalars().all()
        if not ids:
            return 0
        statement = sa.delete(idempotency_keys).where(_C.id.in_(ids), _EXPIRED)
        return int(self._database.run(lambda tx: tx.execute(statement).rowcount, idempotent=True))

    def _insert(self, begun: Begun, fingerprint: str) -> bool:
        values = {
            "scope": begun.scope, "fingerprint": fingerprint, "operation": begun.operation, "owner": begun.owner,
            "busy_micros": self._busy,
        }  # fmt: skip
        try:
            self._database.run(lambda tx: tx.execute(_INSERT, values))
        except Duplicate:
            return False
        return True

    def _look(self, begun: Begun, key: str, fingerprint: str) -> Begun | KeptAnswer | None:
        """Decide by the row that is there; None when it changed meanwhile."""
        with self._database.read() as tx:
            row = tx.execute(_LOOK, {"of_scope": begun.scope}).first()
        if row is None:
            return None
        if row.expired:
            self._database.run(lambda tx: tx.execute(_DROP_EXPIRED, {"of_scope": begun.scope}), idempotent=True)
            return None
        if row.fingerprint != fingerprint:
            raise errors.Conflict(
                f"The Idempotency-Key {key} was used for another request to this route within the last 24 hours. Use a new key.",
                idempotency_key=key,
            )
        if row.status is not None:
            return KeptAnswer(row.status, row.answer["body"], row.answer["headers"])
        if row.lapsed:
            return replace(begun, operation=row.operation) if self._take_over(begun) else None
        raise errors.Conflict(
            f"A request with the Idempotency-Key {key} is in progress. Try again in a moment; you will get its answer.",
            idempotency_key=key,
        )

    def _take_over(self, begun: Begun) -> bool:
        values = {"of_scope": begun.scope, "to_owner": begun.owner, "busy_micros": self._busy}
        return bool(self._database.run(lambda tx: tx.execute(_TAKE_OVER, values).rowcount) == 1)


def _owned(begun: Begun) -> dict[str, str]:
    return {"of_scope": begun.scope, "of_owner": begun.owner}


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
