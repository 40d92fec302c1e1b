# SPDX-License-Identifier: Apache-2.0
"""Confirms the epochs that messages claim by the table of services.

A message may claim any epoch. If a receiver believed a forged one, it would take every later message of the real service for one of
an earlier incarnation. So an epoch counts only when the table has it, or a later one. The table is read when an epoch is not
known: at once for a service that has just started, but ten times as long as a reading took after it, or a second if that is less;
and a second after a reading that did not know the epoch either, however many messages come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from oslo_log import log as logging

from moorage import errors, threads
from moorage.clock import Clock
from moorage.rpc.interface import Origin

__all__ = ["ConfirmedEpochs"]

LOG = logging.getLogger(__name__)
#: Seconds from the end of a reading of the table to the next one at most. It is less after one that confirmed what it was asked:
#: so many times as long as it took.
_PAUSE, _PART = 1.0, 10
#: How many services with an unconfirmed epoch are remembered between two readings.
_MOST = 1000


class ConfirmedEpochs:
    """The epochs of services that the table confirms. Safe for use by several threads.

    :param read: epoch of every service by its uuid, from the table; may raise Unavailable.
    """

    def __init__(self, read: Callable[[], Mapping[str, int]], clock: Clock) -> None:
        self._read = read
        self._clock = clock
        self._lock = threads.lock()
        self._epochs: Mapping[str, int] = {}
        #: When the table may be read again.
        self._next = float("-inf")
        #: Service -> (epoch, host) of the messages that were refused since the table was read.
        self._refused: dict[str, tuple[int, str]] = {}

    def confirms(self, origin: Origin, host: str) -> bool:
        """Returns whether the message may be believed; may read the table.

        :param host: what the message speaks of; see :meth:`take_confirmed`.
        """
        if self._known(origin.service, origin.epoch):
            return True
        with self._lock:
            began = self._clock.monotonic()
            read = self._refresh()
            if self._known(origin.service, origin.epoch):
                if read:
                    took = self._clock.monotonic() - began
                    self._next = began + took + min(_PAUSE, _PART * took)
                return True
            if len(self._refused) < _MOST:
                self._refused[origin.service] = origin.epoch, host
        LOG.debug("Service %s has no epoch %d; its message about %s is ignored.", origin.service, origin.epoch, host)
        return False

    @property
    def has_refused(self) -> bool:
        """Whether :meth:`take_confirmed` has messages to look at."""
        return bool(self._refused)

    def take_confirmed(self) -> set[str]:
        """Hosts whose messages were refused although the table confirms them by now: those messages are lost.

        Call it periodically.
        """
        with self._lock:
            if not self._refused:
                return set()
            read = self._refresh()
            refused = self._refused
            confirmed = {service for service, (epoch, _) in refused.items() if self._known(service, epoch)}
            # Unless the table was read, the next reading may have the others.
            left = () if read else refused.keys() - confirmed
            self._refused = {service: refused[service] for service in left}
            return {refused[service][1] for service in confirmed}

    def _known(self, service: str, epoch: int) -> bool:
        return self._epochs.get(service, -1) >= epoch

    def _refresh(self) -> bool:
        """Read the table unless that was done a moment ago; whether it was read."""
        if self._clock.monotonic() < self._next:
            return False
        try:
            self._epochs = self._read()
        except errors.Unavailable as error:
            LOG.warning("The epochs of services cannot be read: %s", error.message)
            return False
        finally:
            self._next = self._clock.monotonic() + _PAUSE
        return True
