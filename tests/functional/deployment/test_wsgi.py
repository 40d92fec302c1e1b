# SPDX-License-Identifier: Apache-2.0
"""The whole API under the WSGI servers that people use, beside a control plane that is there already."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

import tests
from moorage import client
from tests import servers
from tests.functional.control_plane.test_slice import SliceCase, flavor, patch_shard


@tests.for_ci("builds and starts other servers")
class WsgiServers(SliceCase):
    extra = """
[observers]
enabled = metrics
"""

    def setUp(self) -> None:
        self.addCleanup(self.forget_nothing)
        self.services = {row["uuid"] for row in self.api.services()}

    def forget_nothing(self) -> None:
        """No process of the server is taken for a service, and none of the services was disturbed."""
        self.assertEqual(self.services, {row["uuid"] for row in self.api.services()})

    @contextlib.contextmanager
    def served(
        self, command: Sequence[object], port: int, orderly: bool = True, **environment: str
    ) -> Iterator[client.Client]:
        """A server with two processes, ended in good order, and a client of it."""
        with tempfile.TemporaryDirectory() as numbers, tempfile.NamedTemporaryFile("w+") as said:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=said,
                stderr=said,
                env={
                    **os.environ,
                    "MOORAGE_CONFIG_FILES": str(self.plane.conf),
                    "MOORAGE_STATE_DIR": str(self.plane.state),
                    "PROMETHEUS_MULTIPROC_DIR": numbers,
                    **environment,
                },
            )
            try:
                url = f"http://127.0.0.1:{port}"
                servers.wait_until(lambda: process.poll() is not None or answers(url), "the server answers", 120)
                self.assertIsNone(process.poll(), Path(said.name).read_text())
                yield client.connect(**{**self.plane.data, "url": url})
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60 if orderly else 10)
                except subprocess.TimeoutExpired:
                    if orderly:
                        raise
                finally:
                    process.kill()
                    process.wait()
            if orderly:
                self.assertEqual(0, process.returncode, Path(said.name).read_text())

    def uwsgi(self, port: int, *more: str) -> list[object]:
        program = servers.program("uwsgi")
        return [
            *(program, "--master", "--die-on-term", "--processes", "2", "--virtualenv", sys.prefix, *more),
            # A process whose threads do not run cannot end in good order.
            *("--worker-reload-mercy", "5"),
            # It closes each connection after its answer; a client that is not told so may send its next request into it.
            *("--add-header", "Connection: close"),
            *("--http-socket", f"127.0.0.1:{port}", "--module", "moorage.wsgi:application"),
        ]

    def check(self, there: client.Client, url: str) -> None:
        """What needs messages, the store, the dialects and the other processes of the server."""
        self.assertEqual(8, len(there.hosts()))
        created = there.create_instance(flavor())
        servers.wait_until(lambda: self.api.instance(created["uuid"])["status"] == "active", "the instance", 90)
        there.delete_instance(created["uuid"])
        mine: dict[str, Any] = {"auth": (self.plane.data["username"], self.plane.data["password"]), "timeout": 60.0}
        provider, consumer = (str(uuid.uuid4()) for _ in range(2))
        name = {"uuid": provider, "name": f"pool-{provider}"}
        mine["headers"] = {"OpenStack-API-Version": "placement 1.39"}
        made = requests.post(f"{url}/placement/resource_providers", json=name, **mine)
        self.assertEqual(200, made.status_code, made.text)
        # Links follow the mount.
        self.assertTrue(made.headers["Location"].endswith(f"/placement/resource_providers/{provider}"), made.headers)
        items = {"resource_provider_generation": 0, "inventories": {"DISK_GB": {"total": 10}}}
        put = requests.put(f"{url}/placement/resource_providers/{provider}/inventories", json=items, **mine)
        self.assertEqual(200, put.status_code, put.text)
        claim = {
            "allocations": {provider: {"resources": {"DISK_GB": 10}}},
            **{"consumer_generation": None, "project_id": "p", "user_id": "u", "consumer_type": "INSTANCE"},
        }
        answers = [
            requests.put(f"{url}/placement/allocations/{each}", json=claim, **mine).status_code
            for each in (consumer, str(uuid.uuid4()))
        ]
        self.assertEqual([204, 409], answers)
        self.assertEqual(401, requests.get(f"{url}/scheduling/v1/services", timeout=60).status_code)
        healthy = requests.get(f"{url}/healthcheck", timeout=60)
        self.assertEqual((200, "healthy"), (healthy.status_code, healthy.json()["status"]))
        counted = 'moorage_api_request_seconds_count{method="PUT",route="/allocations/{consumer}",status="204"} 1.0'
        # Whichever process is asked, it knows what the others answered.
        for _ in range(4):
            self.assertIn(counted, requests.get(f"{url}/metrics", timeout=60).text)
        gone = requests.delete(f"{url}/placement/allocations/{consumer}", **mine)
        self.assertEqual(204, gone.status_code)
        self.check_events(url)

    def check_events(self, url: str) -> None:
        """Observers are told of what happens in the server's processes."""
        told = ("api-all", "shard.reassigned")
        before = self.counted().get(told, 0)
        patch_shard(url, self.plane.data, "node-0", f"of-{uuid.uuid4()}")
        servers.wait_until(lambda: self.counted().get(told, 0) == before + 1, "the event", 90)

    def test_gunicorn_serves_the_whole_api(self) -> None:
        port = servers.free_port()
        command = [
            *(sys.executable, "-m", "gunicorn", "--no-control-socket", "--workers", "2", "--threads", "4"),
            *("--bind", f"127.0.0.1:{port}", "moorage.wsgi:application"),
        ]
        with self.served(command, port) as there:
            self.check(there, f"http://127.0.0.1:{port}")

    def test_uwsgi_serves_the_whole_api(self) -> None:
        port = servers.free_port()
        with self.served(self.uwsgi(port, "--enable-threads", "--threads", "4"), port) as there:
            self.check(there, f"http://127.0.0.1:{port}")

    def test_uwsgi_without_pythons_threads_is_refused(self) -> None:
        port = servers.free_port()
        # A process whose threads do not run may not end when it is asked to.
        with self.served(self.uwsgi(port), port, orderly=False):
            self.assertEqual(503, requests.get(f"http://127.0.0.1:{port}/scheduling/v1/hosts", timeout=60).status_code)


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=60).status_code in {200, 503}
    except requests.ConnectionError:
        return False
