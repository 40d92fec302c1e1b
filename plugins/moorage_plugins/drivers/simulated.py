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
from typing import ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage.drivers.interface import ComputeDriver, DriverError, DriverTools, Observed, Workload, WorkloadState

__all__ = ["SimulatedDriver"]

LOG = logging.getLogger(__name__)
#: The longest simulated delay, in seconds.
_LONGEST = 3600.0


class SimulatedDriver(ComputeDriver):
    """Builds and destroys instances as files.

    Each effect lies under a name with its token, in a folder of the instance's own; the newest token is the instance, older
    ones are what tries left that were taken over. ``[compute] build_delay``, ``destroy_delay`` and ``fail_builds`` say how slow it
    is, and how it fails, where the flavor does not say.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    live_migrates: ClassVar[bool] = True

    def __init__(self, tools: DriverTools) -> None:
        super().__init__(tools)
        section = tools.conf.compute
        self._folder = Path(tools.conf.control_plane.state_dir) / "hypervisors" / tools.host
        self._clock = tools.clock
        self._build_delay = float(section.build_delay)
        self._destroy_delay = float(section.destroy_delay)
        self._fail_builds = str(section.fail_builds)
        self._folder.mkdir(parents=True, exist_ok=True)

    @override
    def check(self, workload: Workload) -> None:
        """Takes the time that the operation takes.

        :raises DriverError: the flavor or the configuration says that it fails.
        """
        extra_specs, operation = workload.extra_specs, workload.operation
        builds = operation == "build"
        prefix = "sim:" if builds else f"sim:{operation}_"
        self._clock.sleep(_seconds(prefix, extra_specs, self._build_delay))
        fault = extra_specs.get(f"{prefix}fail", (self._fail_builds or None) if builds else None)
        if fault is not None:
            raise DriverError(fault or f"the simulated {operation} failed")

    @override
    def spawn(self, workload: Workload, token: int) -> None:
        self.check(workload)
        with self._told():
            self._create(workload.uuid, token)
            tokens = self._tokens(workload.uuid)
            self._remove(workload.uuid, (found for found in tokens if found != max(tokens)))

    @override
    def destroy(self, uuid: str, up_to_token: int) -> None:
        self._clock.sleep(self._destroy_delay)
        with self._told():
            self._remove(uuid, [token for token in self._tokens(uuid) if token <= up_to_token])

    @override
    def inspect(self) -> Mapping[str, Observed]:
        with self._told():
            tokens = {entry.name: self._tokens(entry.name) for entry in os.scandir(self._folder) if entry.is_dir()}
        return {uuid: Observed(max(found), WorkloadState.RUNNING) for uuid, found in tokens.items() if found}

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
            LOG.error("The folder %s failed: %s", self._folder, error)
            raise DriverError(
                f"the hypervisor's folder failed ({error.strerror}); the log of the agent names it"
            ) from error


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
