# SPDX-License-Identifier: Apache-2.0
"""Lets threads share work: one thread, the leader, does the work that several threads wait for.

A thread that finds no leader does its work at once. Threads that come meanwhile wait. When the leader has ended, the first of them
leads the next turn: it does its own work and that of the others, up to a limit. So work is done in the first or second turn after
it came, as long as the limit is not reached.

Work that another process does has two parts: to send a request, and to wait for the reply. A leader that has its reply sends
the request of the next turn before it wakes the threads of its own turn. So the other process need not wait until the thread of
the next leader runs.

No thread waits without limit. One whose turn does not begin in time does its work alone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from oslo_log import log as logging

from moorage import errors, threads

__all__ = ["Gathered", "Gathering", "own_error"]

LOG = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Turn:
    """Holds the work of one turn, and the function that waits for the end of this work.

    :ivar end: the function; it sets the outcomes. None if the work is done or has failed.
    """

    works: Sequence[Gathered[Any]]
    end: Callable[[], None] | None


@dataclass(slots=True, eq=False)
class Gathered(Generic[R]):
    """Holds the work of one thread, and what came of it. A subclass adds what is to be done."""

    outcome: R | None = field(default=None, kw_only=True)
    error: BaseException | None = field(default=None, kw_only=True)
    #: The work cannot be shared: its own thread does it.
    alone: bool = field(default=False, kw_only=True)
    #: Set when the work is done, and when its thread has to lead; None: the thread does not wait, or was woken.
    woken: threads.Latch | None = field(default=None, init=False)
    #: The last leader has chosen its thread to lead the next turn.
    leads: bool = field(default=False, init=False)
    #: The turn to lead, if the last leader has begun it.
    begun: _Turn | None = field(default=None, init=False)

    @property
    def decided(self) -> bool:
        """Returns whether the work was done or has failed."""
        return self.outcome is not None or self.error is not None

    @property
    def done(self) -> bool:
        """Returns whether no other thread works on it any more."""
        return self.decided or self.alone


G = TypeVar("G", bound=Gathered[Any])


class Gathering(Generic[G]):
    """Shares one kind of work among threads. Safe for use by several threads.

    :param work: does the work of one turn: it sets the outcome of each, or ``alone``. Or it begins the work, which must not take
        long, and returns a function that waits for its end and sets them. An error that either of them raises becomes the error
        of each that has no outcome, and is logged if all have one.
    :param keys: returns the keys of the parts of some work. No two parts with the same key are done in one turn.
    :param most: how many parts are done in one turn at most; more if the work of one thread has more.
    :param patience: seconds that a thread waits for its turn to begin before it does its work alone.
    :param until_end: seconds that it waits for the end of a turn that has begun.
    :param leaders: how many turns run at a time.
    """

    def __init__(
        self,
        work: Callable[[Sequence[G]], Callable[[], None] | None],
        keys: Callable[[G], Collection[Hashable]],
        most: Callable[[], int],
        patience: float,
        until_end: float,
        leaders: int = 1,
    ) -> None:
        self._work = work
        self._keys = keys
        self._most = most
        self._patience = patience
        self._until_end = until_end
        self._most_leaders = leaders
        self._begin()
        _LIVING.add(self)

    def _begin(self) -> None:
        """Resets the state. A forked child has none of the threads of its parent."""
        self._lock = threads.lock()
        self._leaders = 0
        self._waiting: list[G] = []

    def join(self, mine: G) -> bool:
        """Waits until this thread or another one has done the work. Returns False if its turn has not ended in time.

        The outcome is unknown after False. After True the work is decided, or its own thread has to do it alone.
        """
        woken: threads.Latch | None = None
        with self._lock:
            leads = self._leaders < self._most_leaders
            if leads:
                self._leaders += 1
            else:
                mine.woken = woken = threads.Latch()
                self._waiting.append(mine)
        if woken is not None and not self._wait(mine, woken):
            return False
        if mine.leads or not mine.done:
            self._lead(mine)
        return True

    def give_up(self, turn: Sequence[G], error: Exception) -> None:
        """Ends the wait of a turn's threads with an error, because the leader of the turn hangs.

        What the leader sets later is ignored. It leads until it returns. Threads that come before that do their work alone when
        their patience is over.
        """
        with self._lock:
            for each in turn[1:]:
                if not each.done:
                    each.error = own_error(error)
                _wake(each)

    def _wait(self, mine: G, woken: threads.Latch) -> bool:
        """Waits until another thread has done the work, or until this thread has to lead or to do it alone."""
        if woken.wait(self._patience) or self._withdraw(mine):
            return True
        if woken.wait(self._until_end):
            return True
        with self._lock:
            if not mine.leads:
                return woken.wait(0)
        # The last leader is beginning the turn, and wakes this thread as soon as it has.
        return woken.wait(self._until_end)

    def _withdraw(self, mine: G) -> bool:
        """Takes the work back if it still waits for a turn: its own thread does it alone. Returns whether it waited."""
        with self._lock:
            if mine not in self._waiting:
                return False
            self._waiting.remove(mine)
            mine.alone = True
            return True

    def _lead(self, mine: G) -> None:
        """Leads a turn to its end, begins the next turn if its work has two parts, and wakes the threads of both."""
        turn, mine.begun = mine.begun or self._start(mine), None
        if turn.end is not None:
            try:
                turn.end()
            except BaseException as error:  # noqa: BLE001  (each work gets it)
                _fail(turn.works, mine, error)
        with self._lock:
            following = self._waiting.pop(0) if self._waiting else None
            if following is None:
                self._leaders -= 1
            else:
                following.leads = True
        if following is not None and turn.end is not None:
            following.begun = self._start(following)
        with self._lock:
            if following is not None:
                _wake(following)
            for each in turn.works:
                _wake(each)

    def _start(self, mine: G) -> _Turn:
        """Chooses the work of a turn and calls the work function. ``mine`` is the work of the thread that leads the turn."""
        turn, end = [mine], None
        try:
            turn = self._turn(mine)
            end = self._work(turn)
        except BaseException as error:  # noqa: BLE001  (each work gets it)
            _fail(turn, mine, error)
        return _Turn(turn, end)

    def _turn(self, mine: G) -> list[G]:
        """Chooses the work of one turn. Work that shares a key with work before it is left for a later turn."""
        turn, left, done = [mine], list[G](), set(self._keys(mine))
        most = self._most()
        with self._lock:
            for each in self._waiting:
                keys = self._keys(each)
                if len(done) + len(keys) <= most and done.isdisjoint(keys):
                    turn.append(each)
                    done.update(keys)
                else:
                    left.append(each)
            self._waiting = left
        return turn


def _wake(each: Gathered[Any]) -> None:
    """Wakes the thread of some work, if it waits and was not woken yet. The caller holds the lock."""
    if each.woken is not None:
        each.woken.set()
        each.woken = None


def _fail(turn: Sequence[Gathered[Any]], leads: Gathered[Any], error: BaseException) -> None:
    """Sets the error of the work of a turn that is not done."""
    left = [each for each in turn if not each.done]
    if not left:
        LOG.error("The work of %d threads is done, but what follows it has failed.", len(turn), exc_info=error)
    for each in left:
        each.error = error if each is leads else own_error(error)


def own_error(error: BaseException) -> errors.MoorageError:
    """Copies an error for a thread: callers change the message and the details of what they catch."""
    if isinstance(error, errors.MoorageError):
        found = type(error).__new__(type(error), *error.args)
        found.__dict__.update(error.__dict__, details=dict(error.details))
    else:
        found = errors.StoreUnavailable(
            f"The thread that did this together with other work failed ({error!r}); whether it is done is unknown. Try again.",
            outcome="unknown",
        )
    found.__cause__ = error
    return found


#: All gatherings of this process, for the moment after a fork.
_LIVING: weakref.WeakSet[Gathering[Any]] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for gathering in list(_LIVING):
        gathering._begin()


os.register_at_fork(after_in_child=_after_fork_in_child)
