# SPDX-License-Identifier: Apache-2.0
"""Volumes, snapshots, backups and restores on agents of one cluster that die: no data is lost, mixed up or brought back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.factories import open_workers
from moorage.control_plane.scheduler_role import SchedulerRole
from moorage.db import Database
from moorage_plugins.block_storage.configuration import open_backend
from moorage_plugins.block_storage.service import BlockStorage
from tests.simulation.kernel import Process
from tests.simulation.workloads.cleaning import Cleaning
from tests.simulation.workloads.placement import HOSTS

__all__ = ["Volumes"]

CLUSTER = "cluster-1"
SIZE = 3000
KINDS = ("volume", "snapshot", "backup")
_TABLES = {kind: f"block_{kind}s" for kind in KINDS}
IMAGES = {"one": b"1" * 2500, "two": b"2" * SIZE}


@dataclass
class _Known:
    """What clients know of one resource."""

    kind: str
    uuid: str
    content: bytes
    deleting: bool = False
    deleted: bool = False
    log: list[str] = field(default_factory=list)


class Volumes(Cleaning):
    """Three agents, one scheduler, three clients."""

    settings: ClassVar[dict[tuple[str, str], Any]] = {
        **Cleaning.settings,
        ("agent", "services"): ["block_storage"],
        ("cleanup", "enabled_handlers"): list(KINDS),
        ("block_storage", "chunk_bytes"): 1000,
        ("block_storage", "chunk_delay"): 0.05,
        ("block_storage", "collect_interval"): 20.0,
        ("block_storage", "operations"): 2,
    }

    @staticmethod
    @override
    def fill(database: Database, conf: Any) -> None:
        """The store is empty."""

    @override
    def begin(self) -> None:
        self.dead = set()
        self.known: list[_Known] = []
        folder = self.world.folder / "images"
        folder.mkdir()
        for name, data in IMAGES.items():
            (folder / name).write_bytes(data)
        self.world.conf.set_override("images_dir", str(folder), group="block_storage")
        for host in HOSTS:
            self.start_role(host, Agent)
        self.start_role("scheduler-1", SchedulerRole)

    # -- clients --------------------------------------------------------------------------------------------------

    @override
    def _client(self, process: Process) -> None:
        platform = self.world.platform(process, "api", beats=False)

        def tell(_location: str, kind: str, uuid: str) -> None:
            args = {"resource_type": kind, "uuid": uuid}
            with contextlib.suppress(errors.TransportError):
                platform.sender.cast("agent", "block_storage_operation", args, server=self.random.choice(HOSTS))

        workers = open_workers(platform, self.world.conf)
        storage = BlockStorage(self.world.conf, platform.database, workers, lambda: CLUSTER, tell)
        mine: list[_Known] = []
        for _ in range(self.random.randint(2, 5)):
            with contextlib.suppress(errors.MoorageError):
                self._one(storage, mine)
            platform.clock.sleep(self.random.uniform(0, 3))

    def _one(self, storage: BlockStorage, mine: list[_Known]) -> None:
        living = [each for each in mine if not each.deleting]
        what = self.random.choice(("volume", "snapshot", "backup", "restore", "delete", "delete"))
        of = {"snapshot": "volume", "backup": "volume", "restore": "backup"}.get(what)
        sources = [each for each in living if of in (None, each.kind)]
        if what == "volume" or not sources:
            image = self.random.choice(("", *IMAGES))
            made = storage.create_volume(SIZE, image=image)
            self._made(mine, _Known("volume", made.uuid, IMAGES.get(image, b"").ljust(SIZE, b"\0")))
            return
        source = self.random.choice(sources)
        if what == "delete":
            self._remove(storage, source)
        elif what == "snapshot":
            self._made(mine, _Known(what, storage.create_snapshot(source.uuid).uuid, source.content))
        elif what == "backup":
            self._made(mine, _Known(what, storage.create_backup(source.uuid).uuid, source.content))
        else:
            self._made(mine, _Known("volume", storage.restore(source.uuid).uuid, source.content))

    def _made(self, mine: list[_Known], made: _Known) -> None:
        self.kernel.note("acknowledged", f"{made.kind} {made.uuid}")
        mine.append(made)
        self.known.append(made)

    def _remove(self, storage: BlockStorage, of: _Known) -> None:
        of.deleting = True
        force = self.random.random() < 0.4
        if of.kind == "volume":
            storage.delete_volume(of.uuid, force=force)
        else:
            storage.delete(of.kind, of.uuid, force=force)
        of.deleted = True
        self.kernel.note("acknowledged", f"delete {of.uuid}")

    # -- checks ---------------------------------------------------------------------------------------------------

    @override
    def check_step(self) -> None:
        self.check_tokens("block_volumes", "block_snapshots", "block_backups")

    @override
    def quiet(self) -> str:
        left = self.rows("SELECT resource_type, resource_id, operation, phase FROM workers")
        if left:
            return f"operations are left: {left}"
        strays = self._strays()
        return f"files that belong to nothing: {strays}" if strays else ""

    def _rows_of(self, kind: str) -> dict[str, tuple[str, str]]:
        """Uuid -> status and name of the file of what exists."""
        found = self.rows(f"SELECT uuid, status, path FROM {_TABLES[kind]} WHERE status <> 'deleted'")
        return {uuid: (status, path) for uuid, status, path in found}

    def _strays(self) -> list[tuple[str, str, str]]:
        backend = open_backend(self.world.conf)
        found = []
        for kind in KINDS:
            rows = self._rows_of(kind)
            for uuid in sorted(backend.uuids(kind)):
                live = rows.get(uuid, ("", ""))[1]
                found += [(kind, uuid, name) for name in sorted(backend.tokens(kind, uuid)) if name != live]
        return found

    @override
    def check(self) -> None:
        backend = open_backend(self.world.conf)
        rows = {kind: self._rows_of(kind) for kind in KINDS}
        for each in self.known:
            status, path = rows[each.kind].get(each.uuid, ("gone", ""))
            what = f"{each.kind} {each.uuid} ({status})"
            if each.deleted:
                self.require(status in ("gone", "error_deleting"), f"deleted {what} exists")
            elif not each.deleting:
                self.require(status != "gone", f"acknowledged {what} is gone")
            if status == "available" and each.kind != "backup":
                file = backend.path(each.kind, each.uuid, path)
                self.require(file.is_file(), f"{what} has no file {path}")
                self.require(file.read_bytes() == each.content, f"{what} has other data than it was given")
        moving = [
            (kind, uuid, status)
            for kind in KINDS
            for uuid, (status, _) in rows[kind].items()
            if status.endswith("ing") and not status.startswith("error")
        ]
        self.require(not moving, f"resources did not reach a documented end state: {moving}")
