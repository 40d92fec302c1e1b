# SPDX-License-Identifier: Apache-2.0
"""Requests to clean after a service: one row for each incarnation that ended and each filter, for any number of requesters.

The row is the request. Messages only make it quicker: cleaners look for open rows by themselves, and schedulers that ask for the
same find each other's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.cleanup import totals
from moorage.cleanup.conditions import (
    OF_QUEUE,
    OF_SERVICE,
    OrphanSelector,
    OrphansOfService,
    QueuedForDead,
)
from moorage.cleanup.tables import cleanup_history, cleanup_requests
from moorage.db import MICROSECONDS, Database, Duplicate, now
from moorage.services.interface import Service
from moorage.services.registry import ServiceRegistry
from moorage.work.interface import Phase
from moorage.work.tables import workers

__all__ = ["BATCH", "CleanupRequest", "RequestStore"]

#: Rows that are removed in one transaction at most.
BATCH = 1000

_COLUMNS = (
    cleanup_requests.c.uuid, cleanup_requests.c.service, cleanup_requests.c.epoch, cleanup_requests.c.resource_type,
    cleanup_requests.c.resource_id, cleanup_requests.c.until, cleanup_requests.c.cluster, cleanup_requests.c.host,
    cleanup_requests.c.kind, cleanup_requests.c.requested_by, cleanup_requests.c.done_at, cleanup_requests.c.created_at,
)  # fmt: skip
_SAME = sa.and_(
    cleanup_requests.c.service == sa.bindparam("of_service"),
    cleanup_requests.c.epoch == sa.bindparam("of_epoch"),
    cleanup_requests.c.resource_type == sa.bindparam("of_type"),
    cleanup_requests.c.resource_id == sa.bindparam("of_resource"),
)
_REOPEN = sa.update(cleanup_requests).where(_SAME).values(done_at=None, until=now())
#: What is still to happen to rows of a request.
_AWAITED = {
    Phase.WAITING: "a cleaner of the cluster is to take them",
    Phase.WORKING: "a cleaner of the cluster is to take them",
    Phase.CLEANING: "a cleaner is at them",
    Phase.RETRYING: "the cleanup failed, and is tried again",
}
#: The kind of requests that declare no service dead.
LEFTOVERS = "leftovers"
_DAY = 86_400 * MICROSECONDS


@dataclass(frozen=True, slots=True)
class CleanupRequest:
    """A row of ``cleanup_requests``. Times are microseconds since the Unix epoch, of the database's clock.

    :param epoch: rows of the service's epochs before this one are meant.
    :param kind: ``manual`` or ``automatic`` of a dead service, ``leftovers`` of a living one.
    :param done_at: None while something is left to do.
    """

    uuid: str
    service: str
    epoch: int
    resource_type: str
    resource_id: str
    until: int
    cluster: str | None
    host: str
    kind: str
    requested_by: str
    done_at: int | None
    created_at: int

    @property
    def target(self) -> OrphansOfService:
        """What the service has begun."""
        return OrphansOfService(self.service, self.epoch, self.until, self.resource_type, self.resource_id)

    @property
    def wanted(self) -> Sequence[OrphanSelector]:
        """All that it asks for: of a dead service also what waits for it."""
        if self.kind == LEFTOVERS:
            return (self.target,)
        of_resource = self.resource_type, self.resource_id
        return self.target, QueuedForDead(self.host, self.service, self.epoch, self.until, *of_resource)


#: Without a cluster, the comparison with NULL holds for no row.
_OPEN_FOR = (
    sa.select(*_COLUMNS)
    .where(
        cleanup_requests.c.done_at.is_(None),
        sa.or_(
            cleanup_requests.c.host == sa.bindparam("of_host", type_=sa.String),
            cleanup_requests.c.cluster == sa.bindparam("of_cluster", type_=sa.String),
        ),
    )
    .order_by(cleanup_requests.c.id)
)


class RequestStore:
    """Requests and their progress. Safe for use by several threads."""

    def __init__(self, database: Database, registry: ServiceRegistry) -> None:
        self._database = database
        self._registry = registry

    def open(
        self,
        service: Service,
        *,
        evict: bool,
        kind: str,
        requested_by: str,
        resource_type: str = "",
        resource_id: str = "",
    ) -> CleanupRequest | None:
        """Returns the request to clean up after a service: a new one, or the existing one, which is opened again if it was done.

        :param evict: the service was seen dead with just this (epoch, beat): declare it dead, in the same transaction. None when it
            has shown life since. A service that was declared dead before, and has not started again, is not declared dead again.
        """
        by, resource = (kind if evict else LEFTOVERS, requested_by), (resource_type, resource_id)
        for _ in range(20):
            try:
                found = self._database.run(partial(self._open, service=service, evict=evict, by=by, resource=resource))
            except Duplicate:
                continue
            if found is not None:
                return found
            # Another scheduler declared it dead, or it sent a heartbeat or started.
            current = self._registry.get(service.uuid)
            if current.beat != service.beat:
                return None
            service = current
        raise errors.StoreBusy(f"Others keep changing service {service.uuid}; try again later.")

    def _open(
        self, tx: sa.Connection, service: Service, evict: bool, by: tuple[str, str], resource: tuple[str, str]
    ) -> CleanupRequest | None:
        known = tx.execute(
            sa.select(cleanup_requests.c.uuid).where(*_declared(service.uuid, service.epoch)).limit(1)
        ).first()
        epoch = service.epoch
        if evict and known is None:
            if not self._registry.evict_in(tx, service.uuid, service.epoch, service.beat):
                return None
            epoch += 1
        key = {"of_service": service.uuid, "of_epoch": epoch, "of_type": resource[0], "of_resource": resource[1]}
        row = tx.execute(sa.select(*_COLUMNS).where(_SAME), key).first()
        if row is None:
            tx.execute(
                sa.insert(cleanup_requests).values(
                    uuid=randomness.new_uuid(), service=service.uuid, epoch=epoch, resource_type=resource[0],
                    resource_id=resource[1], until=now(), cluster=service.cluster, host=service.host, kind=by[0],
                    requested_by=by[1][:255], done_at=None, created_at=now(),
                )
            )  # fmt: skip
        elif row.done_at is not None:
            tx.execute(_REOPEN, key)
        return _request(tx.execute(sa.select(*_COLUMNS).where(_SAME), key).one())

    def declared(self) -> frozenset[tuple[str, int]]:
        """Returns (service, epoch) of each service that a request has declared dead, even if it has started since. One read."""
        found = cleanup_requests.c
        with self._database.read() as tx:
            rows = tx.execute(sa.select(found.service, found.epoch).where(found.kind != LEFTOVERS).distinct())
            return frozenset((row.service, row.epoch) for row in rows)

    def open_for(self, host: str, cluster: str | None) -> Sequence[CleanupRequest]:
        """Open requests that a service of that host and cluster may do."""
        with self._database.read() as tx:
            return [_request(row) for row in tx.execute(_OPEN_FOR, {"of_host": host, "of_cluster": cluster})]

    def get(self, uuid: str) -> CleanupRequest:
        """One request.

        :raises NotFound: there is none of that uuid.
        """
        with self._database.read() as tx:
            row = tx.execute(sa.select(*_COLUMNS).where(cleanup_requests.c.uuid == uuid)).first()
        if row is None:
            raise errors.NotFound(f"There is no cleanup request {uuid}; GET /cleanup/requests lists them.")
        return _request(row)

    def page(self, *, after: str = "", limit: int = 1000, is_open: bool | None = None) -> Sequence[CleanupRequest]:
        """Requests by uuid, a page of ``limit`` after the given one."""
        query = sa.select(*_COLUMNS).where(cleanup_requests.c.uuid > after).order_by(cleanup_requests.c.uuid)
        if is_open is not None:
            done = cleanup_requests.c.done_at
            query = query.where(done.is_(None) if is_open else done.is_not(None))
        with self._database.read() as tx:
            return [_request(row) for row in tx.execute(query.limit(limit))]

    # -- progress -------------------------------------------------------------------------------------------------

    def left(self) -> tuple[Mapping[str, frozenset[str]], frozenset[str]]:
        """The phases of the rows that each service has begun, by its uuid, and the names that others wait for; two reads."""
        found: dict[str, set[str]] = {}
        query = sa.select(workers.c.worker, workers.c.phase).where(workers.c.worker.is_not(None)).distinct()
        queued = sa.select(workers.c.target_host).where(workers.c.worker.is_(None)).distinct()
        with self._database.read() as tx:
            for service, phase in tx.execute(query):
                found.setdefault(service, set()).add(phase)
            names = frozenset(tx.execute(queued).scalars())
        return {service: frozenset(phases) for service, phases in found.items()}, names

    def progress(
        self, request: CleanupRequest, blocked_reason: Callable[[str], str] = lambda resource_type: ""
    ) -> dict[str, Any]:
        """Computed from the tables: ``left`` by phase, ``outcomes`` of the cleaners' tries so far, and what it ``waits_for``.

        :param blocked_reason: why resources of a type are not cleaned at present.
        """
        of_row = workers.c.resource_type, workers.c.phase
        with self._database.read() as tx:
            rows = tx.execute(
                sa.select(*of_row, sa.func.count()).where(_rows_of(request)).group_by(*of_row).order_by(*of_row),
                _parameters(request),
            ).all()
            outcomes = tx.execute(
                sa.select(cleanup_history.c.outcome, sa.func.count())
                .where(*_history_of(request))
                .group_by(cleanup_history.c.outcome)
            ).all()
        left: dict[str, int] = {}
        for _, phase, count in rows:
            left[str(phase)] = left.get(str(phase), 0) + int(count)
        waits = [
            f"{count} of the type {kind}: {blocked_reason(kind) or _AWAITED[Phase(phase)]}"
            for kind, phase, count in rows
            if phase != Phase.QUARANTINED.value
        ]
        return {
            "left": left,
            "outcomes": {str(outcome): int(count) for outcome, count in outcomes},
            "waits_for": waits if request.done_at is None else [],
        }

    def close_if_done(self, request: CleanupRequest) -> bool:
        """Mark it as done when nothing that it asks for is left but what is in quarantine."""
        left = sa.exists().where(_rows_of(request), workers.c.phase != Phase.QUARANTINED.value)
        close = (
            sa.update(cleanup_requests)
            .where(cleanup_requests.c.uuid == request.uuid, cleanup_requests.c.done_at.is_(None), sa.not_(left))
            .values(done_at=now())
        )
        return self._database.run(lambda tx: tx.execute(close, _parameters(request)).rowcount == 1)

    def purge(self, days: int, *, batch: int = BATCH) -> int:
        """Remove some lines of the history, and requests, that ended more than so many days ago; how many, 0 when none are left.

        Runs one short transaction for each of the two. Call it until it returns 0. The totals keep what the lines said. If several
        processes purge, one of them goes on and the others get 0.
        """
        before = now() - days * _DAY
        history, requests = cleanup_history.c, cleanup_requests.c
        lines = sa.select(history.id, history.resource_type, history.outcome, history.seconds)
        lines = lines.where(history.at < before).order_by(history.at).limit(batch)
        ended = sa.select(requests.id).where(requests.done_at < before).order_by(requests.done_at).limit(batch)

        def purge_lines(tx: sa.Connection) -> int:
            found = tx.execute(lines).all()
            remove = sa.delete(cleanup_history).where(history.id.in_([row.id for row in found]))
            if found and tx.execute(remove).rowcount != len(found):
                raise _Overtaken
            sums: dict[tuple[str, str], totals.Sum] = {}
            for row in found:
                number, seconds = sums.get((row.resource_type, row.outcome), totals.Sum(0, 0.0))
                sums[row.resource_type, row.outcome] = totals.Sum(number + 1, seconds + row.seconds)
            totals.add(tx, sums)
            return len(found)

        def purge_requests(tx: sa.Connection) -> int:
            found = list(tx.execute(ended).scalars())
            # One may have been opened again meanwhile.
            remove = sa.delete(cleanup_requests).where(requests.id.in_(found), requests.done_at < before)
            return tx.execute(remove).rowcount if found else 0

        try:
            return self._database.run(purge_lines) + self._database.run(purge_requests)
        except (_Overtaken, Duplicate):
            return 0


class _Overtaken(Exception):
    """Another process removes these lines at this moment."""


def _declared(service: str, epoch: int) -> list[sa.ColumnElement[bool]]:
    """Requests that have ended the epoch before."""
    found = cleanup_requests.c
    return [found.service == service, found.epoch == epoch, found.kind != LEFTOVERS]


def _request(row: Any) -> CleanupRequest:
    return CleanupRequest(*row)


def _rows_of(request: CleanupRequest) -> sa.ColumnElement[bool]:
    asked = OF_SERVICE if request.kind == LEFTOVERS else sa.or_(OF_SERVICE, OF_QUEUE)
    found = [asked]
    if request.resource_type:
        found.append(workers.c.resource_type == request.resource_type)
    if request.resource_id:
        found.append(workers.c.resource_id == request.resource_id)
    return sa.and_(*found)


def _parameters(request: CleanupRequest) -> dict[str, Any]:
    return dict(request.wanted[-1].parameters)


def _history_of(request: CleanupRequest) -> list[Any]:
    history = cleanup_history.c
    found = [history.worker == request.service, history.worker_epoch < request.epoch, history.at >= request.created_at]
    if request.resource_type:
        found.append(history.resource_type == request.resource_type)
    if request.resource_id:
        found.append(history.resource_id == request.resource_id)
    return found
