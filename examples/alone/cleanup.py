# SPDX-License-Identifier: Apache-2.0
"""Cleanup alone: a worker dies in the middle of a job of somebody else's, and another one finishes what it left."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.cleanup.cleaner import Cleaner
from moorage.cleanup.conditions import OrphansOfService
from moorage.cleanup.interface import SetCleanupHandler
from moorage.cleanup.orphans import OrphanStore
from moorage.clock import SystemClock
from moorage.db import Database, migrations
from moorage.services.registry import ServiceRegistry
from moorage.work import lease as leases
from moorage.work.interface import Lease
from moorage.work.operations import SqlOperationStore

jobs = sa.Table(
    "jobs",
    sa.MetaData(),
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("status", sa.String(40), nullable=False),
    sa.Column("fence", sa.BigInteger, nullable=False),
)


class JobHandler(SetCleanupHandler):
    """Jobs that were running when their worker died have failed."""

    api_version = (1, 0)
    cleanable = frozenset({"running"})

    def read(self, transaction: Any, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        return {row.id: row for row in transaction.execute(sa.select(jobs).where(jobs.c.id.in_(resource_ids)))}

    def finish_batch(self, transaction: Any, leases_of: Mapping[str, Lease], resources: Mapping[str, Any]) -> None:
        for job, held in leases_of.items():
            write = leases.WRITE.update(jobs, jobs.c.id == job, {"token": held.token}).values(status="failed")
            transaction.execute(write)


clock, database = SystemClock(), Database(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///jobs.sqlite")
migrations.upgrade_all(database)
registry, workers = ServiceRegistry(database, clock), SqlOperationStore(database, lease_seconds=60)
first, second = (registry.enlist("worker", host, rpc_version="1") for host in ("host-1", "host-2"))
with database.write() as tx:
    jobs.metadata.create_all(tx)
    token = workers.create(tx, "job", "job-1", "run", "running", target_host=first.host)
    tx.execute(sa.insert(jobs).values(id="job-1", status="running", fence=token))
lease = workers.take_many("job", ["job-1"], first)["job-1"]
print(f"{first.host} runs job-1")

# It falls silent. Who saw that declares it dead by a write, which fails if it shows life in the same moment.
seen = registry.get(first.uuid)
print("declared dead:", registry.evict(seen.uuid, seen.epoch, seen.beat))
nothing: Any = None
cleaner = Cleaner(OrphanStore(database, workers, second, clock), {"job": JobHandler(nothing)}, clock, random.Random())
print(f"{second.host} cleans: {dict(cleaner.clean(OrphansOfService(first.uuid, first.epoch + 1)))}")
cleaner.stop()

# It had only slept, and goes on: what it wants to write is refused.
try:
    lease.finish_with(lambda tx: tx.execute(sa.update(jobs).values(status="done")))
except errors.Fenced:
    print(f"{first.host} is refused")
with database.read() as tx:
    print("job-1 has", tx.execute(sa.select(jobs.c.status)).scalar_one())
