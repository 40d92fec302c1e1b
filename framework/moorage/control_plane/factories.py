# SPDX-License-Identifier: Apache-2.0
"""Opens stores, detectors and leases by the configuration, for roles and commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from oslo_config import cfg

from moorage import errors
from moorage.allocation.interface import (
    DETECTORS,
    QUOTA_SOURCES,
    STORES,
    AllocationStore,
    OrphanDetector,
    QuotaSource,
    QuotaStore,
)
from moorage.clock import Clock, SystemClock
from moorage.control_plane.process import Platform
from moorage.db import Database
from moorage.instances.create import check_store
from moorage.instances.departures import Departures
from moorage.instances.interface import INSTANCE_STORES, InstanceStore
from moorage.work.operations import SqlOperationStore

__all__ = [
    "check_allocation_store",
    "check_quota_source",
    "load_store",
    "open_detectors",
    "open_instances",
    "open_quota_source",
    "open_store",
    "open_workers",
    "unconnected_database",
]


@contextlib.contextmanager
def unconnected_database(conf: cfg.ConfigOpts) -> Iterator[Database | None]:
    """The database for a check that connects to nothing; None where it cannot be used, which its own check says."""
    try:
        database = Database.from_config(conf)
    except errors.ConfigError:
        yield None
        return
    try:
        yield database
    finally:
        database.close()


def check_allocation_store(conf: cfg.ConfigOpts) -> None:
    """Refuse an allocation store that the roles could not use.

    :raises ConfigError: the store, or one of its options, cannot be used.
    """
    STORES.chosen(conf)
    with unconnected_database(conf) as database:
        if database is not None:
            load_store(conf, database, SystemClock())


def check_quota_source(conf: cfg.ConfigOpts) -> None:
    """Refuse a quota source that engines could not use; connects to nothing.

    :raises ConfigError: the source cannot be used, or the allocation store keeps no limits.
    """
    if open_quota_source(conf) is not None and not issubclass(STORES.load(conf.allocation.store).plugin, QuotaStore):
        raise errors.ConfigError(
            f"[quota] source = {conf.quota.source} needs a store that keeps limits, and [allocation] store = "
            f"{conf.allocation.store} keeps none. Write [allocation] store = sql, or remove the source."
        )


def open_quota_source(conf: cfg.ConfigOpts) -> QuotaSource | None:
    """Returns the quota source that the configuration names; None where limits are set by hand."""
    name = conf.quota.source
    return QUOTA_SOURCES.load(name).build(conf=conf) if name else None


def load_store(conf: cfg.ConfigOpts, database: Database, clock: Clock) -> AllocationStore:
    """The same, where there is no role."""
    loaded = STORES.load(conf.allocation.store)
    opened = loaded.build(conf=conf, database=database, clock=clock)
    check_store(opened, loaded.name)
    return opened


def open_store(platform: Platform, conf: cfg.ConfigOpts) -> AllocationStore:
    """Returns the allocation store that the configuration names."""
    return load_store(conf, platform.database, platform.clock)


def open_detectors(platform: Platform, conf: cfg.ConfigOpts) -> list[OrphanDetector]:
    """Returns the detectors of orphans that the configuration names."""
    found: list[OrphanDetector] = []
    for each in DETECTORS.load_all(conf.allocation.orphan_detectors):
        found.append(each.build(conf=conf, database=platform.database, clock=platform.clock))
    return found


def open_instances(platform: Platform, conf: cfg.ConfigOpts) -> InstanceStore:
    """Returns the store of instances that the configuration names."""
    loaded = INSTANCE_STORES.load(conf.control_plane.instance_store)
    return loaded.build(conf=conf, database=platform.database, clock=platform.clock)


def open_workers(platform: Platform, conf: cfg.ConfigOpts) -> SqlOperationStore:
    """Returns the leases of operations."""
    return SqlOperationStore(platform.database, lease_seconds=conf.cleanup.lease_seconds, clock=platform.clock)


def open_departures(platform: Platform, conf: cfg.ConfigOpts, store: AllocationStore) -> Departures:
    """What hosts have to let go of, and the room that it holds in the store."""
    return Departures(platform.database, store, open_workers(platform, conf), platform.registry)
