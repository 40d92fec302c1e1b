# SPDX-License-Identifier: Apache-2.0
"""The faults of one schedule, drawn from its seed: kills, pauses, partitions, weather, errors of the database, clocks.

Some strike at a step (any point of any victim: so a process dies between its commit and its message), some at a moment.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable

from tests.simulation.kernel import Process, SimThread
from tests.simulation.network import Weather
from tests.simulation.world import World

__all__ = ["Faults"]


def between(generator: random.Random, low: float, high: float) -> float:
    """A number between two, small ones as often as large ones."""
    return math.exp(generator.uniform(math.log(low), math.log(high)))


class Faults:
    """What goes wrong in a schedule.

    :param restart: called with a process that was killed, or that stands still, when another one shall take its place.
    :param reload: called with a victim: its role gets another configuration. None: the workload has no other one.
    :param steps: about how many steps the schedule has while faults strike. :param seconds: how long they do.
    """

    def __init__(
        self,
        world: World,
        restart: Callable[[Process], object],
        reload: Callable[[Process], object] | None = None,
        *,
        steps: int,
        seconds: float,
        jumps: bool = True,
    ) -> None:
        self._world = world
        self._restart = restart
        self._reload = reload
        self._random = world.random.faults
        self._seconds = seconds
        self._steps = steps
        #: Whether clocks of processes may jump.
        self.jumps = jumps
        #: Whether faults strike.
        self.on = True
        #: Whether the database's clock may jump.
        self.jumps_of_database = True
        self.planned: list[str] = []
        self.victims: list[Process] = []
        self.counts: Counter[str] = Counter()
        #: Step from which -> what strikes, and at which kind of point (empty: any).
        self._at_step: dict[int, tuple[str, str, random.Random]] = {}
        self._errors: dict[int, str] = {}
        #: What the next calls of plugins do.
        self._plugins: list[tuple[float, str, random.Random]] = []

    def begin(self) -> None:
        """Draw the plan; it is in force from now on, without what the world's case omits."""
        kernel, draw = self._world.kernel, self._random
        # Each seed also draws how bad it is: many schedules have few faults, which makes each one tell.
        level = draw.choice((0, 1, 1, 2, 4))
        for _ in range(level):
            step = kernel.steps + draw.randrange(1, self._steps)
            # In the midst of work on a hypervisor, after a commit, before a message, anywhere.
            where = draw.choice(("", "", "sleep", "sleep", "sleep", "committed", "send", "commit", "writer"))
            what = draw.choice(("kill", "kill", "freeze", "replace", "replace"))
            self.add(f"{what} at step {step} {where}", functools.partial(self._strikes, step, what, where))
        for _ in range(draw.choice((0, 0, 1, 3))):
            step = kernel.steps + draw.randrange(1, self._steps)
            what = draw.choice(("busy", "lost", "full", "unknown"))
            self.add(f"{what} at step {step}", functools.partial(self._fails, step, what))
        for _ in range(draw.choice((0, 0, 1, 2))):
            after = draw.uniform(0, self._seconds)
            self.add(f"partition after {after:.3f} s", functools.partial(self._later, after, self._partition))
        jump, when = self.jumps and draw.random() < 0.2, draw.uniform(0, self._seconds)
        if jump:
            self.add(f"jump after {when:.3f} s", functools.partial(self._later, when, self._jump))
        if draw.random() < 0.5:
            weather = Weather(
                lost=draw.choice((0.0, 0.05, 0.2)), doubled=draw.choice((0.0, 0.1)), late=draw.choice((0.0, 0.1, 0.3)),
                reply_lost=draw.choice((0.0, 0.05, 0.2)),
            )  # fmt: skip
            self.add(f"{weather}", lambda own: setattr(self._world.network, "weather", weather))
        if draw.random() < 0.15 and self.jumps_of_database:
            moment = draw.uniform(0, self._seconds)
            self.add(
                f"jump of the database after {moment:.3f} s",
                functools.partial(self._later, moment, self._jump_of_database),
            )
        if self._reload is not None:
            for _ in range(draw.choice((0, 0, 0, 1, 3))):
                moment = draw.uniform(0, self._seconds)
                self.add(f"reload after {moment:.3f} s", functools.partial(self._later, moment, self._change_options))
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            moment, what = kernel.now + draw.uniform(0, self._seconds), draw.choice(("raise", "raise", "hang"))
            self.add(f"{what} in a plugin from {moment:.3f} s", functools.partial(self._misbehaves, moment, what))
        kernel.at_point = self._strike
        self._world.site.fault = self._fault
        self._world.at_plugin = self._in_plugin

    def add(self, name: str, plan: Callable[[random.Random], object]) -> None:
        """Plan a fault. Each has random numbers of its own, so that the others stay as they are without it."""
        if name not in self._world.case.without_faults:
            self.planned.append(name)
            plan(random.Random(f"{self._world.seed}/{name}"))

    def _strikes(self, step: int, what: str, where: str, own: random.Random) -> None:
        self._at_step[step] = what, where, own

    def _fails(self, step: int, what: str, own: random.Random) -> None:
        self._errors[step] = what

    def _misbehaves(self, moment: float, what: str, own: random.Random) -> None:
        self._plugins.append((moment, what, own))

    def later(self, seconds: float, strike: Callable[[random.Random], bool], own: random.Random) -> None:
        """Strike after true seconds, and again each half second until it has struck or all faults are over."""

        def once() -> None:
            if self.on and not strike(own):
                self._world.kernel.later(0.5, once)

        self._world.kernel.later(seconds, once)

    def _later(self, seconds: float, strike: Callable[[random.Random], None], own: random.Random) -> None:
        self._world.kernel.later(seconds, lambda: strike(own))

    def end(self) -> None:
        """Heal everything: no fault strikes any more, and what stands still goes on."""
        self.on = False
        self._world.kernel.at_point = None
        self._world.network.weather = Weather()
        self._world.network.cuts.clear()
        self._world.site.fault = lambda kind, writer: None
        self._world.at_plugin = lambda name: None

    # -- at a step ------------------------------------------------------------------------------------------------

    def _strike(self, me: SimThread, kind: str) -> None:
        if not self._at_step:
            return
        due = min(self._at_step)
        if self._world.kernel.steps < due or me.process not in self.victims:
            return
        what, where, own = self._at_step[due]
        if where not in ("", kind):
            return
        del self._at_step[due]
        self.counts[what] += 1
        process = me.process
        if what == "kill":
            self._world.kernel.kill(process)
            self._world.kernel.later(between(own, 0.01, 20.0), lambda: self._replace(process))
            return
        seconds = between(own, 0.05, 60.0)
        self._world.kernel.freeze(process, seconds)
        if what == "replace":
            self._world.kernel.later(seconds * own.uniform(0.1, 0.9), lambda: self._replace(process))

    def _replace(self, process: Process) -> None:
        if process in self.victims:
            self.victims.remove(process)
            self._restart(process)

    def _fault(self, kind: str, writer: bool) -> str | None:
        me = self._world.kernel.current
        if not self._errors or me is None or me.process not in self.victims:
            return None
        due = min(self._errors)
        if self._world.kernel.steps < due:
            return None
        what = self._errors[due]
        if (what == "unknown") != (kind == "committed"):
            return None
        del self._errors[due]
        self.counts[what] += 1
        self._world.kernel.note("fault", what)
        return what

    def _in_plugin(self, name: str) -> None:
        """Called in a plugin, in place of its first statement."""
        me, now = self._world.kernel.current, self._world.kernel.now
        if not self._plugins or me is None or me.process not in self.victims:
            return
        due = min(self._plugins, key=lambda each: each[0])
        moment, what, own = due
        if now < moment:
            return
        self._plugins.remove(due)
        self.counts[f"plugin {what}"] += 1
        self._world.kernel.note("plugin", f"{what} in {name}")
        if what == "raise":
            raise RuntimeError("a mistake of the author")
        self._world.kernel.block(None, between(own, 1.0, 120.0), "sleep", "hang")

    # -- at a moment ----------------------------------------------------------------------------------------------

    def _partition(self, own: random.Random) -> None:
        names = sorted({each.name for each in self._world.kernel.processes if each.name != "main"})
        if not self.on or len(names) < 2:
            return
        self.counts["partition"] += 1
        one, other = own.sample(names, 2)
        self._world.network.cuts.add((one, other))
        heal = between(own, 0.5, 60.0)
        self._world.kernel.later(heal, lambda: self._world.network.cuts.discard((one, other)))

    def _jump(self, own: random.Random) -> None:
        if self.on and self.victims:
            self.counts["jump"] += 1
            process = own.choice(self.victims)
            process.offset += between(own, 1.0, 3600.0)
            self._world.kernel.note("jump", process.name)

    def _jump_of_database(self, own: random.Random) -> None:
        if self.on:
            self.counts["database jump"] += 1
            # Forward ends every lease at once. Back makes them last longer, which healing must still see the end of.
            self._world.site.ahead += own.choice((between(own, 1.0, 3600.0), -between(own, 0.1, 60.0)))
            self._world.kernel.note("database jump", f"{self._world.site.ahead:+.3f}")

    def _change_options(self, own: random.Random) -> None:
        if self.on and self.victims and self._reload is not None:
            self.counts["reload"] += 1
            self._reload(own.choice(self.victims))
