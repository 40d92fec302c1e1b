# SPDX-License-Identifier: Apache-2.0
"""A site as a deployer has it: each role in processes of its own, with PostgreSQL, RabbitMQ and ZooKeeper that keep their data.

Each process has a time of day of its own, by libfaketime. Monotonic clocks stay true: nobody can set them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path

from moorage import client, errors
from tests import servers
from tests.functional.deployment.guides import BIN
from tests.servers import wait_until
from tests.servers.base import Server, newest
from tests.servers.kinds import Postgresql, Rabbitmq, Zookeeper

__all__ = ["HOSTS", "ROLES", "SOON", "VCPUS", "Role", "Site"]

SOON = 180.0
HOSTS = ("host-1", "host-2", "host-3")
#: Of each host.
VCPUS = 24
ROLES: Mapping[str, Sequence[str]] = {
    "api": ("api-1", "api-2"),
    "scheduler": ("scheduler-1", "scheduler-2"),
    "agent": HOSTS,
    "engine": ("engine-1", "engine-2"),
}
_FAKETIME = "/usr/lib/*-linux-gnu/faketime/libfaketime.so.1"
#: With libfaketime 0.9.10, the system call behind ``time.sleep`` of Python 3.11 (clock_nanosleep with an absolute time) is refused:
#: EINVAL. Waits for a lock are not.
_SLEEP = """
import threading
import time


def sleep(seconds):
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    if not seconds:
        return pause(0)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


pause, time.sleep = time.sleep, sleep
"""
_CONF = """
[database]
connection = {database}
[rpc]
transport_url = {broker}
[coordination]
periodic_coordination_backend = {members}
session_timeout = 4
[api]
auth_strategy = noauth
[agent]
cluster = one
sweep_interval = 1
[services]
report_interval = 0.5
service_down_time = 5
[cleanup]
interval = 1
lease_seconds = 6
auto_cleanup_enabled = true
auto_cleanup_checks = 1
unclaimed_timeout = 10
[control_plane]
state_dir = {state}
reconcile_interval = 5
[scheduling]
scheduler_instance_sync_interval = 5
[block_storage]
gigabyte_bytes = 50000
chunk_bytes = 10000
chunk_delay = 0.02
collect_interval = 1
[compute]
build_delay = 0.05
"""


class Role:
    """A role in a process. Whoever has it is its service manager: ``watch`` starts it again."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, library: str) -> None:
        self.name = name
        self.starts = 0
        self.log = folder / f"{name}.log"
        self._clock = folder / f"{name}.time"
        self._command = command
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(self._clock), "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1", "FAKETIME_DISABLE_SHM": "1",
        }  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None
        self.set_clock(0)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def watch(self) -> bool:
        """Start it unless it runs; whether it had to be started."""
        if self.running:
            return False
        self.starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.log.parent,
            )
        return True

    def set_clock(self, seconds: int) -> None:
        """Set its time of day so many seconds off, at once: a process never reads half a file."""
        told = self._clock.with_suffix(".new")
        told.write_text(f"{seconds:+d}\n")
        told.rename(self._clock)

    def signal(self, number: signal.Signals) -> None:
        """To the process, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill it, however it stands."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(SOON)


class Site:
    """Starts servers and roles; ends them with the test."""

    def __init__(self, test: unittest.TestCase) -> None:
        for name in ("postgresql", "rabbitmq", "zookeeper"):
            servers.require(name)
        library = newest(_FAKETIME)
        servers.refuse("" if library else "libfaketime is missing; see bindep.txt")
        folder = tempfile.TemporaryDirectory(prefix="moorage-site-")
        test.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.servers: dict[str, Server] = {
            kind.NAME: test.enterContext(kind(durable=True)) for kind in (Postgresql, Rabbitmq, Zookeeper)
        }
        self.database = servers.fresh_database(self.servers["postgresql"])
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(_SLEEP)
        conf = self.folder / "moorage.conf"
        conf.write_text(
            _CONF.format(
                database=self.database,
                broker=self.servers["rabbitmq"].url,
                members=self.servers["zookeeper"].url,
                state=self.folder / "state",
            )
        )
        conf.chmod(0o600)
        subprocess.run(
            [BIN / "moorage-manage", "--config-file", conf, "db", "upgrade"],
            check=True,
            timeout=SOON,
            capture_output=True,
        )
        self.roles: dict[str, Role] = {}
        self.urls = []
        assert library is not None
        for role, names in ROLES.items():
            for name in names:
                words = [str(BIN / "moorage"), role, "--config-file", str(conf), "--name", name]
                if role == "api":
                    address = f"127.0.0.1:{servers.free_port()}"
                    words += ["--set", f"api.bind={address}"]
                    self.urls.append(f"http://{address}")
                self.roles[name] = Role(name, words, self.folder, library)
                test.addCleanup(self.roles[name].end)
        self.watch()
        wait_until(self.all_up, "all services are up", SOON)
        self.client().import_nodes(
            [{"name": f"{each}-node", "host": each, "inventories": {"VCPU": VCPUS}} for each in HOSTS]
        )

    def client(self, number: int = 0, timeout: float = 20.0) -> client.Client:
        """One that asks the API of this number."""
        return client.connect(self.urls[number % len(self.urls)], timeout=timeout)

    def watch(self) -> int:
        """Start the roles that do not run; how many."""
        return sum(each.watch() for each in self.roles.values())

    def all_up(self) -> bool:
        """Whether each API answers and says that all services are up."""
        try:
            for number in range(len(self.urls)):
                up = {each["host"] for each in self.client(number).services() if each["state"] == "up"}
                if not up >= set(self.roles):
                    return False
        except errors.MoorageError:
            return False
        return True
