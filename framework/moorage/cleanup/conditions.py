# SPDX-License-Identifier: Apache-2.0
"""Conditions of orphaned rows, on which no service works any more. Code that finds, takes, counts or predicts orphans uses them.

A row without a living owner is of one of four kinds: left by a service whose epoch has ended; queued for such a service; lapsed
(its living owner has not renewed it for a long time, so the owner does not know of it); or unclaimed (no service has taken it,
and no living service announces it as queued). A cleaner that takes a row records the former owner, so that the row keeps its
kind when that cleaner dies or fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sqlalchemy as sa

from moorage.db import now
from moorage.work.interface import Phase
from moorage.work.tables import workers

__all__ = [
    "LEFT",
    "OF_QUEUE",
    "OF_SERVICE",
    "ExpiredLease",
    "QueuedForDead",
    "OrphansOfService",
    "NeverStarted",
    "OrphanSelector",
]

_DEAD = sa.bindparam("dead", type_=sa.String)
_DEAD_EPOCH = sa.bindparam("dead_epoch", type_=sa.BigInteger)
_UNTIL = sa.bindparam("asked_until", type_=sa.BigInteger)


def _phase(phase: Phase) -> sa.ColumnElement[bool]:
    return workers.c.phase == phase.value


def _to_clean(begins: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """For the first time, because a cleaner's lease has expired, or because it is to be tried again now."""
    return sa.or_(
        begins,
        sa.and_(_phase(Phase.CLEANING), workers.c.expires_at < now()),
        sa.and_(_phase(Phase.RETRYING), workers.c.next_try_at <= now()),
    )


_OF_DEAD = sa.and_(workers.c.worker == _DEAD, workers.c.worker_epoch < _DEAD_EPOCH)
_OF_NOBODY = workers.c.worker.is_(None)
#: Operations that a service began before its epoch and has not touched since the request, also while a cleaner holds them.
OF_SERVICE = sa.and_(_OF_DEAD, sa.or_(workers.c.phase != Phase.WORKING.value, workers.c.updated_at <= _UNTIL))
#: What waits for the service of a host since before the request.
OF_QUEUE = sa.and_(
    workers.c.target_host == sa.bindparam("of_host", type_=sa.String),
    _OF_NOBODY,
    _phase(Phase.WAITING),
    workers.c.updated_at <= _UNTIL,
)
#: Of :data:`OF_SERVICE` what a cleaner may take now.
LEFT = sa.and_(_OF_DEAD, _to_clean(sa.and_(_phase(Phase.WORKING), workers.c.updated_at <= _UNTIL)))
_LAPSED = sa.and_(
    workers.c.worker == _DEAD,
    workers.c.worker_epoch == _DEAD_EPOCH,
    _to_clean(sa.and_(_phase(Phase.WORKING), workers.c.expires_at < now())),
)
_UNCLAIMED = sa.and_(
    workers.c.target_host.in_(sa.bindparam("names", expanding=True)),
    _OF_NOBODY,
    _to_clean(
        # Of one that waits, ``next_try_at`` is until when a living service has announced that it will come for it.
        sa.and_(_phase(Phase.WAITING), workers.c.next_try_at < now())
    ),
)


@dataclass(frozen=True, slots=True)
class OrphansOfService:
    """What an incarnation left that ended: rows of the service's epochs before ``epoch``.

    :param until: rows that the service touched after this moment (microseconds of the database's clock) are left alone.
    :param resource_id: only this one, of ``resource_type``; empty: all.
    """

    condition: ClassVar[sa.ColumnElement[bool]] = LEFT
    #: Columns with the former target of a row that no service had begun.
    attribution: ClassVar[dict[str, Any]] = {}

    service: str
    epoch: int
    until: int = 2**62
    resource_type: str = ""
    resource_id: str = ""

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the condition, and of :data:`moorage.work.lease.TAKE_OVER`."""
        return {"dead": self.service, "dead_epoch": self.epoch, "asked_until": self.until}

    @property
    def cause(self) -> str:
        """Why it is cleaned, for people."""
        return "The service that did it died."

    def __str__(self) -> str:
        return f"service {self.service} before epoch {self.epoch}"


@dataclass(frozen=True, slots=True)
class QueuedForDead:
    """What waited for a service that was declared dead, and was addressed to its host: from then on as if it had begun it."""

    condition: ClassVar[sa.ColumnElement[bool]] = OF_QUEUE
    attribution: ClassVar[dict[str, Any]] = {"worker": _DEAD, "worker_epoch": _DEAD_EPOCH - 1}

    host: str
    service: str
    epoch: int
    until: int = 2**62
    resource_type: str = ""
    resource_id: str = ""

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the condition, and of :data:`moorage.work.lease.TAKE_OVER`."""
        return {"dead": self.service, "dead_epoch": self.epoch, "asked_until": self.until, "of_host": self.host}

    @property
    def cause(self) -> str:
        """Why it is cleaned, for people."""
        return f"The service that was to do it, on {self.host}, died."

    def __str__(self) -> str:
        return f"what waited for {self.host}"


@dataclass(frozen=True, slots=True)
class ExpiredLease:
    """What a living service has by its rows, and has not renewed for longer than its lease and this time (in seconds).

    The time is that of who judges: see :mod:`moorage.cleanup.staleness`.
    """

    condition: ClassVar[sa.ColumnElement[bool]] = _LAPSED
    attribution: ClassVar[dict[str, Any]] = {}
    resource_type: ClassVar[str] = ""
    resource_id: ClassVar[str] = ""

    service: str
    epoch: int
    timeout: float

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the condition, and of :data:`moorage.work.lease.TAKE_OVER`."""
        return {"dead": self.service, "dead_epoch": self.epoch}

    @property
    def cause(self) -> str:
        """Why it is cleaned, for people."""
        return f"The service that had it did not know of it: it did not renew it for {self.timeout:g} seconds after its lease."

    def __str__(self) -> str:
        return "operations that their service does not know of"


@dataclass(frozen=True, slots=True)
class NeverStarted:
    """Selects operations addressed to one of the names that no service took within the time (in seconds), or that were released.

    An operation in the queue of a live service is not selected, see :meth:`moorage.work.interface.OperationStore.announce`. The
    observing machine measures the time: see :mod:`moorage.cleanup.staleness`.
    """

    condition: ClassVar[sa.ColumnElement[bool]] = _UNCLAIMED
    attribution: ClassVar[dict[str, Any]] = {}
    resource_type: ClassVar[str] = ""
    resource_id: ClassVar[str] = ""

    names: tuple[str, ...]
    timeout: float

    @property
    def parameters(self) -> dict[str, Any]:
        """Of the condition, and of :data:`moorage.work.lease.TAKE_OVER`."""
        return {"dead": "", "dead_epoch": 0, "names": list(self.names)}

    @property
    def cause(self) -> str:
        """Why it is cleaned, for people."""
        return f"No service has begun it within {self.timeout:g} seconds."

    def __str__(self) -> str:
        return "operations that no service has begun in time"


OrphanSelector = OrphansOfService | QueuedForDead | ExpiredLease | NeverStarted
