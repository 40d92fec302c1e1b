# SPDX-License-Identifier: Apache-2.0
"""The engine: it does its share of the periodic work."""

from __future__ import annotations

from collections.abc import Mapping

from oslo_config import cfg

from moorage.control_plane.periodic import PeriodicWork
from moorage.control_plane.periodic import check as check_periodic
from moorage.control_plane.process import Platform
from moorage.rpc.server import Dispatcher, endpoints_of, rpc_method

__all__ = ["Engine"]

ENGINES = "engine"


class Engine:
    """Does its share of the periodic work."""

    binary = "engine"
    owns_work = True

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Begin."""
        self._work = PeriodicWork(platform, conf)
        self._work.start()
        self._subscription = platform.transport.serve(ENGINES, platform.name, Dispatcher(endpoints_of(_Ping())))

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Nothing of an engine changes without a restart; the configuration is checked all the same."""
        check_periodic(conf)

    def stop(self, drain_seconds: float) -> None:
        """End."""
        self._subscription.stop(drain_seconds)
        self._work.stop(drain_seconds)


class _Ping:
    """Lets others see that an engine answers."""

    @rpc_method
    def ping(self) -> Mapping[str, str]:
        """An answer."""
        return {"answer": "pong"}
