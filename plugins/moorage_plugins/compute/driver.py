# SPDX-License-Identifier: Apache-2.0
"""A simulated hypervisor. What it runs are files, so that an agent that was killed finds what really exists.

A flavor's extra specs can make it slow or fail: ``sim:delay_ms`` (milliseconds) and ``sim:fail`` (the text of the fault) its
builds, ``sim:<operation>_delay_ms`` and ``sim:<operation>_fail`` another operation (rebuild, resize, live_migrate, unshelve,
shelve_offload).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moorage.clock import Clock

__all__ = ["DriverError", "SimulatedDriver"]

#: The longest simulated delay, in seconds.
_LONGEST = 3600.0


class DriverError(Exception):
    """The hypervisor could not do it; the text goes into the instance's fault."""


class SimulatedDriver:
    """Builds and destroys instances as files.

    Each effect lies under a name with its token, in a folder of the instance's own; the newest token is the instance, older
    ones are what tries left that were taken over.

    :param build_delay: seconds a build takes where the flavor does not say; ``destroy_delay`` those of a destruction.
    :param fail_builds: the text of the fault with which every build fails; empty for none.
    """

    def __init__(
        self, folder: Path, clock: Clock, *, build_delay: float, destroy_delay: float, fail_builds: str = ""
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._build_delay = build_delay
        self._destroy_delay = destroy_delay
        self._fail_builds = fail_builds
        folder.mkdir(parents=True, exist_ok=True)

    def check(self, operation: str, extra_specs: Mapping[str, str]) -> None:
        """Take the time that the operation takes.

        :raises DriverError: the flavor or the configuration says that it fails.
        """
        builds = operation == "build"
        prefix = "sim:" if builds else f"sim:{operation}_"
        self._clock.sleep(_seconds(prefix, extra_specs, self._build_delay))
        fault = extra_specs.get(f"{prefix}fail", (self._fail_builds or None) if builds else None)
        if fault is not None:
            raise DriverError(fault or f"the simulated {operation} failed")

    def build(self, uuid: str, token: int, extra_specs: Mapping[str, str], operation: str = "build") -> None:
        """Start the instance; repeating it with another token replaces what an earlier try left.

        :raises DriverError: the flavor or the configuration says that it fails, or the folder cannot be written.
        """
        self.check(operation, extra_specs)
        with self._told():
            self._create(uuid, token)
            tokens = self._tokens(uuid)
            self._remove(uuid, (found for found in tokens if found != max(tokens)))

    def destroy(self, uuid: str, *, newest: int | None = None) -> None:
        """Stop the instance, whatever tries left; harmless when there is none.

        :param newest: only what tries up to this token left.
        :raises DriverError: the folder cannot be written.
        """
        self._clock.sleep(self._destroy_delay)
        with self._told():
            self._remove(uuid, [token for token in self._tokens(uuid) if newest is None or token <= newest])

    def discard(self, uuid: str, token: int) -> None:
        """Remove what one try left, after it was taken over.

        :raises DriverError: the folder cannot be written.
        """
        with self._told():
            self._remove(uuid, [token])

    def running(self) -> dict[str, int]:
        """Uuid -> newest token of what really runs.

        :raises DriverError: the folder cannot be read.
        """
        with self._told():
            tokens = {entry.name: self._tokens(entry.name) for entry in os.scandir(self._folder) if entry.is_dir()}
        return {uuid: max(found) for uuid, found in tokens.items() if found}

    def _create(self, uuid: str, token: int) -> None:
        while True:
            (self._folder / uuid).mkdir(exist_ok=True)
            # Somebody who destroys another try may remove the folder in this moment.
            with contextlib.suppress(FileNotFoundError):
                (self._folder / uuid / str(token)).touch()
                return

    def _tokens(self, uuid: str) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._folder / uuid) if name.isdigit()]
        except FileNotFoundError:
            return []

    def _remove(self, uuid: str, tokens: Iterable[int]) -> None:
        for token in tokens:
            (self._folder / uuid / str(token)).unlink(missing_ok=True)
        # Fails while another try has a file there.
        with contextlib.suppress(OSError):
            (self._folder / uuid).rmdir()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DriverError(f"the hypervisor's folder {self._folder} failed: {error.strerror}") from error


def _seconds(prefix: str, extra_specs: Mapping[str, str], default: float) -> float:
    milliseconds = extra_specs.get(f"{prefix}delay_ms")
    if milliseconds is None:
        return default
    try:
        seconds = float(milliseconds) / 1000
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST:
        raise DriverError(
            f"{prefix}delay_ms of the flavor is {milliseconds!r}; it must be milliseconds from 0 to {_LONGEST * 1000:.0f}"
        )
    return seconds
