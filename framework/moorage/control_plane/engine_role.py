# SPDX-License-Identifier: Apache-2.0
"""The role ``engine``: does its share of the periodic work, and delivers the journal to its followers."""

from __future__ import annotations

from collections.abc import Mapping

from oslo_config import cfg

from moorage.control_plane.journal_delivery import Delivery
from moorage.control_plane.periodic import PeriodicWork
from moorage.control_plane.periodic import check as check_periodic
from moorage.control_plane.periodic_loop import Look, SharedLook
from moorage.control_plane.process import Platform
from moorage.journal.delivery import POLL
from moorage.rpc.server import RpcDispatcher, endpoints_of, rpc_method

__all__ = ["Engine"]

ENGINES = "engine"


#: Seconds that deliveries may take to end at a stop or a reload. Those that take longer are done again.
_LAST_DELIVERIES = 5.0


class Engine:
    """Does its share of the periodic work, and delivers the journal."""

    binary = "engine"
    owns_work = True

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Begin."""
        self._platform = platform
        delivery = Delivery(platform, conf, poll=None)
        self._work = PeriodicWork(platform, conf)
        self._work.start()
        self._delivery = delivery
        self._delivery.start()
        looks: dict[str, tuple[float, Look]] = {
            name: (seconds, look) for name, seconds, look in self._work.looks(lambda: self._look.began)
        }
        # A reload replaces the delivery.
        looks["look for events to deliver"] = POLL, lambda transaction: self._delivery.look(transaction)
        self._look = SharedLook(platform, looks, first=0.0)
        self._look.start()
        self._subscription = platform.transport.serve(ENGINES, platform.name, RpcDispatcher(endpoints_of(_Ping())))

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Deliver as the new configuration says. Periodic work changes with a restart; its configuration is checked too."""
        check_periodic(conf)
        old, self._delivery = self._delivery, Delivery(self._platform, conf, poll=None)
        old.stop(_LAST_DELIVERIES)
        self._delivery.start()

    def stop(self, drain_seconds: float) -> None:
        """End."""
        self._subscription.stop(drain_seconds)
        self._delivery.stop(min(_LAST_DELIVERIES, drain_seconds))
        # It looks at the ring for as long as handlings run.
        self._work.stop(drain_seconds)
        self._look.stop()


class _Ping:
    """Lets others see that an engine answers."""

    @rpc_method
    def ping(self) -> Mapping[str, str]:
        """Returns an answer."""
        return {"answer": "pong"}
