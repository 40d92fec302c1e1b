# SPDX-License-Identifier: Apache-2.0
"""Collects files that no row refers to: of tries that were taken over, by processes that were killed or paused at any instant.

A file of a token is kept while it is the live one, or its token is the resource's fence (the try that is being made). The row is
read after the folder: a try writes its token into the row before it makes a file, so no file of one that goes on is taken for old.

Only what this database has known is collected: files of resources that never had an operation in it, or of later tokens than it
has given, were made by somebody with another database (the configuration names the wrong one, it was restored from an old copy, or
two deployments share the folder), for whom they may be all there is. They are left alone, and told of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oslo_log import log as logging

from moorage.cleanup.interface import Workers
from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.outcomes import CLEANABLE, ROWS
from moorage_plugins.block_storage.rows import IMAGE

__all__ = ["Collector"]

LOG = logging.getLogger(__name__)
_PAGE = 500


class Collector:
    """Compares a backend with the rows."""

    def __init__(self, backend: DirectoryBackend, database: Any, workers: Workers) -> None:
        self._backend = backend
        self._database = database
        self._workers = workers
        #: Of how many resources there were foreign files when it was told last.
        self._told = 0

    def collect(self) -> int:
        """Look at everything, in a read for every few hundred resources; how many files were removed."""
        removed, foreign, failures = 0, list[str](), list[OSError]()
        for kind in ROWS:
            uuids = self._backend.uuids(kind)
            for start in range(0, len(uuids), _PAGE):
                for uuid, old, strange in self._compare(kind, uuids[start : start + _PAGE]):
                    foreign += [f"{kind} {uuid}"] if strange else []
                    for name in old:
                        try:
                            self._backend.remove(kind, uuid, name)
                            removed += 1
                        except OSError as error:
                            failures.append(error)
        if failures:
            LOG.warning("%d files could not be collected, the first: %s", len(failures), failures[0])
        if foreign and len(foreign) != self._told:
            LOG.error(
                "In %s are files of %d resources that this database has not made, the first is %s. They are left alone. If the "
                "database was not restored from an older copy, see whether [database] connection and [block_storage] "
                "backend_dir belong together; remove the files by hand when nobody needs them.",
                self._backend.folder, len(foreign), foreign[0],
            )  # fmt: skip
        self._told = len(foreign)
        return removed

    def collect_one(self, kind: str, uuid: str) -> int:
        """Look at one resource; how many files were removed.

        :raises OSError: one could not be removed.
        """
        removed = [name for _, old, _ in self._compare(kind, [uuid]) for name in old]
        for name in removed:
            self._backend.remove(kind, uuid, name)
        return len(removed)

    def _compare(self, kind: str, uuids: Sequence[str]) -> Iterator[tuple[str, list[str], bool]]:
        """Of each resource with files, the names of those to remove, and whether there are some that are nobody's here."""
        found = {uuid: names for uuid in uuids if (names := self._backend.tokens(kind, uuid))}
        if not found:
            return
        with self._database.read() as tx:
            rows: Mapping[str, Any] = ROWS[kind].many(tx, list(found))
            gone = [uuid for uuid in found if uuid not in rows]
            last = self._workers.tokens(tx, kind, gone) if gone else {}
        for uuid, names in found.items():
            row = rows.get(uuid)
            fence = last.get(uuid, -1) if row is None else row.fence
            kept = () if row is None else _kept(kind, row)
            old = [name for name in names if int(name) <= fence and name not in kept]
            yield uuid, old, any(int(name) > fence for name in names)


def _kept(kind: str, row: Any) -> tuple[str, ...]:
    busy = row.status == "saving" if kind == IMAGE else row.status in CLEANABLE[kind]
    return (row.path, str(row.fence)) if busy else (row.path,)
