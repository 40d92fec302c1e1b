# SPDX-License-Identifier: Apache-2.0
"""Keeps the ring that this member works under, and the objects that the member owns on it.

Overlaps of two owners, and what bounds them (one handling of the slowest object is *o*, the time between two looks *P*):

* a member that pauses or loses the backend checks its lease before every object, and stops before others may begin: at most *o*;
* a change of the ring among live members: at most *P* and *o* with ``immediate`` (five *P* when the store answers one of us and
  not the other), nothing with ``drain``, which waits for handlings of the old ring, each for its task's ``timeout`` at most;
* whatever happens, one claim for each task, object and tick, and no write of an owner that was overtaken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.clock import Clock
from moorage.coordination.interface import View
from moorage.coordination.membership import MemberId, Membership
from moorage.coordination.ring_ledger import Ledger, RingRow
from moorage.ring import Ring

__all__ = ["RingManager", "RingSettings", "RingSnapshot", "InFlight", "ring_of"]

LOG = logging.getLogger(__name__)
#: A look of the thread is late after so many times ``poll_interval``.
_LATE = 1.5


@dataclass(frozen=True, slots=True)
class RingSettings:
    """See the options of the same names; durations in seconds."""

    replicas: int = 40
    hash_function: str = "md5"
    settle: float = 1.0
    drain: bool = False
    poll_interval: float = 1.0

    @property
    def stale_after(self) -> float:
        """Seconds after which a ring may not be worked under unless its row was read again."""
        return max(1.0, 5 * self.poll_interval)


def ring_of(row: RingRow) -> Ring[bytes]:
    """Returns the ring that a row describes."""
    weights = {member: MemberId.parse(member).weight for member in row.members}
    return Ring(weights, row.replicas, row.hash_function)


@dataclass(frozen=True, slots=True, eq=False)
class RingSnapshot:
    """One ring, as one member adopted it; never changes.

    :param token: of the ring's row; a larger one is a later ring.
    :param me: the id under which this member is on it.
    :param expires_at: until when, on the monotonic scale, the membership was certain when this was made; it is renewed since,
        so ask :meth:`RingManager.is_current`.
    """

    group: str
    token: int
    me: bytes
    ring: Ring[bytes]
    expires_at: float

    @property
    def members(self) -> tuple[bytes, ...]:
        """Who is on it."""
        return self.ring.members

    @property
    def digest(self) -> str:
        """See :attr:`moorage.ring.Ring.digest`."""
        return self.ring.digest

    def owner(self, key: str) -> bytes:
        """Who owns the key."""
        return self.ring.owner(key)

    def owners(self, keys: Sequence[str]) -> list[bytes]:
        """Who owns each of the keys."""
        return self.ring.owners(keys)

    def subset(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys that this member owns."""
        return self.ring.subset(keys, self.me)

    def ranges(self) -> list[tuple[int, int]]:
        """Where this member's keys can lie; see :meth:`moorage.ring.Ring.ranges`."""
        return self.ring.ranges(self.me)


class InFlight:
    """Around the handling of one object; gives whether it may begin.

    A handling that was abandoned is released before it ends: from then on its lease is over, and a ring that waits for
    it need wait no longer.
    """

    def __init__(self, allowed: bool, end: Callable[[], None]) -> None:
        self._allowed = allowed
        self._end = end
        self._lock = threads.lock()
        self._counted = allowed

    def __enter__(self) -> bool:
        return self._allowed

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """It counts no more; twice is as good as once."""
        with self._lock:
            counted, self._counted = self._counted, False
        if counted:
            self._end()


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The members and the ring, as the first half of a step has read them.

    :param me: the member id of the present stay; None: this process is no member.
    :param adopted: member -> the newest token that it works under.
    :param seen: :attr:`RingManager._seen` after the reading.
    """

    me: bytes | None
    view: View
    row: RingRow | None
    adopted: Mapping[bytes, int]
    seen: tuple[float, int | None]


class RingManager:
    """Looks who is there, proposes rings, adopts what the ledger says. :meth:`step` does it all; a thread calls it."""

    def __init__(
        self, membership: Membership, ledger: Ledger, group: str, clock: Clock, settings: RingSettings
    ) -> None:
        self._membership = membership
        self._ledger = ledger
        self._group = group
        self._clock = clock
        self._settings = settings
        self._first_seen: dict[bytes, float] = {}
        self._active: RingSnapshot | None = None
        #: Adopted, and not to be worked under yet: others still work under an older one.
        self._waiting: RingSnapshot | None = None
        self._working: Counter[int] = Counter()
        self._lock = threads.lock()
        self._stepping = threads.lock()
        self._stop = threads.event()
        self._thread: threads.Thread | None = None
        self._looked_at = float("-inf")
        #: When the ring's row was last read, from before the question, and the token that it had.
        self._seen: tuple[float, int | None] = (float("-inf"), None)
        #: How often the ring changed under this member's eyes.
        self.changes = 0

    # -- what others ask ------------------------------------------------------------------------------------------

    def current(self) -> RingSnapshot | None:
        """Returns the ring to work under now, or None: not a member for certain, not on the ring, or others still drain."""
        snapshot = self._active
        return snapshot if snapshot is not None and self.is_current(snapshot) else None

    def is_current(self, snapshot: RingSnapshot) -> bool:
        """Returns whether work under this ring may go on; to be asked before every object, costs nothing."""
        read_at, token = self._seen
        # By what was read, not by what was made of it: whatever goes wrong after the reading, the old ring is over.
        seen = token == snapshot.token and self._clock.monotonic() - read_at < self._settings.stale_after
        return seen and self._active is snapshot and self._membership.holds(snapshot.me)

    def working(self, snapshot: RingSnapshot) -> InFlight:
        """Says that an object is being handled under this ring; gives False when it may not be."""
        token = snapshot.token

        def end() -> None:
            with self._lock:
                self._working[token] -= 1
                if not self._working[token]:
                    del self._working[token]

        with self._lock:
            allowed = self.is_current(snapshot)
            if allowed:
                self._working[token] += 1
        return InFlight(allowed, end)

    def refresh(self) -> None:
        """Reads the members now, unless they were read within the last 1.5 times ``poll_interval``.

        The thread of the ring reads them each ``poll_interval``.

        :raises Unavailable: the backend or the store does not answer.
        """
        if self._clock.monotonic() - self._looked_at >= _LATE * self._settings.poll_interval:
            self.step()

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Look again and again in a thread of its own."""
        self._thread = threads.thread(self._run, name="ring-keeper")
        self._thread.start()

    def stop(self) -> None:
        """Own nothing any more, and look no more."""
        self._stop.set()
        with self._lock:
            self._active = self._waiting = None
        if self._thread is not None:
            self._thread.join(30)

    def _run(self) -> None:
        while not self._clock.wait(self._stop, self._settings.poll_interval):
            self.step_logged()

    def step_logged(self) -> None:
        """Does a step and logs what it raises."""
        try:
            with plugin_isolation.isolate_plugin_call():
                self.step()
        except errors.Unavailable as error:
            LOG.debug("The ring of %s cannot be looked at: %s", self._group, error.message)
        except Exception:
            LOG.exception("The ring of %s cannot be looked at.", self._group)

    def step(self) -> None:
        """Look who is there, propose what follows, adopt what is written.

        :raises Unavailable: the backend or the store does not answer. What was adopted stays, until it is too old.
        """
        with self._stepping:
            self._act(self._find(self._clock.monotonic()))

    def look(self, began: float) -> Callable[[], None] | None:
        """Does the first half of a step, in a read transaction of the caller. For callers that replace the thread of :meth:`start`.

        :param began: a moment of the clock from before the transaction, which does not see what was committed later.
        :returns: the second half of the step, which may write; call it after the transaction. None: another thread has read the
            ring since ``began``.
        :raises Unavailable: see :meth:`step`.
        """
        with self._stepping:
            if self._seen[0] > began:
                return None
            found = self._find(began)

        def act() -> None:
            with self._stepping:
                # Another thread may have looked meanwhile, and acted on what is newer.
                if found.seen is self._seen:
                    self._act(found)

        return act

    def _find(self, began: float) -> _Found:
        me = self._membership.member_id
        try:
            view = self._membership.view()
        except errors.Unavailable:
            # What others have agreed on holds for this member too, whether it sees them or not.
            self._read(began)
            raise
        row, adopted = self._read(began)
        return _Found(me, view, row, adopted, self._seen)

    def _act(self, found: _Found) -> None:
        me, view, row, adopted = found.me, found.view, found.row, found.adopted
        if me in view.members and self._propose(view, row, adopted):
            row, adopted = self._read()
        if row is not None and me is not None:
            self._adopt(row, adopted, view, me)
        self._looked_at = self._clock.monotonic()

    def _read(self, began: float | None = None) -> tuple[RingRow | None, Mapping[bytes, int]]:
        began = self._clock.monotonic() if began is None else began
        row, adopted = self._ledger.read(self._group)
        self._seen = began, None if row is None else row.token
        return row, adopted

    # -- proposing ------------------------------------------------------------------------------------------------

    def _propose(self, view: View, row: RingRow | None, adopted: Mapping[bytes, int]) -> bool:
        """Write the ring that the view asks for, if it is another one; whether there may be a new row."""
        wanted = self._wanted(view, frozenset() if row is None else frozenset(row.members))
        if row is not None and wanted == frozenset(row.members):
            return False
        settings = self._settings
        proposed = RingRow(0, tuple(sorted(wanted)), settings.replicas, settings.hash_function)
        if self._ledger.propose(self._group, row, proposed):
            gone = adopted.keys() - wanted - view.members
            if gone:
                self._ledger.forget(self._group, gone)
        return True

    def _wanted(self, view: View, on_ring: frozenset[bytes]) -> frozenset[bytes]:
        """Who is gone is dropped at once, who is new taken in when it has been there for a while.

        When no member of the ring is left, nothing needs to drain.
        """
        now = self._clock.monotonic()
        self._first_seen = {member: self._first_seen.get(member, now) for member in view.members - on_ring}
        staying = view.members & on_ring
        if not staying:
            return view.members
        settled = {member for member, since in self._first_seen.items() if now - since >= self._settings.settle}
        return staying | settled

    # -- adopting -------------------------------------------------------------------------------------------------

    def _adopt(self, row: RingRow, adopted: Mapping[bytes, int], view: View, me: bytes) -> None:
        with self._lock:
            known = self._waiting or self._active
            if known is None or (known.token, known.me) != (row.token, me):
                # From here on nothing begins under the old ring.
                self._active, self._waiting = None, self._snapshot(row, me)
                self.changes += 1
            waiting = self._waiting
            still_working = any(self._working[token] > 0 for token in self._working if token < row.token)
        if waiting is None or self._stop.is_set():
            return
        if self._settings.drain:
            if still_working:
                return
            self._ledger.adopt(self._group, me, row.token)
            # A member that adopted an older ring a moment ago is either in what is read now, or reads the new row itself.
            latest, adopted = self._read()
            if latest is None or latest.token != row.token or not _drained(adopted, view, row.token):
                return
        elif adopted.get(me, -1) < row.token:
            self._ledger.adopt(self._group, me, row.token)
        with self._lock:
            if self._waiting is waiting and not self._stop.is_set():
                self._active, self._waiting = (waiting if me in waiting.ring else None), None

    def _snapshot(self, row: RingRow, me: bytes) -> RingSnapshot:
        return RingSnapshot(self._group, row.token, me, ring_of(row), self._membership.valid_until)


def _drained(adopted: Mapping[bytes, int], view: View, token: int) -> bool:
    """Returns whether every living member works under this ring or has never worked under any."""
    return all(adopted.get(member, token) >= token for member in view.members)
