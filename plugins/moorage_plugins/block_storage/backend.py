# SPDX-License-Identifier: Apache-2.0
"""A storage backend of files: ``<folder>/<kind>/<uuid>/<token>``.

Every try writes a file whose name is its token; the row says which file is live. So a try that was taken over never writes a file
that is read, and the try that finishes removes the files of earlier tries. Copies are in chunks; ``tick`` is called after each.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from moorage import errors

__all__ = ["MARKER", "DirectoryBackend", "Tick"]

#: The name of the file by which the folder is known.
MARKER = ".moorage-backend"
#: Called after each chunk; what it raises ends the copy.
Tick = Callable[[], None]
_UUID = re.compile("[0-9a-f-]{36}")


class DirectoryBackend:
    """The files of one backend.

    :raises ConfigError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, chunk_bytes: int) -> None:
        self.folder = folder
        self.chunk_bytes = chunk_bytes
        #: The marker under which it is written to; empty: not known yet, and nothing is written.
        self.identity = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.ConfigError(
                f"[block_storage] backend_dir {folder} cannot be made ({error.strerror}); give a folder that can be written."
            ) from error

    def marker(self) -> str:
        """Reads the identity from the folder's marker; empty without a marker."""
        try:
            return (self.folder / MARKER).read_text().strip()
        except FileNotFoundError:
            return ""

    def mark(self, identity: str) -> str:
        """Makes the marker unless another process has made it, and returns the identity in it."""
        made = self.folder / f"{MARKER}.{identity}"
        made.write_text(f"{identity}\n")
        _sync(made)
        with contextlib.suppress(FileExistsError):
            os.link(made, self.folder / MARKER)
        made.unlink()
        _sync(self.folder)
        return self.marker()

    def path(self, kind: str, uuid: str, token: int | str) -> Path:
        """Where the data of a try lie."""
        return self.folder / kind / uuid / str(token)

    @contextlib.contextmanager
    def writing(self, kind: str, uuid: str, token: int) -> Iterator[Path]:
        """Makes the empty file of a new try; at the end the file is on disk, and so are the names that lead to it.

        A file that has its name already was made with another database, and is set aside.

        :raises Unavailable: the folder has not, or no longer, the marker that was found in it.
        """
        path = self.path(kind, uuid, token)
        if not self.identity or self.marker() != self.identity:
            raise errors.Unavailable(
                f"[block_storage] backend_dir {self.folder} is not the folder that it was: its {MARKER} is gone, or another. Mount "
                "the file system that the data are on."
            )
        while True:
            # Another process may remove the folder while it is empty.
            with contextlib.suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    path.open("xb").close()
                    break
                except FileExistsError:
                    self.set_aside(kind, uuid, token)
                    path.unlink()
        yield path
        for each in (path, path.parent, path.parent.parent, self.folder):
            _sync(each)

    def allocate(self, path: Path, size: int, tick: Tick) -> None:
        """A file of zeros."""
        with open(path, "wb") as stream:
            done = 0
            while done < size:
                step = min(self.chunk_bytes, size - done)
                stream.write(bytes(step))
                stream.flush()
                done += step
                tick()

    def copy(self, source: Path, path: Path, size: int, tick: Tick) -> None:
        """A copy, filled up with zeros to the size.

        :raises InvalidInput: the source is larger, or is not there.
        :raises Conflict: it was changed meanwhile, so that the copy may be of no state that it ever had.
        """
        try:
            opened = os.open(source, os.O_RDONLY)
        except FileNotFoundError:
            raise errors.InvalidInput(f"There is no {source.name} to copy.") from None
        with open(opened, "rb") as reading, open(path, "wb") as stream:
            before = os.fstat(reading.fileno())
            if before.st_size > size:
                raise errors.InvalidInput(
                    f"{source.name} has {before.st_size} bytes, more than the {size} of its copy."
                )
            copied = 0
            while chunk := reading.read(self.chunk_bytes):
                copied += len(chunk)
                if copied > before.st_size:
                    break
                stream.write(chunk)
                stream.flush()
                tick()
            after = os.fstat(reading.fileno())
            if (copied, after.st_size, after.st_mtime_ns) != (before.st_size, before.st_size, before.st_mtime_ns):
                raise errors.Conflict(
                    f"{source.name} was changed while it was copied. Try again when no program writes to it. To replace it, "
                    "rename another file to its name."
                )
            stream.truncate(size)

    def tokens(self, kind: str, uuid: str) -> list[str]:
        """Names of the tries that have left something; what is no token is not looked at."""
        try:
            return sorted(name for name in os.listdir(self.folder / kind / uuid) if name.isascii() and name.isdigit())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def uuids(self, kind: str) -> list[str]:
        """Of what there are files; what is no folder of a resource is not looked at."""
        try:
            with os.scandir(self.folder / kind) as entries:
                return sorted(entry.name for entry in entries if _UUID.fullmatch(entry.name) and entry.is_dir())
        except FileNotFoundError:
            return []

    def set_aside(self, kind: str, uuid: str, token: int | str) -> bool:
        """Gives a file a second name, which no process removes. False if it has one, or does not exist."""
        path = self.path(kind, uuid, token)
        for number in itertools.count(1):
            aside = path.with_name(f"{token}.set-aside" + (f"-{number}" if number > 1 else ""))
            try:
                os.link(path, aside)
            except FileExistsError:
                if aside.samefile(path):
                    return False
            except FileNotFoundError:
                return False
            else:
                _sync(path.parent)
                return True
        raise AssertionError

    def remove(self, kind: str, uuid: str, token: int | str) -> None:
        """Remove what one try left; harmless when there is nothing."""
        self.path(kind, uuid, token).unlink(missing_ok=True)
        # Fails while another try has a file there.
        with contextlib.suppress(OSError):
            (self.folder / kind / uuid).rmdir()

    def sweep(self, kind: str, uuid: str, *, below: int, keep: str = "") -> int:
        """Remove what tries with smaller tokens left, but the live one; how many. None where the live one is not there."""
        removed = 0
        if keep and not self.path(kind, uuid, keep).exists():
            return 0
        for name in self.tokens(kind, uuid):
            if name != keep and int(name) < below:
                self.remove(kind, uuid, name)
                removed += 1
        if not removed:
            with contextlib.suppress(OSError):
                (self.folder / kind / uuid).rmdir()
        return removed


def _sync(path: Path) -> None:
    """A file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
