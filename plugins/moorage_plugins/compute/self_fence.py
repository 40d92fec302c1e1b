# SPDX-License-Identifier: Apache-2.0
"""Renews the lease of a host that fences itself: tells the compute driver of each heartbeat that the store has confirmed.

The store may take the host for fenced ``self_fence`` seconds and a margin after its last heartbeat. The host's workloads end
``self_fence`` seconds less a margin after a moment before that heartbeat was sent. See :mod:`moorage.services.registry`.
"""

from __future__ import annotations

from oslo_log import log as logging

from moorage import errors, threads
from moorage.control_plane.interface import AgentTools
from moorage.drivers.interface import DriverError, SelfFencing
from moorage.services.interface import SELF_FENCE_MARGIN

__all__ = ["SelfFence"]

LOG = logging.getLogger(__name__)
#: Heartbeats that fit into a lease at least.
_HEARTBEATS = 3
#: Seconds that a restart of an agent may take, from the end of its process to the first renewal of the next.
_RESTART = 30.0


class SelfFence:
    """The lease of one agent's host (:class:`moorage.services.heartbeat.HostLease`).

    It is promised when all workloads of the host would end with it. Calls of the driver, which may hang, are in a thread of their
    own: an agent must not lose its heartbeats by them.

    :raises ConfigError: a late heartbeat or two would end all workloads.
    """

    def __init__(self, tools: AgentTools, driver: SelfFencing) -> None:
        self._tools = tools
        self._driver = driver
        self._seconds = driver.self_fence
        interval = tools.conf.services.report_interval if self._seconds else 0.0
        if self._seconds < _HEARTBEATS * interval:
            raise errors.ConfigError(
                f"self_fence = {self._seconds:g} of the compute driver is less than {_HEARTBEATS} times [services] "
                f"report_interval = {interval:g}: late heartbeats would end all workloads. Write a longer self_fence, or 0."
            )
        self._interval = interval
        self._moment = tools.clock.boottime() if self._seconds else 0.0
        #: The moment of the last renewal.
        self._done = self._moment
        self._promised = self._stopped = False
        self._told = 0
        self._wake = threads.event()
        self._thread = threads.thread(self._run, name="self-fence")

    def start(self) -> None:
        """Begins the lease, or turns one off that there was.

        :raises Unavailable: the driver cannot keep it.
        """
        host = self._tools.identity.host
        if self._seconds:
            self._tools.renew(self)
        self._done = self._moment
        try:
            self._renew(self._done)
        except DriverError as error:
            raise errors.Unavailable(f"The lease of host {host} cannot be begun: {error}") from error
        if self._seconds:
            if self._seconds * (1 - SELF_FENCE_MARGIN) < _RESTART:
                LOG.warning(
                    "The workloads of host %s end %g seconds after the last heartbeat of its agent. A restart of the agent may "
                    "take up to %g seconds, and then ends them. Write a longer self_fence.",
                    host, self._seconds * (1 - SELF_FENCE_MARGIN), _RESTART,
                )  # fmt: skip
            self._wake.set()
            self._thread.start()

    def ended(self) -> None:
        """Renews the lease no more; it lasts until it is over, or the next agent has its own."""
        self._stopped = True
        self._wake.set()

    def promised(self) -> float | None:
        """Returns the seconds of the lease, once all workloads end with it."""
        return self._seconds if self._promised else None

    def renewed(self, moment: float) -> None:
        """Has the thread renew the lease."""
        self._moment = moment
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._tools.clock.wait(self._wake, self._interval)
            self._wake.clear()
            if self._stopped:
                return
            moment = self._moment
            try:
                if moment != self._done:
                    self._renew(moment)
                    self._done = moment
                if not self._promised:
                    self._look()
            except DriverError as error:
                LOG.warning(
                    "The lease of host %s cannot be renewed now, and its workloads end with it: %s",
                    self._tools.identity.host, error,
                )  # fmt: skip
            except Exception:
                # The thread must go on: without it all workloads end.
                LOG.exception(
                    "The compute driver has a fault. The lease of host %s cannot be renewed now, and its workloads end with it.",
                    self._tools.identity.host,
                )

    def _renew(self, moment: float) -> None:
        self._driver.renew(self._tools.identity.epoch, moment + self._seconds * (1 - SELF_FENCE_MARGIN))

    def _look(self) -> None:
        """Promises the lease if all workloads would end with it; logs, once, those that would not."""
        left = self._driver.not_fenced()
        self._promised = not left
        if left and len(left) != self._told:
            self._told = len(left)
            LOG.warning(
                "Host %s does not fence itself yet, because %d of its workloads were started without self_fence: %s. Reboot or "
                "rebuild these instances.", self._tools.identity.host, len(left), ", ".join(sorted(left)[:20]),
            )  # fmt: skip
        elif not left:
            LOG.info("Host %s fences itself within %g seconds.", self._tools.identity.host, self._seconds)
