# SPDX-License-Identifier: Apache-2.0
"""Reservations of the requests for which one scheduler is claiming nodes at this moment."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from moorage import threads
from moorage.scheduling.interface import InstanceRecord

__all__ = ["Reservation", "Reservations"]

#: Nodes share locks: requests for two nodes with one lock only wait for each other.
_LOCKS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """What a request has reserved. ``ended``: set when its claim holds or was refused."""

    record: InstanceRecord
    ended: threads.Event = field(default_factory=threads.event)


class Reservations:
    """Knows which request reserved what, and lets requests for one node take turns. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threads.lock()
        self._held: dict[int, Reservation] = {}
        self._turns = [threads.lock() for _ in range(_LOCKS)]

    @contextlib.contextmanager
    def holding(self, number: int, record: InstanceRecord) -> Iterator[None]:
        """Keep what a request has reserved, until its claim has ended."""
        mine = Reservation(record)
        with self._lock:
            self._held[number] = mine
        try:
            yield
        finally:
            with self._lock:
                del self._held[number]
            mine.ended.set()

    def instances(self) -> set[str]:
        """The uuids of what is reserved."""
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
