# SPDX-License-Identifier: Apache-2.0
"""The seed's tasks over real rows and real processes, and the operations that they ask for."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from oslo_config import cfg

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane import options as control_plane_options
from moorage.control_plane.interface import AgentTools
from moorage.coordination.interface import PeriodicTask, TaskTools
from moorage.coordination.task_run import OwnsAll, TickTaskLease
from moorage.coordination.tick_leases import SqlTickLeases, TickLease
from moorage.db import Database
from moorage.ring import POSITION_COUNT
from moorage.services.interface import ServiceIdentity
from moorage.testing.coordination import wait_for
from moorage.work import tables as work_tables
from moorage.work.operations import SqlOperationStore
from moorage_plugins.data_processing import engine, operations, options, tables, tasks
from moorage_plugins.data_processing.store import DataStore
from tests.unit.coordination.store_tests import create_tables

TABLES = (tables.clusters, tables.jobs, tables.proxy_users)


@dataclass
class Cast:
    topic: str
    method: str
    args: Mapping[str, Any]
    server: str | None


class DataProcessingCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.database = Database(f"sqlite:///{folder.name}/test.sqlite", lock_timeout=30)
        self.addCleanup(self.database.close)
        create_tables(self.database)
        with self.database.write() as tx:
            tables.clusters.metadata.create_all(tx, tables=TABLES)
            work_tables.workers.metadata.create_all(tx, tables=[work_tables.workers, work_tables.fences])
        self.conf = cfg.ConfigOpts()
        for module in (options, control_plane_options):
            module.register_opts(self.conf)
        self.conf([])
        self.conf.set_override("folder", f"{folder.name}/clusters", group="data_processing")
        self.conf.set_override("min_transient_cluster_active_time", 0.0, group="data_processing")
        self.workers = SqlOperationStore(self.database, lease_seconds=60)
        self.store = DataStore(self.database, self.workers)
        self.claims = SqlTickLeases(self.database)
        self.casts: list[Cast] = []
        self.addCleanup(self.remove_clusters)
        self.agent = self.started()
        self.tick = 0

    def remove_clusters(self) -> None:
        for uuid in self.store.cluster_ids():
            self.agent._engine.remove(uuid)

    def make_agent(self, epoch: int = 1) -> operations.DataProcessingAgent:
        identity = ServiceIdentity("11111111-1111-4111-8111-111111111111", "agent-1", "agent", None, epoch)
        tools = AgentTools(
            conf=self.conf, clock=SystemClock(), database=self.database, identity=identity, workers=self.workers,
            instances=None, store=None, release=lambda *_: True, reporter=None,  # type: ignore[arg-type]
        )  # fmt: skip
        agent = operations.DataProcessingAgent(tools)
        self.addCleanup(agent.stop)
        return agent

    def started(self, epoch: int = 1) -> operations.DataProcessingAgent:
        agent = self.make_agent(epoch)
        agent.start()
        self.rest(agent)
        return agent

    def rest(self, agent: operations.DataProcessingAgent | None = None) -> None:
        """Wait until the agent has done what it knows of."""
        loop = (agent or self.agent).loop
        wait_for(lambda: not any(loop.depth), "the agent rests")

    def cast(self, topic: str, method: str, args: Any = None, *, server: str | None = None) -> None:
        self.casts.append(Cast(topic, method, args, server))

    def task(self, kind: Callable[[TaskTools], PeriodicTask]) -> PeriodicTask:
        sender = SimpleNamespace(cast=self.cast)
        return kind(TaskTools(self.conf, SystemClock(), self.database, sender, None, workers=self.workers))  # type: ignore[arg-type]

    def sweep(self, kind: Callable[[TaskTools], PeriodicTask], token: int = 1) -> dict[str, object]:
        """What the runner does: claim and handle each object."""
        task = self.task(kind)
        self.tick += 1
        name = type(task).__name__
        found = {}
        for object_id in task.list_objects():
            claim = TickLease(name, self.tick, token, "me", f"{name}-{self.tick}-{token}")
            self.assertEqual(self.claims.claim(claim, [object_id]), [object_id])
            lease = TickTaskLease(self.claims, claim, object_id, OwnsAll("me", token), SystemClock(), 60)
            found[object_id] = task.handle(object_id, lease)
        return found

    def deliver(self) -> list[bool]:
        """Let the messages arrive; what the agent made of each."""
        casts, self.casts = self.casts, []
        made = [getattr(self.agent, each.method)(**each.args) for each in casts]
        self.rest()
        return made

    def look(self, kind: Callable[[TaskTools], PeriodicTask], token: int = 1) -> list[bool]:
        """A sweep, and what the agent did about it."""
        self.sweep(kind, token)
        return self.deliver()

    def cluster(self, **settings: Any) -> str:
        uuid = self.store.create_cluster("c", "agent-1", **settings)
        self.sweep_agent()
        return uuid

    def sweep_agent(self) -> None:
        self.agent.sweep()
        self.rest()

    def status(self, cluster: str) -> str:
        found = self.store.cluster(cluster)
        return "gone" if found is None else found.status

    def job_status(self, job: str) -> str:
        found = self.store.job(job)
        assert found is not None
        return found.status

    def run_job(self, cluster: str, *command: str) -> str:
        job = self.store.create_job(cluster, command)
        self.agent.start_job(job)
        return job


class JobTests(DataProcessingCase):
    def test_statuses_of_real_processes_are_written_down(self) -> None:
        cluster = self.cluster()
        good, bad, long = (
            self.run_job(cluster, *each) for each in (("true",), ("sh", "-c", "exit 3"), ("sleep", "600"))
        )

        def done() -> bool:
            self.look(tasks.UpdateJobStatuses)
            return {self.job_status(each) for each in (good, bad)} == {"Succeeded", "Failed"}

        wait_for(done, "both to end")
        self.look(tasks.UpdateJobStatuses)
        self.assertEqual(self.job_status(long), "Running")
        failed = self.store.job(bad)
        assert failed is not None
        self.assertEqual((failed.status, failed.exit_code), ("Failed", 3))

    def test_a_job_that_was_killed_is_called_so(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "sleep", "600")
        self.assertEqual(self.agent._engine.status(cluster, job), ("Running", None))
        group = engine._group(self.agent._engine._path(cluster) / job)
        assert group is not None
        os.killpg(group, signal.SIGKILL)
        wait_for(lambda: self.agent._engine.status(cluster, job)[0] != "Running", "it to die")
        self.assertEqual(self.look(tasks.UpdateJobStatuses), [True])
        self.assertEqual(self.job_status(job), "Killed")

    def test_a_process_that_has_the_number_of_a_job_by_now_is_neither_the_job_nor_killed(self) -> None:
        cluster = self.cluster()
        other = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        job = self.store.create_job(cluster, ["true"])
        folder = self.agent._engine._path(cluster) / job
        folder.mkdir()
        (folder / "process").write_text(f"{other.pid} 1 another-boot\n")
        self.assertEqual(self.agent._engine.status(cluster, job), ("Killed", None))
        self.agent._engine.remove(cluster)
        self.assertIsNone(other.poll())

    def test_a_start_of_which_nobody_wrote_down_who_it_was_runs_nothing_and_is_made_good(self) -> None:
        """The agent is killed in between: the wrapper hears nothing more, and ends."""
        cluster = self.cluster()
        job = self.store.create_job(cluster, ["touch", "../ran"])
        folder = self.agent._engine._path(cluster) / job
        folder.mkdir()
        lost = subprocess.Popen(
            ["/bin/sh", "-c", engine._WRAPPER, "job", str(folder / "exit"), "touch", "../ran"],
            stdin=subprocess.PIPE,
            cwd=folder,
        )
        lost.communicate(b"")
        self.assertFalse((folder.parent / "ran").exists())
        self.agent.sweep()
        wait_for((folder.parent / "ran").exists, "the agent's own start")

    def test_a_start_whose_message_was_lost_is_made_good_by_the_agents_sweep(self) -> None:
        cluster = self.cluster()
        job = self.store.create_job(cluster, ["true"])
        self.agent.sweep()
        wait_for(lambda: self.agent._engine.status(cluster, job)[0] == "Succeeded", "it ends")

    def test_a_job_is_killed_on_request_and_one_that_never_ran_never_will(self) -> None:
        cluster = self.cluster()
        running, waiting = self.run_job(cluster, "sleep", "600"), self.store.create_job(cluster, ["sleep", "600"])
        for job in (running, waiting):
            self.assertEqual(self.store.cancel_job(job).status, "ToBeKilled")
            self.assertEqual(self.store.cancel_job(job).status, "ToBeKilled")
        # The message was lost: the agent finds out by itself.
        wait_for(lambda: self.agent.sweep() or {self.job_status(running), self.job_status(waiting)} == {"Killed"}, "it")
        self.agent.start_job(waiting)
        self.assertEqual(self.agent._engine.status(cluster, waiting), ("Killed", None))
        with self.assertRaisesRegex(errors.Conflict, "has ended already"):
            self.store.cancel_job(running)
        self.store.delete_job(running)
        with self.assertRaises(errors.NotFound):
            self.store.delete_job(running)

    def test_a_job_that_ended_before_it_could_be_killed_is_called_what_it_is(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "sh", "-c", "exit 3")
        wait_for(lambda: self.agent._engine.status(cluster, job)[0] == "Failed", "it ends")
        self.store.cancel_job(job)
        self.agent.cancel_job(job)
        self.assertEqual(self.job_status(job), "Failed")

    def test_a_job_is_started_once(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "sh", "-c", "echo x >> ../count")
        self.agent.start_job(job)
        wait_for(lambda: self.agent._engine.status(cluster, job)[0] == "Succeeded", "it ends")
        self.assertEqual((self.agent._engine._folder / cluster / "count").read_text(), "x\n")

    def test_an_owner_of_an_older_ring_writes_no_status(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "true")
        wait_for(lambda: self.agent._engine.status(cluster, job)[0] == "Succeeded", "it ends")
        self.database.run(lambda tx: self.store.set_job(tx, job, "Running", 9, exit_code=None, expected=("Pending",)))
        self.assertEqual(self.look(tasks.UpdateJobStatuses, token=8), [False])
        self.assertEqual(self.job_status(job), "Running")
        self.assertEqual(self.look(tasks.UpdateJobStatuses, token=9), [True])
        self.assertEqual(self.job_status(job), "Succeeded")

    def test_nothing_runs_in_a_cluster_that_is_not_active(self) -> None:
        cluster = self.store.create_cluster("c", "elsewhere")
        with self.assertRaises(errors.Conflict):
            self.store.create_job(cluster, ["true"])


class TerminationTests(DataProcessingCase):
    def test_an_idle_transient_cluster_is_flipped_and_terminated_by_the_operations_alone(self) -> None:
        cluster, lasting = self.cluster(transient=True), self.cluster()
        self.assertEqual(self.sweep(tasks.TerminateUnneededTransientClusters), {cluster: True})
        self.assertEqual((self.status(cluster), self.status(lasting)), ("Deleting", "Active"))
        (cast,) = self.casts
        self.assertEqual(self.workers.get("cluster", cluster).operation, "terminate")  # type: ignore[union-attr]
        self.assertEqual((cast.topic, cast.method, cast.server), ("agent", "terminate_cluster", "agent-1"))
        self.deliver()
        self.assertEqual(self.status(cluster), "gone")
        self.assertFalse((self.agent._engine._folder / cluster).exists())

    def test_two_sweeps_at_once_terminate_once(self) -> None:
        cluster = self.cluster(transient=True)
        self.sweep(tasks.TerminateUnneededTransientClusters)
        self.sweep(tasks.TerminateUnneededTransientClusters, token=2)
        self.assertEqual(len(self.casts), 1)
        self.casts *= 2
        with self.assertLogs("moorage.work.work_loop", "INFO") as logs:
            self.deliver()
        self.assertEqual(sum("has ended" in line for line in logs.output), 1)
        self.assertEqual(self.status(cluster), "gone")

    def test_a_cluster_in_which_a_job_runs_stays_until_it_has_ended(self) -> None:
        cluster = self.cluster(transient=True)
        job = self.run_job(cluster, "sleep", "600")
        self.assertEqual(self.sweep(tasks.TerminateUnneededTransientClusters), {cluster: False})
        self.database.run(lambda tx: self.store.set_job(tx, job, "Failed", 1, exit_code=1, expected=("Pending",)))
        self.assertEqual(self.sweep(tasks.TerminateUnneededTransientClusters), {cluster: True})

    def test_a_cluster_that_was_used_lately_stays(self) -> None:
        self.conf.set_override("min_transient_cluster_active_time", 3600.0, group="data_processing")
        cluster = self.cluster(transient=True)
        self.assertEqual(self.sweep(tasks.TerminateUnneededTransientClusters), {cluster: False})

    def test_operations_refuse_a_smaller_token_than_the_cluster_has(self) -> None:
        cluster = self.cluster(transient=True)
        self.sweep(tasks.TerminateUnneededTransientClusters, token=5)
        with self.assertRaises(errors.Fenced):
            self.agent.terminate_cluster(cluster, 4)
        self.assertEqual(self.status(cluster), "Deleting")

    def test_a_lost_message_is_made_good_by_the_agents_sweep(self) -> None:
        cluster = self.cluster(transient=True)
        self.sweep(tasks.TerminateUnneededTransientClusters, token=5)
        self.started(epoch=2)
        self.assertEqual(self.status(cluster), "gone")

    def test_a_termination_overtakes_a_creation_that_is_in_progress(self) -> None:
        uuid = self.store.create_cluster("c", "agent-1")
        held = self.workers.take("cluster", uuid, self.make_agent()._tools.identity)
        assert held is not None
        self.store.delete_cluster(uuid)
        self.assertEqual(self.store.delete_cluster(uuid).status, "Deleting")
        with self.assertRaises(errors.Fenced):
            held.finish_with(lambda tx: self.store.set_final_status(tx, uuid, "Active", held.token))
        self.sweep_agent()
        self.assertEqual(self.status(uuid), "gone")
        with self.assertRaises(errors.NotFound):
            self.store.delete_cluster(uuid)

    def test_a_cluster_that_cannot_be_made_is_called_so_after_some_tries(self) -> None:
        self.agent._engine._folder.parent.mkdir(exist_ok=True)
        self.agent._engine._folder.write_text("a file in the way")
        uuid = self.store.create_cluster("c", "agent-1")
        for expected in ("Starting", "Starting", "Error"):
            self.agent.create_cluster(uuid)
            self.rest()
            self.assertEqual(self.status(uuid), expected)
        self.assertIsNone(self.workers.get("cluster", uuid))
        self.agent._engine._folder.unlink()

    def test_folders_of_clusters_that_are_gone_are_removed_with_what_runs_in_them(self) -> None:
        cluster, other = self.cluster(), self.cluster()
        job = self.run_job(cluster, "sleep", "600")
        group = engine._group(self.agent._engine._path(cluster) / job)
        self.store.delete_cluster(cluster)
        self.database.run(lambda tx: self.store.remove_cluster(tx, cluster, 1_000))
        self.started(epoch=2)
        self.assertEqual(self.agent._engine.clusters(), [other])
        assert group is not None
        with self.assertRaises((OSError, ValueError)):
            engine._began(group)

    def test_a_termination_kills_what_runs(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "sleep", "600")
        wait_for(lambda: self.agent._engine.status(cluster, job) == ("Running", None), "it runs")
        group = engine._group(self.agent._engine._path(cluster) / job)
        assert group is not None
        self.store.delete_cluster(cluster)
        self.agent.terminate_cluster(cluster, 1)
        self.rest()
        self.assertEqual(self.job_status(job), "Killed")
        with self.assertRaises((OSError, ValueError)):
            engine._began(group)

    def test_an_incomplete_cluster_is_terminated_when_its_time_is_over_and_others_are_not(self) -> None:
        stuck = self.store.create_cluster("stuck", "elsewhere", status="Configuring")
        self.cluster()
        self.assertEqual(self.sweep(tasks.TerminateIncompleteClusters), {})
        self.conf.set_override("cleanup_time_for_incomplete_clusters", 1.0, group="data_processing")
        self.assertEqual(self.sweep(tasks.TerminateIncompleteClusters), {stuck: False})
        self.conf.set_override("cleanup_time_for_incomplete_clusters", 1e-9, group="data_processing")
        self.assertEqual(self.sweep(tasks.TerminateIncompleteClusters), {stuck: True})


class OtherTaskTests(DataProcessingCase):
    def test_proxy_users_go_with_the_end_of_their_jobs(self) -> None:
        cluster = self.cluster()
        ended, running = self.store.create_job(cluster, ["true"]), self.store.create_job(cluster, ["true"])
        self.database.run(lambda tx: self.store.set_job(tx, ended, "Killed", 1, exit_code=None, expected=("Pending",)))
        self.assertEqual(self.sweep(tasks.ZombieProxyUsers), {f"job-{ended}": True, f"job-{running}": False})
        self.assertEqual(self.store.proxy_user_names(), [f"job-{running}"])

    def test_health_says_whether_a_cluster_can_work(self) -> None:
        cluster = self.cluster()
        self.look(tasks.ClusterHealth)
        healthy = self.store.cluster(cluster)
        self.agent._engine.remove(cluster)
        self.look(tasks.ClusterHealth)
        broken = self.store.cluster(cluster)
        assert healthy is not None and broken is not None
        self.assertEqual((healthy.health, broken.health), ("green", "red"))

    def test_engines_read_their_own_ranges_alone(self) -> None:
        for number in range(8):
            self.cluster(transient=number % 2 == 0)
        half = POSITION_COUNT // 2
        for kind in (tasks.ClusterHealth, tasks.TerminateUnneededTransientClusters):
            task = self.task(kind)
            parts = [list(task.objects_in([each]) or []) for each in ((0, half), (half, POSITION_COUNT))]
            self.assertEqual(sorted(parts[0] + parts[1]), sorted(task.list_objects()))
