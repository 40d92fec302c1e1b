# SPDX-License-Identifier: Apache-2.0
"""What operators see and do, in a whole control plane on one machine."""

from __future__ import annotations

import io
import json
import pathlib
import signal
import tempfile
import unittest
import urllib.request
from contextlib import redirect_stdout
from typing import Any

from moorage import client, errors
from moorage.cli.main import main
from moorage.testing.coordination import SOON, wait_for
from tests.forking import Command

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
enabled_tasks = reconcile, update_job_statuses, terminate_unneeded_transient_clusters, check_for_zombie_proxy_users, cluster_health
[agent]
services = compute, data_processing
sweep_interval = 0.5
[api]
enabled_apis = data_processing
[data_processing]
min_transient_cluster_active_time = 10
update_job_statuses_interval = 0.5
transient_clusters_interval = 0.5
zombie_proxy_users_interval = 0.5
cluster_health_interval = 0.5
"""


class ViewTests(unittest.TestCase):
    api: client.Client
    url: str
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
        said = pathlib.Path(folder.name) / "stderr"
        process = Command(["up", *arguments, *counts], said)

        def end() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.communicate(timeout=2 * SOON)

        cls.addClassCleanup(end)
        ready = process.stdout.readline()
        assert ready.startswith("moorage is ready"), (ready, said.read_text())
        known = json.loads((cls.state / "client.json").read_text())
        cls.api, cls.url = client.connect(**known), known["url"]
        wait_for(lambda: len(cls.members()) == 4, "four members")

    @classmethod
    def members(cls) -> list[dict[str, Any]]:
        return [member for ring in cls.api.rings() for member in ring["members"]]

    def command(self, *words: str) -> Any:
        said = io.StringIO()
        with redirect_stdout(said):
            given = ["--state-dir", str(self.state), "-f", "json"]
            # What follows on -- is somebody else's command.
            place = words.index("--") if "--" in words else len(words)
            status = main([*words[:place], *given, *words[place:]])
        self.assertEqual(status, 0, said.getvalue())
        return json.loads(said.getvalue())

    def test_the_ring_shows_who_owns_what_share_and_how_old_each_heartbeat_is(self) -> None:
        def adopted() -> dict[str, Any] | None:
            (found,) = self.api.rings()
            return found if {each["token"] for each in found["members"]} == {found["token"]} else None

        wait_for(lambda: adopted() is not None, "all to have adopted it")
        ring = adopted()
        assert ring is not None
        self.assertEqual(ring["group"], "moorage-periodic-tasks")
        self.assertEqual({(each["host"], each["worker"]) for each in ring["members"]},
                         {(f"engine-{number}", worker) for number in (1, 2) for worker in (0, 1)})  # fmt: skip
        self.assertAlmostEqual(sum(each["share"] for each in ring["members"]), 1.0, places=4)
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
        (task,) = [each for each in self.command("periodic", "list") if each["name"] == "reconcile"]
        self.assertEqual((task["enabled"], task["paused"]), (True, False))
        self.assertTrue(self.command("periodic", "show", "reconcile"))

    def test_a_cluster_is_made_used_and_terminated_by_the_commands_and_the_tasks(self) -> None:
        made = self.command("cluster", "create", "one", "--host", "agent-1", "--wait")
        uuid = made["uuid"]
        self.assertEqual((made["status"], made["host"], made["transient"]), ("Active", "agent-1", False))
        ended = self.command("job", "create", uuid, "--wait", "--", "sh", "-c", "exit 3")
        self.assertEqual((ended["status"], ended["exit_code"]), ("Failed", 3))
        job = self.command("job", "create", uuid, "sleep", "600")["uuid"]
        users = {user["job"] for user in self.command("proxy", "user", "list")}
        self.assertIn(job, users)
        wait_for(lambda: self.command("job", "show", job)["status"] == "Running", "it to run")
        self.assertEqual(self.command("job", "cancel", job)["status"], "ToBeKilled")
        wait_for(lambda: self.command("job", "show", job)["status"] == "Killed", "it to be killed")
        wait_for(lambda: not self.command("proxy", "user", "list"), "the proxy users to go")
        wait_for(lambda: self.command("cluster", "show", uuid)["health"] == "green", "its health to be known")
        listed = self.command("job", "list", "--cluster", uuid, "--status", "Killed")
        self.assertEqual([each["uuid"] for each in listed], [job])
        self.assertEqual(self.command("cluster", "reset-state", uuid, "--status", "Error")["status"], "Error")
        self.assertEqual(self.command("cluster", "reset-state", uuid)["status"], "Active")
        self.assertEqual(self.command("cluster", "delete", uuid)["status"], "Deleting")
        wait_for(lambda: not self.command("cluster", "list"), "it to go")

    def test_a_transient_cluster_goes_by_itself_when_nothing_runs_in_it(self) -> None:
        uuid = self.command("cluster", "create", "two", "--transient", "--wait")["uuid"]
        self.command("job", "create", uuid, "true", "--wait")

        def gone() -> bool:
            return uuid not in {each["uuid"] for each in self.command("cluster", "list")}

        wait_for(gone, "the task and the agent")
        self.assertFalse((self.state / "data_processing" / uuid).exists())

    def test_metrics_of_engines_are_where_those_of_the_api_are(self) -> None:
        def metrics() -> dict[str, float]:
            with urllib.request.urlopen(f"{self.url}/metrics", timeout=SOON) as answer:
                lines = answer.read().decode().splitlines()
            return {
                name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
            }

        sweeps = 'moorage_periodic_sweeps_total{ended="complete",task="cluster_health"}'
        wanted = {'moorage_ring_members{group="moorage-periodic-tasks"}': 4, 'moorage_engines{state="working"}': 2}
        wait_for(
            lambda: metrics().get(sweeps, 0) > 2 and wanted.items() <= metrics().items(), "three sweeps and all members"
        )
        found = metrics()
        self.assertGreaterEqual(found['moorage_ring_generation{group="moorage-periodic-tasks"}'], 1)
        self.assertLess(found['moorage_periodic_since_tick_seconds{task="cluster_health"}'], SOON)
        self.assertEqual(len([each for each in found if each.startswith("moorage_ring_member_behind{")]), 4)
        self.assertGreater(metrics()[sweeps], 2)

    def test_what_there_is_not_is_not_found(self) -> None:
        for ask in (
            lambda: self.api.periodic_runs("nothing"),
            lambda: self.api.pause_periodic_task("nothing"),
            lambda: self.api.run_periodic_task("nothing"),
        ):
            with self.assertRaises(errors.NotFound):
                ask()
