# SPDX-License-Identifier: Apache-2.0
"""Cleanup in ``/scheduling/v1`` over HTTP: the YAML files beside this module, in order, on one live control plane.

Of a dead service's volumes two cannot be written, because the database refuses it: so they come into quarantine, one as
often as it is tried, until the database is repaired; the other one is discarded.
"""

from __future__ import annotations

import pathlib
import unittest

import sqlalchemy as sa

from moorage.control_plane.api_role import ApiRole
from moorage.control_plane.factories import open_workers
from moorage.services.interface import ServiceIdentity
from moorage_plugins.block_storage.rows import VOLUME, Rows
from tests.functional.scheduling.plane import Plane
from tests.gabbits import run_file

FOLDER = pathlib.Path(__file__).parent / "gabbits"
SOUND, BROKEN, WAITS, HOPELESS, ELSEWHERE = (f"{number * 8}-1111-4111-8111-111111111111" for number in "12345")
_BREAK = f"""
CREATE TRIGGER broken BEFORE UPDATE ON block_volumes WHEN NEW.uuid IN ('{BROKEN}', '{HOPELESS}') AND NEW.status = 'error'
BEGIN SELECT RAISE(ABORT, 'this volume cannot be written'); END
"""


class HttpTests(unittest.TestCase):
    def setUp(self) -> None:
        self.plane = Plane(
            self,
            api__bind="127.0.0.1:0",
            api__auth_strategy="noauth",
            agent__cluster="one",
            cleanup__interval=0.1,
            cleanup__max_attempts=1,
        ).up(("h1",))
        self.url: str = self.plane.start(ApiRole(), "api-live").url
        dead = self.plane.registry.enlist("agent", "dead", cluster="one", rpc_version="1.0")
        for uuid, host, owner in (
            (SOUND, "dead", dead),
            (BROKEN, "dead", dead),
            (WAITS, "dead", None),
            (HOPELESS, "dead", dead),
            (ELSEWHERE, "elsewhere", None),
        ):
            self.volume(uuid, host, owner)
        self.plane.registry.set(dead.uuid, forced_down=True)
        self.statement(_BREAK)

    def statement(self, text: str) -> None:
        with self.plane.database.write() as tx:
            tx.exec_driver_sql(text)

    def volume(self, uuid: str, host: str, owner: ServiceIdentity | None) -> None:
        workers = open_workers(self.plane.client, self.plane.conf)

        def work(tx: sa.Connection) -> None:
            token = workers.create(tx, VOLUME, uuid, "create", "creating", target_host=host)
            rest = {"location": "one", "upload_to": "", "attached_to": "", "snapshots": 0, "image": ""}
            Rows(VOLUME).insert(tx, uuid, "creating", token, size_bytes=1000, project_id="p", **rest)
            if owner is not None:
                workers.start_many(tx, VOLUME, [uuid], owner)

        self.plane.database.run(work)

    def test_from_orphans_to_an_empty_quarantine(self) -> None:
        for name in ("1-clean", "2-quarantine", "3-repaired", "4-mistakes"):
            with self.subTest(name):
                if name == "3-repaired":
                    self.statement("DROP TRIGGER broken")
                run_file(self, self.url, FOLDER / f"{name}.yaml", prefix="/scheduling/v1")
