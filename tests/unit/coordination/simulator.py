# SPDX-License-Identifier: Apache-2.0
"""Engines on one clock that a source of chance drives: joins, deaths, pauses, partitions, skewed clocks, lost answers.

What runs is production's: membership, keeper, sweep, leases, and the statements of the claims. In memory are the server, the store
and time. An engine has three threads (heartbeat, keeper, work), of which one step is taken at a time; while a handler handles, or
a server takes its time with an answer, steps of all others are taken *inside* of that call, so an engine can be stopped anywhere.

What is checked at every step is said where it is checked, in :class:`Oracle`.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from moorage import plugin_isolation
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.coordination.membership import Timing
from moorage.coordination.ring_ledger import RingRow
from moorage.coordination.ring_manager import RingSettings
from moorage.coordination.task_run import (
    AcquiredTick,
    Backoff,
    RingOwnership,
    TaskRun,
    TickContext,
)
from moorage.coordination.tick_leases import AHEAD, TickLease
from tests.unit.coordination.worlds import GROUP, Member, World

__all__ = ["Engine", "Simulation", "Violation"]

MICRO = 1_000_000
SESSION, INTERVAL, MARGIN, POLL = 10.0, 1.0, 1.0, 1.0
#: Seconds between two ticks.
SPACING = 20
#: How deep calls of one engine inside of calls of others go.
DEPTH = 3


class Dead(plugin_isolation.Ending):
    """Ends what a process that was killed was about to do; nothing of production's code catches it."""


class Violation(plugin_isolation.Ending):
    """A law was broken; the message says which, and when. Production's code must not take it for a failure of a handler."""


@dataclass
class Handling:
    """A handler that is running."""

    engine: Engine
    object_id: str
    member: bytes
    token: int


@dataclass
class Oracle:
    """Knows everything, and shares no code with what it watches."""

    simulation: Simulation
    claimed: set[tuple[str, int]] = field(default_factory=set)
    running: list[Handling] = field(default_factory=list)
    handled_at: dict[str, float] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    last_claim: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Since the store's clock was set the last time.
    last_tick: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    moved_at: dict[int, float] = field(default_factory=dict)
    handled: int = 0
    fenced: int = 0
    overlaps: int = 0

    def fail(self, law: str) -> None:
        raise Violation(f"{law} (seed {self.simulation.seed}, second {self.simulation.world.clock.now:.1f})")

    def begins(self, engine: Engine, object_id: str, tick: int, token: int) -> Handling:
        """A handler is about to begin."""
        me = engine.member.membership.member_id or b""
        # Once the clock was set, names of ticks may come again; then what is claimed decides.
        if (object_id, tick) in self.claimed and not self.steps:
            self.fail(f"{object_id} was handled twice at tick {tick}")
        self.claimed.add((object_id, tick))
        if self.simulation.guarded:
            self._begins_in_its_time(engine, me, token)
        others = [each for each in self.running if each.object_id == object_id and each.engine is not engine]
        living = self.simulation.real_members()
        for other in others:
            self.overlaps += 1
            if self.simulation.guarded and self.simulation.drain and other.member in living and other.engine.alive:
                self.fail(f"{engine.name} and {other.engine.name}, both members, handle {object_id} at once")
        handling = Handling(engine, object_id, me, token)
        self.running.append(handling)
        return handling

    def claims(self, object_id: str, tick: int, token: int) -> None:
        """A claim has been granted."""
        tick_before, (_, token_before) = self.last_tick.get(object_id), self.last_claim.get(object_id, (-1, 0))
        if (tick_before is not None and tick_before >= tick) or token_before > token:
            self.fail(f"{object_id} was claimed for tick {tick} under ring {token} after {tick_before}, {token_before}")
        self.last_claim[object_id] = tick, token
        self.last_tick[object_id] = tick

    def clock_was_set(self) -> None:
        """Names of ticks may come again; what was claimed before that is over. Fences rise through all of it."""
        self.last_tick.clear()
        self.steps += 1

    def _begins_in_its_time(self, engine: Engine, me: bytes, token: int) -> None:
        """The laws that rest on a member's own guards: its lease, and the look at the ring's row."""
        world = self.simulation.world
        if me not in self.simulation.real_members():
            self.fail(f"{engine.name} began to handle while the server had dropped it")
        row = world.ledger.row
        if row is not None and row.token > token:
            since = world.clock.now - self.moved_at[token + 1]
            if since > self.simulation.bound:
                self.fail(f"{engine.name} began under ring {token}, {since:.1f} s after ring {token + 1}")
        if me not in world.ledger.history[token]:
            self.fail(f"{engine.name} works under ring {token} and is not on it")

    def writes(self, object_id: str, tick: int, token: int) -> None:
        """A handler's transaction is committed."""
        if self.last_claim[object_id] != (tick, token):
            self.fail(f"{object_id} was written for tick {tick} after {self.last_claim[object_id]} was claimed")
        if self.fences.get(object_id, 0) > token:
            self.fail(f"{object_id} was written with token {token} after {self.fences[object_id]}")
        self.fences[object_id] = token
        self.handled_at[object_id] = self.simulation.world.clock.now
        self.handled += 1

    def ends(self, handling: Handling) -> None:
        self.running.remove(handling)


class Work(PeriodicTask):
    """Objects whose handling takes a while, during which others run."""

    api_version = (1, 0)

    def __init__(self, simulation: Simulation, engine: Engine) -> None:
        super().__init__(TaskTools(None, engine.member.clock, None, None, None, None))  # type: ignore[arg-type]
        self._simulation = simulation
        self._engine = engine

    @override
    def list_objects(self) -> Sequence[str]:
        return self._simulation.objects

    @override
    def handle(self, object_id: str, lease: TaskLease) -> object:
        simulation = self._simulation
        handling = simulation.oracle.begins(self._engine, object_id, lease.tick, lease.token)
        try:
            simulation.others(self._engine)
            with lease.finish():
                # From here on to the commit nothing else happens: the store makes them take turns.
                pass
            simulation.oracle.writes(object_id, lease.tick, lease.token)
        finally:
            simulation.oracle.ends(handling)
        return True


class Engine:
    """One process: a heartbeat, a keeper and work."""

    def __init__(self, simulation: Simulation, number: int, epoch: int) -> None:
        random = simulation.random
        self.name = f"engine-{number}.{epoch}"
        self.number, self.epoch = number, epoch
        self.alive = True
        self.paused_until = 0.0
        self.cut_until = 0.0
        #: Until when the thread of the heartbeat does not run, though the others do.
        self.hangs_until = 0.0
        self.busy: set[str] = set()
        self._simulation = simulation
        rate = random.uniform(0.992, 1.008)
        timing = Timing(INTERVAL, MARGIN, SESSION)
        self.member = simulation.new_member(number, epoch, rate, timing)
        inner = self.member._fault

        def fault(call: str) -> None:
            inner(call)
            if call in {"renewed", "seen", "joined"} and random.random() < simulation.slow:
                # The server has done it, and the answer takes its time.
                simulation.others(self)
                if call == "renewed" and random.random() < 0.3:
                    simulation.hang(self)

        self.member._fault = fault  # type: ignore[method-assign]
        self._beat_at = self._look_at = simulation.world.clock.now
        self._sweep: TaskRun | None = None
        self._batches: Iterator[Any] = iter(())
        self._todo: list[AcquiredTick] = []
        self._slot = -1
        #: Slot and token of the last sweep that was not cut short.
        self._swept: tuple[int, int] = (-1, -1)
        self._backoff = Backoff(0)
        self._task = Work(simulation, self)

    @property
    def able(self) -> bool:
        return self.alive and self.paused_until <= self._simulation.world.clock.now

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """What it may do now, by thread; a thread that is inside of a call does nothing else."""
        if not self.able:
            return []
        now = self._simulation.world.clock.now
        found = []
        if "beat" not in self.busy and now >= max(self._beat_at, self.hangs_until):
            found.append(("beat", self._beat))
        if "look" not in self.busy and now >= self._look_at:
            found.append(("look", self._look))
        if "work" not in self.busy:
            found.append(("work", self._work))
        return found

    def do(self, thread: str, step: Callable[[], None]) -> None:
        self.busy.add(thread)
        try:
            step()
        except Dead:
            if self.alive:
                raise
        finally:
            self.busy.discard(thread)

    def _beat(self) -> None:
        self._beat_at = self._simulation.world.clock.now + INTERVAL
        self.member.beat()

    def _look(self) -> None:
        self._look_at = self._simulation.world.clock.now + POLL
        self.member.look()

    def _work(self) -> None:
        if self._todo and self._sweep is not None:
            self._sweep.handle(self._todo.pop())
        elif self._sweep is not None:
            self._next_batch(self._sweep)
        else:
            self._begin()

    def _next_batch(self, sweep: TaskRun) -> None:
        batch = None if sweep.stale else next(self._batches, None)
        if batch is not None:
            self._todo = sweep.claim(*batch)
            return
        if not sweep.stale:
            self._swept = self._slot, sweep.share.token
        run = sweep.run()
        self._simulation.oracle.fenced += run.fenced
        self._sweep = None

    def _begin(self) -> None:
        snapshot = self.member.keeper.current()
        moment = self._simulation.moment()
        if snapshot is None or self._swept == (moment // (SPACING * MICRO), snapshot.token):
            return
        world = self._simulation.world
        self._slot = moment // (SPACING * MICRO)
        self._sweep = TaskRun(
            "work", self._task, RingOwnership(self.member.keeper, snapshot), world.claims, TickContext(moment, SPACING * MICRO),
            self.member.clock, backoff=self._backoff, timeout=1e9, batch=10,
        )  # fmt: skip
        self._sweep.begin()
        self._batches = self._sweep.batches()


class Simulation:
    """A schedule from a seed.

    :param faults: how often something goes wrong, per step.
    :param member: makes a member; a mutant's makes a broken one.
    :param guarded: whether members' own guards work; without them only the laws that rest on the rows are checked.
    """

    def __init__(
        self,
        seed: int,
        *,
        drain: bool = False,
        engines: int = 4,
        objects: int = 24,
        faults: float = 0.02,
        member: type[Member] = Member,
        world: World | None = None,
        guarded: bool = True,
    ) -> None:
        self.seed = seed
        self.random = random_module.Random(seed)
        self.drain = drain
        self.guarded = guarded
        self.world = world or World(SESSION)
        self.settings = RingSettings(settle=1.0, drain=drain, poll_interval=POLL)
        self.objects = [f"object-{number}" for number in range(objects)]
        self.oracle = Oracle(self)
        self.slow = 0.1
        self._faults = faults
        self._member = member
        self._depth = 0
        self.steps = 0
        #: The longest, by a true clock, that an engine may begin under a ring that was replaced.
        self.bound = self.settings.stale_after * 1.01 + 0.01
        self._watch_store()
        self.engines = [Engine(self, number, 1) for number in range(engines)]

    # -- for engines ----------------------------------------------------------------------------------------------

    def new_member(self, number: int, epoch: int, rate: float, timing: Timing) -> Member:
        return self._member(self.world, number, self.settings, rate=rate, epoch=epoch, timing=timing)

    def moment(self) -> int:
        """The store's time."""
        return self.world.moment()

    def real_members(self) -> frozenset[bytes]:
        return self.world.server.members(GROUP)

    def others(self, engine: Engine) -> None:
        """While a thread of an engine waits, others run; the engine's own other threads do too, unless it is paused."""
        if self._depth >= DEPTH:
            return
        self._depth += 1
        try:
            paused = self._faults > 0 and self.random.random() < 0.1
            if paused:
                engine.paused_until = self.world.clock.now + self.random.uniform(0, 3 * SESSION)
            for _ in range(self.random.randrange(12)):
                self.step()
            if paused:
                self.world.clock.advance(
                    max(0.0, self.random.uniform(0, 1) * (engine.paused_until - self.world.clock.now))
                )
                engine.paused_until = self.world.clock.now
        finally:
            self._depth -= 1
        if not engine.alive:
            raise Dead

    def hang(self, engine: Engine) -> None:
        """An answer to a heartbeat takes seconds, during which all others run, and then the heartbeat's thread is held up."""
        if self._depth >= DEPTH:
            return
        self._depth += 1
        try:
            end = self.world.clock.now + self.random.uniform(0, SESSION / 2)
            while self.world.clock.now < end:
                self.step()
        finally:
            self._depth -= 1
        if not engine.alive:
            raise Dead
        engine.hangs_until = self.world.clock.now + self.random.uniform(0, 1.5 * SESSION)

    # -- the schedule ---------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        while self.steps < steps:
            self.step()
        self.heal()

    def step(self) -> None:
        self.steps += 1
        if self.random.random() < self._faults:
            self._fault()
        if self.random.random() < 0.3:
            self.world.clock.advance(self.random.uniform(0, 0.4))
        self._release()
        choices = [(engine, each) for engine in self.engines for each in engine.steps()]
        if not choices:
            self.world.clock.advance(self.random.uniform(0, 1.0))
            return
        engine, (thread, action) = self.random.choice(choices)
        engine.do(thread, action)

    def _release(self) -> None:
        for engine in self.engines:
            if engine.member.cut and engine.cut_until <= self.world.clock.now:
                engine.member.cut = set()

    def _fault(self) -> None:
        engine = self.random.choice(self.engines)
        kind = self.random.choice(
            ("kill", "pause", "cut", "hang", "members", "answers", "session", "restart", "leave", "step")
        )
        now = self.world.clock.now
        if kind == "kill" and engine.alive:
            engine.alive = False
        elif kind == "restart" and not engine.alive and not engine.busy:
            self.engines[self.engines.index(engine)] = Engine(self, engine.number, engine.epoch + 1)
        elif kind == "pause":
            engine.paused_until = max(engine.paused_until, now + self.random.uniform(0, 3 * SESSION))
        elif kind == "hang":
            engine.hangs_until = now + self.random.uniform(0, 2 * SESSION)
        elif kind in {"cut", "members", "answers"}:
            calls = {"cut": {"all"}, "members": {"members"}, "answers": {"renewed", "seen"}}
            engine.member.cut, engine.cut_until = calls[kind], now + self.random.uniform(0, 2 * SESSION)
        elif kind == "session" and self.random.random() < 0.3:
            # The server ends somebody's session early: it lost its data. Nobody can know before the next heartbeat, so the law
            # about the server's members is left out of the check by ending it for an engine that is idle.
            if not engine.busy and engine.alive and engine._sweep is None:
                self.world.server.remove(GROUP, engine.member.membership.member_id or b"")
                engine.do("beat", engine.member.beat)
        elif kind == "step" and self.random.random() < 0.3:
            # By more than the claims take for a difference of servers' clocks, so that a tick's name may come a second time.
            seconds = self.random.uniform(AHEAD / MICRO + SPACING, 30 * SPACING)
            self.world.stepped += self.random.choice((-seconds, seconds))
            self.oracle.clock_was_set()
        elif kind == "leave" and engine.able and not engine.busy:
            engine.member.keeper.stop()
            engine.member.membership.stop()
            engine.alive = False

    def heal(self) -> None:
        """End all faults; then every object must be handled within two periods, and in every period."""
        self._faults, self.slow = 0.0, 0.0
        now = self.world.clock.now
        for number, engine in enumerate(self.engines):
            engine.member.cut, engine.paused_until, engine.hangs_until = set(), now, now
            if not engine.alive:
                self.engines[number] = Engine(self, engine.number, engine.epoch + 1)
        # What the dead and the paused were is over after a session, and what came back has settled.
        self._quietly(SESSION + 5 * POLL + 2)
        if self.oracle.steps:
            # What was claimed ahead by less than clocks may differ.
            self._quietly(AHEAD / MICRO + 2 * SPACING)
        recovered = self.world.clock.now
        self._quietly(2 * SPACING)
        for object_id in self.objects:
            if self.oracle.handled_at.get(object_id, -1.0) < recovered:
                self.oracle.fail(f"{object_id} was not handled within two periods after all was well")

    def _quietly(self, seconds: float) -> None:
        end = self.world.clock.now + seconds
        while self.world.clock.now < end:
            self.step()

    def _watch_store(self) -> None:
        ledger, inner = self.world.ledger, self.world.ledger.propose

        def propose(group: str, seen: RingRow | None, proposed: RingRow) -> bool:
            done = inner(group, seen, proposed)
            if done and ledger.row is not None:
                self.oracle.moved_at[ledger.row.token] = self.world.clock.now
            return done

        ledger.propose = propose  # type: ignore[method-assign]
        claims, claim_one = self.world.claims, self.world.claims.claim_one

        def claim(claim: TickLease, object_id: str) -> bool:
            granted = claim_one(claim, object_id)
            if granted:
                self.oracle.claims(object_id, claim.tick, claim.token)
            return granted

        claims.claim_one = claim  # type: ignore[method-assign]
