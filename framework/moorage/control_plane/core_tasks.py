# SPDX-License-Identifier: Apache-2.0
"""The core's own periodic tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage.allocation.interface import AllocationLedger
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import load_store, open_instances
from moorage.control_plane.idempotency import IdempotencyKeys
from moorage.control_plane.notifications import tell_schedulers
from moorage.control_plane.process import Platform
from moorage.control_plane.shard_hosts import ShardHosts
from moorage.control_plane.sharding import open_mover
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.fleet.nodes import NodeStore
from moorage.journal.purge import purge

__all__ = ["ExpireClaims", "PurgeEvents", "PurgeIdempotencyKeys", "Reconcile"]

LOG = logging.getLogger(__name__)


class Reconcile(PeriodicTask):
    """Compares nodes with their providers, and gives nodes to the agents that serve their shard."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    #: The comparison goes by pages over everything: one object, so one engine does it at a time.
    timeout = 3600.0
    WHOLE: ClassVar[str] = "fleet"

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self.spacing = float(tools.conf.control_plane.reconcile_interval)
        platform: Platform = tools.services
        self._changed = tell_schedulers(platform)
        store = load_store(tools.conf, platform.database, platform.clock)
        self._enrolment = Enrolment(
            platform.database, NodeStore(platform.database), store, platform.registry, self._changed
        )
        instances = open_instances(platform, tools.conf)
        self._shard_hosts = ShardHosts(platform.database, platform.registry, instances, open_mover(instances))

    @override
    def list_objects(self) -> Sequence[str]:
        return [self.WHOLE]

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Every write of it is conditional and may be done twice, so it needs no fence."""
        changes = self._enrolment.reconcile() + self._shard_hosts.correct() + self._enrolment.assign()
        if changes:
            self._changed()
        return changes


class ExpireClaims(PeriodicTask):
    """Give back claims that were made for a time which is over."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    timeout = 3600.0
    WHOLE: ClassVar[str] = "claims"

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self.spacing = float(tools.conf.allocation.reap_interval)
        self._store = load_store(tools.conf, tools.database, tools.clock)

    @override
    def list_objects(self) -> Sequence[str]:
        return [self.WHOLE] if isinstance(self._store, AllocationLedger) else []

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Each claim is released by one statement on the condition that it has expired, so it needs no fence."""
        found = 0
        while isinstance(self._store, AllocationLedger) and (expired := self._store.expire()):
            LOG.info("%d claims expired, the first is that of %s.", len(expired), expired[0])
            found += len(expired)
            lease.check()
        return found


class PurgeIdempotencyKeys(PeriodicTask):
    """Remove answers to requests with an Idempotency-Key after 24 hours."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    timeout = 3600.0
    spacing = 600.0
    WHOLE: ClassVar[str] = "idempotency keys"

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self._keys = IdempotencyKeys(tools.database, busy_seconds=0)

    @override
    def list_objects(self) -> Sequence[str]:
        return [self.WHOLE]

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Each statement removes at most 1,000 rows that are still expired, so it needs no fence."""
        removed = 0
        while count := self._keys.purge():
            removed += count
            lease.check()
        return removed


class PurgeEvents(PeriodicTask):
    """Remove events of the journal that are older than ``[journal] retention_days``."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    timeout = 3600.0
    spacing = 600.0
    WHOLE: ClassVar[str] = "events"

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self._database = tools.database
        self._seconds = float(tools.conf.journal.retention_days) * 86400

    @override
    def list_objects(self) -> Sequence[str]:
        return [self.WHOLE] if self._seconds else []

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Each transaction removes at most 1,000 events, on the condition that no other has, so it needs no fence."""
        removed = 0
        while count := purge(self._database, self._seconds):
            removed += count
            lease.check()
        return removed
