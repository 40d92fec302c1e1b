# SPDX-License-Identifier: Apache-2.0
"""Collects files that no row refers to: of tries that were taken over, by processes that were killed or paused at any instant.

A file of a token is kept while it is the live one, or its token is the resource's fence (the try that is being made). The row is
read after the folder: a try writes its token into the row before it makes a file, so no file of one that goes on is taken for old.

Only files that this database has known are collected. Files of resources that never had an operation in it, or of later tokens than
it has given, were made with another database: the configuration names the wrong one, it was restored from an old copy, or two
deployments share the folder. They may be the only data of that database, so they stay, and the log names them. The tokens of this
database rise and would reach theirs. So files of later tokens get a second name, ``<token>.set-aside``, which no process removes:
when everything is looked at, and when an operation on the resource begins, before it makes a file. If a row's live file is missing,
all files of the resource are set aside, whatever their tokens, and none is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oslo_log import log as logging

from moorage.work.interface import OperationStore
from moorage_plugins.block_storage.backend import DirectoryBackend
from moorage_plugins.block_storage.outcomes import CLEANABLE, ROWS
from moorage_plugins.block_storage.rows import IMAGE

__all__ = ["Collector"]

LOG = logging.getLogger(__name__)
_PAGE = 500


class Collector:
    """Compares a backend with the rows."""

    def __init__(self, backend: DirectoryBackend, database: Any, workers: OperationStore) -> None:
        self._backend = backend
        self._database = database
        self._workers = workers
        #: The number of resources with files of another database, when the log named them last.
        self._logged = 0

    def collect(self) -> int:
        """Look at everything, in a read for every few hundred resources; how many files were removed."""
        removed, foreign, failures = 0, list[str](), list[OSError]()
        for kind in ROWS:
            uuids = self._backend.uuids(kind)
            for start in range(0, len(uuids), _PAGE):
                for found in self._compare(kind, uuids[start : start + _PAGE]):
                    foreign += [f"{kind} {found.uuid}"] if found.foreign else []
                    for act, name in found.acts():
                        try:
                            act(self._backend, kind, found.uuid, name)
                            removed += act is DirectoryBackend.remove
                        except OSError as error:
                            failures.append(error)
        if failures:
            LOG.warning("%d files could not be collected or set aside, the first: %s", len(failures), failures[0])
        if foreign and len(foreign) != self._logged:
            LOG.error(
                "In %s are files of %d resources that this database has not made, the first is %s. They are left alone, or kept "
                "under a second name that ends with .set-aside. If the database was not restored from an older copy, see whether "
                "[database] connection and [block_storage] backend_dir belong together; remove the files by hand if they "
                "are not needed.",
                self._backend.folder, len(foreign), foreign[0],
            )  # fmt: skip
        self._logged = len(foreign)
        return removed

    def collect_one(self, kind: str, uuid: str) -> int:
        """Look at one resource; how many files were removed.

        :raises OSError: one could not be removed.
        """
        removed = [name for found in self._compare(kind, [uuid]) for name in found.old]
        for name in removed:
            self._backend.remove(kind, uuid, name)
        return len(removed)

    def begin(self, kind: str, row: Any, token: int) -> None:
        """Set aside what another database's tries have left, before a file of this token is made.

        :param row: as it was read when the token was given.
        :raises OSError: it could not be done: nothing may be written, lest it is taken for old.
        """
        if not self._foreign(kind, row, token - 1, self._backend.tokens(kind, row.uuid)):
            return
        names = self._backend.tokens(kind, row.uuid)
        with self._database.read() as tx:
            now = ROWS[kind].find(tx, row.uuid)
        if now is None or now.fence != token:
            # Another process has it, which begins again.
            return
        kept = [
            name for name in self._foreign(kind, now, token - 1, names) if self._backend.set_aside(kind, row.uuid, name)
        ]
        if kept:
            LOG.error(
                "The files %s of %s %s were not made by this database; they are kept beside, with names that end with .set-aside. "
                "If it was restored from an older copy, what is in them is later than what the database knows.",
                ", ".join(kept), kind, row.uuid,
            )  # fmt: skip

    def _foreign(self, kind: str, row: Any, fence: int, names: Sequence[str]) -> list[str]:
        """Which of a resource's files this database has not made, or may be what is missing."""
        if self._lacks_live(kind, row, names):
            kept = _kept(kind, row)
            return [name for name in names if name not in kept or int(name) > fence]
        return [name for name in names if int(name) > fence]

    def _lacks_live(self, kind: str, row: Any, names: Sequence[str]) -> bool:
        return bool(row.path) and row.path not in names and not self._backend.path(kind, row.uuid, row.path).exists()

    def _compare(self, kind: str, uuids: Sequence[str]) -> Iterator[_Found]:
        """What is to be done with the files of each resource that has some."""
        listed = {uuid: names for uuid in uuids if (names := self._backend.tokens(kind, uuid))}
        if not listed:
            return
        with self._database.read() as tx:
            rows: Mapping[str, Any] = ROWS[kind].many(tx, list(listed))
            gone = [uuid for uuid in listed if uuid not in rows]
            last = self._workers.tokens(tx, kind, gone) if gone else {}
        for uuid, names in listed.items():
            if (row := rows.get(uuid)) is None:
                fence = last.get(uuid, -1)
                old = [name for name in names if int(name) <= fence]
                yield _Found(uuid, old, [], foreign=len(old) < len(names))
            else:
                strange = self._foreign(kind, row, row.fence, names)
                kept = names if self._lacks_live(kind, row, names) else (*strange, *_kept(kind, row))
                yield _Found(uuid, [name for name in names if name not in kept], strange, foreign=bool(strange))


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of a resource: names to remove, names to set aside, and whether there are files of another database."""

    uuid: str
    old: Sequence[str]
    strange: Sequence[str]
    foreign: bool

    def acts(self) -> Iterator[tuple[Callable[[DirectoryBackend, str, str, str], Any], str]]:
        """What to call for each."""
        yield from ((DirectoryBackend.set_aside, name) for name in self.strange)
        yield from ((DirectoryBackend.remove, name) for name in self.old)


def _kept(kind: str, row: Any) -> tuple[str, ...]:
    busy = row.status == "saving" if kind == IMAGE else row.status in CLEANABLE[kind]
    return (row.path, str(row.fence)) if busy else (row.path,)
