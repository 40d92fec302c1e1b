# SPDX-License-Identifier: Apache-2.0
"""The guide for several machines, carried out: its file, its units, its commands, on a real PostgreSQL and RabbitMQ."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tests import servers

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "doc/source/install/distributed.rst").read_text(encoding="utf-8")
UNITS = ROOT / "etc/systemd"
BIN = Path(sys.executable).parent


def blocks(kind: str) -> list[str]:
    """The code blocks of the guide, without their indentation."""
    found = re.findall(rf"\.\. code-block:: {kind}\n\n((?: {{3}}.*\n|\n)+)", GUIDE)
    return [re.sub(r"(?m)^ {3}", "", block).strip() for block in found]


def commands() -> list[str]:
    """What the guide has a person type, in order."""
    return [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]


def exec_start(unit: str) -> list[str]:
    """The command line of a unit."""
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(UNITS / f"{unit}.service")
    return shlex.split(parsed["Service"]["ExecStart"])


class Unit:
    """A service as systemd starts it: with a socket that it tells its state."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = folder / f"{name}.notify"
        self.told.bind(str(path))
        self.told.settimeout(120)
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, "NOTIFY_SOCKET": str(path)}, stdout=log, stderr=log, cwd=folder
            )

    def wait_for(self, state: str) -> None:
        try:
            said = self.told.recv(1024).decode()
        except TimeoutError:
            raise AssertionError(f"{self.name} told nothing: {self.log.read_text()[-3000:]}") from None
        if said != state:
            raise AssertionError(f"{self.name} told {said}, not {state}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.told.close()


class DistributedTests(unittest.TestCase):
    """One machine plays all of them."""

    def setUp(self) -> None:
        servers.require("postgresql")
        servers.require("rabbitmq")
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-distributed-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.conf = self.folder / "moorage.conf"
        self.port = servers.free_port()
        self.units: list[Unit] = []
        (file,) = blocks("ini")
        for line, value in (
            ("connection", servers.fresh_database(servers.shared("postgresql"))),
            ("transport_url", servers.shared("rabbitmq").url),
            ("bind", f"127.0.0.1:{self.port}"),
            ("http_basic_auth_user_file", str(self.folder / "users")),
        ):
            file, count = re.subn(rf"(?m)^{line} = .*$", lambda _, each=line, to=value: f"{each} = {to}", file)  # type: ignore[misc]
            self.assertEqual(1, count, line)
        self.conf.write_text(file + "\n")

    def here(self, command: str) -> list[str]:
        """A command of the guide on this machine."""
        words = shlex.split(command.replace("/etc/moorage/moorage.conf", str(self.conf)))
        words[0] = str(BIN / Path(words[0]).name)
        return words

    def run_command(self, command: str, stdin: str = "", **environment: str) -> str:
        done = subprocess.run(
            self.here(command), input=stdin, env={**os.environ, **environment}, cwd=self.folder,
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        self.assertEqual(0, done.returncode, f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_units(self, command: str) -> None:
        names = [word for word in command.split() if word.startswith("moorage-")]
        self.assertEqual(4, len(names))
        for name in names:
            words = self.here(shlex.join(exec_start(name)))
            unit = Unit(name, [*words, "--name", f"{name}-here"], self.folder)
            self.addCleanup(unit.kill)
            self.units.append(unit)
        for unit in self.units:
            unit.wait_for("READY=1")

    def test_the_guide_brings_up_a_control_plane_that_takes_a_request_and_ends_in_good_order(self) -> None:
        typed = commands()
        upgrade, user, start = (
            next(each for each in typed if part in each) for part in ("db upgrade", "user set", "systemctl")
        )
        self.assertIn("Upgraded", self.run_command(upgrade))
        self.run_command(f"{user} --password-file -", stdin="a password\n")
        self.start_units(start)

        validate = re.search(r"``(moorage config validate [^`]*)``", GUIDE)
        assert validate is not None
        self.assertIn("can be used", self.run_command(validate.group(1)))

        (exported,) = (each for each in typed if each.startswith("export MOORAGE_URL"))
        environment = dict(pair.split("=", 1) for pair in exported.split()[1:])
        environment |= {"MOORAGE_URL": f"http://127.0.0.1:{self.port}", "MOORAGE_PASSWORD": "a password"}
        (self.folder / "nodes.csv").write_text("name,vcpus\nrack1-a,16\nrack1-b,16\n")
        said = {}
        for command in typed[typed.index(exported) + 1 :]:
            said[command] = self.run_command(command, **environment)
        listed = next(text for command, text in said.items() if command.startswith("moorage service list"))
        for unit in self.units:
            self.assertIn(f"{unit.name}-here", listed)
        created = next(text for command, text in said.items() if command.startswith("moorage instance create"))
        self.assertIn("active", created)

        for unit in self.units:
            unit.process.send_signal(signal.SIGTERM)
        for unit in self.units:
            unit.wait_for("STOPPING=1")
            self.assertEqual(0, unit.process.wait(120), unit.log.read_text()[-3000:])


class UnitFileTests(unittest.TestCase):
    """Each unit is one that systemd takes, and runs a command that exists."""

    def test_systemd_finds_nothing_wrong(self) -> None:
        program = shutil.which("systemd-analyze")
        if program is None:
            self.skipTest("systemd-analyze is not installed")
        with tempfile.TemporaryDirectory() as name:
            copies = []
            for unit in sorted(UNITS.iterdir()):
                copy = Path(name) / unit.name
                copy.write_text(unit.read_text().replace("/usr/bin/moorage", str(BIN / "moorage")))
                copies.append(str(copy))
            done = subprocess.run(
                [program, "verify", "--man=no", *copies], capture_output=True, text=True, timeout=120, check=False
            )
        self.assertEqual((0, ""), (done.returncode, done.stdout + done.stderr))

    def test_there_is_a_unit_for_each_role_with_the_exit_status_of_a_bad_configuration(self) -> None:
        for role in ("api", "scheduler", "agent", "engine"):
            command = exec_start(f"moorage-{role}")
            self.assertEqual(["/usr/bin/moorage", role], command[:2])
            done = subprocess.run(
                [str(BIN / "moorage"), role, "--config-file", "/nowhere/moorage.conf"],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            self.assertIn(
                f"RestartPreventExitStatus={done.returncode}\n", (UNITS / f"moorage-{role}.service").read_text()
            )
            self.assertIn("/nowhere/moorage.conf", done.stderr)
