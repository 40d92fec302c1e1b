# SPDX-License-Identifier: Apache-2.0
"""Keeps the place of each follower of the journal in the store, under a fenced lease.

One process at a time delivers the events of a subscription. It holds the lease of the subscription's row, and moves the cursor
after each delivery. Both are conditional statements of :mod:`moorage.work.lease`: a process that lost its lease, because it was
paused for longer, cannot move the cursor. A process that dies between a delivery and the move leaves the cursor where it was. Then
the next owner delivers the same events again: each event is delivered at least once, and in the order of the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage import plugin_isolation
from moorage.db import MICROSECONDS, Database, Duplicate, now
from moorage.db.tables import event_sequence
from moorage.journal.tables import subscriptions
from moorage.services.interface import ServiceIdentity
from moorage.work.lease import RELEASE, RENEW, TAKE

__all__ = ["FAILING_AFTER", "Subscription", "SubscriptionStore", "shown"]

#: Failures in a row after which a subscription counts as failing. It is tried again all the same, every :data:`_LONGEST_BACKOFF`.
FAILING_AFTER = 10
#: Seconds between two tries: after the first failure, and at most. It doubles with each failure.
_FIRST_BACKOFF, _LONGEST_BACKOFF = 1.0, 300.0
_ERROR_LENGTH = 1000

_COLUMNS = tuple(subscriptions.c[name] for name in (
    "name", "position", "missed", "token", "owner", "epoch", "expires_at", "failures", "failing_since", "retry_at",
    "last_error", "last_error_at", "delivered_at",
))  # fmt: skip
_KEY = subscriptions.c.name == sa.bindparam("of_name", type_=sa.String)
_PARAMETERS = {
    "now": now(),
    "token": sa.bindparam("to_token", type_=sa.BigInteger),
    "owner": sa.bindparam("to_owner", type_=sa.String),
    "epoch": sa.bindparam("to_epoch", type_=sa.BigInteger),
    "lease": sa.bindparam("for_micros", type_=sa.BigInteger),
}
_FROM = subscriptions.c.position == sa.bindparam("from_position", type_=sa.BigInteger)
_ALL = sa.select(*_COLUMNS).order_by(subscriptions.c.name)
_LAST = sa.select(event_sequence.c.last)
_LIST = _ALL.add_columns(now(), _LAST.scalar_subquery())
_SEEN = subscriptions.c.token == sa.bindparam("seen_token", type_=sa.BigInteger)
_TAKE = TAKE.update(subscriptions, _KEY, _PARAMETERS).where(_SEEN)
#: From an earlier loop of this very process, whose call may still run: a new token fences its end off.
_TAKE_BACK = (
    RENEW.update(subscriptions, _KEY, {**_PARAMETERS, "token": sa.bindparam("seen_token", type_=sa.BigInteger)})
    .where(subscriptions.c.owner == _PARAMETERS["owner"], subscriptions.c.epoch == _PARAMETERS["epoch"])
    .values(token=_PARAMETERS["token"])
)
_RENEW = RENEW.update(subscriptions, _KEY, _PARAMETERS)
_MOVE = _RENEW.where(_FROM).values(position=sa.bindparam("to_position", type_=sa.BigInteger))
_DELIVERED = _MOVE.values(failures=0, failing_since=0, retry_at=0, delivered_at=now())
_SKIP = _MOVE.values(
    missed=subscriptions.c.missed + sa.bindparam("skipped", type_=sa.BigInteger),
    last_error=sa.bindparam("text", type_=sa.String),
    last_error_at=now(),
)
_FAIL = _RENEW.values(
    failures=subscriptions.c.failures + 1,
    # MariaDB sees the new value of a column that was assigned before, so the condition names no other column.
    failing_since=sa.case((subscriptions.c.failing_since == 0, now()), else_=subscriptions.c.failing_since),
    retry_at=now() + sa.bindparam("pause", type_=sa.BigInteger),
    last_error=sa.bindparam("text", type_=sa.String),
    last_error_at=now(),
)
_RELEASE = RELEASE.update(subscriptions, _KEY, _PARAMETERS)
#: An operator moves the cursor: the process that delivers has lost its lease.
_RESET = (
    sa.update(subscriptions)
    .where(_KEY)
    .values(token=subscriptions.c.token + 1, owner=None, epoch=0, expires_at=0, failures=0, failing_since=0, retry_at=0)
)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One follower of the journal. Times are microseconds since the Unix epoch, of the database's clock; 0: never.

    :param position: the cursor: no event up to it is delivered again, unless a delivery's end was not recorded.
    :param missed: how many events were purged before they were delivered.
    :param owner: uuid of the service that delivers, with ``epoch``; None when no service does.
    :param failures: failed deliveries since the last one that succeeded.
    """

    name: str
    position: int
    missed: int
    token: int
    owner: str | None
    epoch: int
    expires_at: int
    failures: int
    failing_since: int
    retry_at: int
    last_error: str
    last_error_at: int
    delivered_at: int

    @property
    def status(self) -> str:
        """``active``; ``retrying`` after a failure; ``failing`` after :data:`FAILING_AFTER` in a row."""
        if not self.failures:
            return "active"
        return "retrying" if self.failures < FAILING_AFTER else "failing"


class SubscriptionStore:
    """The rows of subscriptions. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self) -> tuple[Sequence[Subscription], int, int]:
        """Returns all subscriptions by name, the number of the newest event, and the time; one statement.

        Both numbers are 0 when there is no subscription.
        """
        return self._database.read_run(self.list_in)

    @staticmethod
    def list_in(tx: sa.Connection) -> tuple[Sequence[Subscription], int, int]:
        """:meth:`list` in the caller's transaction."""
        rows = tx.execute(_LIST).all()
        moment, last = rows[0][-2:] if rows else (0, 0)
        return [Subscription(*row[:-2]) for row in rows], last or 0, moment

    def begin(self, name: str) -> None:
        """Make a subscription that begins after the newest event; nothing happens if there is one of this name."""
        try:
            self._database.run(lambda tx: self.insert(tx, name, None))
        except Duplicate:
            return

    def insert(self, tx: sa.Connection, name: str, position: int | None) -> None:
        """Make a subscription in the caller's transaction.

        :param position: the cursor; None: the newest event.
        :raises Duplicate: there is one of this name.
        """
        if position is None:
            position = tx.execute(_LAST).scalar_one_or_none() or 0
        nothing = dict.fromkeys(
            ("missed", "token", "epoch", "expires_at", "failures", "failing_since", "retry_at", "last_error_at",
             "delivered_at"), 0,
        )  # fmt: skip
        tx.execute(sa.insert(subscriptions).values(name=name, position=position, last_error="", **nothing))

    def remove(self, tx: sa.Connection, name: str) -> None:
        """Remove a subscription in the caller's transaction; a process that delivers for it stops at its next write."""
        tx.execute(sa.delete(subscriptions).where(subscriptions.c.name == name))

    def reset(self, tx: sa.Connection, name: str, position: int | None) -> None:
        """Try again at once, from another position where one is given, in the caller's transaction.

        The token rises, so that a delivery that runs cannot move the cursor any more.
        """
        statement = _RESET if position is None else _RESET.values(position=position)
        tx.execute(statement, {"of_name": name})

    # -- the lease --------------------------------------------------------------------------------------------------

    def hold(
        self, seen: Subscription, me: ServiceIdentity, seconds: float, token: int | None = None
    ) -> Subscription | None:
        """Hold the lease for so many seconds, newly or still; returns the row, or None when another owner was faster.

        :param token: what the caller got when it took the lease; None: it never did. A lease that an earlier caller of the same
            process has taken is taken again, so that two never write with one token.
        """
        mine = (seen.owner, seen.epoch) == (me.uuid, me.epoch)
        still = mine and seen.token == token
        values = self._key(seen.name, seen.token if still else seen.token + 1, seconds)
        if not still:
            values |= {"to_owner": me.uuid, "to_epoch": me.epoch, "seen_token": seen.token}
        statement = _RENEW if still else _TAKE_BACK if mine else _TAKE

        def work(tx: sa.Connection) -> Subscription | None:
            if tx.execute(statement, values).rowcount != 1:
                return None
            return Subscription(*tx.execute(sa.select(*_COLUMNS).where(subscriptions.c.name == seen.name)).one())

        return self._database.run(work)

    def delivered(self, held: Subscription, position: int, seconds: float) -> bool:
        """Move the cursor after a delivery; False when the lease is lost, or another owner has moved the cursor."""
        return self._write(_DELIVERED, held, seconds, from_position=held.position, to_position=position)

    def pass_over(self, held: Subscription, position: int, seconds: float) -> bool:
        """Move the cursor over events that the follower does not want; as :meth:`delivered`."""
        return self._write(_MOVE, held, seconds, from_position=held.position, to_position=position)

    def skip(self, held: Subscription, position: int, seconds: float) -> bool:
        """Move the cursor over events that were purged, and say so; as :meth:`delivered`."""
        skipped = position - held.position
        text = f"The events {held.position + 1} to {position} were purged before they were delivered."
        values = {"from_position": held.position, "to_position": position, "skipped": skipped, "text": text}
        return self._write(_SKIP, held, seconds, **values)

    def failed(self, held: Subscription, error: str, seconds: float) -> bool:
        """Note a failure, and put the next try off; False when the lease is lost."""
        pause = min(_LONGEST_BACKOFF, _FIRST_BACKOFF * 2 ** min(held.failures, 16))
        text = plugin_isolation.escape_unprintable(error)[:_ERROR_LENGTH]
        return self._write(_FAIL, held, seconds, pause=int(pause * MICROSECONDS), text=text)

    def release(self, name: str, token: int) -> None:
        """Leave the work to other processes at once; harmless when the lease is lost."""
        self._database.run(lambda tx: tx.execute(_RELEASE, {"of_name": name, "to_token": token}) and None)

    def _write(self, statement: sa.Update, held: Subscription, seconds: float, **values: Any) -> bool:
        given = self._key(held.name, held.token, seconds) | values
        return self._database.run(lambda tx: tx.execute(statement, given).rowcount == 1)

    @staticmethod
    def _key(name: str, token: int, seconds: float) -> dict[str, Any]:
        return {"of_name": name, "to_token": token, "for_micros": int(seconds * MICROSECONDS)}


def shown(found: Subscription, last: int) -> Mapping[str, Any]:
    """What people see of a subscription.

    :param last: the number of the newest event.
    """
    return {
        "status": found.status,
        "position": found.position,
        "lag": max(0, last - found.position),
        "missed": found.missed,
        "failures": found.failures,
        "failing_since": found.failing_since or None,
        "next_try_at": found.retry_at or None,
        "last_error": found.last_error,
        "last_error_at": found.last_error_at or None,
        "delivered_at": found.delivered_at or None,
    }
