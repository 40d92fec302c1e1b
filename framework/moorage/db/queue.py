# SPDX-License-Identifier: Apache-2.0
"""Queues the writers of a SQLite file, first come, first served, among threads and processes.

SQLite lets one transaction write at a time and makes the others sleep and try again, up to a tenth of a second between tries;
the last writer is the likeliest to be next, and some of eight writers starve. Here writers take tickets instead.

A ticket is a number from a counter in a file beside the database, and a lock on the byte of that number in the same file. It is a
writer's turn when no lower byte is locked. The kernel drops the lock when its process ends in any way, so a dead
process delays no writer. The queue only orders writers; SQLite's own lock (BEGIN IMMEDIATE) keeps their transactions apart. So
writers overtake a ticket that does not move for a while (its process is stopped, or writes for long), and SQLite decides.

A writer that ends its turn rings the bell of the next ticket: a datagram to an abstract Unix socket, whose name the file has. The
bell is a hint. A writer that hears none (the one before it was killed, or is in another network namespace) looks by itself.

The locks are Linux' open file description locks (fcntl(2), F_OFD_SETLK): those of POSIX belong to the process and are lost when
any descriptor of the file is closed. Where they are missing, only the threads of a process queue up.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator

from moorage import errors, randomness, threads
from moorage.clock import Clock

__all__ = ["WritersQueue"]

#: struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_SETLK = getattr(fcntl, "F_OFD_SETLK", None)
_GETLK = getattr(fcntl, "F_OFD_GETLK", None)
_COUNTER = struct.Struct("<q")
#: After the counter: ticket and process id of the transaction that wrote last.
_WRITER = struct.Struct("<qq")
#: The byte that guards the counter, and the byte of ticket 0.
_DOOR = 0
_TICKETS = 1024
#: After the writer, for each of the last tickets: its number, and the name of its bell.
_BELL = struct.Struct("<q24s")
_BELLS_AT, _BELLS = 64, 256
#: How the abstract names of bells begin.
_BELL_NAMES = b"\0moorage-"
#: Seconds between looks at the queue: at least, for each writer in front, and at most. Without bells the pauses become short.
_PAUSE = 0.0003
_PAUSE_LONGEST = 0.02
#: Seconds after which a first ticket that does not move is passed by.
PATIENCE = 2.0


class WritersQueue:
    """The queue of one SQLite file as one process sees it. Not for use by a forked child: make a new one there."""

    def __init__(self, path: str, clock: Clock, random: randomness.Random) -> None:
        self._path = path
        self._clock = clock
        self._random = random
        self._threads = _FairLock()
        self._file: int | None = None
        self._bell: _Bell | None = None
        self._pause = _PAUSE_LONGEST
        #: Tickets below this one are passed by.
        self._passed = 0

    @contextlib.contextmanager
    def acquire(self, seconds: float) -> Iterator[int | None]:
        """Hold the turn for the length of the block; gives its ticket, or None where the system has no such locks.

        :param seconds: how long to wait for it.
        :raises StoreBusy: it did not come in time.
        :raises StoreUnavailable: the file of the queue cannot be opened.
        """
        deadline = self._clock.monotonic() + seconds
        if not self._threads.acquire(self._clock, seconds):
            raise self._too_late("Other threads of this process have", seconds)
        try:
            if _SETLK is None:
                yield None
                return
            ticket = self._take_ticket(deadline, seconds)
            try:
                self._await(ticket, deadline, seconds)
                yield ticket
            finally:
                self._lock(fcntl.F_UNLCK, _TICKETS + ticket)
                self._ring(ticket + 1)
        finally:
            self._threads.release()

    def record_writer(self, ticket: int) -> None:
        """Write down that this process writes under the ticket; call it when SQLite has begun the transaction."""
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor(), _WRITER.pack(ticket, os.getpid()), _COUNTER.size)

    def writer(self) -> tuple[int, int] | None:
        """(ticket, process id) of the transaction that writes now; None when none writes, or it is unknown."""
        if _GETLK is None or not os.path.exists(self._path):
            return None
        raw = os.pread(self._descriptor(), _WRITER.size, _COUNTER.size)
        if len(raw) != _WRITER.size:
            return None
        ticket, pid = _WRITER.unpack(raw)
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _TICKETS + ticket, 1, 0)
        held = _FLOCK.unpack(fcntl.fcntl(self._descriptor(), _GETLK, asked))[0] != fcntl.F_UNLCK
        return (ticket, pid) if held else None

    def close(self) -> None:
        """Close the file of the queue; it is opened again when needed. In a forked child this takes nothing from the parent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._bell is not None:
            self._bell.close()
            self._bell = None

    # -- tickets --------------------------------------------------------------------------------------------------

    def _take_ticket(self, deadline: float, seconds: float) -> int:
        descriptor = self._descriptor()
        while not self._lock(fcntl.F_WRLCK, _DOOR):
            if self._clock.monotonic() > deadline:
                raise self._too_late("Another process has", seconds)
            self._clock.sleep(self._random.uniform(0, _PAUSE))
        try:
            raw = os.pread(descriptor, _COUNTER.size, 0)
            ticket = _COUNTER.unpack(raw)[0] if len(raw) == _COUNTER.size else 0
            # Taken already only when the counter was lost, with the file, while others waited.
            while not self._lock(fcntl.F_WRLCK, _TICKETS + ticket):
                ticket += 1
            try:
                os.pwrite(descriptor, _COUNTER.pack(ticket + 1), 0)
            except OSError as error:
                self._lock(fcntl.F_UNLCK, _TICKETS + ticket)
                raise self._unusable(error) from error
        finally:
            self._lock(fcntl.F_UNLCK, _DOOR)
        return ticket

    def _await(self, ticket: int, deadline: float, seconds: float) -> None:
        if self._locked_below(ticket) is None:
            return
        bell = self._hang_up(ticket)
        head, seen = -1, self._clock.monotonic()
        rung = False
        while True:
            ahead = self._locked_below(ticket)
            if ahead is None:
                # In a queue whose bells do not ring, the next wait looks more often.
                self._pause = min(_PAUSE_LONGEST, 2 * self._pause) if rung else max(_PAUSE, self._pause / 2)
                return
            moment = self._clock.monotonic()
            if moment > deadline:
                raise self._too_late("Another process has", seconds)
            if moment - seen > PATIENCE / 4:
                first = self._first_below(ticket)
                if first is not None and first == head and moment - seen > PATIENCE:
                    self._passed = first + 1
                elif first != head:
                    head, seen = -1 if first is None else first, moment
            pause = self._random.uniform(0.5, 1.0) * min(self._pause * (ticket - ahead), _PAUSE_LONGEST)
            rung = self._clock.wait(bell, pause)
            bell.clear()

    def _hang_up(self, ticket: int) -> _Bell:
        """The bell of this process, with its name beside the ticket; call it before the look after which the bell is awaited."""
        if self._bell is None:
            self._bell = _Bell()
        with contextlib.suppress(OSError):
            place = _BELLS_AT + _BELL.size * (ticket % _BELLS)
            os.pwrite(self._descriptor(), _BELL.pack(ticket, self._bell.name), place)
        return self._bell

    def _ring(self, ticket: int) -> None:
        """Ring the bell of a ticket, if it waits."""
        with contextlib.suppress(OSError):
            raw = os.pread(self._descriptor(), _BELL.size, _BELLS_AT + _BELL.size * (ticket % _BELLS))
            if len(raw) != _BELL.size:
                return
            number, name = _BELL.unpack(raw)
            if number == ticket and name.startswith(_BELL_NAMES):
                if self._bell is None:
                    self._bell = _Bell()
                self._bell.ring(name.rstrip(b"\0"))

    def _first_below(self, ticket: int) -> int | None:
        """Returns the lowest ticket in front. The kernel names any locked ticket of a range, so it is asked until none is lower."""
        first = None
        ahead = self._locked_below(ticket)
        while ahead is not None:
            first = ahead
            ahead = self._locked_below(ahead)
        return first

    def _locked_below(self, ticket: int) -> int | None:
        """Some ticket in front of this one that is held; None when there is none."""
        if self._passed >= ticket or _GETLK is None:
            return None
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, _TICKETS + self._passed, ticket - self._passed, 0)
        kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(self._descriptor(), _GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(start - _TICKETS, self._passed)

    def _lock(self, kind: int, byte: int) -> bool:
        """Take or drop the lock of one byte; False when another process has it."""
        assert _SETLK is not None  # noqa: S101  (turn() has looked)
        try:
            fcntl.fcntl(self._descriptor(), _SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _descriptor(self) -> int:
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
            except OSError as error:
                raise self._unusable(error) from error
        return self._file

    # -- errors ---------------------------------------------------------------------------------------------------

    def _too_late(self, who: str, seconds: float) -> errors.StoreBusy:
        return errors.StoreBusy(
            f"{who} been writing to the database beside {self._path} for {seconds:g} seconds; "
            "try again later, and restart the process if it hangs."
        )

    def _unusable(self, error: OSError) -> errors.StoreUnavailable:
        return errors.StoreUnavailable(
            f"The lock file {self._path} cannot be used ({error.strerror}); check that the folder exists, that its disk has "
            "room and that this user may write to it."
        )


class _Bell:
    """A socket that wakes the writer that waits at it, used as an event. Another user may ring it: then the writer looks once."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.name = _BELL_NAMES + randomness.secret(6).hex().encode()
        self._socket.bind(self.name)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)

    def ring(self, name: bytes) -> None:
        """Wake the writer that waits at the bell of that name.

        :raises OSError: there is none.
        """
        self._socket.sendto(b"!", name)

    def is_set(self) -> bool:
        """Returns whether the bell was rung."""
        return self.wait(0.0)

    def set(self) -> None:
        """Ring this bell."""
        self.ring(self.name)

    def clear(self) -> None:
        """Forget that it was rung."""
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(1):
                pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is rung, at most ``timeout`` seconds."""
        return bool(self._poller.poll(None if timeout is None else timeout * 1000.0))

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()


class _FairLock:
    """A lock that the longest waiting thread gets (a lock of threading goes to any waiter)."""

    def __init__(self) -> None:
        self._mutex = threads.lock()
        self._held = False
        self._waiting: collections.deque[threads.Event] = collections.deque()

    def acquire(self, clock: Clock, seconds: float) -> bool:
        with self._mutex:
            if not self._held:
                self._held = True
                return True
            mine = threads.event()
            self._waiting.append(mine)
        try:
            if clock.wait(mine, seconds):
                return True
        except BaseException:
            self._leave(mine)
            raise
        with self._mutex:
            if mine.is_set():
                return True
            self._waiting.remove(mine)
            return False

    def release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()  # stays held: handed on
            else:
                self._held = False

    def _leave(self, mine: threads.Event) -> None:
        with self._mutex:
            if mine in self._waiting:
                self._waiting.remove(mine)
                return
        self.release()
