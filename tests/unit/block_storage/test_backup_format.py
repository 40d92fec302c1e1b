# SPDX-License-Identifier: Apache-2.0
"""The format of backups."""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
import tracemalloc
import unittest
import zlib
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
        self.assertEqual(backup_format.verify_backup(path, 1000, lambda: ticks.append(None)), digest)
        # One for each chunk: an agent that stops, or has lost the lease, does not read all of it first.
        self.assertEqual(len(ticks), -(-len(data) // 64))
        whole = path.read_bytes()
        found = 0
        for at in range(len(whole)):
            self.replace(path, whole[:at])
            with self.assertRaises(errors.Conflict):
                backup_format.verify_backup(path, 1000, lambda: None)
            self.replace(path, whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
            try:
                # A packed chunk ends with bits that mean nothing: what it unpacks to is still right.
                self.assertEqual(backup_format.verify_backup(path, 1000, lambda: None), digest)
            except errors.Conflict:
                found += 1
        self.assertGreater(found, len(whole) * 0.95)
        self.replace(path, whole)
        target = Path(self.path("target"))
        self.assertEqual(backup_format.read_backup(path, target, 1000, lambda: None), digest)
        self.assertEqual(target.read_bytes(), data + bytes(1000 - len(data)))
        with self.assertRaisesRegex(errors.Conflict, "more than the 100 bytes"):
            backup_format.read_backup(path, target, 100, lambda: None)

    def test_what_lengths_say_is_not_believed(self) -> None:
        """A damaged header, or a bomb, does not take more memory than a piece."""
        head, magic, size = struct.Struct(">II32s"), b"moorage backup 1\n", 10**6
        bomb = zlib.compress(bytes(64 * 2**20), 1)
        digest = hashlib.sha256(bytes(1000)).digest()
        for what, data in {
            "zeros": head.pack(2**31, 0, digest),
            "a bomb": head.pack(1000, len(bomb), digest) + bomb,
            "a bomb within the size": head.pack(size, len(bomb), digest) + bomb,
            "more than the file has": head.pack(1000, 2**32 - 1, digest) + zlib.compress(bytes(1000)),
            "more than is needed": head.pack(1000, 50, digest) + zlib.compress(bytes(1000)).ljust(50, b"x"),
            "less than was said": head.pack(2000, 17, digest) + zlib.compress(bytes(1000)),
        }.items():
            path = Path(self.path("backup", magic + data + head.pack(0, 0, digest)))
            tracemalloc.start()
            with self.subTest(what=what), self.assertRaisesRegex(errors.Conflict, f"damaged at byte {len(magic)}"):
                backup_format.verify_backup(path, size, lambda: None)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.assertLess(most, 8 * 2**20, what)

    def test_chunks_that_are_larger_than_a_piece_are_read_whole(self) -> None:
        data = os.urandom(2**20 + 5) + bytes(2**21)
        source, path, target = Path(self.path("source", data)), Path(self.path("backup")), Path(self.path("target"))
        for chunk in (2**23, 2**20 + 5):
            digest = backup_format.write_backup(source, path, chunk, lambda: None)
            self.assertEqual(backup_format.read_backup(path, target, len(data), lambda: None), digest)
            self.assertEqual(target.read_bytes(), data)
