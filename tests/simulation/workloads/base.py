# SPDX-License-Identifier: Apache-2.0
"""What every workload has: roles that are started and started again, clients, a time of faults, a time to heal, checks."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from moorage.control_plane.factories import open_instances, open_workers
from moorage.db import Database
from moorage.instances.agent_messages import AgentMessages, cast_to_agent
from moorage.instances.availability import Availability
from moorage.instances.delete import Deleter
from tests.simulation.faults import Faults
from tests.simulation.kernel import Process
from tests.simulation.world import World

__all__ = ["Workload", "open_deleter"]

#: Virtual seconds that roles may take to start and clients to end: a policy may have them wait for thousands of steps, which the
#: workload's own loop makes alone when all others wait.
PATIENCE = 3000.0


class Workload(abc.ABC):
    """One schedule of a workload."""

    #: Options of the configuration, by (group, name).
    settings: ClassVar[Mapping[tuple[str, str], Any]] = {}
    #: What a reload changes of them; without it no role reloads.
    reloaded: ClassVar[Mapping[tuple[str, str], Any]] = {}
    #: About how many guarded points and steps a schedule has while faults strike, measured without faults.
    points: ClassVar[int] = 1000
    steps: ClassVar[int] = 3000
    #: Virtual seconds in which faults strike, and that healing may take.
    seconds: ClassVar[float] = 30.0
    healing: ClassVar[float] = 300.0
    jumps: ClassVar[bool] = True
    #: Whether clients decide how long it takes.
    clients: ClassVar[bool] = True

    def __init__(self, world: World) -> None:
        self.world = world
        self.kernel = world.kernel
        reload = self.reload if self.reloaded else None
        self.faults = Faults(world, self.restart, reload, steps=self.steps, seconds=self.seconds, jumps=self.jumps)
        #: Role objects by the process's name.
        self.roles: dict[str, Any] = {}
        self._makers: dict[str, Callable[[], Any]] = {}
        self._numbers: dict[str, int] = {}
        self._ready: set[str] = set()
        #: Roles that are ready, and whether they have the other configuration.
        self._roles_of: dict[Process, Any] = {}
        self._changed: dict[Process, bool] = {}
        #: Clients, and those that have not ended.
        self.started: list[str] = []
        self._running: set[str] = set()
        #: The highest fence of a row, by table and uuid.
        self._highest_tokens: dict[tuple[str, str], int] = {}
        self.facts: dict[str, int] = {}

    @staticmethod
    @abc.abstractmethod
    def fill(database: Database, conf: Any) -> None:
        """Write what is in the store at the beginning."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Start roles and clients; called in a thread of the process main."""

    @abc.abstractmethod
    def quiet(self) -> str:
        """Why the system is not at rest yet; empty when it is."""

    @abc.abstractmethod
    def check(self) -> None:
        """Look whether every invariant holds, at rest."""

    def check_step(self) -> None:  # noqa: B027  (not every workload has such a law)
        """Look at what must hold after every commit; cheap."""

    def check_tokens(self, *tables: str) -> None:
        """No change follows one of a later token: the fence of a row never falls."""
        for table in tables:
            for uuid, fence in self.rows(f"SELECT uuid, fence FROM {table}"):
                highest = self._highest_tokens.get((table, uuid), 0)
                self.require(fence >= highest, f"a change of {uuid} ({table}) with token {fence} came after {highest}")
                self._highest_tokens[table, uuid] = fence

    # -- the schedule ---------------------------------------------------------------------------------------------

    def run(self) -> str:
        """The whole schedule; the hash of its trace."""
        self.world.site.after_commit = self.check_step
        with self.world.active():
            main = self.kernel.process("main")
            self.world.network.owners["main"] = main
            return self.kernel.run(main, self._main)

    def _main(self) -> None:
        self.begin()
        self._sleep_until(lambda: self._makers.keys() <= self._ready, PATIENCE, "the roles did not start")
        self.faults.begin()
        self.begin_clients()
        end = self.kernel.now + self.seconds
        while self._running and self.kernel.now < end + 120.0:
            self.kernel.block(None, 0.5, "sleep")
        self.kernel.block(
            None, max(0.0, end - self.kernel.now) if self.faults.counts or not self.clients else 0.0, "sleep"
        )
        self.faults.end()
        self.kernel.note("healed")
        self.kernel.resume_all()
        self._sleep_until(lambda: not self._running, PATIENCE, "clients did not end")
        deadline = self.kernel.now + self.healing
        while (why := self.quiet()) and self.kernel.now < deadline:
            self.kernel.block(None, 1.0, "sleep")
        self.require(not why, f"not at rest {self.healing:g} seconds after all faults healed: {why}")
        if self.calm:
            ended = [f"{each.name}: {each.lost}" for each in self.kernel.processes if each.lost]
            self.require(not ended, f"processes ended themselves although nothing went wrong: {ended}")
        self.check()
        self.kernel.note("rows", self.fingerprint())

    def begin_clients(self) -> None:  # noqa: B027  (a workload without clients starts none)
        """Start clients; the roles are ready."""

    def _sleep_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = self.kernel.now + seconds
        while not done():
            self.require(self.kernel.now < deadline, f"{what} within {seconds:g} seconds")
            self.kernel.block(None, 0.2, "sleep")

    def require(self, holds: object, law: str) -> None:
        """End the schedule as a violation unless it holds."""
        if not holds:
            self.kernel.violated(law)

    @property
    def random(self) -> random.Random:
        """What the running process draws its work from."""
        return self.world.workload()

    @property
    def calm(self) -> bool:
        """Whether nothing went wrong: no fault, and no thread stood still for long."""
        return not self.faults.counts and not self.world.policy_name.startswith("pauses")

    # -- roles and clients ----------------------------------------------------------------------------------------

    def start_role(self, name: str, make: Callable[[], Any], *, victim: bool = True) -> None:
        """Start a role in a process of its own; ``make`` is called again for each incarnation."""
        self._makers[name] = make
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        process = self.world.process(name if number == 1 else f"{name}#{number}")

        def work() -> None:
            role = make()
            platform = self.make_platform(role, process, name)
            role.start(platform, self.world.conf)
            if number == self._numbers[name]:
                self.roles[name] = role
            self._roles_of[process] = role
            self._ready.add(name)

        def start() -> None:
            try:
                work()
            except Exception as error:
                # Its text names the folder of this run, which is no part of the trace.
                self.kernel.note("not started", type(error).__name__, error)
                self.kernel.kill(process)
                self.kernel.later(1.0, lambda: self.restart(process))
                self.kernel.point("exit")
            else:
                # A mistake in a law is no failed start.
                self.started_role(name)

        process.on_kill.append(lambda: self._later(name, process))
        if victim:
            self.faults.victims.append(process)
        self.world.spawn(process, "start", start)

    def started_role(self, name: str) -> None:  # noqa: B027  (not every workload has such a law)
        """Look at what must hold when a role is ready; called in its process."""

    def _later(self, name: str, process: Process) -> None:
        if process.lost:
            # It ended by itself; a service manager starts it again.
            self.kernel.later(1.0, lambda: self.restart(process))

    def make_platform(self, role: Any, process: Process, name: str) -> Any:
        """What the role of a process stands on; called in a thread of the process."""
        return self.world.platform(process, role.binary, cluster=self.cluster_of(name))

    def cluster_of(self, name: str) -> str | None:
        """The cluster of a role."""
        return None

    def restart(self, process: Process) -> None:
        """Start the role of a process again, in a new one; of a process that stands still nothing is heard any more."""
        name = process.name.partition("#")[0]
        if name not in self._makers:
            return
        if self._numbers[name] > (int(process.name.partition("#")[2] or 1)):
            return
        if process in self.faults.victims:
            self.faults.victims.remove(process)
        platform = self.world.platforms.get(process.name)
        if platform is not None:
            self.world.network.forget(platform.transport)  # type: ignore[arg-type]
        self.start_role(name, self._makers[name])

    def reload(self, process: Process) -> None:
        """Have the role of a process take the other configuration, or the first one again, as after SIGHUP."""
        name = process.name.partition("#")[0]
        role = self._roles_of.get(process)
        if role is None or not process.alive:
            return
        changed = self._changed[process] = not self._changed.get(process, False)
        conf = self.world.base.other_conf if changed else self.world.conf
        self.kernel.note("reload", f"{name}: {'other' if changed else 'first'} configuration")
        self.world.spawn(process, "reload", lambda: role.reload(conf))

    def client(self, name: str, work: Callable[[Process], object], *, victim: bool = False) -> None:
        """Start a client in a process of its own; a victim may be killed, and is not started again."""
        if name in self.world.case.without_clients:
            return
        process = self.world.process(name)
        self.started.append(name)
        self._running.add(name)

        def run() -> None:
            work(process)
            self._running.discard(name)

        process.on_kill.append(lambda: self._running.discard(name))
        if victim:
            self.faults.victims.append(process)
        self.world.spawn(process, name, run)

    # -- looking --------------------------------------------------------------------------------------------------

    def rows(self, statement: str, *values: Any) -> list[Any]:
        """Read the database behind the control plane's back."""
        return self.world.site.rows(statement, values)

    def fingerprint(self) -> str:
        """Of all rows at the end, for the hash of the trace."""
        return ";".join(
            f"{table}:{self.rows(f'SELECT count(*) FROM {table}')[0][0]}" for table in self.world.base.tables
        )


def open_deleter(platform: Any, conf: Any) -> Deleter:
    """What begins deletions, as the API has it."""
    availability = Availability(platform.database, conf.services.service_down_time)
    messages = AgentMessages(cast_to_agent(platform.sender), availability.lacking, platform.clock)
    return Deleter(platform.database, open_instances(platform, conf), open_workers(platform, conf), messages.delete)
