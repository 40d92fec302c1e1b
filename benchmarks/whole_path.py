# SPDX-License-Identifier: Apache-2.0
"""Processor time of whole requests by role, printed as one JSON object.

``python benchmarks/whole_path.py [--hosts 1523] [--creates 400] [--clients 8] [--settle 130] [--idle 60] [--schedulers 1]
[--agents 2] [--bulk 1] [--flavors 1] [--open] [--keep]``

Starts ``moorage up`` on SQLite in an empty folder, imports a fleet, leaves it idle, creates instances, waits until all are built,
and deletes them (not with ``--keep``). ``--bulk`` has each request create so many alike, ``--flavors`` has the requests take turns
at so many flavors: requests for different flavors are not ranked together. Printed for each phase: processor
milliseconds of each role (per node, per minute, per instance), the instances per second until the last answer (``per_s``) and until
all are built or gone (``done_per_s``), and the times that clients saw of their requests.

``--open`` finds the capacity first: requests to create arrive at random moments, at a rate that rises from step to step as long as
they are answered as fast as they arrive. Then they arrive at half of that rate, and the times from the arrivals to the answers are
printed; a request that no client is free to send waits, and its wait counts.

Schedulers and engines read an imported fleet again for up to two minutes: once a minute they read the rows that were written up to
a minute before their last reading. That counts with what follows the import unless ``--settle`` waits for so long, and is then
printed beside the import (``settle``). With ``--settle 0 --idle 0`` a run of some 10,000 hosts is short, and creates cost a few
microseconds more.

``loop_ns`` is the processor time of one turn of an empty loop, before the run: divide by it to compare machines and Pythons. A
Python that was compiled without optimizations takes a fifth more for everything.

The load generator is a process on the same machine; its own processor time is printed beside the roles' and not added to them. It
writes its requests itself, because the client of users takes 0.9 ms for each. The machine's load is printed beside the results.

ext4 does not use inodes again for some minutes after they were freed, and looks at each of them when a file is made. The simulated
driver makes a file per instance, so a run soon after another one in the same folder costs agents up to 0.4 ms more per create. Give
each run another block group: a TMPDIR on which ``chattr +T`` was used.
"""

from __future__ import annotations

import argparse
import base64
import collections
import json
import os
import pathlib
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any
from urllib import parse

import psutil

from moorage.client import Client, connect
from moorage.fleet.interface import uuid_of_name

#: Nodes that one request imports.
PAGE = 1000
#: Seconds in which roles end what they do at their start, and schedulers read the imported fleet.
READING = 5.0
#: Seconds that builds and deletions may take after the last request.
PATIENCE = 120.0
#: Requests per second of the first step, the factor from step to step, and the seconds of a step.
FIRST_RATE, RISE, STEP = 40.0, 1.2, 5.0
#: A rate is sustained when so much of it is answered, and the 99th percentile of the times is at most so many milliseconds.
SUSTAINED, SLOWEST = 0.95, 1000.0
#: Seconds of the open loop at half of the capacity.
HALF = 20.0


class Plane:
    """``moorage up`` in a folder of its own."""

    def __init__(self, folder: pathlib.Path, arguments: argparse.Namespace) -> None:
        self.state = folder / "state"
        conf = folder / "moorage.conf"
        conf.write_text(arguments.conf.replace("\\n", "\n"))
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moorage.cli.main", "up", "--state-dir", self.state, "--bind", "127.0.0.1:0"),
                *("--config-file", conf, "--schedulers", str(arguments.schedulers), "--agents", str(arguments.agents)),
            ],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def client(self) -> Client:
        return connect(**self._access())

    def sender(self) -> Sender:
        return Sender(**self._access())

    def _access(self) -> Any:
        return json.loads((self.state / "client.json").read_text())

    def processor(self) -> dict[str, float]:
        """Seconds of processor by role since its processes began."""
        found: collections.Counter[str] = collections.Counter()
        for row in json.loads((self.state / "run" / "processes.json").read_text()):
            times = psutil.Process(row["pid"]).cpu_times()
            found[row["name"].split("-")[0].split(" ")[0]] += times.user + times.system
        return dict(found)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=120)


class Sender:
    """Sends requests to the API over one connection, with a tenth of the processor that a client library takes."""

    def __init__(self, url: str, username: str, password: str, **_: str) -> None:
        where = parse.urlsplit(url)
        self._socket = socket.create_connection((where.hostname, where.port), timeout=PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        secret = base64.b64encode(f"{username}:{password}".encode()).decode()
        self._headers = f"Host: {where.netloc}\r\nAuthorization: Basic {secret}\r\nContent-Type: application/json\r\n"

    def send(self, method: str, path: str, body: Any = None) -> None:
        """Send a request and wait for its whole answer; ValueError unless it succeeds."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} /scheduling/v1{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(data)}\r\n\r\n"
        self._socket.sendall(head.encode() + data)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._receive()
        length = answer[:end].lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        while len(answer) < end + 4 + int(length or 0):
            answer += self._receive()
        if not 200 <= int(answer[9:12]) < 300:
            raise ValueError(f"{method} {path}: {answer.decode()}")

    def _receive(self) -> bytes:
        found = self._socket.recv(65536)
        if not found:
            raise ConnectionError("the API has closed the connection")
        return found


class Phase:
    """The processor that each role took in a ``with`` block."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    def __enter__(self) -> Phase:
        self._before, self._began, self._own = self._plane.processor(), time.monotonic(), time.process_time()
        return self

    def __exit__(self, *failure: object) -> None:
        self.seconds, self.own = time.monotonic() - self._began, time.process_time() - self._own
        after = self._plane.processor()
        self.roles = {role: after[role] - self._before.get(role, 0.0) for role in sorted(after)}

    def rounded(self) -> dict[str, float]:
        """Seconds of each role."""
        return {role: round(seconds, 2) for role, seconds in self.roles.items()}

    def milliseconds(self, parts: float) -> dict[str, float]:
        """Of each role and of all, for one of so many parts."""
        found = {role: round(1000 * seconds / parts, 3) for role, seconds in self.roles.items()}
        return found | {"all": round(1000 * sum(self.roles.values()) / parts, 3)}


def started(plane: Plane, roles: int) -> None:
    """Wait until so many roles beside the API are up, and have ended what they do at their start."""
    deadline = time.monotonic() + PATIENCE
    while sum(each["state"] == "up" for each in plane.client().services()) < roles:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all roles are up after {PATIENCE} seconds")
        time.sleep(0.2)
    time.sleep(READING)


def nodes(hosts: int, instances: int) -> Iterator[list[dict[str, Any]]]:
    """Pages of nodes, with room for twice as many instances; in the order of ``moorage node import``."""
    room = max(64, 2 * instances // hosts)
    inventories = {"VCPU": room, "MEMORY_MB": 4096 * room, "DISK_GB": 2000}
    names = sorted((f"node-{number:06}" for number in range(hosts)), key=uuid_of_name)
    for first in range(0, hosts, PAGE):
        yield [{"name": name, "inventories": inventories} for name in names[first : first + PAGE]]


def settled(plane: Plane, phase: str) -> None:
    """Wait until all instances are built, or gone."""
    client, deadline = plane.client(), time.monotonic() + PATIENCE
    status = "building" if phase == "create" else "deleting"
    while next(iter(client.instances(status=status)), None) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"instances are still {status} after {PATIENCE} seconds")
        time.sleep(0.1)


def run(senders: Sequence[Sender], work: Callable[[Sender, str], object], items: Sequence[str]) -> list[float]:
    """Works on the items with a thread for each sender, which takes the next item when it has ended one.

    Returns the seconds that each item took.
    """
    left = iter(items)

    def several(sender: Sender) -> list[float]:
        taken = []
        # The iterator of a sequence gives each item to one thread.
        for item in left:
            began = time.monotonic()
            work(sender, item)
            taken.append(time.monotonic() - began)
        return taken

    with futures.ThreadPoolExecutor(len(senders)) as pool:
        return [each for some in pool.map(several, senders) for each in some]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 1),
        "p99_ms": round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 1),
    }


def requests(
    plane: Plane, senders: Sequence[Sender], phase: str, of_each: Sequence[str], bulk: int = 1, flavors: int = 1
) -> dict[str, Any]:
    """Create instances of these names or delete those of these uuids; what each costs."""

    def create(sender: Sender, of: str) -> None:
        many = {} if bulk == 1 else {"count": bulk}
        kind = flavor(int(of.rpartition("-")[2]) % flavors)
        sender.send("POST", "/instances", {"name": of, "flavor": kind, **many})

    def delete(sender: Sender, of: str) -> None:
        sender.send("DELETE", f"/instances/{of}")

    work = {"create": create, "delete": delete}[phase]
    with Phase(plane) as cost:
        began = time.monotonic()
        taken = run(senders, work, of_each)
        seconds = time.monotonic() - began
        settled(plane, phase)
        until_done = time.monotonic() - began
    instances = len(of_each) * bulk
    return {
        "processor_ms": cost.milliseconds(instances),
        "generator_ms": round(1000 * cost.own / instances, 3),
        "per_s": round(instances / seconds, 1),
        "done_per_s": round(instances / until_done, 1),
        **percentiles(taken),
    }


def flavor(number: int = 0) -> dict[str, Any]:
    """One of many small flavors."""
    return {"flavorid": f"small-{number}", "resources": {"VCPU": 1, "MEMORY_MB": 256 + number}}


def made(client: Client) -> list[str]:
    """The uuids of all instances. The API has chosen them, as it does for users: those that clients draw cost a tenth more."""
    return [each["uuid"] for each in client.instances()]


def open_loop(plane: Plane, senders: Sequence[Sender], rate: float, seconds: float) -> dict[str, Any]:
    """Create instances at random moments, ``rate`` per second on average; what that costs, and the times from these moments on."""
    chance, moments = random.Random(1), [0.0]
    while moments[-1] < seconds:
        moments.append(moments[-1] + chance.expovariate(rate))
    began = time.monotonic()

    def create(sender: Sender, of: str) -> None:
        moment = began + moments[int(of)]
        time.sleep(max(0.0, moment - time.monotonic()))
        sender.send("POST", "/instances", {"name": of, "flavor": flavor()})
        taken.append(time.monotonic() - moment)

    taken: list[float] = []
    with Phase(plane) as cost:
        run(senders, create, [str(number) for number in range(len(moments))])
        answered = time.monotonic() - began
        settled(plane, "create")
    return {
        "rate": round(rate, 1),
        "arrived_per_s": round(len(moments) / moments[-1], 1),
        "per_s": round(len(moments) / answered, 1),
        "processor_ms": cost.milliseconds(len(moments)),
        **percentiles(taken),
    }


def capacity(plane: Plane, senders: Sequence[Sender]) -> dict[str, Any]:
    """The steps of the rising rate, and the open loop at half of the last one that was sustained."""
    steps, rate, sustained = [], FIRST_RATE, 0.0
    while True:
        steps.append(open_loop(plane, senders, rate, STEP))
        if steps[-1]["per_s"] < SUSTAINED * steps[-1]["arrived_per_s"] or steps[-1]["p99_ms"] > SLOWEST:
            break
        sustained, rate = rate, rate * RISE
    return {"steps": steps, "capacity_per_s": sustained, "half": open_loop(plane, senders, sustained / 2, HALF)}


def measure(plane: Plane, arguments: argparse.Namespace) -> dict[str, Any]:
    """All phases."""
    started(plane, arguments.schedulers + arguments.agents + 1)
    client = plane.client()
    found: dict[str, Any] = {}
    with Phase(plane) as cost:
        began = time.monotonic()
        for page in nodes(arguments.hosts, arguments.creates):
            client.import_nodes(page)
        seconds = time.monotonic() - began
        # Schedulers read what was imported.
        time.sleep(READING)
    found["import"] = {
        "seconds": round(seconds, 2),
        "processor_s": cost.rounded(),
    }
    if arguments.settle:
        with Phase(plane) as cost:
            time.sleep(arguments.settle)
        found["settle"] = {"processor_s": cost.rounded()}
    if arguments.idle:
        with Phase(plane) as cost:
            time.sleep(arguments.idle)
        found["idle"] = {"processor_ms_per_minute": cost.milliseconds(cost.seconds / 60)}
    senders = [plane.sender() for _ in range(arguments.clients)]
    requests(plane, senders, "create", [f"warm-{number}" for number in range(10 * len(senders))])
    requests(plane, senders, "delete", made(client))
    names = [f"instance-{number}" for number in range(arguments.creates // arguments.bulk)]
    found["create"] = requests(plane, senders, "create", names, arguments.bulk, arguments.flavors)
    if arguments.open:
        found["open"] = capacity(plane, senders)
    if not arguments.keep:
        found["delete"] = requests(plane, senders, "delete", made(client))
    return found


def loop_ns(turns: int = 5_000_000) -> float:
    """Measures the nanoseconds of processor time of one turn of an empty loop, the least of three times."""
    taken = []
    for _ in range(3):
        began = time.thread_time()
        for _ in range(turns):
            pass
        taken.append(time.thread_time() - began)
    return round(1e9 * min(taken) / turns, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1523)
    parser.add_argument("--creates", type=int, default=400)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--settle", type=float, default=130.0, help="seconds after the import before anything is measured"
    )
    parser.add_argument("--idle", type=float, default=60.0, help="seconds in which nothing is asked for")
    parser.add_argument("--schedulers", type=int, default=1)
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--bulk", type=int, default=1, help="instances that each request creates")
    parser.add_argument("--flavors", type=int, default=1, help="flavors that requests take turns at")
    parser.add_argument("--open", action="store_true", help="find the capacity, and the times at half of it")
    parser.add_argument("--keep", action="store_true", help="do not delete what was created")
    parser.add_argument("--conf", default="", help="more lines of the configuration")
    arguments = parser.parse_args()
    load, loop = os.getloadavg()[0], loop_ns()
    with tempfile.TemporaryDirectory() as folder:
        plane = Plane(pathlib.Path(folder), arguments)
        try:
            found = measure(plane, arguments)
        finally:
            plane.end()
    options = {name: value for name, value in vars(arguments).items() if name != "conf" or value}
    machine = {
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "loop_ns": loop,
        "python": platform.python_version(),
    }
    print(json.dumps({**options, **machine, **found}, indent=2))


if __name__ == "__main__":
    main()
