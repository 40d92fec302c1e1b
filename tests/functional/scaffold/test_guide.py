# SPDX-License-Identifier: Apache-2.0
"""The page "Write a plugin", carried out line by line, down to a decision of a running control plane."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from tests import servers

GUIDE = (Path(__file__).parents[3] / "doc/source/howto/plugin.rst").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
#: Without a network, and beside what the tests run on instead of in it.
INSTALL = "pip install --quiet --no-deps --no-build-isolation --no-index --disable-pip-version-check --target {site} ."


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"\.\. code-block:: {kind}\n\n((?: {{3}}.*\n|\n)+)", GUIDE)
    return [re.sub(r"(?m)^ {3}", "", block).strip() for block in found]


class GuideTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-guide-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.site = self.folder / "site"
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.site),
            "MOORAGE_STATE_DIR": str(self.folder / "state"),
        }
        self.place = self.folder

    def type(self, line: str) -> str:
        """What a person types, in the folder where the lines before have led."""
        if line.startswith("cd "):
            self.place = self.place / line.removeprefix("cd ")
            return ""
        if line == "pip install .":
            line = INSTALL.format(site=self.site)
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.place,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.assertEqual(0, done.returncode, f"{line}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def start(self, file: str) -> None:
        conf = self.folder / "moorage.conf"
        conf.write_text(file + "\n")
        state = self.environment["MOORAGE_STATE_DIR"]
        log = (self.folder / "up.log").open("w")
        self.addCleanup(log.close)
        process = subprocess.Popen(
            [BIN / "moorage", "up", "--state-dir", state, "--bind", "127.0.0.1:0", "--config-file", conf],
            env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip

        def end() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=180)

        self.addCleanup(end)
        assert process.stdout is not None
        self.assertIn("is ready", process.stdout.readline(), (self.folder / "up.log").read_text())

    def test_every_line_works_and_the_scheduler_decides_by_the_plugin(self) -> None:
        write, tests, install, ask = blocks("console")
        for block in (write, tests, install):
            for line in block.splitlines():
                said = self.type(line.removeprefix("$ "))
        self.assertRegex(said, r"state\s*\| ready")
        (file,) = blocks("ini")
        self.start(file)
        *before, select = (line.removeprefix("$ ") for line in ask.splitlines())
        for line in before:
            self.type(line)

        def answer() -> dict[str, object]:
            found: dict[str, object] = json.loads(self.type(f"{select} -f json"))
            return found

        # The nodes become known to both schedulers within moments.
        servers.wait_until(lambda: all("n2" in str(answer().get("selections", "")) for _ in range(4)), "the nodes", 120)
        self.assertNotIn("n1", str(answer()["selections"]))
        self.assertRegex(str(answer()["removed"]), r"'gpu_model': 1\b|\"gpu_model\": 1\b")
