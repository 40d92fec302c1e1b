# SPDX-License-Identifier: Apache-2.0
"""What a create costs a scheduler's process when claims share transactions and when they do not, printed as one JSON object.

``python benchmarks/combined_claims.py [--database URL] [--server PID] [--creates 600] [--clients 1 8 64] [--nodes 100]
[--rounds 3]``

Each client is a thread that claims rooms on nodes and writes instances and operations, as a scheduler does. Both ways run
alternately on one database; ``[allocation_sql] claims_per_transaction`` is all that differs. For each: processor milliseconds of
this process for one create, with ``--server`` also those of the database server on this machine (its main process and the children
of that), statements and commits for one create, creates per second and the median time that a client waits. Processor times,
statements and commits hardly depend on what else the machine does. Without ``--database`` a
SQLite file in a temporary folder is used; a given database must be empty, and its tables are left behind.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from sqlalchemy import event

from moorage.allocation import options
from moorage.allocation.interface import InventoryItem, ResourceProvider
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.fleet.interface import NodeSpec
from moorage.fleet.nodes import NodeStore
from moorage.instances.availability import Availability
from moorage.instances.create import StoreClaimer
from moorage.scheduling.groups import GroupStore
from moorage.scheduling.interface import Flavor, RequestSpec
from moorage.services.registry import ServiceRegistry
from moorage.testing.allocation import inconsistencies
from moorage.testing.database import create_all
from moorage.work.operations import SqlOperationStore
from moorage_plugins.compute.instances import ComputeInstances
from moorage_plugins.stores import options as sql_options
from moorage_plugins.stores.sql import SqlStore

FLAVOR = Flavor("small", {"VCPU": 1, "MEMORY_MB": 256})
ROOM = (InventoryItem("VCPU", 1_000_000), InventoryItem("MEMORY_MB", 1_000_000_000))
HOSTS = 2


class Names:
    def node_name(self, uuid: str) -> str:
        return f"node-{uuid}"


def open_claimer(url: str, largest: int) -> tuple[StoreClaimer, SqlStore]:
    conf = cfg.ConfigOpts()
    options.register_opts(conf)
    sql_options.register_opts(conf)
    conf([], default_config_files=[])
    conf.set_override("claims_per_transaction", largest, group="allocation_sql")
    # A service's name: it writes the journal.
    database = Database(url, service="scheduler:benchmark", pool_size=70)
    store = SqlStore(conf=conf, database=database, clock=SystemClock())
    instances = ComputeInstances(conf=None, database=database, clock=SystemClock())
    workers = SqlOperationStore(database, lease_seconds=60)
    availability = Availability(database, 3600.0)
    return StoreClaimer(store, instances, workers, Names(), GroupStore(database), availability), store


def fill(url: str, count: int) -> list[tuple[str, str]]:
    """Creates the tables, and nodes whose agents are up; (uuid, host) of each."""
    database = Database(url)
    create_all(database)
    nodes = [(str(uuid.uuid4()), f"host-{number % HOSTS}") for number in range(count)]
    _, store = open_claimer(url, 1)
    store.ensure_providers([ResourceProvider(each, f"node-{each}", inventories=ROOM) for each, _ in nodes])
    with database.write() as tx:
        NodeStore(database).ensure(tx, [NodeSpec(each, f"node-{each}", host) for each, host in nodes])
    for host in range(HOSTS):
        ServiceRegistry(database, SystemClock()).enlist("agent", f"host-{host}", rpc_version="1.0")
    database.close()
    return nodes


def server_seconds(pid: int) -> float:
    """Processor seconds of a server's main process, its children, and those of its children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat") if pid else ():
        try:
            text = stat.read_text(encoding="utf-8")
        except OSError:
            continue  # it has ended meanwhile
        of = text.rpartition(")")[2].split()
        if int(stat.parent.name) == pid:
            ticks += sum(map(int, of[11:15]))
        elif int(of[1]) == pid:
            ticks += sum(map(int, of[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run(
    claimer: StoreClaimer, nodes: Sequence[tuple[str, str]], clients: int, creates: int, server: int = 0
) -> dict[str, float]:
    counts: collections.Counter[str] = collections.Counter()

    def statement(*_: Any) -> None:
        counts["statements"] += 1

    def commit(*_: Any) -> None:
        counts["commits"] += 1

    def several(place: int) -> list[float]:
        taken = []
        for number in range(place, creates, clients):
            of, node = str(uuid.uuid4()), nodes[number % len(nodes)]
            began = time.perf_counter()
            claimer.claim(RequestSpec(of, FLAVOR, project_id="p"), *node, f"req-{of}")
            taken.append(time.perf_counter() - began)
        return taken

    event.listen(sa.Engine, "before_cursor_execute", statement)
    event.listen(sa.Engine, "commit", commit)
    try:
        processor, on_server, began = time.process_time(), server_seconds(server), time.perf_counter()
        with futures.ThreadPoolExecutor(clients) as pool:
            waits = [each for some in pool.map(several, range(clients)) for each in some]
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        on_server = server_seconds(server) - on_server
    finally:
        event.remove(sa.Engine, "before_cursor_execute", statement)
        event.remove(sa.Engine, "commit", commit)
    return {
        "processor_ms": 1000 * processor / creates,
        "server_processor_ms": 1000 * on_server / creates,
        "statements": counts["statements"] / creates,
        "commits": counts["commits"] / creates,
        "per_s": creates / seconds,
        "p50_ms": 1000 * statistics.median(waits),
    }


def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    nodes = fill(url, arguments.nodes)
    stores = {"alone": open_claimer(url, 1), "combined": open_claimer(url, 64)}
    for claimer, _ in stores.values():
        run(claimer, nodes, 8, 64)
    found: dict[str, Any] = {}
    for clients in arguments.clients:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in stores}
        for _ in range(arguments.rounds):
            for name, (claimer, _) in stores.items():
                rounds[name].append(run(claimer, nodes, clients, arguments.creates, arguments.server))
        found[f"clients_{clients}"] = {
            name: {value: round(statistics.median(each[value] for each in several), 3) for value in several[0]}
            for name, several in rounds.items()
        }
    return {**found, "inconsistent": len(inconsistencies(stores["alone"][1]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", default="")
    parser.add_argument("--creates", type=int, default=600)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server", type=int, default=0)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.database or f"sqlite:///{folder}/benchmark.db", arguments)
    named = {"creates": arguments.creates, "nodes": arguments.nodes, "rounds": arguments.rounds}
    print(json.dumps({**named, "load": [round(load, 2), round(os.getloadavg()[0], 2)], **found}, indent=2))


if __name__ == "__main__":
    main()
