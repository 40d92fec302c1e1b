# SPDX-License-Identifier: Apache-2.0
"""Shows operators the operations in progress, their owners, and what they wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup.conditions import LEFT, OF_QUEUE, QueuedForDead
from moorage.cleanup.dry_run import Key
from moorage.cleanup.tables import cleanup_history, cleanup_requests
from moorage.db import MICROSECONDS, Database, JournalEvent, now, read_now, record
from moorage.services.interface import Service
from moorage.services.tables import services
from moorage.work.interface import Operation, Phase
from moorage.work.operation_statements import COLUMNS
from moorage.work.operations import SqlOperationStore, operation_of
from moorage.work.tables import workers

__all__ = ["Forecast", "OperationViews"]

_HISTORY = tuple(cleanup_history.c)
_FILTERS = {
    "resource_type": workers.c.resource_type,
    "resource_id": workers.c.resource_id,
    "phase": workers.c.phase,
    "status": workers.c.status,
    "target_host": workers.c.target_host,
    "worker": workers.c.worker,
}
_QUARANTINED = workers.c.phase == Phase.QUARANTINED.value


@dataclass(frozen=True, slots=True)
class _Named:
    host: str
    binary: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Some rows with what would become of each, and how many more there are."""

    rows: Sequence[Mapping[str, Any]]
    left_out: int


class OperationViews:
    """Reads worker rows for people, and the two verbs that people have for rows in quarantine.

    :param blocked_reason: why resources of a type are not cleaned at present, empty when they are; for all that is known here.
    """

    def __init__(
        self,
        database: Database,
        store: SqlOperationStore,
        blocked_reason: Callable[[str], str] = lambda resource_type: "",
    ) -> None:
        self._database = database
        self._store = store
        self._hindrance = blocked_reason

    def rows(
        self, *, after: tuple[str, str] = ("", ""), limit: int = 1000, host: str | None = None, **filters: str | None
    ) -> Sequence[dict[str, Any]]:
        """Rows by (type, id), a page of ``limit`` after the given ones, each with ``why``.

        :param host: addressed to it, or worked on by its service.
        """
        key = sa.tuple_(workers.c.resource_type, workers.c.resource_id)
        query = sa.select(*COLUMNS).order_by(workers.c.resource_type, workers.c.resource_id).limit(limit)
        if after != ("", ""):
            query = query.where(key > sa.tuple_(sa.literal(after[0]), sa.literal(after[1])))
        for name, value in filters.items():
            if value is not None:
                query = query.where(_FILTERS[name] == value)
        if host is not None:
            of_host = sa.select(services.c.uuid).where(services.c.host == host)
            query = query.where(
                sa.or_(workers.c.target_host == host, workers.c.owner.in_(of_host), workers.c.worker.in_(of_host))
            )
        return self._shown(query)

    def get(self, resource_type: str, resource_id: str) -> dict[str, Any]:
        """One row.

        :raises NotFound: no operation on the resource is in progress.
        """
        found = self._shown(sa.select(*COLUMNS).where(*_of(resource_type, resource_id)))
        if not found:
            raise errors.NotFound(f"No operation on {resource_type} {resource_id} is in progress.")
        return found[0]

    def find(self, resource_id: str, resource_type: str | None) -> Sequence[Operation]:
        """Rows of a resource; several when types share a uuid."""
        query = sa.select(*COLUMNS).where(workers.c.resource_id == resource_id)
        if resource_type is not None:
            query = query.where(workers.c.resource_type == resource_type)
        with self._database.read() as tx:
            return [operation_of(row) for row in tx.execute(query)]

    def would_clean(
        self,
        service: Service,
        dead: bool,
        resource_type: str | None,
        resource_id: str | None,
        limit: int = 1000,
        predict: Callable[[Any, Sequence[Operation]], Mapping[Key, str]] = lambda transaction, rows: {},
    ) -> Forecast:
        """Rows that the service has begun, or that wait for it, each with ``would``: whether it would be cleaned, and why (not).

        :param dead: it would be declared dead.
        :param predict: of rows that a cleaner may take, what else hinders it; see :meth:`moorage.cleanup.cleaner.Cleaner.predict`.
        """
        asked, claimed = workers.c.worker == service.uuid, LEFT
        if dead:
            asked, claimed = sa.or_(asked, OF_QUEUE), sa.or_(LEFT, OF_QUEUE)
        wanted = QueuedForDead(service.host, service.uuid, service.epoch + dead)
        conditions = [asked]
        if resource_type:
            conditions.append(workers.c.resource_type == resource_type)
        if resource_id:
            conditions.append(workers.c.resource_id == resource_id)
        query = sa.select(sa.case((claimed, 1), else_=0), *COLUMNS).where(*conditions)
        query = query.order_by(workers.c.resource_type, workers.c.resource_id).limit(limit)
        count = sa.select(sa.func.count()).select_from(workers).where(*conditions)
        with self._database.read() as tx:
            moment = read_now(tx)
            rows = [(bool(row[0]), operation_of(row[1:])) for row in tx.execute(query, wanted.parameters)]
            all_of_them = len(rows) if len(rows) < limit else tx.execute(count, wanted.parameters).scalar_one()
            otherwise = predict(tx, [row for taken, row in rows if taken])
        found = [
            {
                "resource_type": row.resource_type,
                "resource_id": row.resource_id,
                "status": row.status,
                "phase": row.phase,
                "host": service.host,
                "would": otherwise.get((row.resource_type, row.resource_id), "yes") if taken else _why_not(row, moment),
            }
            for taken, row in rows
        ]
        return Forecast(found, all_of_them - len(rows))

    def history(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        resource_type: str | None = None,
        resource_id: str | None = None,
        outcome: str | None = None,
    ) -> Sequence[dict[str, Any]]:
        """What became of orphans, oldest first, a page of ``limit`` after the line of that number."""
        query = sa.select(*_HISTORY).where(cleanup_history.c.id > after).order_by(cleanup_history.c.id).limit(limit)
        for column, value in (
            (cleanup_history.c.resource_type, resource_type),
            (cleanup_history.c.resource_id, resource_id),
            (cleanup_history.c.outcome, outcome),
        ):
            if value is not None:
                query = query.where(column == value)
        with self._database.read() as tx:
            return [dict(row._mapping) for row in tx.execute(query)]

    # -- verbs ----------------------------------------------------------------------------------------------------

    def retry(self, resource_type: str, resource_id: str) -> dict[str, Any]:
        """Take it out of quarantine: it is tried again from the beginning, with the next look of a cleaner.

        :raises NotFound, Conflict: there is no such row, or it is not in quarantine.
        """

        def work(tx: sa.Connection) -> bool:
            row = tx.execute(sa.select(*COLUMNS).where(*key)).first()
            if row is None or tx.execute(statement).rowcount != 1:
                return False
            # An operator must look after it again.
            requests = cleanup_requests.c
            asked = requests.resource_type.in_(("", resource_type)), requests.resource_id.in_(("", resource_id))
            tx.execute(
                sa.update(cleanup_requests)
                .where(requests.service == row.worker, requests.epoch > row.worker_epoch, *asked)
                .values(done_at=None)
            )
            _record(tx, "requeued", row)
            return True

        key = (*_of(resource_type, resource_id), _QUARANTINED)
        values = {"phase": Phase.RETRYING.value, "next_try_at": 0, "attempts": 1, "updated_at": now()}
        statement = sa.update(workers).where(*key).values(values)
        if not self._database.run(work):
            raise self._not_in_quarantine(resource_type, resource_id)
        return self.get(resource_type, resource_id)

    def discard(self, resource_type: str, resource_id: str) -> None:
        """End a row in quarantine without cleaning; what the resource is then, its service's reset-state says.

        :raises NotFound, Conflict: there is no such row, or it is not in quarantine.
        """

        def work(tx: sa.Connection) -> bool:
            of_row = *_of(resource_type, resource_id), _QUARANTINED
            query = sa.select(*COLUMNS).where(*of_row)
            row = tx.execute(query).first()
            if row is None:
                return False
            # Another operator may have taken it out of quarantine at this moment.
            if tx.execute(sa.delete(workers).where(*of_row, workers.c.token == row.token)).rowcount != 1:
                return False
            self._store.reset(tx, resource_type, resource_id)
            tx.execute(
                sa.insert(cleanup_history).values(
                    at=now(), resource_type=resource_type, resource_id=resource_id, operation=row.operation,
                    status=row.status, outcome="discarded", reason=row.last_error, worker=row.worker,
                    worker_epoch=row.worker_epoch, cleaner=None, cleaner_epoch=0, token=row.token,
                    attempts=row.attempts, seconds=0.0,
                )
            )  # fmt: skip
            _record(tx, "discarded", row)
            return True

        if not self._database.run(work):
            raise self._not_in_quarantine(resource_type, resource_id)

    def _not_in_quarantine(self, resource_type: str, resource_id: str) -> errors.MoorageError:
        try:
            row = self.get(resource_type, resource_id)
        except errors.NotFound as error:
            return error
        return errors.Conflict(f"{resource_type} {resource_id} is not in quarantine: {row['why']}.")

    # -- why ------------------------------------------------------------------------------------------------------

    def _shown(self, query: Any) -> list[dict[str, Any]]:
        with self._database.read() as tx:
            rows = [operation_of(row) for row in tx.execute(query)]
            wanted = {uuid for row in rows for uuid in (row.owner, row.worker) if uuid is not None}
            columns = (services.c.uuid, services.c.host, services.c.binary, services.c.epoch)
            known = {
                row.uuid: _Named(row.host, row.binary, row.epoch)
                for row in tx.execute(sa.select(*columns).where(services.c.uuid.in_(wanted)))
            }
            moment = read_now(tx)
        return [{**asdict(row), "why": _why(row, known, moment) + self._but(row, known, moment)} for row in rows]

    def _but(self, row: Operation, known: Mapping[str, _Named], moment: int) -> str:
        """What keeps cleaners from a row that waits for one."""
        owner = known.get(row.owner or "")
        ended = row.phase == Phase.WORKING and (owner is None or row.epoch < owner.epoch)
        if not ended and row.phase != Phase.RETRYING and not (row.phase == Phase.CLEANING and row.expires_at < moment):
            return ""
        hinders = self._hindrance(row.resource_type)
        return f"; but {hinders}" if hinders else ""


def _record(tx: sa.Connection, what: str, row: Any) -> None:
    state = {"operation": row.operation, "status": row.status, "worker": row.worker, "attempts": row.attempts}
    subject = f"{row.resource_type}/{row.resource_id}"
    record(tx, JournalEvent(f"cleanup.{what}", subject, row.token, state, row.project_id or ""))


def _of(resource_type: str, resource_id: str) -> tuple[Any, ...]:
    return workers.c.resource_type == resource_type, workers.c.resource_id == resource_id


def _why(row: Operation, known: Mapping[str, _Named], moment: int) -> str:
    """One sentence: who has it, and what it waits for."""
    if row.phase == Phase.WAITING:
        error = f"; the last owner gave it back: {row.last_error}" if row.last_error else ""
        queued = ", which has it in its queue," if row.next_try_at > moment else ""
        return f"waits for {row.target_host}{queued} to take it, since {_ago(row.updated_at, moment)}{error}"
    if row.phase == Phase.QUARANTINED:
        return f"in quarantine after {row.attempts} tries, the last one failed: {row.last_error}"
    if row.phase == Phase.RETRYING:
        when = max(0.0, (row.next_try_at - moment) / MICROSECONDS)
        return f"the cleanup failed ({row.last_error}); tried again in {when:.0f} s, when its cluster has a cleaner"
    owner = known.get(row.owner or "")
    named = f"{owner.binary} {owner.host}" if owner else f"service {row.owner}, which is not known any more"
    left = (row.expires_at - moment) / MICROSECONDS
    lease = f"its lease ends in {left:.0f} s" if left > 0 else f"its lease has ended {-left:.0f} s ago"
    if row.phase == Phase.CLEANING:
        return f"{named} cleans it, {lease}"
    if owner is None or row.epoch < owner.epoch:
        return (
            f"{named} began it and has ended since; it waits for a cleaner of its cluster, or for that service's start"
        )
    return f"{named} works on it, {lease}"


def _why_not(row: Operation, moment: int) -> str:
    if row.phase == Phase.QUARANTINED:
        return f"no: in quarantine ({row.last_error})"
    if row.phase == Phase.CLEANING and row.expires_at >= moment:
        return "no: a cleaner is at it"
    if row.phase == Phase.RETRYING and row.next_try_at > moment:
        return f"later: {row.last_error}"
    return "no: its service lives and works on it"


def _ago(then: int, moment: int) -> str:
    return f"{max(0.0, (moment - then) / MICROSECONDS):.0f} s"
