# SPDX-License-Identifier: Apache-2.0
"""Services of an earlier commit of this repository work with those of the present one, in the order of the upgrade guide (H4).

There is no release yet, so a commit stands for one. Its sources are taken from the repository and installed in a folder of their
own; the libraries are those of the present code. Each service is a process, on PostgreSQL and RabbitMQ.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid
from pathlib import Path
from typing import ClassVar

import tests
from moorage import client, errors
from tests import servers
from tests.servers import wait_until

ROOT = Path(__file__).resolve().parents[3]
#: The commit that stands for the earlier release: of 23 November 2026, 100 commits before this test.
EARLIER = "a0aa504e0f49a637587c62456315311d38e116e0"
SOON = 120.0
HOSTS = ("host-1", "host-2")
#: VCPUs of each host; each instance has one.
ROOM = 3
_CONF = """
[database]
connection = {database}
[rpc]
transport_url = {broker}
[api]
auth_strategy = noauth
[agent]
sweep_interval = 1
services = compute
[services]
report_interval = 0.5
service_down_time = 5
[control_plane]
state_dir = {state}
[scheduling]
silent_hosts_age = 1
"""


def _install(folder: Path) -> None:
    """Install the earlier code into the folder ``site`` of a folder."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", EARLIER], capture_output=True, check=True, timeout=SOON)
    source = folder / "source"
    source.mkdir()
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True, timeout=SOON)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    command = [*pip, "--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder / "site"), str(source)]
    subprocess.run(command, check=True, timeout=SOON, capture_output=True, env={**os.environ, "PBR_VERSION": "0.0.0"})


@tests.for_ci("it installs an earlier release, and starts each service twice")
class EarlierReleaseTests(unittest.TestCase):
    """Upgrades a site service by service, while it is used."""

    folder: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        for name in ("postgresql", "rabbitmq"):
            servers.require(name)
        has = subprocess.run(
            ["git", "-C", ROOT, "cat-file", "-e", f"{EARLIER}^{{commit}}"], capture_output=True, check=False
        )
        servers.refuse(
            "" if has.returncode == 0 else f"the repository has no commit {EARLIER}: it was not cloned whole"
        )
        folder = tempfile.TemporaryDirectory(prefix="moorage-earlier-")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        _install(cls.folder)
        found = subprocess.run(
            [sys.executable, "-c", "import moorage; print(moorage.__file__)"],
            capture_output=True, text=True, check=True, cwd=cls.folder, env={**os.environ, "PYTHONPATH": str(cls.folder / "site")},
        ).stdout  # fmt: skip
        if not found.startswith(str(cls.folder / "site")):
            raise AssertionError(f"the earlier code is not used, but {found}")

    def setUp(self) -> None:
        database = servers.fresh_database(servers.shared("postgresql"))
        self.conf = self.folder / "moorage.conf"
        broker = servers.shared("rabbitmq").url
        self.conf.write_text(_CONF.format(database=database, broker=broker, state=self.folder / "state"))
        self.conf.chmod(0o600)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"127.0.0.1:{servers.free_port()}"
        self.api = client.connect(f"http://{self.address}", timeout=30)
        #: What was acknowledged and not deleted.
        self.there: set[str] = set()

    def run_program(self, module: str, *words: str, earlier: bool) -> list[str]:
        python = [sys.executable, "-c", f"import sys; from moorage.cli.{module} import main; sys.exit(main())", *words]
        path = self.folder / "site" if earlier else ROOT / "framework"
        return ["env", f"PYTHONPATH={path}", *python]

    def upgrade_database(self, *, earlier: bool) -> None:
        words = self.run_program("manage", "--config-file", str(self.conf), "db", "upgrade", earlier=earlier)
        done = subprocess.run(words, capture_output=True, text=True, timeout=SOON, check=False, cwd=self.folder)
        self.assertEqual(0, done.returncode, done.stderr)

    def start(self, role: str, name: str, *, earlier: bool) -> None:
        """Start a service, in the place of one of its name."""
        self.end(name)
        words = [role, "--config-file", str(self.conf), "--name", name]
        words += ["--set", f"api.bind={self.address}"] if role == "api" else []
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.run_program("main", *words, earlier=earlier),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
            )  # fmt: skip
        self.addCleanup(self.end, name)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        process = self.processes.pop(name, None)
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(SOON)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_up(self) -> None:
        def up() -> bool:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended:\n{(self.folder / f'{name}.log').read_text()[-3000:]}")
            try:
                found = {each["host"] for each in self.api.services() if each["state"] == "up"}
            except errors.MoorageError:
                return False
            return found >= set(self.processes)

        wait_until(up, "all services are up", SOON)

    def create(self) -> bool:
        """Whether there was room for one more."""
        wanted = str(uuid.uuid4())
        for _ in range(20):
            try:
                self.api.create_instance(
                    {"uuid": wanted, "name": "one", "flavor": {"flavorid": "small", "resources": {"VCPU": 1}}}
                )
            except errors.NoValidHost:
                return False
            except errors.Unavailable:
                time.sleep(0.5)
                continue
            self.there.add(wanted)
            return True
        raise AssertionError("no scheduler answers")

    def delete(self, count: int) -> None:
        for wanted in sorted(self.there)[:count]:
            self.api.delete_instance(wanted)
            self.there.discard(wanted)
        wait_until(lambda: {each["uuid"] for each in self.api.instances()} == self.there, "deleted", SOON)

    def use(self, step: str) -> None:
        """Fill the fleet to the last VCPU, free some room, and fill it again: nothing is refused by what was true before."""
        with self.subTest(step):
            while self.create():
                pass
            self.assertEqual(ROOM * len(HOSTS), len(self.there), step)
            self.rest()
            self.delete(3)
            made = [self.create() for _ in range(3)]
            self.assertEqual([True] * 3, made, f"{step}: a host was refused by what it had before")
            self.assertFalse(self.create())
            self.rest()
            self.delete(1)

    def rest(self) -> None:
        """Everything is built, the hypervisors run what the store says, and each scheduler sees it."""

        def wrong() -> str:
            found = {each["uuid"]: each for each in self.api.instances()}
            if set(found) != self.there:
                return f"there are {set(found) ^ self.there} too many or too few"
            waiting = [each for each in found.values() if each["status"] != "active"]
            if waiting:
                return f"not active: {waiting}"
            for host in HOSTS:
                mine = {key for key, each in found.items() if each["host"] == host}
                # The earlier release has a folder for each workload.
                files = {
                    (path if path.is_symlink() else path.parent).name
                    for pattern in ("[!.]*", "[!.]*/*")
                    for path in (self.folder / "state" / "hypervisors" / host).glob(pattern)
                    if path.is_symlink() or path.is_file()
                }
                if files != mine:
                    return f"{host} runs {files ^ mine} too many or too few"
                # Schedulers answer in turn.
                for _ in range(2):
                    seen = set(self.api.host(host)["instances"])
                    if seen != mine:
                        return f"a scheduler sees of {host} {seen ^ mine} too many or too few"
            audit = self.api.audit_allocations()
            return ", ".join(name for name in ("drift", "overuse", "orphans", "findings") if audit[name])

        last = ""

        def rests() -> bool:
            nonlocal last
            last = wrong()
            return not last

        try:
            wait_until(rests, "all is at rest", SOON)
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None

    def test_a_site_is_used_while_its_services_are_upgraded_one_after_the_other(self) -> None:
        self.upgrade_database(earlier=True)
        self.start("api", "api-1", earlier=True)
        for name in ("scheduler-1", "scheduler-2"):
            self.start("scheduler", name, earlier=True)
        for host in HOSTS:
            self.start("agent", host, earlier=True)
        self.wait_up()
        self.api.import_nodes([{"name": f"{each}-node", "host": each, "inventories": {"VCPU": ROOM}} for each in HOSTS])
        self.use("all are of the earlier release")
        self.upgrade_database(earlier=False)
        self.start("scheduler", "scheduler-1", earlier=False)
        self.wait_up()
        self.use("the database and one scheduler were upgraded")
        self.start("scheduler", "scheduler-2", earlier=False)
        self.wait_up()
        self.start("agent", "host-1", earlier=False)
        self.wait_up()
        self.use("both schedulers and one agent were upgraded")
        self.end("host-2", signal.SIGKILL)
        self.start("agent", "host-2", earlier=False)
        self.wait_up()
        self.use("both agents were upgraded")
        self.start("api", "api-1", earlier=False)
        self.wait_up()
        self.use("all are of the present release")
