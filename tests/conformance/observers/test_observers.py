# SPDX-License-Identifier: Apache-2.0
"""The reference observers on the kit, and what each is for."""

from __future__ import annotations

import json
import unittest
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import override

from moorage import errors
from moorage.observers.interface import (
    ClaimRefused,
    InstanceCreated,
    InstanceDeleted,
    Observer,
    ObserverTools,
    WorkReported,
)
from moorage.testing.observers import ObserverTests, event
from moorage_plugins.observers.log import LogObserver
from moorage_plugins.observers.metrics import MetricsObserver
from moorage_plugins.observers.options import list_opts


class LogObserverTests(ObserverTests, unittest.TestCase):
    @override
    def make_observer(self, tools: ObserverTools) -> Observer:
        return LogObserver(tools)

    @override
    def list_opts(self):
        return list_opts()

    def test_a_line_for_each_event_whatever_its_names_are(self) -> None:
        observer = self.make_observer(self.tools())
        with self.assertLogs("moorage_plugins.observers.log", "INFO") as logs:
            observer.observe(self.notice(event(InstanceDeleted, "two\nlines")))
        (line,) = (record.getMessage() for record in logs.records)
        kind, _, fields = line.partition(" ")
        self.assertEqual(("instance.deleted", 1), (kind, len(line.splitlines())))
        self.assertEqual({"instance": "two\nlines", "host": "two\nlines"}, json.loads(fields))

    def test_only_the_kinds_that_the_configuration_names(self) -> None:
        tools = self.tools()
        tools.conf.set_override("kinds", ["instance.deleted"], group="observer_log")
        observer = self.make_observer(tools)
        with self.assertLogs("moorage_plugins.observers.log", "INFO") as logs:
            observer.observe(self.notice(event(InstanceCreated)))
            observer.observe(self.notice(event(InstanceDeleted)))
        self.assertEqual(["instance.deleted"], [record.getMessage().split()[0] for record in logs.records])

    def test_a_kind_that_does_not_exist_is_refused_with_those_that_do(self) -> None:
        tools = self.tools()
        tools.conf.set_override("kinds", ["instance.gone"], group="observer_log")
        with self.assertRaisesRegex(errors.ConfigError, r"kinds names instance\.gone; there are: .*instance\.deleted"):
            self.make_observer(tools)


class MetricsObserverTests(ObserverTests, unittest.TestCase):
    @override
    def make_observer(self, tools: ObserverTools) -> Observer:
        return MetricsObserver(tools)

    @override
    def list_opts(self):
        return list_opts()

    def test_what_was_told_stands_in_a_file_that_prometheus_can_read(self) -> None:
        tools = self.tools()
        observer = self.make_observer(tools)
        for _ in range(3):
            observer.observe(self.notice(event(ClaimRefused, "moorage.capacity_exceeded")))
        observer.observe(self.notice(event(InstanceCreated)))
        observer.flush()
        folder = Path(tools.conf.control_plane.state_dir) / "metrics"
        (file,) = folder.iterdir()
        self.assertEqual("scheduler-scheduler-1.prom", file.name)
        found = {
            (sample.name, sample.labels.get("kind") or sample.labels.get("reason")): sample.value
            for family in text_string_to_metric_families(file.read_text())
            for sample in family.samples
        }
        self.assertEqual(3, found["moorage_events_total", "claim.refused"])
        self.assertEqual(1, found["moorage_events_total", "instance.created"])
        self.assertEqual(3, found["moorage_claims_refused_total", "moorage.capacity_exceeded"])
        self.assertEqual(0, found["moorage_events_dropped", None])

    def test_the_work_of_agents_is_counted_by_what_became_of_it(self) -> None:
        tools = self.tools()
        observer = self.make_observer(tools)
        observer.observe(self.notice(WorkReported("compute", 5, {"done": 3, "retry": 1}, 1, 4500, 7, 2, 9000)))
        observer.observe(self.notice(WorkReported("compute", 2, {"done": 4}, 0, 500, 0, 0, 0)))
        observer.observe(self.notice(WorkReported("licences", 1, {}, 0, 0, 0, 1, 250)))
        observer.flush()
        (file,) = (Path(tools.conf.control_plane.state_dir) / "metrics").iterdir()
        found = {
            (sample.name, sample.labels["service"], sample.labels.get("outcome")): sample.value
            for family in text_string_to_metric_families(file.read_text())
            for sample in family.samples
            if "service" in sample.labels and not sample.name.endswith("_created")
        }
        outcomes = {("compute", "taken"): 7, ("compute", "done"): 7, ("compute", "retry"): 1, ("compute", "hung"): 1}
        outcomes |= {("licences", "taken"): 1, ("licences", "hung"): 0}
        gauges = {
            ("moorage_operation_seconds_total", "compute"): 5.0, ("moorage_operation_seconds_total", "licences"): 0.0,
            ("moorage_operations_waiting", "compute"): 0.0, ("moorage_operations_waiting", "licences"): 0.0,
            ("moorage_operations_running", "compute"): 0.0, ("moorage_operations_running", "licences"): 1.0,
            ("moorage_operation_longest_seconds", "compute"): 0.0, ("moorage_operation_longest_seconds", "licences"): 0.25,
        }  # fmt: skip
        expected = {("moorage_operations_total", *key): float(number) for key, number in outcomes.items()}
        self.assertEqual(expected | {(*key, None): number for key, number in gauges.items()}, found)

    def test_a_folder_that_cannot_be_made_is_refused_by_the_options_name(self) -> None:
        tools = self.tools()
        file = Path(tools.conf.control_plane.state_dir) / "file"
        file.write_text("")
        tools.conf.set_override("folder", str(file / "below"), group="observer_metrics")
        with self.assertRaisesRegex(errors.ConfigError, r"\[observer_metrics\] folder"):
            self.make_observer(tools)
