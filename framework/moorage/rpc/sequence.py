# SPDX-License-Identifier: Apache-2.0
"""Distinguishes new messages from old, repeated and lost ones by their (service, epoch, sequence)."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from moorage import threads
from moorage.rpc.interface import Origin

__all__ = ["OriginFilter", "Verdict"]


class Verdict(enum.Enum):
    """What a message is to a receiver that has seen others of the same sender."""

    #: The next one, or the first that was ever seen of this sender.
    NEW = "new"
    #: Newer than all, but numbers between were not seen: lost, still under way, or sent to others (a sender counts all its
    #: topics together).
    GAP = "gap"
    #: Not seen before, but a newer one was: whatever it says about the present state is out of date.
    LATE = "late"
    #: Seen before, or so old that it is unknown whether it was seen.
    DUPLICATE = "duplicate"
    #: Of an earlier incarnation of the service.
    OLD_EPOCH = "old-epoch"

    @property
    def fresh(self) -> bool:
        """Whether it is the newest word of its sender (NEW or GAP)."""
        return self in (Verdict.NEW, Verdict.GAP)


@dataclass(slots=True)
class _Seen:
    """``mask`` has bit i set when the sequence ``highest - i`` was seen."""

    epoch: int
    highest: int
    mask: int


class OriginFilter:
    """Remembers what was seen of each service; thread safe, O(1), bounded memory.

    Numbers more than ``window`` below the newest count as DUPLICATE: throwing out a message is allowed (at most once), handling
    one twice is not. When more than ``services`` send, the one not heard for longest is forgotten, and its next message is NEW.

    :param window: how many of the last numbers are remembered.
    :param services: how many senders are remembered.
    """

    def __init__(self, window: int = 1024, services: int = 65536) -> None:
        self._window = window
        self._limit = services
        self._full = (1 << window) - 1
        self._services: OrderedDict[str, _Seen] = OrderedDict()
        self._lock = threads.lock()

    def accept(self, origin: Origin) -> Verdict:
        """Judge a message and remember it. Two calls with equal origins: the second is never NEW, GAP or LATE."""
        with self._lock:
            seen = self._services.get(origin.service)
            if seen is None:
                return self._first(origin, Verdict.NEW)
            self._services.move_to_end(origin.service)
            if origin.epoch < seen.epoch:
                return Verdict.OLD_EPOCH
            if origin.epoch > seen.epoch:
                return self._first(origin, Verdict.NEW if origin.sequence == 1 else Verdict.GAP)
            return self._same_epoch(seen, origin.sequence)

    def forget(self, service: str) -> None:
        """Remember nothing more of a service (it was removed)."""
        with self._lock:
            self._services.pop(service, None)

    def __len__(self) -> int:
        """Returns how many services are remembered."""
        return len(self._services)

    def _first(self, origin: Origin, verdict: Verdict) -> Verdict:
        self._services[origin.service] = _Seen(origin.epoch, origin.sequence, 1)
        self._services.move_to_end(origin.service)
        if len(self._services) > self._limit:
            self._services.popitem(last=False)
        return verdict

    def _same_epoch(self, seen: _Seen, sequence: int) -> Verdict:
        ahead = sequence - seen.highest
        if ahead > 0:
            # A jump beyond the window forgets all of it; without this test a huge number would build a huge integer.
            seen.mask = 1 if ahead >= self._window else ((seen.mask << ahead) | 1) & self._full
            seen.highest = sequence
            return Verdict.NEW if ahead == 1 else Verdict.GAP
        bit = 1 << -ahead if -ahead < self._window else 0
        if not bit or seen.mask & bit:
            return Verdict.DUPLICATE
        seen.mask |= bit
        return Verdict.LATE
