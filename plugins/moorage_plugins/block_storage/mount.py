# SPDX-License-Identifier: Apache-2.0
"""Whether the backend's folder is the one that the data are in, or the empty one that their file system is to be mounted on.

The folder has a marker with an identity. It is made where the database knows of no data at this location yet, so that nothing can
be missing, or where data that it knows of are there (they were made by a version without markers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage_plugins.block_storage.backend import MARKER, DirectoryBackend
from moorage_plugins.block_storage.rows import BACKUP, IMAGE, TABLES, VOLUME

__all__ = ["Mount"]

_LOOK_AT = 100


class Mount:
    """The folder of a backend.

    :param names: the locations whose data are there.
    """

    def __init__(self, backend: DirectoryBackend, database: Any, names: Sequence[str]) -> None:
        self._backend = backend
        self._database = database
        self._names = list(names)

    def check(self) -> None:
        """One read of a small file; the backend writes only under the marker that was found here.

        :raises Unavailable: it is not the folder that the data are in.
        """
        backend = self._backend
        found = backend.marker()
        if found and backend.identity in ("", found):
            backend.identity = found
            return
        known = self._known()
        if known and not any(backend.path(kind, owner, path).exists() for kind, owner, path in known):
            raise errors.Unavailable(
                f"In [block_storage] backend_dir {backend.folder} there is {'another' if found else 'no'} {MARKER}, and no data "
                "that the database knows of: mount the file system that they are on. If this is the right folder, "
                f"{'start the agent again' if found else f'write any word into {backend.folder / MARKER}'}."
            )
        backend.identity = found or backend.mark(randomness.new_uuid())

    def _known(self) -> list[tuple[str, str, str]]:
        """Some of the data that must be there."""
        found: list[tuple[str, str, str]] = []
        with self._database.read() as tx:
            for kind in (VOLUME, BACKUP, IMAGE):
                of = TABLES[kind].c
                query = sa.select(of.uuid, of.path).where(of.location.in_(self._names), of.path != "").limit(_LOOK_AT)
                found += [(kind, row.uuid, row.path) for row in tx.execute(query)]
        return found
