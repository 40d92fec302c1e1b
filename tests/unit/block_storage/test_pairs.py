# SPDX-License-Identifier: Apache-2.0
"""Every pair of requests on a volume and what is made of it, the second while the first waits, carried out in both orders.

Either the second is refused and told why, or all holds in the end what it would hold had each been done when it was asked for.
"""

from __future__ import annotations

import logging
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

from moorage import errors
from tests.unit.block_storage.storages import Storage

_SIZE = 500
_BEFORE, _OTHER = b"b" * _SIZE, b"o" * _SIZE
#: Reads the volume into something new: what it makes, which must hold what the volume holds when it is asked for.
_READS = {"snapshot": "snapshot", "backup": "backup", "upload": "image"}
#: Ends what is being done to the resource.
_ENDS = {"reset": "volume", "delete by force": "volume", "reset backup": "backup", "delete backup by force": "backup"}
_RESTORES = ("restore", "restore elsewhere", "restore to new")
_ALL = (*_READS, *_ENDS, *_RESTORES, "delete", "delete backup", "attach", "volume of the image")
#: By what is under way: what is let in. All the rest is refused.
_LET_IN = {
    "snapshot": {"snapshot", "backup", "upload", "reset", "attach", "restore elsewhere", "restore to new"},
    "backup": {"reset", "delete by force", "restore elsewhere", "restore to new"},
    "upload": {"reset", "delete by force", "restore elsewhere", "restore to new"},
    "restore": {"reset", "delete by force", "reset backup", "delete backup by force"},
    "delete": {"reset", "delete by force", "restore elsewhere", "restore to new"},
    "restore elsewhere": {
        "snapshot", "backup", "upload", "reset", "delete by force", "delete", "attach", "reset backup", "delete backup by force",
    },
    "restore to new": {
        "snapshot", "backup", "upload", "reset", "delete by force", "delete", "attach", "reset backup", "delete backup by force",
    },
    "delete backup": {
        "snapshot", "backup", "upload", "reset", "delete by force", "delete", "attach", "reset backup", "delete backup by force",
    },
}  # fmt: skip
_ALWAYS = {"reset backup", "delete backup", "delete backup by force", "volume of the image"}


def made(storage: Storage, data: bytes) -> str:
    """A volume that holds that."""
    uuid = storage.service.create_volume(_SIZE, image=storage.image("file", data)).uuid
    storage.do("volume", uuid)
    return str(uuid)


class _World:
    """A volume, the image of one that held the same, a backup of another volume, and a third volume."""

    def __init__(self, storage: Storage, image: str, other: str) -> None:
        self.storage, service = storage, storage.service
        self.volume, self.third, self.image = made(storage, _BEFORE), made(storage, bytes(_SIZE)), image
        self.backup = service.create_backup(other).uuid
        storage.do("backup", self.backup)
        #: What each reader made, and of what.
        self.results: dict[str, tuple[str, bytes]] = {}
        self.holds: dict[str, bytes | None] = {self.volume: _BEFORE, self.third: bytes(_SIZE), self.backup: _OTHER}
        self.asks: dict[str, Callable[[], Any]] = {
            "snapshot": lambda: service.create_snapshot(self.volume),
            "backup": lambda: service.create_backup(self.volume),
            "upload": lambda: service.upload(self.volume, "another"),
            "restore": lambda: service.restore(self.backup, self.volume),
            "restore elsewhere": lambda: service.restore(self.backup, self.third),
            "restore to new": lambda: service.restore(self.backup),
            "reset": lambda: service.reset("volume", self.volume, "available"),
            "reset backup": lambda: service.reset("backup", self.backup, "available"),
            "delete": lambda: service.delete_volume(self.volume),
            "delete by force": lambda: service.delete_volume(self.volume, force=True),
            "delete backup": lambda: service.delete("backup", self.backup),
            "delete backup by force": lambda: service.delete("backup", self.backup, force=True),
            "attach": lambda: service.attach(self.volume, "server"),
            "volume of the image": lambda: service.create_volume(_SIZE, image=self.image),
        }

    def waiting(self) -> list[tuple[str, str]]:
        workers = self.storage.workers
        return [
            (kind, row.resource_id)
            for kind in ("volume", "snapshot", "backup")
            for row in workers.waiting(kind, ["cluster"])
        ]

    def go_on(self, first: Callable[[tuple[str, str]], bool] = lambda key: False) -> None:
        """Do what waits, those first; half of an operation may end only after the other half has."""
        for _ in range(3):
            for key in sorted(self.waiting(), key=lambda key: not first(key)):
                self.storage.do(*key)

    def ask(self, what: str) -> None:
        """Ask, and note what there must be."""
        found = self.asks[what]()
        holds = self.holds
        if what in _READS:
            before = holds[self.volume]
            assert before is not None
            self.results[what] = found.uuid, before
        elif what.startswith("restore"):
            holds[found.uuid] = _OTHER
        elif what.startswith("delete"):
            holds[self.volume if "backup" not in what else self.backup] = None
        elif what == "volume of the image":
            holds[found.uuid] = _BEFORE


class PairTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.storage = Storage(f"sqlite:///{folder.name}/test.sqlite", folder.name)
        self.addCleanup(self.storage.database.close)
        self.storage.create_tables()
        self.other, imaged = made(self.storage, _OTHER), made(self.storage, _BEFORE)
        self.image = self.storage.service.upload(imaged, "image").uuid
        self.storage.do("volume", imaged)
        logging.disable(logging.WARNING)
        self.addCleanup(logging.disable, logging.NOTSET)

    def test_what_was_asked_for_first_is_not_changed_by_what_was_asked_for_later(self) -> None:
        for first in _LET_IN:
            for second in _ALL:
                let_in = self.one(first, second, first_first=True)
                if let_in:
                    self.one(first, second, first_first=False)
                if second not in _ALWAYS:
                    self.assertEqual(let_in, second in _LET_IN[first], f"{second} while {first} waits")

    def one(self, first: str, second: str, *, first_first: bool) -> bool:
        """Whether the second was let in."""
        what = f"{first}, then {second}, {'in' if first_first else 'against'} the order"
        world = _World(self.storage, self.image, self.other)
        before = dict(world.holds)
        world.ask(first)
        mine = set(world.waiting())
        try:
            world.ask(second)
        except (errors.Conflict, errors.InvalidInput) as error:
            self.assertRegex(error.message, f"{world.volume}|{world.third}|{world.backup}", what)
            return False
        world.go_on(lambda key: (key in mine) == first_first)
        self.assertEqual(world.waiting(), [], what)
        # What ends the first leaves what was there before it, or what it had come to.
        ended = second in _ENDS
        for reader, (uuid, data) in world.results.items():
            found = self.content(_READS[reader], uuid)
            self.assertIn(found, (data, None) if ended else (data,), what)
        for uuid, held in world.holds.items():
            found = self.content("backup" if uuid == world.backup else "volume", uuid, unpacked=_OTHER)
            self.assertIn(found, (held, before.get(uuid)) if ended else (held,), what)
        return True

    def content(self, kind: str, uuid: str, unpacked: bytes = b"") -> bytes | None:
        """What a resource holds that can be used; None where there is none of that."""
        row = self.storage.get(kind, uuid)
        if row is None or row.status not in ("available", "in-use", "active", "error_restoring"):
            return None
        if kind != "backup":
            return self.storage.data(kind, uuid) if row.path else None
        into = self.storage.service.create_volume(_SIZE).uuid
        self.storage.do("volume", into)
        self.storage.service.restore(uuid, into)
        self.assertTrue(self.storage.do("backup", uuid))
        return self.storage.data("volume", into)
