# SPDX-License-Identifier: Apache-2.0
"""What the driver libvirt keeps of its machines, in files that survive the agent, and the locks under which it changes machines.

``FOLDER/UUID/TOKEN/state.json`` is the :class:`Record` of one workload. Its folder is made before its domain is defined, and is
removed after it. A call locks (flock) the folder of the instance while it changes anything of the instance. The kernel takes the
lock from an agent that was killed; an agent that is paused keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moorage.clock import Clock
from moorage.drivers.interface import DriverError
from moorage_plugins.drivers.guarded.files import read_json, tokens_of, write_json

__all__ = ["Power", "Record", "Records"]

_STATE = "state.json"
_PAUSE = 0.05


class Power(enum.StrEnum):
    """What was last done to a machine that ran at least once.

    ON: it was started, or its start was begun. STOPPING: a stop was begun. OFF: it was stopped. REPLACED: it was ended for a newer
    token, which has not run yet.
    """

    ON = "on"
    STOPPING = "stopping"
    OFF = "off"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a machine that ran at least once.

    :param order: the highest order of the power calls. :param since: when ``power`` was written, in seconds since the Unix epoch.
    """

    power: Power
    order: int = 0
    since: float = 0.0


class Records:
    """The records of one agent. Safe for use by several threads and processes."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def tokens(self, uuid: str) -> list[int]:
        """Returns the tokens of an instance that have records."""
        return tokens_of(self._folder / uuid)

    def all(self) -> Mapping[str, Mapping[int, Record | None]]:
        """Returns all records, by instance and token."""
        return {
            uuid: {token: self.read(uuid, token) for token in self.tokens(uuid)} for uuid in os.listdir(self._folder)
        }

    def read(self, uuid: str, token: int) -> Record | None:
        """Returns the record of a machine; None when it never ran."""
        found = read_json(self._folder / uuid / str(token) / _STATE)
        return None if found is None else Record(**{**found, "power": Power(found["power"])})

    def begin(self, uuid: str, token: int) -> None:
        """Notes that there is about to be something of this token. The caller holds the instance."""
        (self._folder / uuid / str(token)).mkdir(exist_ok=True, mode=0o700)

    def write(self, uuid: str, token: int, record: Record) -> Record:
        """Replaces the record of a machine. The caller holds the instance."""
        self.begin(uuid, token)
        written = dataclasses.replace(record, since=self._clock.wall())
        write_json(self._folder / uuid / str(token) / _STATE, dataclasses.asdict(written))
        return written

    def clear(self, uuid: str, token: int) -> None:
        """Forgets a token. The caller holds the instance."""
        shutil.rmtree(self._folder / uuid / str(token), ignore_errors=True)

    def busy(self, uuid: str) -> bool:
        """Returns whether a call changes something of the instance now."""
        try:
            descriptor = os.open(self._folder / uuid, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextlib.contextmanager
    def held(self, uuid: str, seconds: float) -> Iterator[int]:
        """Holds an instance, so that no other call changes anything of it; the descriptor of the lock.

        :raises DriverError: another call has held it for so long.
        """
        folder = self._folder / uuid
        end = self._clock.monotonic() + seconds
        while True:
            # Not by exist_ok: it fails for a folder that another call removes at this moment.
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            try:
                if self._lock(descriptor, folder):
                    try:
                        yield descriptor
                    finally:
                        # Fails unless nothing is left of the instance.
                        with contextlib.suppress(OSError):
                            folder.rmdir()
                    return
            finally:
                os.close(descriptor)
            if self._clock.monotonic() >= end:
                raise DriverError(
                    f"another operation has worked on the machine of the instance for more than {seconds:g} seconds. If an earlier "
                    "process of the agent stands still, end it"
                )
            self._clock.sleep(_PAUSE)

    @staticmethod
    def _lock(descriptor: int, folder: Path) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been removed, and made again, since it was opened.
            return os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except (BlockingIOError, FileNotFoundError):
            return False
