# SPDX-License-Identifier: Apache-2.0
"""A simulated network under transport ``memory``: messages arrive when, if, and as often as a test says.

There are no threads: a handler runs inside :meth:`ScriptedNetwork.deliver`, or inside the call that was sent. So a run is decided
by the order of the test's steps alone.
"""

from __future__ import annotations

import abc
import enum
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from typing_extensions import override

from moorage import errors
from moorage.clock import Clock

__all__ = ["Fate", "Listener", "Network", "Parcel", "ScriptedNetwork"]


class Listener(abc.ABC):
    """Where a parcel goes."""

    #: Name of the simulated process that listens.
    owner: str
    topic: str
    server: str

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether it still listens."""

    @abc.abstractmethod
    def handle_now(self, encoded: bytes, timeout: float | None) -> bytes:
        """Handles a message in the calling thread, and returns the reply. No other thread can answer in its place."""

    @abc.abstractmethod
    def handle_call(self, encoded: bytes, timeout: float, send: Callable[[bytes], None]) -> None:
        """Handles a call in the calling thread, and sends one reply; see :func:`moorage.rpc.wire.answer_once`."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One message on its way from one process to one listener; equal only to itself."""

    source: str
    topic: str
    target: Listener
    encoded: bytes


class Fate(enum.Enum):
    """What becomes of a call."""

    DELIVER = "deliver"
    #: It never arrives; its sender waits in vain.
    LOSE_REQUEST = "lose-request"
    #: It is handled; the answer never arrives.
    LOSE_REPLY = "lose-reply"
    #: It is handled, and the connection breaks before the answer.
    BREAK = "break"


class Network(abc.ABC):
    """What carries parcels."""

    @abc.abstractmethod
    def post(self, parcel: Parcel) -> None:
        """Take a cast or one copy of a fanout."""

    @abc.abstractmethod
    def call(self, parcel: Parcel, timeout: float) -> bytes:
        """Carry a call and its reply; raises CallTimeout, PeerLost, NoListener."""

    def begin_call(self, parcel: Parcel, timeout: float) -> Callable[[], bytes]:
        """Sends a call and returns the function that waits for the reply. By default that function makes the whole call."""
        return functools.partial(self.call, parcel, timeout)


class ScriptedNetwork(Network):
    """Keeps casts and fanouts in :attr:`pending`, oldest first, until a test delivers or drops them. Calls go through at once.

    :param clock: sleeps for the timeout of a call that is lost.
    :param fate: decides about each call; all are delivered without it.
    """

    def __init__(self, clock: Clock, fate: Callable[[Parcel], Fate] | None = None) -> None:
        self.pending: list[Parcel] = []
        self.fate = fate
        self._clock = clock
        self._cuts: set[frozenset[str]] = set()

    @override
    def post(self, parcel: Parcel) -> None:
        self.pending.append(parcel)

    @override
    def call(self, parcel: Parcel, timeout: float) -> bytes:
        fate = self.fate(parcel) if self.fate is not None else Fate.DELIVER
        if fate is Fate.LOSE_REQUEST or self.is_cut(parcel.source, parcel.target.owner):
            self._clock.sleep(timeout)
            raise errors.CallTimeout(f"The simulated network lost a call to topic '{parcel.topic}'.")
        if not parcel.target.alive:
            raise errors.NoListener(f"Server '{parcel.target.server}' of topic '{parcel.topic}' is gone.")
        started = self._clock.monotonic()
        reply = parcel.target.handle_now(parcel.encoded, timeout)
        if fate is Fate.BREAK:
            raise errors.PeerLost(f"The simulated network broke a call to topic '{parcel.topic}'.")
        late = self._clock.monotonic() - started > timeout
        if fate is Fate.LOSE_REPLY or late:
            self._clock.sleep(max(0.0, started + timeout - self._clock.monotonic()))
            raise errors.CallTimeout(f"The simulated network lost the reply of a call to topic '{parcel.topic}'.")
        return reply

    def deliver(self, index: int = 0) -> bool:
        """Let one pending parcel arrive; False when its target is gone or cut off (the parcel is lost then)."""
        parcel = self.pending.pop(index)
        if not parcel.target.alive or self.is_cut(parcel.source, parcel.target.owner):
            return False
        parcel.target.handle_now(parcel.encoded, None)
        return True

    def deliver_all(self, most: int = 100_000) -> int:
        """Let everything arrive in order, also what handlers send meanwhile; returns how many parcels moved.

        :raises RuntimeError: more than ``most`` moved; two handlers probably answer each other for ever.
        """
        moved = 0
        while self.pending:
            if moved >= most:
                raise RuntimeError(
                    f"{most} messages moved and there are still more; do two handlers answer each other?"
                )
            self.deliver()
            moved += 1
        return moved

    def drop(self, index: int = 0) -> None:
        """Lose one pending parcel."""
        del self.pending[index]

    def duplicate(self, index: int = 0) -> None:
        """Put a copy of one pending parcel at the end."""
        self.pending.append(self.pending[index])

    def reorder(self, index: int, to: int) -> None:
        """Move one pending parcel to another place in the line (delay it, or let it overtake)."""
        self.pending.insert(to, self.pending.pop(index))

    def cut(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Let nothing through between two sets of processes, in both directions."""
        others = list(other)
        self._cuts |= {frozenset((left, right)) for left in one for right in others}

    def heal(self) -> None:
        """Let everything through again."""
        self._cuts.clear()

    def is_cut(self, one: str, other: str) -> bool:
        """Returns whether nothing gets through between two processes."""
        return frozenset((one, other)) in self._cuts
