# SPDX-License-Identifier: Apache-2.0
"""The seed's tasks over real rows and real processes, and the operations that they ask for."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from oslo_config import cfg

from moorage import errors
from moorage.clock import SystemClock
from moorage.coordination.claims import Claim, SqlClaims
from moorage.coordination.interface import PeriodicTask, TaskTools
from moorage.coordination.sweep import ClaimLease, Everything
from moorage.db import Database
from moorage.ring import POSITION_COUNT
from moorage.testing.coordination import wait_for
from moorage_plugins.data_processing import operations, options, tables, tasks
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
        self.conf = cfg.ConfigOpts()
        options.register_opts(self.conf)
        self.conf([])
        self.conf.set_override("folder", f"{folder.name}/clusters", group="data_processing")
        self.conf.set_override("min_transient_cluster_active_time", 0.0, group="data_processing")
        self.store = DataStore(self.database)
        self.claims = SqlClaims(self.database)
        self.casts: list[Cast] = []
        self.agent = self.make_agent()
        self.tick = 0
        self.addCleanup(self.remove_clusters)

    def remove_clusters(self) -> None:
        for uuid in self.store.cluster_ids():
            self.agent._engine.remove(uuid)

    def make_agent(self) -> operations.DataProcessingAgent:
        tools = SimpleNamespace(conf=self.conf, database=self.database, identity=SimpleNamespace(host="agent-1"))
        return operations.DataProcessingAgent(tools)  # type: ignore[arg-type]

    def cast(self, topic: str, method: str, args: Any = None, *, server: str | None = None) -> None:
        self.casts.append(Cast(topic, method, args, server))

    def task(self, kind: Callable[[TaskTools], PeriodicTask]) -> PeriodicTask:
        sender = SimpleNamespace(cast=self.cast)
        return kind(TaskTools(self.conf, SystemClock(), self.database, sender, None))  # type: ignore[arg-type]

    def sweep(self, kind: Callable[[TaskTools], PeriodicTask], token: int = 1) -> dict[str, object]:
        """What the runner does: claim and handle each object."""
        task = self.task(kind)
        self.tick += 1
        name = type(task).__name__
        found = {}
        for object_id in task.list_objects():
            claim = Claim(name, self.tick, token, "me", f"{name}-{self.tick}-{token}")
            self.assertEqual(self.claims.claim(claim, [object_id]), [object_id])
            lease = ClaimLease(self.claims, claim, object_id, Everything("me", token), SystemClock(), 60)
            found[object_id] = task.handle(object_id, lease)
        return found

    def cluster(self, **settings: Any) -> str:
        uuid = self.store.create_cluster("c", "agent-1", **settings)
        self.agent.sweep()
        return uuid

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
            self.sweep(tasks.UpdateJobStatuses)
            return {self.job_status(each) for each in (good, bad)} == {"Succeeded", "Failed"}

        wait_for(done, "both to end")
        wait_for(
            lambda: self.sweep(tasks.UpdateJobStatuses) is not None and self.job_status(long) == "Running", "it runs"
        )
        failed = self.store.job(bad)
        assert failed is not None
        self.assertEqual((failed.status, failed.exit_code), ("Failed", 3))

    def test_a_job_that_was_killed_is_called_so(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "sleep", "600")
        wait_for(lambda: self.agent._engine.status(cluster, job) == ("Running", None), "it runs")
        self.agent._engine.remove(cluster)
        (self.agent._engine._folder / cluster / job).mkdir(parents=True)
        (self.agent._engine._folder / cluster / job / "pid").write_text("999999999")
        self.sweep(tasks.UpdateJobStatuses)
        self.assertEqual(self.job_status(job), "Killed")

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
        self.assertEqual(self.sweep(tasks.UpdateJobStatuses, token=8), {job: False})
        self.assertEqual(self.job_status(job), "Running")
        self.sweep(tasks.UpdateJobStatuses, token=9)
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
        self.assertEqual((cast.topic, cast.method, cast.server), ("agent", "terminate_cluster", "agent-1"))
        self.assertTrue(self.agent.terminate_cluster(**cast.args))
        self.assertEqual(self.status(cluster), "gone")
        self.assertFalse((self.agent._engine._folder / cluster).exists())

    def test_two_sweeps_at_once_terminate_once(self) -> None:
        cluster = self.cluster(transient=True)
        self.sweep(tasks.TerminateUnneededTransientClusters)
        self.sweep(tasks.TerminateUnneededTransientClusters, token=2)
        self.assertEqual(len(self.casts), 1)
        done = [self.agent.terminate_cluster(**self.casts[0].args) for _ in range(2)]
        self.assertEqual((done, self.status(cluster)), ([True, False], "gone"))

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
        self.make_agent().start()
        self.assertEqual(self.status(cluster), "gone")

    def test_a_termination_kills_what_runs(self) -> None:
        cluster = self.cluster()
        job = self.run_job(cluster, "sleep", "600")
        wait_for(lambda: self.agent._engine.status(cluster, job) == ("Running", None), "it runs")
        group = int((self.agent._engine._folder / cluster / job / "pid").read_text())
        self.database.run(lambda tx: self.store.set_cluster(tx, cluster, "Deleting", 1, expected=("Active",)))
        self.assertTrue(self.agent.terminate_cluster(cluster, 1))
        self.assertEqual(self.job_status(job), "Killed")
        from moorage_plugins.data_processing import engine

        wait_for(lambda: not engine._lives(group), "the process to die")

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
        self.sweep(tasks.ClusterHealth)
        healthy = self.store.cluster(cluster)
        self.agent._engine.remove(cluster)
        self.sweep(tasks.ClusterHealth)
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
