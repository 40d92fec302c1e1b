# SPDX-License-Identifier: Apache-2.0
"""What the driver redfish keeps of its machines, in files that survive the agent and its machine.

* ``NODE.json``: which instance has the machine of a node, under which token, and how far its power was changed. Absent: none has
  it.
* ``NODE.lock``: a lock (flock) on it is held while the power of the machine is changed, and while its record is written. The kernel
  takes it from an agent that was killed; an agent that is paused keeps it.
* ``tokens.json``: the highest token that was seen of each instance lately, also of instances that are gone. An operation writes its
  token there before it waits for a machine, and looks there again when it has it. So no late operation comes after a later one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oslo_log import log as logging

from moorage import randomness
from moorage.clock import Clock
from moorage.drivers.interface import DriverError

__all__ = ["Power", "Record", "Records"]

LOG = logging.getLogger(__name__)
_TOKENS = "tokens"
#: Instances whose tokens are kept: so many are not built on the machines of one agent while another agent stands still.
_KEPT = 1000
_PAUSE = 0.05
#: Seconds that no write of a file takes.
_OLD = 3600.0


class Power(enum.StrEnum):
    """How far the power of a machine was changed for its instance.

    BUILDING: it is to run for the first time, or its machine may boot what a build set for one boot. STARTING, STOPPING: a start
    or stop was begun. ON: it was seen on. OFF: it was stopped. REPLACED: it was turned off for another try on another machine,
    which has not run yet.
    """

    BUILDING = "building"
    STARTING = "starting"
    STOPPING = "stopping"
    ON = "on"
    OFF = "off"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Record:
    """Who has a machine.

    :param order: the highest order of the power calls. :param since: when ``power`` was written, in seconds since the Unix epoch.
    """

    instance: str
    token: int
    power: Power
    order: int = 0
    since: float = 0.0


class Records:
    """The records of one agent. Safe for use by several threads and processes."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        for entry in os.scandir(folder):
            # What a killed writer left. A younger one may be being written.
            with contextlib.suppress(FileNotFoundError):
                if entry.name.startswith(".") and entry.stat().st_mtime < clock.wall() - _OLD:
                    os.unlink(entry.path)

    def announce(self, uuid: str, token: int) -> bool:
        """Keeps the token of an operation on an instance; False when a higher one is known.

        :raises DriverError: another process keeps the file locked.
        """
        with self.locked(_TOKENS, 10.0):
            tokens = self._tokens()
            highest = max(tokens.pop(uuid, 0), token)
            self._replace(_TOKENS, json.dumps({**tokens, uuid: highest}))
            return highest == token

    def is_newest(self, uuid: str, token: int) -> bool:
        """Returns whether no higher token of the instance is known."""
        return self._tokens().get(uuid, 0) <= token

    def all(self) -> Mapping[str, Record]:
        """Node -> record, of the machines that instances have."""
        names = [each.removesuffix(".json") for each in os.listdir(self._folder) if each.endswith(".json")]
        found = {name: self.read(name) for name in names if name != _TOKENS}
        return {node: record for node, record in found.items() if record is not None}

    def of(self, uuid: str) -> Mapping[str, Record]:
        """Node -> record, of the machines that an instance has."""
        return {node: record for node, record in self.all().items() if record.instance == uuid}

    def read(self, node: str) -> Record | None:
        """Returns the record of a machine; None when no instance has it.

        :raises DriverError: the file is damaged.
        """
        path = self._folder / f"{node}.json"
        try:
            found = json.loads(path.read_bytes())
            return Record(**{**found, "power": Power(found["power"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            LOG.error(
                "%s is damaged: %s. See which instance has the machine, and remove the file when none has.", path, error
            )
            raise DriverError(f"the record of node {node} is damaged; the log of the agent names its file") from error

    def write(self, node: str, record: Record) -> Record:
        """Replaces the record of a machine whose lock the caller has."""
        written = dataclasses.replace(record, since=self._clock.wall())
        self._replace(node, json.dumps(dataclasses.asdict(written)))
        return written

    def clear(self, node: str) -> None:
        """Removes the record of a machine whose lock the caller has."""
        (self._folder / f"{node}.json").unlink(missing_ok=True)
        self._flush(self._folder)

    def busy(self, node: str) -> bool:
        """Returns whether the power of a machine is being changed."""
        try:
            with self.locked(node, 0.0):
                return False
        except DriverError:
            return True

    @contextlib.contextmanager
    def locked(self, name: str, seconds: float) -> Iterator[None]:
        """Holds the lock of a machine.

        :raises DriverError: another thread or process has held it for so long.
        """
        descriptor = os.open(self._folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            end = self._clock.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._clock.monotonic() >= end:
                        raise DriverError(
                            f"another operation has worked on the machine of node {name} for more than {seconds:g} seconds. If an "
                            "earlier process of the agent stands still, end it"
                        ) from None
                self._clock.sleep(_PAUSE)
            yield
        finally:
            os.close(descriptor)

    def _tokens(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads((self._folder / f"{_TOKENS}.json").read_bytes())
        except FileNotFoundError:
            return {}
        return dict(list(found.items())[-_KEPT:])

    def _replace(self, name: str, text: str) -> None:
        """Replaces a file by one rename, on the disk."""
        made = self._folder / f".{name}.{randomness.new_hex()}"
        try:
            with open(made, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            made.replace(self._folder / f"{name}.json")
        finally:
            made.unlink(missing_ok=True)
        self._flush(self._folder)

    @staticmethod
    def _flush(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
