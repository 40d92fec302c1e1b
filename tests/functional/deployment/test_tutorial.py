# SPDX-License-Identifier: Apache-2.0
"""The tutorial, typed line by line into a shell, in an empty folder."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

import tests
from moorage.control_plane import unknown_options
from tests import servers
from tests.functional.deployment.guides import BIN, ROOT, blocks, commands

GUIDE = (ROOT / "doc/source/tutorial.rst").read_text(encoding="utf-8")
#: Its port may be taken here.
ANY_PORT = " --bind 127.0.0.1:0"


@tests.for_ci("carries out a guide")
class TutorialTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-tutorial-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MOORAGE_", "OS_"))},
            "HOME": str(self.folder), "PATH": f"{BIN}:{os.environ['PATH']}",
        }  # fmt: skip
        self.up: subprocess.Popen[bytes] | None = None
        self.addCleanup(self.end_up)

    def end_up(self) -> None:
        """Ctrl-C in the terminal of ``moorage up``."""
        if self.up is not None:
            self.up.send_signal(signal.SIGINT)
            self.assertEqual(0, self.up.wait(120), self.said())
            self.up = None

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def start_up(self, command: str) -> None:
        self.end_up()
        words = [word.replace("~", str(self.folder)) for word in shlex.split(command + ANY_PORT)]
        with (self.folder / "said").open("wb") as told:
            self.up = subprocess.Popen(words, cwd=self.folder, env=self.environment, stdout=told, stderr=told)
        servers.wait_until(lambda: "moorage is ready" in self.said() or self.up_has_ended(), "moorage is ready", 120)
        self.assertFalse(self.up_has_ended(), self.said())

    def up_has_ended(self) -> bool:
        return self.up is None or self.up.poll() is not None

    def type(self, command: str) -> str:
        if command.startswith("export "):
            name, value = command.removeprefix("export ").split("=", 1)
            self.environment[name] = value.replace("~", str(self.folder))
            return ""
        if command.startswith("pkill -HUP"):
            # On this machine there may be others.
            assert self.up is not None
            self.assertIn(shlex.split(command)[-1], " ".join(map(str, self.up.args)))  # type: ignore[arg-type]
            before = self.in_force()
            self.up.send_signal(signal.SIGHUP)
            servers.wait_until(
                lambda: all(now > then for now, then in zip(self.in_force(), before, strict=True)),
                "every scheduler to have the new configuration",
                60,
            )
            return ""
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        self.assertEqual(0, done.returncode, f"{command}: {done.stdout}{done.stderr}")
        return done.stdout

    def in_force(self) -> list[int]:
        """How often each scheduler has taken a configuration."""
        logs = sorted((self.folder / "moorage/log").glob("scheduler-*.log"))
        return [path.read_text().count("in force") for path in logs]

    def test_every_line_does_what_the_page_says(self) -> None:
        said = {}
        for line in commands(GUIDE):
            if line.startswith("moorage up "):
                self.start_up(line)
            elif line.startswith(("moorage is ready", "pip install")):
                continue
            else:
                said[line] = self.type(line)
        listed = said["moorage service list"]
        for name in ("api-1", "scheduler-2", "agent-2", "engine-1"):
            self.assertIn(name, listed)
        self.assertIn("active", next(text for line, text in said.items() if line.startswith("moorage instance create")))
        refused = next(text for line, text in said.items() if line.startswith("moorage select"))
        self.assertIn("capacity: too little VCPU", refused)
        replayed = next(text for line, text in said.items() if line.startswith("moorage replay"))
        self.assertRegex(replayed, r"over-allocated +0 ")
        self.assertRegex(replayed, r"killed +scheduler-")
        self.assertRegex(replayed, r"refused +[1-9]")
        (servers_file,) = blocks(GUIDE, "ini")
        path = self.folder / "servers.conf"
        path.write_text(servers_file)
        self.assertEqual([], unknown_options.unknown([str(path)]))
