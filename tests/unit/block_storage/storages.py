# SPDX-License-Identifier: Apache-2.0
"""Block storage for tests: the real service and agents over a real database and real files; messages are collected."""

from __future__ import annotations

import random
import uuid as uuid_module
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg

from moorage.cleanup import options as cleanup_options
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.orphans import OrphanStore
from moorage.clock import SystemClock
from moorage.control_plane import options as control_plane_options
from moorage.control_plane.interface import AgentTools
from moorage.db import Database
from moorage.db.schema import core_metadata
from moorage.services.interface import ServiceIdentity
from moorage.testing.cleanup import Tools
from moorage.testing.database import empty_tables
from moorage.work.job import Job
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from moorage_plugins.block_storage import options
from moorage_plugins.block_storage.agent import BlockStorageAgent, NotFree
from moorage_plugins.block_storage.cleanup import BackupHandler, SnapshotHandler, VolumeHandler
from moorage_plugins.block_storage.configuration import open_backend
from moorage_plugins.block_storage.outcomes import ROWS
from moorage_plugins.block_storage.service import BlockStorage
from moorage_plugins.migrations import MIGRATIONS
from moorage_plugins.schema import plugins_metadata
from tests.servers import wait_until

# So that the metadata has all tables.
MIGRATIONS.import_tables()

CLUSTER = "cluster"
SOON = 60.0
SIZE = 40_000
HANDLERS = {"volume": VolumeHandler, "snapshot": SnapshotHandler, "backup": BackupHandler}


class NoReporter:
    """Volumes are no instances."""


def member(name: str, epoch: int = 1) -> ServiceIdentity:
    """A service of the cluster; the same name is the same service."""
    return ServiceIdentity(str(uuid_module.uuid5(uuid_module.NAMESPACE_OID, name)), name, "agent", CLUSTER, epoch)


class Storage:
    """One backend with its database.

    :param delay: seconds that a chunk takes.
    :param database: options of the :class:`Database`.
    """

    def __init__(
        self,
        url: str,
        folder: str,
        *,
        delay: float = 0.0,
        lease_seconds: float = 60.0,
        chunk: int = 10_000,
        **database: int,
    ) -> None:
        self.database = Database(url, **database)  # type: ignore[arg-type]
        self.folder = Path(folder)
        self.conf = cfg.ConfigOpts()
        for module in (control_plane_options, cleanup_options, options):
            module.register_opts(self.conf)
        self.conf([], project="moorage", default_config_files=[])
        (self.folder / "images").mkdir(exist_ok=True)
        for name, value in {
            "backend_dir": str(self.folder / "backend"),
            "images_dir": str(self.folder / "images"),
            "chunk_bytes": chunk,
            "chunk_delay": delay,
            "collect_interval": 0.05,
        }.items():
            self.conf.set_override(name, value, group="block_storage")
        self.backend = open_backend(self.conf)
        self.workers = SqlOperationStore(self.database, lease_seconds=lease_seconds)
        self.told: list[tuple[str, str, str]] = []
        #: Where new volumes are.
        self.place = CLUSTER
        self.service = BlockStorage(
            self.conf, self.database, self.workers, lambda: self.place, lambda *told: self.told.append(told)
        )

    def create_tables(self) -> None:
        with self.database.write() as tx:
            empty_tables(tx, core_metadata, plugins_metadata)

    def tools(self, identity: ServiceIdentity) -> AgentTools:
        return AgentTools(
            conf=self.conf, clock=SystemClock(), database=self.database, identity=identity, workers=self.workers,
            instances=None, store=None, release=lambda *_: True, reporter=NoReporter(),  # type: ignore[arg-type]
        )  # fmt: skip

    def agent(self, name: str = "a", epoch: int = 1) -> BlockStorageAgent:
        return BlockStorageAgent(self.tools(member(name, epoch)))

    def image(self, name: str, data: bytes) -> str:
        (self.folder / "images" / name).write_bytes(data)
        return name

    def run_all(self, name: str = "a") -> None:
        """Do all that waits, as a service that then stops."""
        agent = self.agent(name)
        agent.start()
        wait_until(lambda: self.rows() == 0, "all operations are done", SOON)
        agent.stop()

    def rows(self) -> int:
        with self.database.read() as tx:
            return tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one()

    def get(self, kind: str, uuid: str) -> Any:
        with self.database.read() as tx:
            return ROWS[kind].find(tx, uuid)

    def status(self, kind: str, uuid: str) -> str | None:
        row = self.get(kind, uuid)
        return None if row is None else row.status

    def data(self, kind: str, uuid: str) -> bytes:
        return self.backend.path(kind, uuid, self.get(kind, uuid).path).read_bytes()

    def strays(self) -> list[tuple[str, str, str]]:
        """Files that are not the live one of a resource."""
        found = []
        for kind in ROWS:
            for uuid in self.backend.uuids(kind):
                row = self.get(kind, uuid)
                found += [
                    (kind, uuid, name) for name in self.backend.tokens(kind, uuid) if row is None or name != row.path
                ]
        return found

    def volume(self, *, image: bytes | None = None, name: str = "image") -> str:
        """One that is available."""
        made = self.service.create_volume(SIZE, image=self.image(name, image) if image is not None else "")
        self.run_all()
        assert self.status("volume", made.uuid) == "available"
        return str(made.uuid)

    def start(self, kind: str, uuid: str, identity: ServiceIdentity) -> Any:
        """Begin an operation as that service, do nothing of it, and leave it."""
        work = BlockStorageAgent(self.tools(identity)).work
        task = self.database.run(lambda tx: work.begin(tx, kind, uuid))
        return None if task is None else Job([*task.leases.values()], task)

    def do(self, kind: str, uuid: str, name: str = "a") -> bool:
        """Do an operation in this thread; False when it is not there to be done, or was ended instead."""
        try:
            job = self.start(kind, uuid, member(name))
        except NotFree:
            return False
        if job is not None:
            self.agent(name).loop.run(job)
        return job is not None

    def cleaner(self, name: str) -> Cleaner:
        identity = member(name)
        handlers = {kind: handler(self.tools(identity)) for kind, handler in HANDLERS.items()}
        policy = Policy(backoff=0.01, backoff_longest=0.01, max_attempts=10_000)
        store = OrphanStore(self.database, self.workers, identity, SystemClock())
        return Cleaner(store, handlers, SystemClock(), random.Random(1), policy)


__all__ = ["CLUSTER", "HANDLERS", "SIZE", "SOON", "Storage", "Tools", "member"]
