# SPDX-License-Identifier: Apache-2.0
"""SQLite: two engines on one file, on local disks only, and never across a fork.

A forked child inherits what SQLite's library remembers of its parent's locks, but not the locks (those of POSIX belong to the
process). A connection that the child opens to the same file would rely on them, and the parent could delete the log under it. So
idle connections are closed before a fork; when one is in use at that moment, the child may not open the file.
"""

from __future__ import annotations

import os
import sqlite3
import weakref
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, pool
from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from moorage.db.prepared import PreparedConnection
from moorage.db.settings import DatabaseSettings

__all__ = ["create", "file", "forget_inherited", "refuse_inherited"]

#: File systems on which SQLite's locks or its shared memory cannot be trusted, as the kernel names them.
_NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "smb3", "smbfs",
}  # fmt: skip


#: The first statement of a transaction, by whether it writes.
_BEGIN = {True: "BEGIN IMMEDIATE", False: "BEGIN DEFERRED"}


class _Connection(sqlite3.Connection):
    """A connection that is known while it is open."""

    @override
    def close(self) -> None:
        super().close()
        for connections in _OPEN.values():
            connections.discard(self)


#: The open connections of this process by file; the files that a parent had open when it forked this process, with the
#: connections, which must not even be closed here.
_OPEN: dict[str, weakref.WeakSet[_Connection]] = {}
_INHERITED: dict[str, list[_Connection]] = {}


def file(url: sa.URL) -> str | None:
    """Returns the path of a SQLite database file; None for one in memory or another database."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return os.path.realpath(url.database)


def forget_inherited() -> None:
    """In a forked child: remember which files it must not open."""
    for path, connections in _OPEN.items():
        if connections:
            _INHERITED[path] = list(connections)
    _OPEN.clear()


def refuse_inherited(path: str) -> None:
    """Do not open a file that this process inherited open.

    :raises StoreUnavailable: says what to do instead.
    """
    if path in _INHERITED:
        raise errors.StoreUnavailable(
            f"This process was forked while a transaction on {path} was open, and SQLite does not work in such a child. "
            "Fork outside of transactions, or start a new program instead (subprocess, or spawn of multiprocessing)."
        )


def create(url: sa.URL, path: str, settings: DatabaseSettings, clock: Clock, *, writer: bool) -> sa.Engine:
    """Returns an engine on the file; connects when first used.

    :raises ConfigError: the file lies on a network file system.
    """
    _refuse_network_file_system(path)
    engine = sa.create_engine(
        url,
        poolclass=pool.QueuePool,
        # SQLite has one writer: one connection is all that is kept. The second one is for a writer that finds the pool empty
        # because another thread, which forks, is closing the first one. Nothing would come back for which it could wait.
        pool_size=1 if writer else settings.pool_size,
        max_overflow=1 if writer else settings.pool_size,
        pool_timeout=settings.pool_timeout,
        connect_args={
            "timeout": settings.lock_timeout,
            "check_same_thread": False,
            "isolation_level": None,
            "factory": _Connection,
        },
    )

    def connect(connection: Any, record: Any) -> None:
        _OPEN.setdefault(path, weakref.WeakSet()).add(connection)
        cursor = connection.cursor()
        _write_ahead(cursor, clock, settings.lock_timeout)
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.execute("PRAGMA journal_size_limit=67108864")
        if not writer:
            cursor.execute("PRAGMA query_only=ON")
        cursor.close()

    def begin(connection: Any) -> None:
        connection.driver_connection.execute(_BEGIN[writer])

    engine._connection_cls = PreparedConnection
    event.listen(engine, "connect", connect)
    # Not by the event "begin": SQLAlchemy then prepares calls of listeners at each step of each transaction, which costs a third
    # of a small read.
    engine.dialect.do_begin = begin  # type: ignore[method-assign, assignment]
    return engine


def _write_ahead(cursor: Any, clock: Clock, seconds: int) -> None:
    """Make the file WAL. SQLite does not wait for others here, though several processes may start at the same moment."""
    deadline = clock.monotonic() + seconds
    while True:
        try:
            mode = cursor.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        except Exception as error:
            if "locked" not in str(error) or clock.monotonic() > deadline:
                raise
            clock.sleep(0.01)
            continue
        if mode != "wal":
            raise errors.ConfigError(
                f"SQLite cannot keep a write-ahead log here (journal mode {mode}); put the state directory on a local disk."
            )
        return


def _refuse_network_file_system(path: str) -> None:
    mount = _mount_of(os.path.realpath(path), "/proc/self/mounts")
    if mount is not None and mount[1] in _NETWORK_FILE_SYSTEMS:
        raise errors.ConfigError(
            f"The SQLite file {path} lies on {mount[0]}, a network file system ({mount[1]}), where SQLite loses data. "
            "Put the state directory on a local disk, or use PostgreSQL or MariaDB."
        )


def _mount_of(path: str, table: str) -> tuple[str, str] | None:
    """Where the file system that holds ``path`` is mounted, and its type; None where the table cannot be read."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as lines:
            mounts = [line.split()[1:3] for line in lines]
    except OSError:
        return None
    # Spaces and the like in a mount point are written as octal numbers.
    named = [(point.encode().decode("unicode_escape"), kind) for point, kind in mounts]
    holding = [(point, kind) for point, kind in named if os.path.commonpath([point, path]) == point]
    # Of two mounts on one point the later one is seen.
    return max(enumerate(holding), key=lambda each: (len(each[1][0]), each[0]), default=(0, None))[1]
