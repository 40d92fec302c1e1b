# SPDX-License-Identifier: Apache-2.0
"""The format of backups."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path

from moorage import errors
from moorage_plugins.block_storage import backup_format


class BackupFormatTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name: str, data: bytes | None = None) -> str:
        path = os.path.join(self.folder, name)
        if data is not None:
            with open(path, "wb") as stream:
                stream.write(data)
        return path

    def replace(self, path: Path, data: bytes) -> None:
        # Some file systems flush a file that is cut and written again.
        path.unlink()
        path.write_bytes(data)

    def test_every_cut_and_every_changed_byte_is_found(self) -> None:
        data = os.urandom(60) + bytes(100) + b"text" * 20
        source, path = Path(self.path("source", data)), Path(self.path("backup"))
        digest = backup_format.write_backup(source, path, 64, lambda: None)
        ticks: list[None] = []
        self.assertEqual(backup_format.verify_backup(path, lambda: ticks.append(None)), digest)
        # One for each chunk: an agent that stops, or has lost the lease, does not read all of it first.
        self.assertEqual(len(ticks), -(-len(data) // 64))
        whole = path.read_bytes()
        found = 0
        for at in range(len(whole)):
            self.replace(path, whole[:at])
            with self.assertRaises(errors.Conflict):
                backup_format.verify_backup(path, lambda: None)
            self.replace(path, whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
            try:
                # A packed chunk ends with bits that mean nothing: what it unpacks to is still right.
                self.assertEqual(backup_format.verify_backup(path, lambda: None), digest)
            except errors.Conflict:
                found += 1
        self.assertGreater(found, len(whole) * 0.95)
        self.replace(path, whole)
        target = Path(self.path("target"))
        self.assertEqual(backup_format.read_backup(path, target, 1000, lambda: None), digest)
        self.assertEqual(target.read_bytes(), data + bytes(1000 - len(data)))
        with self.assertRaisesRegex(errors.Conflict, "more than the 100 bytes"):
            backup_format.read_backup(path, target, 100, lambda: None)
