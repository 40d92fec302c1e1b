# SPDX-License-Identifier: Apache-2.0
"""The cost of worker rows and of cleaning, printed as one JSON object.

``python benchmarks/cleanup.py [--database URL] [--rows 1000,10000] [--cleaners 1,4] [--lifecycles 500]``

Without ``--database`` a SQLite file in a temporary folder is used; a given database must be empty, and its tables are left behind.
A lifecycle is what one cleanable operation costs: create, start, end, each in a transaction of its own. Orphans are cleaned by a
handler that does nothing but end them, in processes of their own; beside that stands the floor: the same three effects (take,
read, delete) on all rows by one statement each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.conditions import OrphansOfService
from moorage.cleanup.interface import SetCleanupHandler
from moorage.cleanup.orphans import OrphanStore
from moorage.cleanup.tables import cleanup_history, cleanup_totals
from moorage.clock import SystemClock
from moorage.db import Database, new_metadata, now
from moorage.db.schema import BigId, Uuid, exact
from moorage.services.interface import ServiceIdentity
from moorage.testing.cleanup import Tools
from moorage.work.interface import Lease
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import fences, workers

TYPE = "thing"
METADATA = new_metadata()
#: All tables that cleaners write.
TABLES = (workers, fences, cleanup_history, cleanup_totals)
THINGS = sa.Table(
    "benchmark_things",
    METADATA,
    sa.Column("id", BigId, primary_key=True),
    sa.Column("uuid", Uuid, nullable=False, unique=True),
    sa.Column("status", exact(40), nullable=False),
)
DEAD = ServiceIdentity("dead", "dead", "agent", None, 1)


class NothingHandler(SetCleanupHandler):
    """Reads the resource, and lets the row end."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    cleanable = frozenset({"creating"})

    @override
    def read(self, transaction: sa.Connection, resource_ids: Sequence[str]) -> Mapping[str, Any]:
        return {row.uuid: row for row in transaction.execute(sa.select(THINGS).where(THINGS.c.uuid.in_(resource_ids)))}

    @override
    def finish_batch(
        self, transaction: sa.Connection, leases: Mapping[str, Lease], resources: Mapping[str, Any]
    ) -> None:
        """Nothing."""


def prepare(database: Database) -> None:
    with database.write() as tx:
        for table in (*TABLES, THINGS):
            table.create(tx, checkfirst=True)


def empty(database: Database) -> None:
    with database.write() as tx:
        for table in (*TABLES, THINGS):
            tx.execute(sa.delete(table))


def fill(database: Database, count: int) -> None:
    """Orphans of the dead service, by plain inserts."""
    uuids = [str(uuid.uuid4()) for _ in range(count)]
    common: dict[str, Any] = {
        "resource_type": TYPE, "operation": "create", "status": "creating", "target_host": "dead", "owner": "dead",
        "epoch": 1, "token": 1, "expires_at": 0, "attempts": 1, "phase": "working", "worker": "dead", "worker_epoch": 1,
        "next_try_at": 0, "last_error": "", "created_at": 1, "updated_at": 1,
    }  # fmt: skip
    for start in range(0, count, 1000):
        part = uuids[start : start + 1000]
        with database.write() as tx:
            tx.execute(sa.insert(THINGS), [{"uuid": each, "status": "creating"} for each in part])
            tx.execute(sa.insert(workers), [{**common, "resource_id": each} for each in part])
            tx.execute(sa.insert(fences), [{"resource_type": TYPE, "resource_id": each, "token": 1} for each in part])


def lifecycle(database: Database, count: int) -> dict[str, float]:
    store = SqlOperationStore(database, lease_seconds=60)
    identity = ServiceIdentity("me", "here", "agent", None, 1)
    with database.write() as tx:
        tx.execute(sa.insert(THINGS).values(uuid=str(uuid.uuid4()), status="0"))
        first = tx.execute(sa.select(sa.func.min(THINGS.c.id))).scalar_one()
    times: dict[str, list[float]] = {"create": [], "start": [], "end": []}
    for _ in range(count):
        each = str(uuid.uuid4())
        marks = [time.perf_counter()]
        database.run(lambda tx, each=each: store.create(tx, TYPE, each, "create", "creating", target_host="here"))
        marks.append(time.perf_counter())
        held = database.run(lambda tx, each=each: store.start_many(tx, TYPE, [each], identity))[each]
        marks.append(time.perf_counter())
        database.run(held.end)
        marks.append(time.perf_counter())
        for name, begun, ended in zip(("create", "start", "end"), marks, marks[1:], strict=False):
            times[name].append((ended - begun) * 1000)
    # The floor: three transactions of one statement each.
    bare: list[float] = []
    for number in range(count):
        begun = time.perf_counter()
        database.run(
            lambda tx, number=number: tx.execute(
                sa.update(THINGS).where(THINGS.c.id == first).values(status=str(number))
            )
        )
        bare.append((time.perf_counter() - begun) * 1000)
    times["bare_transaction"] = bare
    found = {f"{name}_ms": round(statistics.median(values), 3) for name, values in times.items()}
    total = sum(found[f"{name}_ms"] for name in ("create", "start", "end"))
    floor_ms = 3 * found["bare_transaction_ms"]
    return {**found, "total_ms": round(total, 3), "times_the_floor": round(total / floor_ms, 2)}


def clean(url: str, number: int, barrier: Any, answers: Any) -> None:
    database = Database(url)
    identity = ServiceIdentity(f"cleaner-{number}", "here", "agent", None, 1)
    store = OrphanStore(database, SqlOperationStore(database, lease_seconds=60), identity, SystemClock())
    handler = NothingHandler(Tools(database, identity))
    cleaner = Cleaner(store, {TYPE: handler}, SystemClock(), random.Random(number), Policy())
    with database.read() as tx:
        tx.execute(sa.select(1))
    barrier.wait()
    begun, spent = time.monotonic(), time.process_time()
    done = cleaner.clean(OrphansOfService("dead", 2))
    answers.put((begun, time.monotonic(), time.process_time() - spent, dict(done)))


def orphans(url: str, database: Database, rows: int, cleaners: int) -> dict[str, Any]:
    empty(database)
    fill(database, rows)
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(cleaners), context.Queue()
    processes = [context.Process(target=clean, args=(url, number, barrier, answers)) for number in range(cleaners)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    seconds = max(ended for _, ended, _, _ in found) - min(begun for begun, _, _, _ in found)
    spent = sum(each for _, _, each, _ in found)
    total = sum(done.get("done", 0) for _, _, _, done in found)
    with database.read() as tx:
        left = tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one()
        lines = tx.execute(sa.select(sa.func.count()).select_from(cleanup_history)).scalar_one()
    return {
        "rows": rows, "cleaners": cleaners, "seconds": round(seconds, 3), "rows_per_s": round(rows / seconds),
        "processor_us_per_row": round(1e6 * spent / rows, 1), "done": total, "left": left, "history": lines,
    }  # fmt: skip


def floor(database: Database, rows: int) -> dict[str, Any]:
    """Take, read and delete all rows by one statement each."""
    empty(database)
    fill(database, rows)
    begun = time.perf_counter()
    with database.write() as tx:
        tx.execute(sa.update(workers).values(token=workers.c.token + 1, owner="me", expires_at=now()))
    with database.write() as tx:
        join = sa.select(workers.c.resource_id, THINGS.c.status).join(THINGS, THINGS.c.uuid == workers.c.resource_id)
        tx.execute(join).all()
    with database.write() as tx:
        tx.execute(sa.delete(workers).where(workers.c.owner == "me"))
    return {"rows": rows, "seconds": round(time.perf_counter() - begun, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--database")
    parser.add_argument("--rows", default="1000,10000")
    parser.add_argument("--cleaners", default="1,4")
    parser.add_argument("--lifecycles", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.database or f"sqlite:///{folder}/benchmark.sqlite"
        database = Database(url)
        try:
            prepare(database)
        except errors.MoorageError as error:
            raise SystemExit(error.message) from error
        sizes = [int(each) for each in arguments.rows.split(",")]
        counts = [int(each) for each in arguments.cleaners.split(",")]
        report = {
            "database": database.url_safe if arguments.database else "sqlite",
            "lifecycle": lifecycle(database, arguments.lifecycles),
            "floor": [floor(database, rows) for rows in sizes],
            "cleaning": [orphans(url, database, rows, cleaners) for rows in sizes for cleaners in counts],
        }
        database.close()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
