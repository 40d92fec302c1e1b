# SPDX-License-Identifier: Apache-2.0
"""Claims per second of the sql store, in process, printed as one JSON object.

``python benchmarks/allocation.py [--database URL] [--claims 2000] [--providers 50] [--clients 8] [--fill 0]``

Without ``--database`` a SQLite file in a temporary folder is used; a given database must be empty, and its tables are left
behind. Every claim takes two classes of one provider in a transaction of its own. Scenarios: many providers and one hot one,
with one client and with several processes. ``--fill`` first gives the hot provider that many consumers, to show that the cost
of a claim does not depend on them. Runs in one process are of one client's latency; all are bounded by the disk of the database.
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

from moorage.allocation import options
from moorage.allocation.interface import ClaimRequest
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.testing.allocation import inconsistencies, provider
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
        database.close()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
