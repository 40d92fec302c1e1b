# SPDX-License-Identifier: Apache-2.0
"""Claims per second of the sql store, in process, printed as one JSON object.

``python benchmarks/allocation.py [--database URL] [--claims 2000] [--providers 50] [--clients 8] [--fill 0] [--capacity 200]``

Without ``--database`` a SQLite file in a temporary folder is used; a given database must be empty, and its tables are left
behind. Every claim takes two classes of one provider in a transaction of its own. Scenarios: many providers and one hot one,
with one client and with several processes. ``--fill`` first gives the hot provider that many consumers, to show that the cost
of a claim does not depend on them. Runs in one process are of one client's latency; all are bounded by the disk of the database.

In the same run stands what one writes at first: read what is used, decide in Python, write the new number (``naive``), with the
same rows and the same number of commits. Both race with several clients for ``--capacity`` units, and what was granted is summed
from the stored allocations. ``benchmarks/allocation_http.py`` measures over HTTP, and Placement too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence

import sqlalchemy as sa
from oslo_config import cfg

from moorage import errors
from moorage.allocation import options
from moorage.allocation.interface import ClaimRequest
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.testing.allocation import all_allocations, inconsistencies, provider
from moorage_plugins.schema import plugins_metadata
from moorage_plugins.stores import options as sql_options
from moorage_plugins.stores import tables
from moorage_plugins.stores.sql import SqlStore

WANTED = {"VCPU": 1, "MEMORY_MB": 64}


def open_store(url: str) -> tuple[SqlStore, Database]:
    conf = cfg.ConfigOpts()
    options.register_opts(conf)
    sql_options.register_opts(conf)
    conf([])
    database = Database(url)
    return SqlStore(conf=conf, database=database, clock=SystemClock()), database


def claims(store: SqlStore, providers: Sequence[str], count: int) -> list[float]:
    """Claim ``count`` times; the seconds that each took."""
    taken = []
    for number in range(count):
        request = ClaimRequest(str(uuid.uuid4()), {providers[number % len(providers)]: WANTED}, "benchmark")
        begun = time.perf_counter()
        store.claim(request)
        taken.append(time.perf_counter() - begun)
    return taken


class Naive:
    """Read, decide, write: as fast as one likes, and wrong with more than one client."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, of_provider: str) -> bool:
        consumer = str(uuid.uuid4())
        inventories = tables.inventories.c

        def work(tx: sa.Connection) -> bool:
            number = tx.execute(
                sa.select(tables.resource_providers.c.id).where(tables.resource_providers.c.uuid == of_provider)
            ).scalar_one()
            rows = {
                row.resource_class_id: row
                for row in tx.execute(
                    sa.select(tables.inventories).where(inventories.resource_provider_id == number)
                ).all()
            }
            for of_class, amount in enumerate(WANTED.values()):
                row = rows[of_class]
                if row.used + amount > (row.total - row.reserved) * row.allocation_ratio:
                    return False
            for of_class, amount in enumerate(WANTED.values()):
                tx.execute(
                    sa.update(tables.inventories)
                    .where(inventories.id == rows[of_class].id)
                    .values(used=rows[of_class].used + amount)
                )
            shared = {"consumer_type": "INSTANCE", "project_id": "", "user_id": "", "generation": 1, "created_at": 0}
            tx.execute(sa.insert(tables.consumers), [{"uuid": consumer, **shared}])
            tx.execute(
                sa.insert(tables.allocations),
                [
                    {"consumer_id": consumer, "resource_provider_id": number, "resource_class_id": each, "used": amount}
                    for each, amount in enumerate(WANTED.values())
                ],
            )
            return True

        return self._database.run(work)


def racer(url: str, of_provider: str, count: int, naive: bool, barrier: object, results: object) -> None:
    """Claim so often; how often it was granted and what else happened."""
    store, database = open_store(url)
    first = Naive(database)
    store.usages(limit=1)  # connects
    barrier.wait()  # type: ignore[attr-defined]
    granted, other = 0, 0
    for _ in range(count):
        try:
            if naive:
                granted += first.claim(of_provider)
            else:
                store.claim(ClaimRequest(str(uuid.uuid4()), {of_provider: WANTED}, "race"))
                granted += 1
        except errors.CapacityExceeded:
            pass
        except errors.MoorageError:
            other += 1
    results.put((granted, other))  # type: ignore[attr-defined]
    database.close()


def race(url: str, store: SqlStore, capacity: int, clients: int, *, naive: bool) -> dict[str, float]:
    """Several clients ask together for twice as much as there is."""
    hot = provider(VCPU=capacity, MEMORY_MB=2**31 - 1)
    store.ensure_providers([hot])
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(clients + 1), spawn.Queue()
    each = max(1, 2 * capacity // clients)
    processes = [
        spawn.Process(target=racer, args=(url, hot.uuid, each, naive, barrier, results)) for _ in range(clients)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    begun = time.perf_counter()
    answers = [results.get() for _ in processes]
    elapsed = time.perf_counter() - begun
    for process in processes:
        process.join()
    stored = sum(
        item.used for item in all_allocations(store) if item.provider == hot.uuid and item.resource_class == "VCPU"
    )
    return {
        "capacity": capacity,
        "asked": each * clients,
        "granted": sum(granted for granted, _ in answers),
        "stored": stored,
        "over_allocated": max(0, stored - capacity),
        "other_errors": sum(other for _, other in answers),
        "answers_per_s": round(each * clients / elapsed, 1),
    }


def fill(store: SqlStore, database: Database, hot: str, count: int) -> None:
    """Give a provider consumers, by plain inserts: as many claims would take minutes."""
    with database.write() as tx:
        number = tx.execute(
            sa.select(tables.resource_providers.c.id).where(tables.resource_providers.c.uuid == hot)
        ).scalar_one()
        for start in range(0, count, 1000):
            uuids = [str(uuid.uuid4()) for _ in range(start, min(count, start + 1000))]
            shared = {
                "consumer_type": "INSTANCE",
                "project_id": "",
                "user_id": "",
                "generation": 1,
                "created_at": 0,
                "updated_at": 0,
            }
            tx.execute(sa.insert(tables.consumers), [{"uuid": each, **shared} for each in uuids])
            tx.execute(
                sa.insert(tables.allocations),
                [
                    {"consumer_id": each, "resource_provider_id": number, "resource_class_id": of_class, "used": amount}
                    for each in uuids
                    for of_class, amount in enumerate(WANTED.values())
                ],
            )
    store.recount(hot)


def client(url: str, providers: Sequence[str], count: int, barrier: object, results: object) -> None:
    store, database = open_store(url)
    claims(store, providers[:1], 1)  # connects
    barrier.wait()  # type: ignore[attr-defined]
    results.put(claims(store, providers, count))  # type: ignore[attr-defined]
    database.close()


def measure(url: str, providers: Sequence[str], count: int, clients: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(clients + 1), spawn.Queue()
    each = max(1, count // clients)
    processes = [spawn.Process(target=client, args=(url, providers, each, barrier, results)) for _ in range(clients)]
    for process in processes:
        process.start()
    barrier.wait()
    begun = time.perf_counter()
    seconds = [one for _ in processes for one in results.get()]
    elapsed = time.perf_counter() - begun
    for process in processes:
        process.join()
    ordered = sorted(seconds)
    return {
        "claims_per_s": round(len(seconds) / elapsed, 1),
        "p50_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Claims per second of the sql store.")
    parser.add_argument("--database", help="URL of an empty database; default: a SQLite file in a temporary folder")
    parser.add_argument("--claims", type=int, default=2000, help="claims of each scenario")
    parser.add_argument("--providers", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8, help="processes of the scenarios with several clients")
    parser.add_argument("--fill", type=int, default=0, help="consumers that the hot provider holds before")
    parser.add_argument("--capacity", type=int, default=200, help="units that several clients race for")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-benchmark-") as folder:
        url = arguments.database or f"sqlite:///{folder}/moorage.sqlite"
        store, database = open_store(url)
        with database.write() as tx:
            plugins_metadata.create_all(tx, tables=tables.TABLES)
        given = [provider(VCPU=2**31 - 1, MEMORY_MB=2**31 - 1) for _ in range(arguments.providers)]
        store.ensure_providers(given)
        many = [each.uuid for each in given]
        fill(store, database, many[0], arguments.fill)
        report: dict[str, object] = {"database": database.dialect, "consumers_before": arguments.fill}
        for clients in (1, arguments.clients):
            report[f"many_{clients}"] = measure(url, many, arguments.claims, clients)
            report[f"hot_{clients}"] = measure(url, many[:1], arguments.claims, clients)
        report["inconsistencies"] = len(inconsistencies(store))
        report["race"] = race(url, store, arguments.capacity, arguments.clients, naive=False)
        report["race_naive"] = race(url, store, arguments.capacity, arguments.clients, naive=True)
        database.close()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
