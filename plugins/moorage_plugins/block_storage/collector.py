# SPDX-License-Identifier: Apache-2.0
"""Collects files that no row refers to: of tries that were taken over, by processes that were killed or paused at any instant.

A file of a token is kept while it is the live one, or its token is the resource's fence (the try that is being made). The row is
read after the folder: a try writes its token into the row before it makes a file, so no file of one that goes on is taken for old.
"""

from __future__ import annotations

from typing import Any

from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.outcomes import CLEANABLE, ROWS
from moorage_plugins.block_storage.rows import IMAGE

__all__ = ["Collector"]


class Collector:
    """Compares a backend with the rows."""

    def __init__(self, backend: DirectoryBackend, database: Any) -> None:
        self._backend = backend
        self._database = database

    def collect(self) -> int:
        """Look at everything; how many files were removed."""
        return sum(self.collect_one(kind, uuid) for kind in ROWS for uuid in self._backend.uuids(kind))

    def collect_one(self, kind: str, uuid: str) -> int:
        """Look at one resource; how many files were removed."""
        names = self._backend.tokens(kind, uuid)
        if not names:
            return 0
        with self._database.read() as tx:
            row = ROWS[kind].find(tx, uuid)
        removed = [name for name in names if row is None or not _needed(kind, row, name)]
        for name in removed:
            self._backend.remove(kind, uuid, name)
        return len(removed)


def _needed(kind: str, row: Any, name: str) -> bool:
    if name == row.path:
        return True
    busy = row.status == "saving" if kind == IMAGE else row.status in CLEANABLE[kind]
    # A later token than the row's fence cannot be: leave it to whoever knows it.
    return name.isdigit() and (int(name) > row.fence or (busy and int(name) == row.fence))
