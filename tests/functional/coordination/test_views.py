# SPDX-License-Identifier: Apache-2.0
"""What operators see and do, in a whole control plane on one machine."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stdout
from typing import Any

from moorage import client, errors
from moorage.cli.main import main
from moorage.testing.coordination import SOON, wait_for

CONF = """
[services]
report_interval = 0.5
service_down_time = 6
[coordination]
poll_interval = 0.3
settle = 0.3
[periodic]
poll = 0.3
spacing = reconcile:3600
workers = 2
"""


class ViewTests(unittest.TestCase):
    api: client.Client
    state: pathlib.Path

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.state = pathlib.Path(folder.name) / "state"
        conf = pathlib.Path(folder.name) / "moorage.conf"
        conf.write_text(CONF)
        arguments = ("--state-dir", str(cls.state), "--bind", "127.0.0.1:0", "--config-file", str(conf))
        counts = ("--engines", "2", "--schedulers", "1", "--agents", "1")
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "moorage.cli.main", "up", *arguments, *counts],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )

        def end() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=2 * SOON)

        cls.addClassCleanup(end)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("moorage is ready"), (ready, process.communicate(timeout=SOON))
        cls.api = client.connect(**json.loads((cls.state / "client.json").read_text()))
        wait_for(lambda: len(cls.members()) == 4, "four members")

    @classmethod
    def members(cls) -> list[dict[str, Any]]:
        return [member for ring in cls.api.rings() for member in ring["members"]]

    def command(self, *words: str) -> Any:
        said = io.StringIO()
        with redirect_stdout(said):
            status = main([*words, "--state-dir", str(self.state), "-f", "json"])
        self.assertEqual(status, 0, said.getvalue())
        return json.loads(said.getvalue())

    def test_the_ring_shows_who_owns_what_share_and_how_old_each_heartbeat_is(self) -> None:
        wait_for(lambda: all(each["token"] for each in self.members()), "all to have adopted it")
        (ring,) = self.api.rings()
        self.assertEqual(ring["group"], "moorage-periodic-tasks")
        self.assertEqual({(each["host"], each["worker"]) for each in ring["members"]},
                         {(f"engine-{number}", worker) for number in (1, 2) for worker in (0, 1)})  # fmt: skip
        self.assertAlmostEqual(sum(each["share"] for each in ring["members"]), 1.0, places=4)
        self.assertEqual({each["token"] for each in ring["members"]}, {ring["token"]})
        self.assertTrue(all(each["silent_for_s"] < 6 for each in ring["members"]))
        rows = self.command("ring", "show")
        self.assertEqual({row["member"] for row in rows}, {each["member"] for each in ring["members"]})

    def test_it_says_who_owns_an_object(self) -> None:
        (row,) = self.command("ring", "show", "--owner-of", "fleet")
        self.assertEqual(row["member"], self.api.rings("fleet")[0]["owner"])

    def test_tasks_are_listed_paused_run_and_resumed(self) -> None:
        def runs() -> list[dict[str, Any]]:
            return [run for run in self.api.periodic_runs("reconcile") if run["handled"]]

        wait_for(runs, "the first comparison")
        paused = self.command("periodic", "pause", "reconcile", "--reason", "a test")
        self.assertEqual((paused["paused"], paused["reason"]), (True, "a test"))
        before = runs()[0]["tick"]
        asked = self.command("periodic", "run", "reconcile")
        wait_for(lambda: runs()[0]["tick"] == asked["tick"] > before, "the run that was asked for")
        # Four members swept for it, and one of them had the object.
        self.assertEqual(sum(run["handled"] for run in runs() if run["tick"] == asked["tick"]), 1)
        self.command("periodic", "resume", "reconcile")
        (task,) = self.command("periodic", "list")
        self.assertEqual((task["name"], task["enabled"], task["paused"]), ("reconcile", True, False))
        self.assertTrue(self.command("periodic", "show", "reconcile"))

    def test_what_there_is_not_is_not_found(self) -> None:
        for ask in (
            lambda: self.api.periodic_runs("nothing"),
            lambda: self.api.pause_periodic_task("nothing"),
            lambda: self.api.run_periodic_task("nothing"),
        ):
            with self.assertRaises(errors.NotFound):
                ask()
