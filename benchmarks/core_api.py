# SPDX-License-Identifier: Apache-2.0
"""Processor time that /scheduling/v1 needs for a request besides its handler, within one process.

    python benchmarks/core_api.py [REQUESTS]

Prints JSON: for each kind of request the median and the lowest of seven runs, in microseconds. The routes are the served ones, but
their handlers return a constant. The caller is not authenticated (noauth).
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any
from unittest import mock

from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.api_assembly import ApiAssembly
from moorage.control_plane.core_api import PREFIX
from moorage.control_plane.process import anonymous_platform
from moorage.db import Database, migrations
from moorage.http.routes import Request, Response, Wsgi

RUNS = 7
UUID = "11111111-1111-4111-8111-111111111111"
SHOWN = {"uuid": UUID, "status": "active", "host": "node-1"}
CREATE = {"name": "x", "flavor": {"flavorid": "small", "resources": {"VCPU": 1, "MEMORY_MB": 512}}}
KINDS: dict[str, tuple[str, str, Any]] = {
    "GET": ("GET", f"{PREFIX}/instances/{UUID}", None),
    "GET with a query": ("GET", f"{PREFIX}/instances?limit=10", None),
    "POST": ("POST", f"{PREFIX}/instances", CREATE),
}


def answer(request: Request) -> Response:
    """Every handler."""
    return Response(200 if request.body is None else 202, SHOWN)


def environ(method: str, target: str, body: Any) -> dict[str, Any]:
    """What the embedded server makes of a request."""
    raw = b"" if body is None else json.dumps(body).encode()
    path, _, query = target.partition("?")
    found = {
        "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": path, "QUERY_STRING": query, "SERVER_NAME": "x",
        "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(raw),
        "HTTP_HOST": "x:80", "HTTP_ACCEPT": "*/*", "HTTP_OPENSTACK_API_VERSION": "scheduling 1.0",
    }  # fmt: skip
    return found | ({"CONTENT_LENGTH": str(len(raw)), "CONTENT_TYPE": "application/json"} if raw else {})


def measure(application: Wsgi, requests: int, kind: tuple[str, str, Any]) -> dict[str, Any]:
    """Runs one kind of request."""
    found, statuses = [], set()
    for _ in range(RUNS):
        prepared = [environ(*kind) for _ in range(requests)]
        began = time.process_time()
        for each in prepared:
            b"".join(application(each, lambda status, headers, *_: statuses.add(status)))
        found.append((time.process_time() - began) / requests * 1e6)
    return {"median": round(statistics.median(found), 1), "lowest": round(min(found), 1), "status": ", ".join(statuses)}


def main() -> None:
    """Prints the numbers."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        conf = config.load(
            files=[], state_dir=folder, overrides={("api", "auth_strategy"): "noauth", ("api", "enabled_apis"): []}
        )
        with contextlib.closing(Database.from_config(conf, clock=SystemClock())) as database:
            migrations.upgrade_all(database)
        assembly = ApiAssembly(anonymous_platform("benchmark", conf, SystemClock(), opened), conf)
        routes = tuple(replace(each, handler=answer) for each in assembly._routes())
        with mock.patch.object(assembly, "_routes", lambda: routes):
            application = assembly.mounts(conf)[""]
        print(json.dumps({name: measure(application, requests, kind) for name, kind in KINDS.items()}, indent=2))


if __name__ == "__main__":
    main()
