# SPDX-License-Identifier: Apache-2.0
"""Cost of HTTP servers for a trivial WSGI application, printed as one JSON object.

``python benchmarks/http_server.py [--requests 12000] [--clients 64] [--repeat 3] [--servers moorage waitress ...]``

Each server runs in a process of its own with 16 threads; the clients keep their connections. Printed for each server, as medians
over the repeats: processor microseconds of the server per request, requests per second, seconds until the first answer, resident
MiB after the load, and connections closed under a request. ``moorage`` is the embedded server. The others run unmodified if
they are installed (``pip install waitress cheroot gunicorn granian hypercorn uvicorn a2wsgi``); ``missing`` lists the others. The
load generator is one process beside the server, so read the ratios within one run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import select
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

THREADS = 16
REQUEST = (
    b"GET /ping HTTP/1.1\r\nHost: a\r\nAccept: application/json\r\nUser-Agent: benchmark\r\n"
    b"X-Auth-Token: 0123456789012345678901234567890123456789\r\n\r\n"
)
ANSWER = b'{"answer": true}'
#: Server -> the modules that it needs.
NEEDS = {
    "moorage": ("moorage",),
    "waitress": ("waitress",),
    "cheroot": ("cheroot",),
    "gunicorn": ("gunicorn",),
    "granian": ("granian",),
    "hypercorn": ("hypercorn",),
    "uvicorn-a2wsgi": ("uvicorn", "a2wsgi"),
}


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The same short answer to every request."""
    start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(ANSWER)))])
    return [ANSWER]


def asgi() -> Any:
    """The application through a2wsgi."""
    return importlib.import_module("a2wsgi").WSGIMiddleware(application, workers=THREADS)


def command(name: str, port: int) -> list[str]:
    """The command that starts a server."""
    run, bind = [sys.executable, "-m"], f"127.0.0.1:{port}"
    return {
        "moorage": [sys.executable, __file__, "--serve", "moorage", "--port", str(port)],
        "cheroot": [sys.executable, __file__, "--serve", "cheroot", "--port", str(port)],
        "waitress": [*run, "waitress", "--listen", bind, "--threads", str(THREADS), "http_server:application"],
        "gunicorn": [
            *run,
            "gunicorn",
            "--bind",
            bind,
            "--threads",
            str(THREADS),
            "--keep-alive",
            "60",
            "http_server:application",
        ],
        "granian": [
            *(
                *run,
                "granian",
                "--interface",
                "wsgi",
                "--port",
                str(port),
                "--blocking-threads",
                str(THREADS),
                "--no-ws",
            ),
            "http_server:application",
        ],
        "hypercorn": [*run, "hypercorn", "--bind", bind, "--workers", "0", "wsgi:http_server:application"],
        "uvicorn-a2wsgi": [*run, "uvicorn", "--port", str(port), "--no-access-log", "--factory", "http_server:asgi"],
    }[name]


def serve(name: str, port: int) -> None:
    """Serve until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    if name == "moorage":
        made = importlib.import_module("moorage.http.server").Server(
            f"127.0.0.1:{port}", application, threads=THREADS, drain_seconds=5
        )
        made.start()
    else:
        made = importlib.import_module("cheroot.wsgi").Server(("127.0.0.1", port), application, numthreads=THREADS)
        threading.Thread(target=made.start, daemon=True).start()
    ended.wait()
    made.stop()


class Running:
    """A server in a process of its own."""

    def __init__(self, name: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        began = time.monotonic()
        folder = __file__.rpartition("/")[0] or "."
        self._process = subprocess.Popen(
            command(name, self._port), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        connection = self._first()
        connection.sendall(REQUEST)
        connection.recv(4096)
        self.start_seconds = time.monotonic() - began
        connection.close()

    def _first(self) -> socket.socket:
        while self._process.poll() is None:
            try:
                return self.connect()
            except ConnectionRefusedError:
                time.sleep(0.01)
        raise SystemExit(f"The server ended: {self._process.args}")

    def connect(self) -> socket.socket:
        """A connection to it."""
        return socket.create_connection(("127.0.0.1", self._port), 60)

    def _processes(self) -> list[psutil.Process]:
        first = psutil.Process(self._process.pid)
        return [first, *first.children(recursive=True)]

    def processor_seconds(self) -> float:
        """Of all of its processes, since their start."""
        return sum(sum(each.cpu_times()[:2]) for each in self._processes())

    def resident_mib(self) -> float:
        """Of all of its processes."""
        return sum(each.memory_info().rss for each in self._processes()) / 2**20

    def end(self) -> None:
        """End it, in good order if it does within 10 seconds."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            for each in self._processes():
                each.kill()
        self._process.wait()


class Load:
    """Clients that keep their connections and ask again as soon as they are answered."""

    def __init__(self, server: Running, clients: int) -> None:
        self._server = server
        self._poll = select.epoll()
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self.done = self.cut = 0
        for _ in range(clients):
            self._connect()

    def _connect(self) -> None:
        connection = self._server.connect()
        self._clients[connection.fileno()] = (connection, bytearray())
        self._poll.register(connection.fileno(), select.EPOLLIN)
        connection.sendall(REQUEST)

    def run(self, requests: int) -> None:
        """Until so many more are answered, or a minute has passed."""
        until, late = self.done + requests, time.monotonic() + 60
        while self.done < until and time.monotonic() < late:
            for number, _ in self._poll.poll():
                self._look(number)

    def _look(self, number: int) -> None:
        connection, found = self._clients[number]
        try:
            data = connection.recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self.cut += 1
            self._poll.unregister(number)
            del self._clients[number]
            connection.close()
            self._connect()
            return
        found += data
        if ANSWER in found:
            self.done += 1
            found.clear()
            connection.sendall(REQUEST)

    def close(self) -> None:
        """Close the connections."""
        for connection, _ in self._clients.values():
            connection.close()
        self._poll.close()


def measure(name: str, requests: int, clients: int) -> dict[str, float]:
    """One run of one server."""
    server = Running(name)
    try:
        load = Load(server, clients)
        load.run(requests // 6)
        before, began, done = server.processor_seconds(), time.monotonic(), load.done
        load.run(requests)
        seconds, used = time.monotonic() - began, server.processor_seconds() - before
        resident = server.resident_mib()
        load.close()
    finally:
        server.end()
    done = load.done - done
    return {
        "processor_us_per_request": round(used / done * 1e6, 1),
        "requests_per_second": round(done / seconds),
        "start_seconds": round(server.start_seconds, 3),
        "resident_mib": round(resident, 1),
        "cut_connections": load.cut,
    }


def main() -> None:
    """Measure, in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--servers", nargs="*", choices=list(NEEDS), default=list(NEEDS))
    parser.add_argument("--serve", choices=["moorage", "cheroot"], help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.port)
        return
    there = [name for name in given.servers if all(importlib.util.find_spec(each) for each in NEEDS[name])]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in there}
    for _ in range(given.repeat):
        for name in there:
            runs[name].append(measure(name, given.requests, given.clients))
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    settings = {"requests": given.requests, "clients": given.clients, "repeat": given.repeat, "threads": THREADS}
    missing = [name for name in given.servers if name not in there]
    print(json.dumps({"settings": settings, "servers": medians, "missing": missing}, indent=2))


if __name__ == "__main__":
    main()
