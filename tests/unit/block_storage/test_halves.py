# SPDX-License-Identifier: Apache-2.0
"""Operations of two halves: what a volume or a backup holds afterwards is what its own request named.

Any order of requests, of their beginnings and ends, of resets, deletions by force and cleanups of one half; messages come late, or
for what is over.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moorage import errors
from moorage.cleanup.conditions import NeverStarted
from moorage_plugins.block_storage.agent import NotFree
from moorage_plugins.block_storage.outcomes import ROWS
from tests.unit.block_storage.storages import CLUSTER, SIZE, Storage, member

_STEPS = (
    "restore a", "restore b", "back up", "reset volume", "reset a", "reset b", "reset made", "delete made", "clean volume",
    "clean backup", "begin a", "begin b", "begin made", "begin volume", "end first", "end last",
)  # fmt: skip


class _World:
    """A volume, two backups of other volumes, the backups that are made of it; what each must hold."""

    def __init__(self, storage: Storage, backups: dict[str, str]) -> None:
        self.storage = storage
        self.service = storage.service
        self.uuids = {**backups, "volume": storage.service.create_volume(SIZE).uuid, "made": ""}
        storage.do("volume", self.uuids["volume"])
        self.holds = bytes(SIZE)
        #: What the request that has the volume asks to be restored, by a byte.
        self.wanted = b""
        self.made: dict[str, bytes] = {}
        self.jobs: list[Any] = []

    def step(self, step: str) -> None:
        verb, _, what = step.rpartition(" ")
        kind = "volume" if what == "volume" else "backup"
        steps: dict[str, Callable[[], Any]] = {
            "restore": lambda: self.restore(what),
            "back": self.back_up,
            "reset": lambda: self.service.reset(kind, self.uuids[what], "available"),
            "delete": lambda: self.service.delete(kind, self.uuids[what], force=True),
            "clean": lambda: self.storage.cleaner("c").clean(NeverStarted((CLUSTER,), 0.0), types={what}),
            "begin": lambda: self.jobs.append(self.storage.start(kind, self.uuids[what], member("a"))),
            "end": lambda: (
                self.storage.agent().loop.run(self.jobs.pop(0 if what == "first" else -1)) if self.jobs else None
            ),
        }
        with contextlib.suppress(errors.MoorageError, NotFree):
            steps[verb]()
        self.jobs = [job for job in self.jobs if job is not None]
        self.check()

    def restore(self, which: str) -> None:
        self.service.restore(self.uuids[which], self.uuids["volume"])
        self.wanted = which.encode()

    def back_up(self) -> None:
        self.uuids["made"] = self.service.create_backup(self.uuids["volume"]).uuid
        self.made[self.uuids["made"]] = self.holds

    def check(self) -> None:
        found = self.storage.data("volume", self.uuids["volume"])
        if found != self.holds:
            assert found == self.wanted * SIZE, f"{found[:1]!r} was restored where {self.wanted!r} was asked for"
            self.holds = found

    def end(self) -> None:
        """All that goes on ends; then the backups hold what the volume held when they were asked for."""
        while self.jobs:
            self.step("end first")
        self.storage.run_all()
        self.check()
        volume = self.uuids["volume"]
        for uuid, held in self.made.items():
            if self.storage.status("backup", uuid) == "available":
                self.service.reset("volume", volume, "available")
                self.service.restore(uuid, volume)
                assert self.storage.do("backup", uuid)
                assert self.storage.data("volume", volume) == held, "the backup holds what the volume did not hold"
        for uuid in self.uuids.values():
            row = self.storage.get("backup", uuid)
            assert row is None or row.status in ("available", "error"), row.status


class HalvesTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.storage = Storage(f"sqlite:///{folder.name}/test.sqlite", folder.name, chunk=SIZE)
        self.addCleanup(self.storage.database.close)
        self.storage.create_tables()
        self.backups = {name: self.backup(name.encode() * SIZE) for name in ("a", "b")}
        # What ends before its time is told of; here that is most.
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)

    def backup(self, data: bytes) -> str:
        volume = self.storage.service.create_volume(SIZE, image=self.storage.image("image", data)).uuid
        self.storage.do("volume", volume)
        backup = str(self.storage.service.create_backup(volume).uuid)
        self.storage.do("backup", backup)
        return backup

    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(_STEPS), min_size=3, max_size=12))
    @example(["restore a", "reset volume", "restore b", "begin a", "end first"])
    @example(["restore a", "clean volume", "restore b", "begin a", "end first"])
    @example(["restore a", "reset a", "reset volume", "restore b", "begin b", "reset volume", "restore a", "end last"])
    @example(["back up", "reset volume", "restore a", "begin a", "end first", "back up", "begin made", "end first"])
    def test_what_is_there_afterwards_is_what_was_asked_for(self, steps: list[str]) -> None:
        world = _World(self.storage, self.backups)
        for step in steps:
            world.step(step)
        world.end()

    def test_a_backup_whose_volume_was_taken_away_before_it_began_holds_nothing(self) -> None:
        """What the volume held when it was asked for may be gone by then."""
        world = _World(self.storage, self.backups)
        for step in ("back up", "reset volume", "restore a", "begin a", "end first"):
            world.step(step)
        first, volume = world.uuids["made"], world.uuids["volume"]
        world.step("back up")
        self.assertFalse(self.storage.do("backup", first))
        self.assertEqual(self.storage.status("backup", first), "error")
        self.assertTrue(self.storage.do("backup", world.uuids["made"]))
        self.assertEqual((self.storage.status("volume", volume), self.storage.rows()), ("available", 0))
        with self.storage.database.read() as tx:
            self.assertEqual(ROWS["volume"].get(tx, volume).upload_to, "")
