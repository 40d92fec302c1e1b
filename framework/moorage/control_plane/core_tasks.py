# SPDX-License-Identifier: Apache-2.0
"""The core's own periodic tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import AllocationLedger, NameCatalogue, QuotaStore
from moorage.allocation.quota_changes import QuotaChange, quota_changes
from moorage.control_plane.enrolment import Enrolment
from moorage.control_plane.factories import load_store, open_departures, open_instances, open_quota_source
from moorage.control_plane.idempotency import IdempotencyKeys
from moorage.control_plane.notifications import tell_schedulers
from moorage.control_plane.process import Platform
from moorage.control_plane.shard_hosts import ShardHosts
from moorage.control_plane.sharding_factories import open_mover
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.fleet.nodes import NodeStore
from moorage.journal.purge import purge

__all__ = ["ExpireClaims", "PurgeEvents", "PurgeIdempotencyKeys", "ReadQuotas", "Reconcile"]

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
        departures = open_departures(platform, tools.conf, store)
        self._shard_hosts = ShardHosts(
            platform.database, platform.registry, instances, open_mover(instances), departures
        )

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
        """Without an expired claim there is no object, so that the tick takes no lease."""
        return [self.WHOLE] if isinstance(self._store, AllocationLedger) and self._store.has_expired() else []

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """Each claim is released by one statement on the condition that it has expired, so it needs no fence."""
        found = 0
        while isinstance(self._store, AllocationLedger) and (expired := self._store.expire()):
            LOG.info("%d claims expired, the first is that of %s.", len(expired), expired[0])
            found += len(expired)
            lease.check()
        return found


class ReadQuotas(PeriodicTask):
    """Write the limits of projects that ``[quota] source`` says into the store.

    One fenced transaction writes all changes of a reading, so no engine writes an older reading over a newer one. It writes a
    limited number of limits, because claims of their projects wait for it; the next reading finds the others.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    timeout = 600.0
    WHOLE: ClassVar[str] = "limits"
    #: Limits that one transaction writes.
    MOST: ClassVar[int] = 500

    def __init__(self, tools: TaskTools) -> None:
        super().__init__(tools)
        self.spacing = float(tools.conf.quota.interval)
        self._source = open_quota_source(tools.conf)
        self._store = load_store(tools.conf, tools.database, tools.clock)
        self._most = self.MOST
        self._unknown: frozenset[str] = frozenset()

    @override
    def list_objects(self) -> Sequence[str]:
        return [self.WHOLE] if self._source is not None and isinstance(self._store, QuotaStore) else []

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        """The source is asked before the transaction begins, and after the lease was taken.

        :raises Unavailable: the source does not answer; the store keeps the limits that it has.
        """
        store = self._store
        if self._source is None or not isinstance(store, QuotaStore):
            return 0
        changes, unknown = quota_changes(self._source.limits(), store.quotas(), self._classes())
        if unknown - self._unknown:
            LOG.warning(
                "The quota source %s limits resource classes that do not exist here: %s. Their limits take effect when the classes "
                "are created.",
                self.tools.conf.quota.source,
                ", ".join(sorted(unknown)),
            )
        self._unknown = unknown
        some = changes[: self._most]
        if some:
            try:
                lease.finish_with(lambda tx: _write_limits(store, some, tx))
            except errors.StoreBusy:
                # Of fewer limits there are fewer races.
                self._most = max(1, self._most // 2)
                raise
            self._most = min(self.MOST, self._most * 2)
            LOG.info(
                "%d limits of projects were changed as the quota source says; %d are left.",
                len(some),
                len(changes) - len(some),
            )
        return len(some)

    def _classes(self) -> frozenset[str] | None:
        """Names of the classes that exist; None where the store does not know them."""
        store = self._store
        if not isinstance(store, NameCatalogue):
            return None
        return frozenset(each.name for each in store.resource_classes())


def _write_limits(store: QuotaStore, changes: Sequence[QuotaChange], transaction: Any) -> None:
    for each in changes:
        if each.limit is None:
            store.unset_quota(each.project, each.resource_class, transaction)
        else:
            store.set_quota(each.project, each.resource_class, each.limit, transaction)


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
