# SPDX-License-Identifier: Apache-2.0
"""Simulated processes and their threads, and what a policy that chooses among them is."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.simulation.kernel import Kernel

__all__ = ["BLOCKED", "DEAD", "DONE", "RUNNABLE", "Policy", "Process", "SimThread"]

RUNNABLE, BLOCKED, DEAD, DONE = "runnable", "blocked", "dead", "done"


class Process:
    """A simulated process: threads with one clock that live and die together.

    :ivar rate: seconds of its clock in one true second. :ivar offset: what its clock shows at true second 0.
    :ivar boot_rate: seconds of its machine's clock in one true second.
    """

    def __init__(self, kernel: Kernel, name: str, *, rate: float = 1.0, offset: float = 0.0) -> None:
        self.kernel = kernel
        self.name = name
        self.rate = rate
        self.offset = offset
        self.boot_rate = 1.0
        self.alive = True
        self.frozen = False
        self.threads: list[SimThread] = []
        #: Threads that could run, were the process not frozen.
        self.held: list[SimThread] = []
        #: Called when the process is killed.
        self.on_kill: list[Callable[[], None]] = []
        self.lost = ""

    def monotonic(self) -> float:
        """What the process's clock shows."""
        return self.offset + self.rate * self.kernel.now

    def boottime(self) -> float:
        """What the clock of its machine shows."""
        return self.boot_rate * self.kernel.now


class SimThread:
    """A thread of a simulated process, as :class:`moorage.threads.Thread`. It is a real thread that waits for the baton."""

    def __init__(self, kernel: Kernel, process: Process, name: str, work: Callable[[], object]) -> None:
        self.kernel = kernel
        self.process = process
        self.name = name
        self.work = work
        self.number = 0
        self.state = BLOCKED
        self.started = False
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        #: Free when the real thread has ended.
        self.gone = _thread.allocate_lock()
        #: Raised by each wait, so that the timers of earlier waits mean nothing.
        self.wait_id = 0
        self.woken = False
        self.priority = 0.0
        #: The policy lets it wait until this step, or this moment.
        self.paused_until = 0
        self.joiners: list[SimThread] = []

    @property
    def ident(self) -> int | None:
        """The thread's number; None before it was started."""
        return self.number or None

    def start(self) -> None:
        """Begin to run."""
        self.kernel.start(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most ``timeout`` seconds."""
        if self.started and self.state not in (DONE, DEAD):
            self.kernel.block(self.joiners, timeout, "join", self.name)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self.started and self.state != DONE


class Policy(Protocol):
    """Chooses which thread runs next."""

    def born(self, thread: SimThread) -> None:
        """A thread was started."""

    def choose(self, kernel: Kernel, me: SimThread | None, ready: Sequence[SimThread]) -> SimThread:
        """One of ``ready`` (never empty; in an order that the seed decides); ``me`` is the running one, if it can go on."""

    def guarded(self, kernel: Kernel, me: SimThread) -> None:
        """The running thread is at a point where a switch or a pause is most likely to break something."""
