# SPDX-License-Identifier: Apache-2.0
"""The periodic task that releases expired claims."""

from __future__ import annotations

import unittest

from moorage import context, options
from moorage.allocation.interface import ClaimRequest
from moorage.clock import SystemClock
from moorage.control_plane.core_tasks import ExpireClaims
from moorage.coordination.interface import TaskTools
from moorage.testing.allocation import new_uuid, provider
from moorage.testing.tasks import KitLease, Sent
from moorage.work.operations import SqlOperationStore
from tests.conformance.allocation.stores import SqlCase, sql_store


class ExpireClaimsTests(SqlCase, unittest.TestCase):
    def test_has_an_object_only_while_a_claim_has_expired(self) -> None:
        self.empty()
        store = sql_store(self.database)
        workers = SqlOperationStore(self.database, lease_seconds=60.0)
        task = ExpireClaims(
            TaskTools(options.defaults(), SystemClock(), self.database, Sent(), context.internal("test"), workers)
        )
        node = provider(VCPU=4)
        store.ensure_providers([node])
        held, expired = (ClaimRequest(new_uuid(), {node.uuid: {"VCPU": 1}}, "r", lifetime=1000.0) for _ in range(2))
        for each in (held, expired):
            store.claim(each)
        self.assertEqual([], list(task.list_objects()))
        store.renew(expired.consumer, 0.0)
        (whole,) = task.list_objects()
        self.assertEqual(1, task.handle(whole, KitLease(self.database, whole)))
        self.assertEqual([], list(task.list_objects()))
        self.assertEqual((True, False), (store.renew(held.consumer, None), store.renew(expired.consumer, None)))
