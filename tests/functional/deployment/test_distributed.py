# SPDX-License-Identifier: Apache-2.0
"""The guide for several machines, carried out: its file, its units, its commands, on a real PostgreSQL, RabbitMQ and ZooKeeper."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

import sqlalchemy as sa

import tests
from moorage.cli.roles import ROLES
from tests import SOAK, servers
from tests.functional.deployment.guides import BIN, ROOT, UNITS, Unit, blocks, commands, exec_start, here, type_in
from tests.servers import galera

GUIDE = (ROOT / "doc/source/install/distributed.rst").read_text(encoding="utf-8")


@tests.for_ci("carries out a guide")
class DistributedTests(unittest.TestCase):
    """One machine plays all of them."""

    def setUp(self) -> None:
        for name in ("postgresql", "rabbitmq", "zookeeper"):
            servers.require(name)
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-distributed-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.port = servers.free_port()
        self.units: list[Unit] = []
        file, self.server_settings, self.galera = blocks(GUIDE, "ini")
        #: One for each URL of the database; services take them in turns.
        self.confs = []
        for number, url in enumerate(self.database_urls()):
            conf = self.folder / f"moorage-{number}.conf"
            conf.write_text(self.filled_in(self.with_database(file), url) + "\n")
            self.confs.append(conf)
        self.conf = self.confs[0]

    def database_urls(self) -> list[str]:
        return [servers.fresh_database(servers.shared("postgresql"))]

    def with_database(self, file: str) -> str:
        """The file of the guide, with the section for the database that is tried."""
        return file

    def filled_in(self, file: str, url: str) -> str:
        for line, value in (
            ("connection", url),
            ("transport_url", servers.shared("rabbitmq").url),
            ("periodic_coordination_backend", servers.shared("zookeeper").url),
            ("bind", f"127.0.0.1:{self.port}"),
            ("http_basic_auth_user_file", str(self.folder / "users")),
        ):
            file, count = re.subn(rf"(?m)^{line} = .*$", lambda _, each=line, to=value: f"{each} = {to}", file)  # type: ignore[misc]
            self.assertEqual(1, count, line)
        return file

    def run_command(self, command: str, **environment: str) -> str:
        done = subprocess.run(
            here(command, self.conf), env={**os.environ, **environment}, cwd=self.folder,
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        self.assertEqual(0, done.returncode, f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_units(self, command: str) -> None:
        names = [word for word in command.split() if word.startswith("moorage@")]
        self.assertEqual(4, len(names))
        for number, name in enumerate(names):
            words = here(shlex.join(exec_start(name)), self.confs[number % len(self.confs)])
            unit = Unit(name.replace("@", "-"), [*words, "--name", f"{name.replace('@', '-')}-here"], self.folder)
            self.addCleanup(unit.kill)
            self.units.append(unit)
        for unit in self.units:
            unit.wait_for("READY=1")

    def test_the_guide_brings_up_a_control_plane_that_takes_a_request_and_ends_in_good_order(self) -> None:
        typed = commands(GUIDE)
        (exported,) = (each for each in typed if each.startswith("export MOORAGE_URL"))
        upgrade, user, start = typed[: typed.index(exported)]
        self.assertIn("Upgraded", self.run_command(upgrade))
        self.assertIn("admin is in", type_in(here(user, self.conf), ["a password"] * 2, self.folder))
        self.start_units(start)

        validate = re.search(r"``(moorage config validate [^`]*)``", GUIDE)
        assert validate is not None
        self.assertIn("can be used", self.run_command(validate.group(1)))

        environment = dict(pair.split("=", 1) for pair in exported.split()[1:])
        environment |= {"MOORAGE_URL": f"http://127.0.0.1:{self.port}", "MOORAGE_PASSWORD": "a password"}
        (self.folder / "nodes.csv").write_text("name,vcpus\nrack1-a,16\nrack1-b,16\n")
        said = {}
        for command in typed[typed.index(exported) + 1 :]:
            if command == "moorage ring show":
                # An engine takes its place a moment after it has started.
                servers.wait_until(
                    lambda: "moorage-engine-here" in self.run_command("moorage ring show", **environment), "the engine"
                )
            said[command] = self.run_command(command, **environment)
        listed = next(text for command, text in said.items() if command.startswith("moorage service list"))
        for unit in self.units:
            self.assertIn(f"{unit.name}-here", listed)
        ring = next(text for command, text in said.items() if command.startswith("moorage ring show"))
        self.assertIn("moorage-engine-here", ring)
        created = next(text for command, text in said.items() if command.startswith("moorage instance create"))
        self.assertIn("active", created)

        for unit in self.units:
            unit.process.send_signal(signal.SIGTERM)
        for unit in self.units:
            unit.wait_for("STOPPING=1")
            self.assertEqual(0, unit.process.wait(120), unit.log.read_text()[-3000:])


@unittest.skipUnless(SOAK, "a cluster takes minutes; make soak runs it")
class GaleraTests(DistributedTests):
    """The same on a cluster of three with the settings of the guide; each service writes to a node of its own."""

    def database_urls(self) -> list[str]:
        servers.refuse(galera.missing())
        nodes = self.enterContext(galera.cluster(3))
        first = sa.make_url(servers.fresh_database(nodes[0]))
        return [first.set(port=node.port).render_as_string(hide_password=False) for node in nodes]

    def with_database(self, file: str) -> str:
        self.assertTrue(self.galera.startswith("[database]\nconnection = mysql+pymysql://"))
        self.assertEqual(len(self.server_settings.splitlines()) - 1, len(galera.settings()))
        return re.sub(r"(?s)\[database\]\n.*?\n\n", lambda _: self.galera + "\n\n", file)


class UnitFileTests(unittest.TestCase):
    """The service file is one that systemd takes, and runs commands that exist."""

    def test_systemd_finds_nothing_wrong(self) -> None:
        program = servers.program("systemd-analyze")
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

    def test_the_unit_runs_each_role_and_knows_the_exit_status_of_a_bad_configuration(self) -> None:
        text = (UNITS / "moorage@.service").read_text()
        for role in ROLES:
            command = exec_start(f"moorage@{role}")
            self.assertEqual(["/usr/bin/moorage", role], command[:2])
            done = subprocess.run(
                [str(BIN / "moorage"), role, "--config-file", "/nowhere/moorage.conf"],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
            self.assertIn(f"RestartPreventExitStatus={done.returncode}\n", text)
            self.assertIn("/nowhere/moorage.conf", done.stderr)
