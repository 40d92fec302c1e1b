# SPDX-License-Identifier: Apache-2.0
"""What the commands print beside what they were asked for: nothing."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

from moorage import errors
from moorage.api.server import Server
from moorage.cli.up import ControlPlane, Plan


class NoiseTests(unittest.TestCase):
    def test_listing_plugins_prints_the_plugins_alone(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "moorage.cli.main", "plugin", "list", "-f", "csv"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertIn('"moorage.transports","oslo","ready"', done.stdout)


class BindTests(unittest.TestCase):
    def test_what_is_no_port_is_refused_before_anything_starts(self) -> None:
        for bind in ("127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:²", "8780", ":8780"):
            with self.subTest(bind=bind), self.assertRaisesRegex(errors.ConfigError, "port from 0 to 65535"):
                ControlPlane(Plan(Path("nowhere"), bind))

    def test_the_server_refuses_it_too(self) -> None:
        for bind in ("127.0.0.1:99999", "127.0.0.1:http", "127.0.0.1"):
            with self.subTest(bind=bind), self.assertRaisesRegex(errors.ConfigError, "port from 0 to 65535"):
                Server(bind, lambda *_: [], threads=1, drain_seconds=1)
