# SPDX-License-Identifier: Apache-2.0
"""The guide to shards, carried out: a fleet goes from one agent to another, shard by shard."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

import tests
from tests import servers
from tests.functional.deployment.guides import ROOT, Unit, blocks, commands, exec_start, here

GUIDE = (ROOT / "doc/source/howto/sharding.rst").read_text(encoding="utf-8")
CONF = """
[api]
bind = 127.0.0.1:{port}
auth_strategy = noauth
[control_plane]
state_dir = {folder}
[services]
report_interval = 0.5
"""
#: What ends otherwise than with 0, as the guide says.
STATUSES = {"moorage shard plan": 2, "node reassign rack-a new-1": 1}


@tests.for_ci("carries out a guide")
class ShardingGuideTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-sharding-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.conf = self.folder / "moorage.conf"
        port = servers.free_port()
        self.conf.write_text(CONF.format(port=port, folder=self.folder))
        self.conf.chmod(0o600)
        self.connection = ("--url", f"http://127.0.0.1:{port}", "--auth-type", "none")
        self.units: dict[str, Unit] = {}
        self.plan = ""

    def start(self, role: str, name: str) -> None:
        words = here(shlex.join(exec_start(f"moorage@{role}")), self.conf)
        unit = self.units[name] = Unit(name, [*words, "--name", name], self.folder)
        self.addCleanup(unit.kill)
        unit.wait_for("READY=1")

    def stop(self, name: str) -> None:
        unit = self.units.pop(name)
        unit.process.send_signal(signal.SIGTERM)
        self.assertEqual(0, unit.process.wait(120), unit.log.read_text()[-3000:])

    def type(self, command: str) -> str:
        """Run it, with what is different here; what it printed."""
        if command == "systemctl stop moorage@agent":
            self.stop("old-1")
            return ""
        if command == "systemctl restart moorage@agent":
            (file,) = blocks(GUIDE, "ini")
            with self.conf.open("a") as conf:
                conf.write(file + "\n")
            self.stop("new-1")
            self.start("agent", "new-1")
            return ""
        words = here(command.replace("PLAN", self.plan), self.conf)
        if command.startswith("moorage "):
            words += [*self.connection, "-f", "json"]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=180, check=False)
        wanted = next(
            (status for part, status in STATUSES.items() if command.endswith(part) or part + " " in command), 0
        )
        wanted = 0 if command.endswith("--preview") else wanted
        self.assertEqual(wanted, done.returncode, f"{command}: {done.stdout}{done.stderr}")
        return done.stdout + (done.stderr if wanted == 1 else "")

    def test_a_shard_goes_to_an_agent_of_its_own(self) -> None:
        self.type("moorage-manage --config-file /etc/moorage/moorage.conf db upgrade")
        self.start("api", "api")
        self.start("agent", "old-1")
        (self.folder / "nodes.csv").write_text("name,vcpus\n" + "".join(f"n{number},8\n" for number in range(6)))
        self.type("moorage node import nodes.csv")
        self.start("agent", "new-1")
        said = {}
        for command in commands(GUIDE):
            said[command] = self.type(command)
            if command.startswith("moorage shard plan"):
                self.plan = json.loads(said[command])["plan"]
        self.assertEqual(
            ["check", "plan", "stop", "reassign", "restart", "verify"],
            [title.lower() for title in re.findall(r"(?m)^(\w+)\n-+$", GUIDE)],
        )
        preview, done = (text for command, text in said.items() if "node reassign" in command)
        self.assertIn("3 nodes of old-1 would go to new-1", preview)
        self.assertIn("3 nodes and 0 instances are new-1's now", done)
        self.assertIn("old-1 still has 3 nodes", done)
        self.assertTrue(json.loads(said["moorage shard verify PLAN"])["ok"])
        self.assertEqual(3, len(json.loads(said["moorage node list --shard rack-a --host new-1"])))
        agents = {row["host"]: row["state"] for row in json.loads(said["moorage service list --binary agent"])}
        self.assertEqual("up", agents["new-1"])
