# SPDX-License-Identifier: Apache-2.0
"""The YAML files beside this module, each against a dialect of its own: services, one of them dead, and what it left.

Behind the dialect is the real coordinator, reached as by messages, with a clock that the test moves.
"""

from __future__ import annotations

import json
import pathlib
import unittest
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from moorage.cleanup.coordinator import CleanupCoordinator, CleanupFilter
from moorage.cleanup.requests import RequestStore
from moorage.cleanup.views import OperationViews
from moorage.services.interface import ServiceIdentity
from moorage.services.liveness import LivenessObserver
from moorage.services.registry import ServiceRegistry
from moorage.testing.clock import ManualClock
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from moorage_plugins.block_storage.rows import IMAGE, VOLUME, Rows
from tests.api.live import LiveDialect
from tests.gabbits import run_file

FOLDER = pathlib.Path(__file__).parent / "gabbits"
#: Of the resource whose operation the dead service left.
ORPHAN = "11111111-1111-4111-8111-111111111111"
WAITS = "22222222-2222-4222-8222-222222222222"
#: Images that volumes were, and are being, uploaded to.
SAVED = "33333333-3333-4333-8333-333333333333"
SAVING = "44444444-4444-4444-8444-444444444444"
OPTIONS = """
[services]
service_down_time = 3600
[block_storage]
gigabyte_bytes = 1000
max_volume_gb = 10
"""


class Schedulers:
    """One scheduler, asked as by messages."""

    def __init__(self, test: TestGabbits) -> None:
        self._test = test

    def call(self, topic: str, method: str, args: Mapping[str, Any], **_: Any) -> Any:
        assert topic == "scheduler"
        given = json.loads(json.dumps(args))
        coordinator, by, dry_run = self._test.coordinator, given["requested_by"], given["dry_run"]
        if method == "request_cleanup":
            found = coordinator.request(CleanupFilter(**given["filters"]), by, dry_run=dry_run)
        else:
            found = coordinator.automatic(by, dry_run=dry_run)
        return json.loads(json.dumps(found))

    def cast(self, topic: str, method: str, args: Mapping[str, Any], server: str) -> None:
        self._test.told.append((server, method))


class TestGabbits(unittest.TestCase):
    coordinator: CleanupCoordinator

    def world(self) -> LiveDialect:
        """Three services of a cluster; one has been dead for long, with a volume that it was creating and one that waits."""
        self.told: list[tuple[str, str]] = []
        live = LiveDialect("volume", "/volume", options=OPTIONS, sender=lambda: Schedulers(self))
        self.addCleanup(live.close)
        clock = ManualClock(1000.0)
        database, registry = live.database, ServiceRegistry(live.database, clock)
        store = SqlOperationStore(database, lease_seconds=60)
        requests, views = RequestStore(database, registry), OperationViews(database, store)
        self.coordinator = CleanupCoordinator(
            registry,
            LivenessObserver(clock, 10.0),
            requests,
            views,
            tell=lambda host, _: self.told.append((host, "clean_up")),
            announce=lambda *_: None,
            checks=lambda: 2,
            automatic=lambda: False,
        )
        names = ("alive@lvm", "dead@lvm", "other@lvm", "alone")
        who = {
            name: registry.enlist("agent", name, cluster=None if name == "alone" else "one", rpc_version="1.0")
            for name in names
        }
        for uuid, owner in ((ORPHAN, who["dead@lvm"]), (WAITS, None)):
            self.volume(database, store, uuid, owner)
        for uuid, status in ((SAVED, "active"), (SAVING, "saving")):
            self.image(database, uuid, status)
        self.coordinator.sample()
        clock.now += 11
        for name in names[::2]:
            self.assertTrue(registry.beat(who[name]))
        for _ in range(2):
            self.coordinator.sample()
        return live

    def image(self, database: Any, uuid: str, status: str) -> None:
        values = {"name": status, "size_bytes": 1000, "project_id": "p", "location": "one", "path": "1"}
        with database.write() as tx:
            Rows(IMAGE).insert(tx, uuid, status, 1, **values)

    def volume(self, database: Any, store: SqlOperationStore, uuid: str, owner: ServiceIdentity | None) -> None:
        def work(tx: sa.Connection) -> None:
            token = store.create(tx, VOLUME, uuid, "create", "creating", target_host="dead@lvm")
            rest = {"location": "one", "upload_to": "", "attached_to": "", "snapshots": 0, "image": ""}
            Rows(VOLUME).insert(tx, uuid, "creating", token, size_bytes=1000, project_id="p", **rest)
            if owner is not None:
                store.start_many(tx, VOLUME, [uuid], owner)

        database.run(work)

    def test_every_file_holds(self) -> None:
        files = sorted(FOLDER.glob("*.yaml"))
        self.assertTrue(files)
        for file in files:
            with self.subTest(file.name):
                live = self.world()
                run_file(self, live.url, file, prefix="/volume")
                if file.stem == "cleanup":
                    self.assertEqual(set(self.told), {("alive@lvm", "clean_up")})
                    with live.database.read() as tx:
                        self.assertEqual(tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one(), 2)
