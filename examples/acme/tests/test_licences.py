# SPDX-License-Identifier: Apache-2.0
"""The cleanup handler and the periodic task on Moorage's conformance kits, and the API, over one table."""

from __future__ import annotations

import tempfile
import unittest
import uuid as uuid_module
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import sqlalchemy as sa
from acme_moorage.agent import LICENCE, LicenceWork
from acme_moorage.api import MAY_READ, LicencesApi
from acme_moorage.cleanup import LicenceHandler
from acme_moorage.metrics import LicenceCollector
from acme_moorage.migrations import MIGRATIONS
from acme_moorage.options import list_opts
from acme_moorage.routes import POLICIES, routes
from acme_moorage.tables import licences, metadata
from acme_moorage.tasks import ExpireLicences

from moorage import errors, options
from moorage.clock import SystemClock
from moorage.context import RequestContext
from moorage.control_plane.interface import ApiTools
from moorage.coordination.interface import PeriodicTask, TaskTools
from moorage.db import Database
from moorage.http.routes import Request
from moorage.services.interface import ServiceIdentity
from moorage.testing import database as databases
from moorage.testing.cleanup import CleanupHandlerTests
from moorage.testing.http import send
from moorage.testing.tasks import PeriodicTaskTests
from moorage.testing.work import WorkTests
from moorage.work.job import Work

HOUR = 3_600_000_000


class LicencesCase(unittest.TestCase):
    """A database of each test's own."""

    database: Database

    def setUp(self) -> None:
        super().setUp()
        self.database = self.enterContext(databases.temporary(tables=True))
        with self.database.write() as tx:
            metadata.create_all(tx)

    def make(self, status: str, *, token: int = 0, until: int = 0, product: str = "cad") -> str:
        uuid = str(uuid_module.uuid4())
        row = {
            "uuid": uuid, "product": product, "status": status, "holder": "agent-1", "held_until": until, "fence": token,
        }  # fmt: skip
        with self.database.write() as tx:
            tx.execute(sa.insert(licences).values(row))
        return uuid

    def status(self, uuid: str) -> str | None:
        with self.database.read() as tx:
            return tx.execute(sa.select(licences.c.status).where(licences.c.uuid == uuid)).scalar_one_or_none()


class MigrationsTests(unittest.TestCase):
    def test_the_history_ends_at_what_the_code_says(self) -> None:
        with databases.temporary() as fresh:
            MIGRATIONS.upgrade(fresh)
            self.assertEqual([], MIGRATIONS.differences(fresh))


class LicenceHandlerTests(LicencesCase, CleanupHandlerTests):
    resource_type = "licence"
    handler_class = LicenceHandler
    expected: ClassVar = {"taking": "available", "returning": "available"}

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        uuid = self.make(status)
        with self.database.write() as tx:
            self.worker_rows.create(tx, "licence", uuid, status, status, target_host=identity.host)
        self.assertIn(uuid, self.worker_rows.take_many("licence", [uuid], identity))
        return uuid


class LicenceWorkTests(LicencesCase, WorkTests):
    expected: ClassVar = {"taking": "held", "returning": "available"}

    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def make_work(self, store: Any, identity: ServiceIdentity) -> Work[str]:
        return LicenceWork(self.database, store, identity, self.folder)

    def asked(self, operation: str, store: Any, host: str) -> tuple[str, str]:
        uuid = self.make(operation)
        self.database.run(lambda tx: store.create(tx, LICENCE, uuid, operation, operation, target_host=host) and None)
        return LICENCE, uuid

    def assert_tidy(self, uuid: str) -> None:
        held = self.status(uuid) == "held"
        self.assertEqual(1 if held else 0, len(list(self.folder.glob(f"{uuid}.*"))))


class ExpireLicencesTests(LicencesCase, PeriodicTaskTests):
    def make_task(self, tools: TaskTools) -> PeriodicTask:
        return ExpireLicences(tools)

    def list_opts(self) -> Any:
        return list_opts()

    def make_due(self) -> str:
        return self.make("held", until=1)

    def make_idle(self) -> str:
        return self.make("held", until=2**62)

    def state(self, object_id: str) -> object:
        return self.status(object_id)

    def test_whose_time_is_over_is_available(self) -> None:
        uuid = self.make_due()
        self.handle(uuid)
        self.assertEqual("available", self.status(uuid))

    def test_a_later_writer_wins(self) -> None:
        uuid = self.make("held", token=10**6, until=1)
        self.handle(uuid)
        self.assertEqual("held", self.status(uuid))


class LicencesApiTests(LicencesCase):
    def setUp(self) -> None:
        super().setUp()
        self.allowed = {MAY_READ}
        self.tools = ApiTools(
            conf=options.defaults(),
            clock=SystemClock(),
            database=self.database,
            authenticate=lambda environ: RequestContext(user_id="somebody"),
            check_policy=self.check,
            count=lambda *request: None,
            store=mock.Mock(),
            fleet=mock.Mock(),
            sender=mock.Mock(),
        )
        self.application = LicencesApi(self.tools).application()

    def check(self, rule: str, context: RequestContext, target: Any = None) -> None:
        if rule not in self.allowed:
            raise errors.Forbidden(f"{context.user_id} may not do {rule}.")

    def test_licences_are_counted_by_product_and_status(self) -> None:
        for status in ("held", "held", "available"):
            self.make(status)
        self.make("held", product="cam")
        answer = send(self.application, "GET", "/")
        self.assertEqual({"licences": {"cad": {"available": 1, "held": 2}, "cam": {"held": 1}}}, answer.json)

    def test_the_part_lists_and_counts_them(self) -> None:
        held = self.make("held")
        (route,) = routes(self.tools)
        self.assertEqual(POLICIES[0].name, route.policy)
        wanted = {"uuid": held, "product": "cad", "status": "held", "holder": "agent-1"}
        self.assertEqual({"licences": [wanted]}, route.handler(Request()).body)
        (metric,) = LicenceCollector(self.database).collect()
        self.assertEqual([({"status": "held"}, 1)], [(each.labels, each.value) for each in metric.samples])

    def test_who_may_not_is_told_so(self) -> None:
        self.allowed.clear()
        answer = send(self.application, "GET", "/")
        self.assertEqual(403, answer.status)
        self.assertIn(MAY_READ, answer.json["error"]["message"])
