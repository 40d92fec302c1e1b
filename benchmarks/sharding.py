# SPDX-License-Identifier: Apache-2.0
"""How quick shards are: listings and counts over HTTP, plans, and carrying them out; printed as one JSON object.

``python benchmarks/sharding.py [--nodes 10000] [--shards 50] [--repeat 7] [--parts http,plan,apply]``
    makes a fleet in a SQLite file of its own, serves it by the production server without authentication, and measures all of it.
``python benchmarks/sharding.py --url http://host:port[/baremetal] --shard NAME [--repeat 7]``
    measures the listings of any server that speaks Ironic's API, Ironic itself included; nothing is written there.

Times are medians in milliseconds, of one client on one connection that reads whole answers; on a machine that does other things
too only ratios within one run mean something. ``processor`` is processor time: the mean of the server's, where it is ours, or the
median of the work's own.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import requests
import sqlalchemy as sa

from moorage.db import Database, migrations
from moorage.fleet.nodes import NodeStore
from moorage.fleet.tables import nodes
from moorage.http.server import Server
from moorage.sharding.interface import STRATEGIES, ShardNode, ShardStrategy
from moorage.sharding.moving import ShardMover
from moorage.sharding.planner import make_plan
from moorage.sharding.plans import PlanRequest, Plans
from moorage.wsgi import build
from moorage_plugins.api.baremetal.tables import ports

VERSION = {"X-OpenStack-Ironic-API-Version": "1.82", "X-Auth-Token": "none"}
NOVA = (
    "uuid,power_state,provision_state,target_power_state,target_provision_state,last_error,maintenance,properties,instance_uuid,"
    "traits,resource_class"
)


def fill(database: Database, count: int, shards: int) -> None:
    """Nodes with a port each, spread over the shards, with properties and extra as real ones have them."""
    names = [f"shard-{number:04}" for number in range(shards)]
    with database.write() as tx:
        for first in range(0, count, 10_000):
            some = range(first, min(first + 10_000, count))
            tx.execute(
                sa.insert(nodes),
                [
                    {
                        "id": number + 1, "uuid": str(uuid.UUID(int=number + 1)), "name": f"node-{number:06}",
                        "shard": names[number % shards], "resource_class": "baremetal", "driver": "fake-hardware",
                        "properties": {"cpus": 64, "memory_mb": 262144, "local_gb": 1788, "cpu_arch": "x86_64"},
                        "extra": {"rack": f"r{number % 400:03}", "serial": f"SN{number:08}"},
                        "driver_info": {"ipmi_address": f"10.0.{number >> 8 & 255}.{number & 255}", "ipmi_username": "admin"},
                        "conductor_group": "", "generation": 0, "created_at": 1_700_000_000_000_000,
                        "updated_at": 1_700_000_000_000_000,
                    }
                    for number in some
                ],
            )  # fmt: skip
            tx.execute(
                sa.insert(ports),
                [
                    {
                        "uuid": str(uuid.UUID(int=(1 << 100) + number)), "node_id": number + 1,
                        "address": f"52:54:{number >> 24 & 255:02x}:{number >> 16 & 255:02x}:{number >> 8 & 255:02x}:"
                        f"{number & 255:02x}",
                        "pxe_enabled": True, "is_smartnic": False, "local_link_connection": {}, "extra": {},
                        "generation": 0, "created_at": 1_700_000_000_000_000,
                    }
                    for number in some
                ],
            )  # fmt: skip


class Served:
    """The dialect in a process of its own."""

    def __init__(self, folder: pathlib.Path) -> None:
        conf = folder / "moorage.conf"
        conf.write_text("[api]\nauth_strategy = noauth\n")
        environment = {**os.environ, "MOORAGE_CONFIG_FILES": str(conf), "MOORAGE_STATE_DIR": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


def serve() -> None:
    """Serve the dialect of the environment until ended; prints the URL."""
    server = Server("127.0.0.1:0", build("baremetal"), threads=2, drain_seconds=1)
    server.start()
    print(server.url, flush=True)
    while True:
        time.sleep(3600)


def listings(url: str, shard: str, repeat: int, process: psutil.Process | None) -> dict[str, Any]:
    """Every listing that consumers of shards ask for."""
    session = requests.Session()
    session.headers.update(VERSION)
    found: dict[str, Any] = {}
    for name, path in (
        ("nodes", f"/v1/nodes?shard={shard}"),
        ("nodes nova fields", f"/v1/nodes?shard={shard}&fields={NOVA}"),
        ("nodes detail", f"/v1/nodes/detail?shard={shard}"),
        ("ports", f"/v1/ports?shard={shard}"),
        ("nodes unsharded", "/v1/nodes?sharded=false"),
        ("shards", "/v1/shards"),
    ):
        walls, processor = [], []
        for number in range(repeat + 2):
            used = sum(process.cpu_times()[:2]) if process else 0.0
            began = time.perf_counter()
            answer = session.get(url + path, timeout=300)
            seconds = time.perf_counter() - began
            answer.raise_for_status()
            if number >= 2:
                walls.append(seconds * 1000)
                processor.append((sum(process.cpu_times()[:2]) - used) * 1000 if process else 0.0)
        body = answer.json()
        items = next(iter(value for value in body.values() if isinstance(value, list)))
        found[name] = {"ms": round(statistics.median(walls), 2), "items": len(items), "bytes": len(answer.content)}
        if process:
            found[name]["processor"] = round(statistics.mean(processor), 2)
    return found


def load(name: str) -> ShardStrategy:
    """A strategy by its name."""
    return STRATEGIES.load(name).plugin()


def planning(database: Database, repeat: int) -> dict[str, Any]:
    """One shard more, and one less, by each strategy."""
    rows = NodeStore(database).for_planning()
    fleet = [ShardNode._make(row[:8]) for row in rows]
    current = {row[0]: row.shard for row in rows}
    names = sorted({shard for shard in current.values() if shard is not None})
    found: dict[str, Any] = {"reading the fleet": _timed(lambda: NodeStore(database).for_planning(), 3)}
    for strategy, params in (
        ("balanced", {}),
        ("hash_ring", {"hash_function": "xxh3"}),
        ("affinity", {"group_by": "extra.rack"}),
        ("rules", {"rules": [{"match": {"name": ".*7"}, "shard": names[0]}], "fallback": "balanced"}),
    ):
        for label, shards in (("one more", [*names, "zz-new"]), ("one less", names[:-1])):
            make = lambda: make_plan(strategy, load(strategy), fleet, shards, current, params=params)  # noqa: B023, E731
            plan = make()
            found[f"{strategy}, {label}"] = {
                **_timed(make, repeat),
                "moves": len(plan.moves),
                "lower bound": plan.lower_bound,
                "largest / mean": round(plan.imbalance_after, 4),
            }
    locked = {node.uuid for number, node in enumerate(fleet) if number * 2654435761 % 1000 < 700}
    make = lambda: make_plan("balanced", load("balanced"), fleet, [*names, "zz-new"], current, locked=locked)  # noqa: E731
    plan = make()
    found["balanced, one more, 70 % locked"] = {
        **_timed(make, repeat),
        "moves": len(plan.moves),
        "lower bound": plan.lower_bound,
        "largest / mean": round(plan.imbalance_after, 4),
    }
    return found


def carrying_out(database: Database, batch: int) -> dict[str, Any]:
    """Move every node to another shard, and back."""
    store = NodeStore(database)
    plans = Plans(
        database,
        store,
        lambda name: (name or "balanced", load(name or "balanced")),
        ShardMover(sa.false()),
        batch=batch,
        keep=5,
    )
    before = Counter(dict(store.shards()))
    names = [f"new-{number:04}" for number in range(len(before))]
    found: dict[str, Any] = {}
    began, used = time.perf_counter(), time.process_time()
    plan = plans.make(PlanRequest(shards=names))
    found["planning and keeping it"] = {
        "s": round(time.perf_counter() - began, 2),
        "processor, s": round(time.process_time() - used, 2),
    }
    for label, step in (("apply", plans.apply), ("rollback", plans.rollback)):
        began, used, done = time.perf_counter(), time.process_time(), 0
        while (progress := step(plan.uuid, 5000)).remaining:
            done += progress.done
        found[label] = {
            "moves": done + progress.done,
            "s": round(time.perf_counter() - began, 2),
            "processor, s": round(time.process_time() - used, 2),
        }
    assert Counter(dict(store.shards())) == before, "taken back, the fleet must be as it was"
    return found


def _timed(work: Callable[[], object], repeat: int) -> dict[str, float]:
    walls, processor = [], []
    for _ in range(repeat):
        began, used = time.perf_counter(), time.process_time()
        work()
        walls.append((time.perf_counter() - began) * 1000)
        processor.append((time.process_time() - used) * 1000)
    return {"ms": round(statistics.median(walls), 1), "processor": round(statistics.median(processor), 1)}


def parts(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What is measured, over a fleet of our own."""
    wanted = arguments.parts.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        database = Database(f"sqlite:///{folder / 'moorage.sqlite'}")
        migrations.upgrade_all(database)
        fill(database, arguments.nodes, arguments.shards)
        if "http" in wanted:
            served = Served(folder)
            try:
                yield "http", listings(served.url, "shard-0000", arguments.repeat, psutil.Process(served.process.pid))
            finally:
                served.close()
        if "plan" in wanted:
            yield "plan", planning(database, arguments.repeat)
        if "apply" in wanted:
            yield "apply", carrying_out(database, arguments.batch)
        database.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--shards", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--batch", type=int, default=500, help="moves in one transaction")
    parser.add_argument("--parts", default="http,plan,apply")
    parser.add_argument("--url", help="a server to measure instead of our own")
    parser.add_argument("--shard", help="a shard of that server")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    elif arguments.url:
        print(json.dumps(listings(arguments.url.rstrip("/"), arguments.shard, arguments.repeat, None), indent=2))
    else:
        print(json.dumps({"nodes": arguments.nodes, "shards": arguments.shards, **dict(parts(arguments))}, indent=2))


if __name__ == "__main__":
    main()
