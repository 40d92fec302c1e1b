# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a simulation: a baton that goes from one real thread to another, virtual time, kills and pauses.

Exactly one thread runs at any moment: the one that holds the baton. It gives the baton away at points (:meth:`Kernel.point`) and
when it waits (:meth:`Kernel.block`). A policy with a seed chooses the next thread, so one seed gives one schedule.

A killed process is never scheduled again: its threads keep their stacks, and no ``finally`` block of them runs.
"""

from __future__ import annotations

import _thread
import hashlib
import heapq
import itertools
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from tests.simulation.processes import BLOCKED, DEAD, DONE, RUNNABLE, Policy, Process, SimThread

__all__ = ["Kernel", "Policy", "Process", "SimThread", "Stalled", "Violation"]

#: Virtual seconds that one step between two points takes.
STEP = 0.0002
#: Real seconds after which a thread that reaches no point is reported. The machine may be busy with other tests.
STALL = 20.0


class Violation(Exception):
    """An invariant is broken."""


class _EndedError(BaseException):
    """Ends a thread of a schedule that is over."""


class Stalled(Exception):
    """A thread reached no point for some seconds, or no thread can run: a defect of the simulation or a deadlock."""


class Kernel:
    """One schedule.

    :param keep: remember every point for a time line.
    """

    def __init__(self, policy: Policy, *, keep: bool = False) -> None:
        self.policy = policy
        self.now = 0.0
        self.steps = 0
        self.guarded_steps = 0
        self.current: SimThread | None = None
        #: The process that a callback of a timer acts for.
        self.acting: Process | None = None
        self.ready: list[SimThread] = []
        self.processes: list[Process] = []
        self.timeline: list[tuple[float, str, str, str]] | None = [] if keep else None
        self.at_point: Callable[[SimThread, str], None] | None = None
        self._hash = hashlib.blake2b(digest_size=8)
        self._timers: list[tuple[float, int, Callable[[], None] | None, SimThread | None, int]] = []
        self._order = itertools.count(1)
        self._numbers = itertools.count(1)
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._over = self._ending = False
        self.failure: BaseException | None = None

    # -- the outside ----------------------------------------------------------------------------------------------

    def process(self, name: str, *, rate: float = 1.0, offset: float = 0.0) -> Process:
        """A new process."""
        made = Process(self, name, rate=rate, offset=offset)
        self.processes.append(made)
        return made

    def run(self, process: Process, work: Callable[[], object]) -> str:
        """Run a schedule until ``work``, in a thread of the process, ends; the hash of its trace.

        The other threads stay where they are, for ever.

        :raises Violation: an invariant is broken. :raises Stalled: nothing moves.
        """
        main = SimThread(self, process, "main", work)
        self.start(main)
        self._hand_to(self._next(None))
        seen = -1
        while not self._ended.acquire(timeout=STALL):
            if self.steps == seen:
                raise Stalled(self._stacks())
            seen = self.steps
        self._over = True
        if self.failure is not None:
            raise self.failure
        return self.digest()

    def digest(self) -> str:
        """The hash of the trace so far."""
        return self._hash.hexdigest()

    def note(self, kind: str, what: str = "", more: object = None) -> None:
        """Put something into the trace; no point. ``more`` is for the time line only."""
        me = self.current
        name = "" if me is None else me.process.name
        self._hash.update(f"{self.now:.6f}|{name}|{kind}|{what}\n".encode())
        if self.timeline is not None:
            text = " ".join(what.split()) + ("" if more is None else f" {more}")
            self.timeline.append((self.now, f"{name}/{me.name if me else ''}", kind, text))

    # -- points ---------------------------------------------------------------------------------------------------

    def point(self, kind: str, what: str = "", *, guarded: bool = False, more: object = None) -> None:
        """A place where another thread may go on, or this process may die. Outside of a simulated thread: nothing."""
        me = self.current
        if me is None:
            return
        if self._over:
            self._park(me)
        self.steps += 1
        self.now += STEP
        self.note(kind, what, more)
        if self._timers and self._timers[0][0] <= self.now:
            self._fire(self.now)
        if guarded:
            self.guarded_steps += 1
            self.policy.guarded(self, me)
        if self.at_point is not None:
            self.at_point(me, kind)
        if me.state == RUNNABLE and not me.process.frozen and len(self.ready) == 1 and not me.paused_until:
            return
        self._switch(me)

    def block(self, waiters: list[SimThread] | None, timeout: float | None, kind: str, what: str = "") -> bool:
        """Wait until somebody wakes the thread or ``timeout`` seconds of its process's clock are over; whether it was woken."""
        me = self.current
        if me is None:
            raise Stalled(f"{kind} {what}: something outside of the simulation would wait for ever")
        if self._over:
            self._park(me)
        self.steps += 1
        self.note(kind, what)
        me.state, me.woken = BLOCKED, False
        me.wait_id += 1
        self.ready.remove(me)
        if timeout is not None:
            self._at(self.now + max(0.0, timeout) / me.process.rate, None, me)
        if waiters is not None:
            waiters.append(me)
        if self.at_point is not None:
            self.at_point(me, kind)
        self._switch(me)
        if waiters is not None and not me.woken and me in waiters:
            waiters.remove(me)
        return me.woken

    def wake(self, thread: SimThread) -> None:
        """Let a waiting thread go on."""
        if thread.state == BLOCKED:
            thread.woken = True
            self._make_ready(thread)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it after true seconds; it must not wait."""
        self._at(self.now + seconds, call, None)

    def start(self, thread: SimThread) -> None:
        """Begin a thread."""
        if thread.started:
            raise RuntimeError("threads can only be started once")
        thread.started = True
        thread.number = next(self._numbers)
        self.note("start", thread.name)
        thread.process.threads.append(thread)
        self.policy.born(thread)
        if thread.process.alive:
            thread.gone.acquire()
            _thread.start_new_thread(self._body, (thread,))
            self._make_ready(thread)
        else:
            thread.state = DEAD

    def in_process(self) -> Process:
        """The process that acts now."""
        if self.acting is not None:
            return self.acting
        if self.current is not None:
            return self.current.process
        raise Stalled("no simulated process acts now")

    # -- faults ---------------------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: nothing of it ever runs again."""
        if not process.alive:
            return
        self.note("killed", process.name)
        process.alive = False
        for thread in process.threads:
            if thread.state != DONE:
                thread.state = DEAD
        self.ready = [each for each in self.ready if each.process is not process]
        process.held.clear()
        for act in process.on_kill:
            act()

    def freeze(self, process: Process, seconds: float) -> None:
        """Let a process stand still, as SIGSTOP does, and go on after true seconds."""
        if process.frozen or not process.alive:
            return
        self.note("frozen", f"{process.name} {seconds:.3f}")
        process.frozen = True
        process.held = [each for each in self.ready if each.process is process]
        self.ready = [each for each in self.ready if each.process is not process]
        self.later(seconds, lambda: self._thaw(process))

    def _thaw(self, process: Process) -> None:
        process.frozen = False
        if process.alive:
            self.note("thawed", process.name)
            held, process.held = process.held, []
            self.ready.extend(held)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _at(self, when: float, call: Callable[[], None] | None, thread: SimThread | None) -> None:
        heapq.heappush(self._timers, (when, next(self._order), call, thread, thread.wait_id if thread else 0))

    def _make_ready(self, thread: SimThread) -> None:
        thread.state = RUNNABLE
        thread.wait_id += 1
        (thread.process.held if thread.process.frozen else self.ready).append(thread)

    def _fire(self, until: float) -> None:
        """Whatever is due."""
        me, self.current = self.current, None
        while self._timers and self._timers[0][0] <= until:
            _, _, call, thread, wait_id = heapq.heappop(self._timers)
            if call is not None:
                call()
            elif thread is not None and thread.state == BLOCKED and thread.wait_id == wait_id:
                self._make_ready(thread)
        self.current = me

    def _next(self, me: SimThread | None) -> SimThread:
        while True:
            ready = [each for each in self.ready if not each.paused_until or self._resumes(each)]
            if ready:
                return self.policy.choose(self, me if me in ready else None, ready)
            if not self._timers:
                if self.ready:  # all that can run are paused
                    self.ready[0].paused_until = 0
                    continue
                raise Stalled("no thread can run:\n" + self._waits())
            self.now = max(self.now, self._timers[0][0])
            self._fire(self.now)

    def resume_all(self) -> None:
        """End the pauses that the policy has begun: where little happens, one of many steps may last for minutes."""
        for each in self.ready:
            each.paused_until = 0

    def _resumes(self, thread: SimThread) -> bool:
        if self.steps >= thread.paused_until:
            thread.paused_until = 0
            return True
        return False

    def _switch(self, me: SimThread) -> None:
        try:
            chosen = self._next(me if me.state == RUNNABLE and not me.process.frozen else None)
        except BaseException as error:
            self.fail(error)
            chosen = None
        if chosen is me:
            return
        if chosen is not None:
            self._hand_to(chosen)
        self._park(me)
        self.current = me

    def _park(self, me: SimThread) -> None:
        """Wait for the baton."""
        if not self._ending:
            me.gate.acquire()
        if self._ending:
            raise _EndedError

    def close(self) -> int:
        """End the threads of a schedule that is over, whose connections are closed; how many do not end."""
        self._ending = self._over = True
        left = 0
        for process in self.processes:
            for thread in process.threads:
                if not thread.gone.acquire(blocking=False):
                    self.current = thread
                    thread.gate.release()
                    left += not thread.gone.acquire(timeout=1.0)
        self.current = None
        return left

    def _hand_to(self, thread: SimThread) -> None:
        self.current = thread
        thread.gate.release()

    def violated(self, law: str) -> None:
        """End the schedule: an invariant is broken. Production's code does not get to see it."""
        self.note("violated", law)
        self.fail(Violation(law))
        if self.current is not None:
            self._park(self.current)

    def fail(self, error: BaseException) -> None:
        """End the schedule with an error."""
        if not self._over:
            self._over = True
            self.failure = error
            self._ended.release()

    def _body(self, thread: SimThread) -> None:
        try:
            self._park(thread)
            self.current = thread
            self._work(thread)
        except _EndedError:
            pass
        finally:
            thread.gone.release()

    def _work(self, thread: SimThread) -> None:
        try:
            thread.work()
        except Exception:
            self.fail(Stalled(f"{thread.process.name}/{thread.name} ended:\n{traceback.format_exc()}"))
        if self._over:
            return
        thread.state = DONE
        self.ready.remove(thread)
        for each in thread.joiners:
            self.wake(each)
        thread.joiners.clear()
        self.note("end", thread.name)
        if thread.name == "main":
            self._over = True
            self._ended.release()
            return
        try:
            self._hand_to(self._next(None))
        except BaseException as error:
            self.fail(error)

    def _waits(self) -> str:
        return "\n".join(
            f"  {each.process.name}/{each.name}: {each.state}{' (frozen)' if each.process.frozen else ''}"
            for process in self.processes
            for each in process.threads
            if each.state not in (DONE, DEAD)
        )

    def _stacks(self) -> str:
        me = self.current
        frames = sys._current_frames()
        found = [f"{me.process.name}/{me.name}" if me else "", f"reached no point for {STALL} seconds"]
        for ident, frame in frames.items():
            if ident != threading.get_ident():
                stack = traceback.extract_stack(frame)
                if stack[-1].filename != __file__:
                    found.append("".join(traceback.format_list(stack[-12:])))
        return "\n".join(found)

    def call_as(self, process: Process, work: Callable[[], Any]) -> Any:
        """Call it for a process, outside of its threads; it must not wait."""
        before, self.acting = self.acting, process
        try:
            return work()
        finally:
            self.acting = before
