# SPDX-License-Identifier: Apache-2.0
"""What was decided, for later questions: all of it for a while in memory, refusals also in the store."""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from oslo_log import log as logging

from moorage import threads
from moorage.db import MICROSECONDS, Database, now
from moorage.scheduling.interface import RequestSpec
from moorage.scheduling.tables import refusals

__all__ = ["Decision", "Decisions", "StoredRefusals"]

LOG = logging.getLogger(__name__)
#: Refusals that wait to be written at most; what is more is not written.
_WAITING = 1000
#: Seconds for which they are kept.
_KEPT = 86_400


@dataclass(slots=True)
class Decision:
    """What was decided of a request for one instance.

    :param best: the nodes that came out best, with their weights.
    :param tried: earlier builds of the instance that failed: host, node and fault of each.
    """

    request_id: str
    spec: RequestSpec
    outcome: str = "refused"
    considered: int = 0
    passed: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    refusals: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[tuple[str, str, float], ...] = ()
    host: str = ""
    node: str = ""
    tried: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "request_id": self.request_id,
            "instance_uuid": self.spec.instance_uuid,
            "outcome": self.outcome,
            "considered": self.considered,
            "passed": self.passed,
            "removed": dict(self.removed),
            "skipped": list(self.skipped),
            "best": [{"host": host, "node": node, "weight": round(weight, 6)} for host, node, weight in self.best],
            "claims_refused": list(self.refusals),
            "host": self.host,
            "node": self.node,
            "tried": [dict(each) for each in self.tried],
        }


class Decisions:
    """The last ones, by request id and by instance. Safe for use by several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threads.lock()
        self._kept: collections.OrderedDict[str, Decision] = collections.OrderedDict()
        self._instances: dict[str, str] = {}

    def add(self, decision: Decision) -> None:
        """Remember it."""
        key = f"{decision.request_id}/{decision.spec.instance_uuid}"
        with self._lock:
            self._kept[key] = decision
            self._kept.move_to_end(key)
            self._instances[decision.request_id] = self._instances[decision.spec.instance_uuid] = key
            while len(self._kept) > self._most:
                _, old = self._kept.popitem(last=False)
                for name in (old.request_id, old.spec.instance_uuid):
                    if self._kept.get(self._instances.get(name, "")) is None:
                        self._instances.pop(name, None)

    def get(self, name: str) -> Decision | None:
        """The last one on a request id or an instance's uuid."""
        with self._lock:
            return self._kept.get(self._instances.get(name, ""))


class StoredRefusals:
    """Refusals in the store: written a little later by :meth:`flush`, so that a refusal costs its request nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: collections.deque[Decision] = collections.deque(maxlen=_WAITING)

    def record(self, decision: Decision) -> None:
        """It was refused."""
        self._waiting.append(decision)

    @property
    def waits(self) -> bool:
        """Whether a refusal is to be written."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Write what waits and forget what is older than a day; called every second or so."""
        batch = []
        while self._waiting:
            batch.append(self._waiting.popleft())
        if not batch:
            return
        rows = [
            {
                "request_id": each.request_id[:255],
                "instance_uuid": each.spec.instance_uuid[:36],
                "decision": json.dumps(each.to_json(), default=str),
            }
            for each in batch
        ]

        def work(tx: sa.Connection) -> None:
            tx.execute(sa.insert(refusals).values(at=now()), rows)
            tx.execute(sa.delete(refusals).where(refusals.c.at < now() - _KEPT * MICROSECONDS))

        self._database.run(work)

    def find(self, name: str) -> dict[str, Any] | None:
        """The last one on a request id or an instance's uuid."""
        query = (
            sa.select(refusals.c.decision)
            .where(sa.or_(refusals.c.request_id == name, refusals.c.instance_uuid == name))
            .order_by(refusals.c.id.desc())
            .limit(1)
        )
        with self._database.read() as tx:
            text = tx.execute(query).scalar_one_or_none()
        return None if text is None else dict(json.loads(text))
