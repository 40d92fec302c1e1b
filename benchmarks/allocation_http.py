# SPDX-License-Identifier: Apache-2.0
"""Claims and candidates per second of any server that speaks Placement's API, printed as one JSON object.

``python benchmarks/allocation_http.py URL [--token admin] [--claims 400] [--providers 50] [--clients 8] [--fleet 1000]``

URL is the base of the API: Moorage's ``http://HOST:PORT/placement``, or OpenStack Placement itself, so that both can be put side by
side (``benchmarks/placement_peer.py`` starts one). Clients are processes with one connection each. Every claim is a PUT of one
new consumer with two classes; scenarios: many providers and one hot one, one client and several; a race of all clients for a fixed
capacity, whose outcome is summed from the allocations that the server reports; candidates with and without a limit. ``--user`` and
``--password`` instead of ``--token`` for http_basic. Providers that the server has already count for ``--fleet``.

With ``--processes`` (ids of the main processes of the server and of the database, on this machine) the processor time of each
request for candidates, in those processes and their children, is measured too; elapsed times mean little on a machine that others
use.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import http.client
import json
import multiprocessing
import os
import statistics
import time
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VERSION = "placement 1.39"
WANTED = {"VCPU": 1, "MEMORY_MB": 64}
LARGE = 2**31 - 1
#: Seconds after which a server may have ended a connection that was not used.
QUIET = 1.0
#: How often each query for candidates is asked.
CANDIDATES = 9


class Server:
    """One connection."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parsed = urllib.parse.urlsplit(url)
        self._prefix = parsed.path.rstrip("/")
        self._connection = http.client.HTTPConnection(parsed.hostname or "", parsed.port or 80, timeout=120)
        self._used = time.monotonic()
        self._headers = {
            "OpenStack-API-Version": VERSION,
            "Content-Type": "application/json",
            "Accept": "application/json",
            **headers,
        }

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body)
        if time.monotonic() - self._used > QUIET:
            self._connection.close()  # the next request opens it again
        self._connection.request(method, self._prefix + path, data, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        self._used = time.monotonic()
        return answer.status, json.loads(text) if text else None

    def must(self, method: str, path: str, body: Any = None) -> Any:
        status, answer = self.ask(method, path, body)
        if status >= 300:
            raise SystemExit(f"{method} {path} answered {status}: {answer}")
        return answer


def provider(server: Server, totals: Mapping[str, int]) -> str:
    made = str(uuid.uuid4())
    server.must("POST", "/resource_providers", {"name": f"benchmark-{made}", "uuid": made})
    items = {name: {"total": total} for name, total in totals.items()}
    server.must(
        "PUT", f"/resource_providers/{made}/inventories", {"resource_provider_generation": 0, "inventories": items}
    )
    return made


def claim(server: Server, of_provider: str) -> int:
    body = {
        "allocations": {of_provider: {"resources": WANTED}},
        "consumer_generation": None,
        "project_id": "benchmark",
        "user_id": "benchmark",
        "consumer_type": "INSTANCE",
    }
    return server.ask("PUT", f"/allocations/{uuid.uuid4()}", body)[0]


def client(
    arguments: tuple[str, dict[str, str]], providers: Sequence[str], count: int, barrier: Any, results: Any
) -> None:
    server = Server(*arguments)
    server.must("GET", "/")
    barrier.wait()
    statuses: collections.Counter[int] = collections.Counter()
    taken = []
    for number in range(count):
        begun = time.perf_counter()
        statuses[claim(server, providers[number % len(providers)])] += 1
        taken.append(time.perf_counter() - begun)
    results.put((dict(statuses), taken))


def measure(
    arguments: tuple[str, dict[str, str]], providers: Sequence[str], count: int, clients: int
) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(clients + 1), spawn.Queue()
    each = max(1, count // clients)
    processes = [
        spawn.Process(target=client, args=(arguments, providers, each, barrier, results)) for _ in range(clients)
    ]
    for process in processes:
        process.start()
    barrier.wait()
    begun = time.perf_counter()
    answers = [results.get() for _ in processes]
    elapsed = time.perf_counter() - begun
    for process in processes:
        process.join()
    statuses: collections.Counter[int] = collections.Counter()
    for found, _ in answers:
        statuses.update(found)
    ordered = sorted(second for _, seconds in answers for second in seconds)
    return {
        "granted_per_s": round(statuses[204] / elapsed, 1),
        "p50_ms": round(statistics.median(ordered) * 1000, 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)] * 1000, 2),
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
    }


def race(arguments: tuple[str, dict[str, str]], server: Server, capacity: int, clients: int) -> dict[str, Any]:
    """All clients ask for twice as much as there is."""
    hot = provider(server, {"VCPU": capacity, "MEMORY_MB": LARGE})
    found = measure(arguments, [hot], 2 * capacity, clients)
    held = server.must("GET", f"/resource_providers/{hot}/allocations")["allocations"]
    stored = sum(each["resources"]["VCPU"] for each in held.values())
    return {
        "clients": clients,
        "capacity": capacity,
        "granted": found["statuses"].get("204", 0),
        "stored": stored,
        "over_allocated": max(0, stored - capacity),
        "statuses": found["statuses"],
    }


def processor_ms(roots: Sequence[int]) -> float:
    """Processor time so far of processes and all their descendants."""
    found: dict[int, tuple[int, int]] = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = each.read_text().rpartition(")")[2].split()
            found[int(each.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    wanted = set(roots)
    while more := {number for number, (parent, _) in found.items() if parent in wanted} - wanted:
        wanted |= more
    ticks = sum(found[number][1] for number in wanted if number in found)
    return 1000 * ticks / os.sysconf("SC_CLK_TCK")


def candidates(server: Server, fleet: int, processes: Sequence[int]) -> dict[str, Any]:
    present = len(server.must("GET", "/resource_providers")["resource_providers"])
    for _ in range(fleet - present):
        provider(server, {"VCPU": 64, "MEMORY_MB": 65536, "DISK_GB": 1000})
    found: dict[str, Any] = {"providers": max(fleet, present)}
    for label, limit in (("limit_10", "&limit=10"), ("no_limit", "")):
        seconds, processor = [], []
        for _ in range(CANDIDATES):
            spent, begun = processor_ms(processes), time.perf_counter()
            answer = server.must("GET", f"/allocation_candidates?resources=VCPU:1,MEMORY_MB:1024,DISK_GB:20{limit}")
            seconds.append(time.perf_counter() - begun)
            processor.append(processor_ms(processes) - spent)
        found[label] = {
            "candidates": len(answer["allocation_requests"]),
            "median_ms": round(statistics.median(seconds) * 1000, 1),
            **({"processor_median_ms": round(statistics.median(processor), 1)} if processes else {}),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Claims and candidates of a server that speaks Placement's API.")
    parser.add_argument("url")
    parser.add_argument("--token", help="X-Auth-Token")
    parser.add_argument("--user")
    parser.add_argument("--password", default="")
    parser.add_argument("--claims", type=int, default=400, help="claims of each scenario")
    parser.add_argument("--providers", type=int, default=50)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=60, help="what the clients race for")
    parser.add_argument("--fleet", type=int, default=0, help="providers for the candidates; 0: leave them out")
    parser.add_argument(
        "--processes", default="", help="ids of processes whose processor time is measured, with commas"
    )
    arguments = parser.parse_args()
    headers = {"X-Auth-Token": arguments.token} if arguments.token else {}
    if arguments.user:
        secret = base64.b64encode(f"{arguments.user}:{arguments.password}".encode()).decode()
        headers["Authorization"] = f"Basic {secret}"
    where = (arguments.url, headers)
    server = Server(*where)
    many = [provider(server, {"VCPU": LARGE, "MEMORY_MB": LARGE}) for _ in range(arguments.providers)]
    report: dict[str, Any] = {"url": arguments.url}
    for clients in (1, arguments.clients):
        report[f"many_{clients}"] = measure(where, many, arguments.claims, clients)
        report[f"hot_{clients}"] = measure(where, many[:1], arguments.claims, clients)
    report["race"] = race(where, server, arguments.capacity, arguments.clients)
    if arguments.fleet:
        processes = [int(each) for each in arguments.processes.split(",") if each]
        report["candidates"] = candidates(server, arguments.fleet, processes)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
