# SPDX-License-Identifier: Apache-2.0
"""Imports the module of one entry point: Moorage's own at once, plugins' within limits of time.

A module of another distribution may compute or wait for ever, or end the thread that imports it. So it is imported in a thread of
its own. It is late when it used more processor time than :data:`PROCESSOR_LIMIT`, or :data:`WALL_FACTOR` times that of wall time.
A busy machine costs wall time, which is why the limit of wall time is generous. Moorage's own modules have no limit.
"""

from __future__ import annotations

import functools
import importlib.metadata
import traceback
from typing import Any

from oslo_log import log as logging
from stevedore import named

from moorage import plugin_isolation
from moorage.bounded_pool import BoundedPool, Overdue
from moorage.clock import SystemClock

__all__ = ["LateImportError", "distribution_of", "import_entry_point"]

LOG = logging.getLogger(__name__)

#: Seconds of processor time that the import of a plugin's module may use.
PROCESSOR_LIMIT = 30.0
#: How many times as much wall time it may take.
WALL_FACTOR = 10
_OWN = "moorage"


class LateImportError(Exception):
    """An import did not end within its limits. Another try may succeed, on a machine that is less busy."""


def import_entry_point(point: importlib.metadata.EntryPoint) -> tuple[Any, BaseException | None]:
    """Import an entry point; returns the object that it names, or None and what the import raised."""
    importing = _Import(point)
    # Here and not in the thread, which may never come back.
    with plugin_isolation.printing_aside():
        if distribution_of(point)[0].lower() == _OWN:
            importing.run()
            if isinstance(importing.failure, KeyboardInterrupt):
                raise importing.failure
        else:
            importing.run_within_limits()
    if importing.failure is not None:
        said = "".join(traceback.format_exception(importing.failure))
        LOG.debug("Import of %s failed: %s", point.value, said)
    return importing.plugin, importing.failure


def distribution_of(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that brings an entry point."""
    if point.dist is None:
        return "an unknown distribution", ""
    return _name_and_version(point.dist)


@functools.lru_cache(maxsize=1024)
def _name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Name and version; both are parsed out of the whole metadata each time they are read."""
    return distribution.name, distribution.version


class _Import:
    """One import and its outcome."""

    def __init__(self, point: importlib.metadata.EntryPoint) -> None:
        self._point = point
        self.plugin: Any = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            manager = _FreshManager(self._point)
            if manager.failure is None:
                self.plugin = manager.extensions[0].plugin
            self.failure = manager.failure
        except BaseException as error:  # noqa: BLE001  (SystemExit and AssertionError of a plugin must not stop the host)
            self.failure = error

    def run_within_limits(self) -> None:
        attempt = _Import(self._point)
        wall = PROCESSOR_LIMIT * WALL_FACTOR
        pool = BoundedPool(f"import-{self._point.name}", SystemClock(), 1)
        try:
            pool.call(attempt.run, wall, processor=PROCESSOR_LIMIT)
        except Overdue:
            self.failure = LateImportError(
                f"the import did not end within {PROCESSOR_LIMIT:g} seconds of processor time and {wall:g} seconds of wall time"
            )
        else:
            self.plugin, self.failure = attempt.plugin, attempt.failure
        finally:
            pool.close()


class _FreshManager(named.NamedExtensionManager[Any]):
    """stevedore's manager over one given entry point, without its cache."""

    def __init__(self, point: importlib.metadata.EntryPoint) -> None:
        self._point = point
        self.failure: BaseException | None = None
        super().__init__(
            namespace=point.group,
            names=[point.name],
            on_load_failure_callback=self._failed,
        )

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        return [self._point]

    @staticmethod
    def _failed(manager: Any, point: importlib.metadata.EntryPoint, error: BaseException) -> None:
        manager.failure = error
