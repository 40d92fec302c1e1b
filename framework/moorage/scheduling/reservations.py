# SPDX-License-Identifier: Apache-2.0
"""Reservations of the requests for which one scheduler is claiming nodes at this moment."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moorage import threads
from moorage.scheduling.interface import InstanceRecord

__all__ = ["Reservation", "Reservations"]

#: Nodes share locks: requests for two nodes with one lock only wait for each other.
_LOCKS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """What a request has reserved. ``ended``: set when its claim, and those made with it, hold or were refused."""

    record: InstanceRecord
    ended: threads.Event


class Reservations:
    """Knows which request reserved what, and lets requests for one node take turns. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threads.lock()
        self._held: dict[int, Reservation] = {}
        self._turns = [threads.lock() for _ in range(_LOCKS)]

    @contextlib.contextmanager
    def holding(self) -> Iterator[Callable[[int, InstanceRecord], None]]:
        """Keep what requests have reserved, until their claims have ended.

        :returns: keeps a reservation; called with the number of the request, and what it has reserved.
        """
        mine: list[int] = []
        ended = threads.event()

        def hold(number: int, record: InstanceRecord) -> None:
            mine.append(number)
            with self._lock:
                self._held[number] = Reservation(record, ended)

        try:
            yield hold
        finally:
            with self._lock:
                for number in mine:
                    del self._held[number]
            ended.set()

    def instances(self) -> set[str]:
        """Returns the uuids of the reserved instances."""
        with self._lock:
            return {each.record.uuid for each in self._held.values()}

    def beside(self, number: int) -> tuple[list[InstanceRecord], list[Reservation]]:
        """What later requests have reserved, and what earlier ones have, the earliest first."""
        with self._lock:
            held = sorted(self._held.items())
        later = [each.record for other, each in held if other > number]
        return later, [each for other, each in held if other < number]

    @contextlib.contextmanager
    def acquire(self, node_uuid: str) -> Iterator[None]:
        """Keep other requests of this scheduler from judging and claiming the node meanwhile."""
        with self._turns[zlib.crc32(node_uuid.encode()) % _LOCKS]:
            yield
