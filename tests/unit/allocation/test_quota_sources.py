# SPDX-License-Identifier: Apache-2.0
"""Limits that a quota source says: what is written into the store, and what is kept when the source fails."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from typing import Any
from unittest import mock

from moorage import context, errors, options
from moorage.allocation import quotas_api
from moorage.allocation.interface import ClaimRequest, Quota, QuotaSource
from moorage.allocation.quota_changes import QuotaChange, quota_changes
from moorage.clock import SystemClock
from moorage.control_plane import core_tasks, factories, periodic
from moorage.control_plane.core_tasks import ReadQuotas
from moorage.coordination.interface import TaskTools
from moorage.http.routes import Request
from moorage.testing.allocation import new_uuid, provider
from moorage.testing.tasks import KitLease, Sent
from moorage.work.operations import SqlOperationStore
from tests import memory_store
from tests.conformance.allocation.stores import SqlCase, sql_store


class Source(QuotaSource):
    """Says what a test gives it."""

    api_version = (2, 0)

    def __init__(self) -> None:
        self.said: Mapping[str, Mapping[str, int]] | errors.Unavailable = {}

    def limits(self) -> Mapping[str, Mapping[str, int]]:
        if isinstance(self.said, errors.Unavailable):
            raise self.said
        return self.said


class ChangeTests(unittest.TestCase):
    def test_writes_what_differs_in_the_order_of_projects_and_classes(self) -> None:
        wanted = {"q": {"VCPU": 5, "DISK_GB": 1}, "p": {"VCPU": 7, "CUSTOM_NEW": 3}, "empty": {}}
        present = [Quota("p", "VCPU", 7, 9), Quota("q", "VCPU", 6, 0), Quota("gone", "VCPU", 1, 1)]
        changes = [QuotaChange("gone", "VCPU", None), QuotaChange("q", "DISK_GB", 1), QuotaChange("q", "VCPU", 5)]
        self.assertEqual((changes, {"CUSTOM_NEW"}), quota_changes(wanted, present, {"VCPU", "DISK_GB"}))
        changes.insert(1, QuotaChange("p", "CUSTOM_NEW", 3))
        self.assertEqual((changes, frozenset()), quota_changes(wanted, present, None))


class ReadQuotasTests(SqlCase, unittest.TestCase):
    def setUp(self) -> None:
        self.empty()
        self.store = sql_store(self.database)
        self.source = Source()
        self.enterContext(mock.patch.object(core_tasks, "open_quota_source", return_value=self.source))
        self.task = ReadQuotas(self.tools(quota={"source": "given", "interval": 7.0}))

    def tools(self, **sections: Mapping[str, Any]) -> TaskTools:
        workers = SqlOperationStore(self.database, lease_seconds=60.0)
        conf = options.defaults(**sections)
        return TaskTools(conf, SystemClock(), self.database, Sent(), context.internal("test"), workers)

    def read(self, *, lost: bool = False) -> object:
        (whole,) = self.task.list_objects()
        return self.task.handle(whole, KitLease(self.database, whole, lost=lost))

    def test_the_store_gets_the_limits_of_the_source_and_no_others(self) -> None:
        node = provider(VCPU=100)
        self.store.ensure_providers([node])
        self.store.claim(ClaimRequest(new_uuid(), {node.uuid: {"VCPU": 3}}, "r", "p"))
        self.store.set_quota("by-hand", "VCPU", 1)
        self.source.said = {"p": {"VCPU": 5}, "q": {"DISK_GB": 0}, "free": {}}
        self.assertEqual(3, self.read())
        self.assertEqual([Quota("p", "VCPU", 5, 3), Quota("q", "DISK_GB", 0, 0)], self.store.quotas())
        self.assertEqual(0, self.read())
        self.assertEqual((7.0, [ReadQuotas.WHOLE]), (self.task.spacing, self.task.list_objects()))

    def test_a_source_that_does_not_answer_leaves_the_limits(self) -> None:
        self.source.said = {"p": {"VCPU": 5}}
        self.read()
        self.source.said = errors.Unavailable("Keystone is away.")
        with self.assertRaisesRegex(errors.Unavailable, "Keystone is away"):
            self.read()
        self.assertEqual([Quota("p", "VCPU", 5, 0)], self.store.quotas())

    def test_an_engine_that_lost_its_lease_writes_nothing_of_an_older_reading(self) -> None:
        self.source.said = {"p": {"VCPU": 5}, "q": {"VCPU": 6}}
        with self.assertRaises(errors.Fenced):
            self.read(lost=True)
        self.assertEqual([], self.store.quotas())

    def test_a_transaction_writes_so_many_limits_and_the_next_reading_the_others(self) -> None:
        self.source.said = {f"p{number}": {"VCPU": number} for number in range(5)}
        with mock.patch.object(ReadQuotas, "MOST", 2):
            self.task = ReadQuotas(self.task.tools)
            self.assertEqual([2, 2, 1, 0], [self.read() for _ in range(4)])
        self.assertEqual([0, 1, 2, 3, 4], [each.limit for each in self.store.quotas()])

    def test_lost_races_make_the_next_transaction_smaller_and_success_larger_again(self) -> None:
        self.source.said = {f"p{number}": {"VCPU": 1} for number in range(8)}
        with mock.patch.object(ReadQuotas, "MOST", 4):
            self.task = ReadQuotas(self.task.tools)
            with (
                mock.patch.object(KitLease, "finish_with", side_effect=errors.StoreBusy("Others write.")),
                self.assertRaises(errors.StoreBusy),
            ):
                self.read()
            self.assertEqual([2, 4, 2], [self.read() for _ in range(3)])

    def test_a_class_that_does_not_exist_is_told_once_and_limited_when_it_does(self) -> None:
        self.source.said = {"p": {"CUSTOM_LICENSE": 2, "VCPU": 1}}
        with self.assertLogs(core_tasks.__name__, "WARNING") as logs:
            self.assertEqual(1, self.read())
            self.assertEqual(0, self.read())
        self.assertEqual(1, len([each for each in logs.output if "CUSTOM_LICENSE" in each]))
        self.store.create_resource_class("CUSTOM_LICENSE")
        self.assertEqual(1, self.read())
        self.assertEqual({"CUSTOM_LICENSE", "VCPU"}, {each.resource_class for each in self.store.quotas()})

    def test_a_limit_of_a_class_that_is_gone_is_removed(self) -> None:
        self.store.create_resource_class("CUSTOM_LICENSE")
        self.store.set_quota("p", "CUSTOM_LICENSE", 5)
        with self.database.write() as tx:
            tx.exec_driver_sql("UPDATE resource_classes SET name = NULL")
        self.assertEqual(1, self.read())
        self.assertEqual([], self.store.quotas())

    def test_engines_run_the_task_where_a_source_is_chosen(self) -> None:
        self.assertIn("read_quotas", periodic.enabled_tasks(options.defaults(quota={"source": "keystone"})))
        self.assertNotIn("read_quotas", periodic.enabled_tasks(options.defaults()))

    def test_limits_of_a_source_are_not_set_by_hand(self) -> None:
        routes = {each.method: each for each in quotas_api.routes(self.store, "keystone")}
        path = {"project": "p", "resource_class": "VCPU"}
        for method in ("PUT", "DELETE"):
            request = Request(context=context.internal("test"), path_params=path, body={"limit": 5})
            with self.assertRaisesRegex(errors.Conflict, "quota source keystone says the limits"):
                routes[method].handler(request)
        self.assertEqual([], self.store.quotas())


class CheckTests(unittest.TestCase):
    def test_a_source_needs_its_options_and_a_store_with_limits(self) -> None:
        memory_store.offer(self)
        keystone = {"auth_url": "http://127.0.0.1:1/v3", "password": "x"}
        factories.check_quota_source(options.defaults())
        factories.check_quota_source(options.defaults(quota={"source": "keystone"}, quota_keystone=keystone))
        for sections, sentence in (
            ({"quota": {"source": "none"}}, "offered are: .*keystone"),
            ({"quota": {"source": "keystone"}}, "needs .quota_keystone. auth_url, password"),
            (
                {
                    "quota": {"source": "keystone"},
                    "quota_keystone": keystone,
                    "allocation": {"store": "memory"},
                },
                "needs a store that keeps limits",
            ),
        ):
            with self.assertRaisesRegex(errors.MoorageError, sentence):
                factories.check_quota_source(options.defaults(**sections))
