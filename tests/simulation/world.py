# SPDX-License-Identifier: Apache-2.0
"""The world of one schedule: kernel, network, database file, clocks, randomness, and processes with production's platforms."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from typing_extensions import override

from moorage import bounded_pool, extensions, randomness, threads
from moorage.control_plane import config, engine_role, scheduler_role
from moorage.control_plane.process import Platform
from moorage.db import Database, migrations
from moorage.rpc.client import RpcSender
from moorage.scheduling import plugin_runner
from moorage.scheduling.scheduler import Scheduler
from moorage.services.heartbeat import Heartbeat
from moorage.services.interface import ServiceIdentity
from moorage.services.registry import ServiceRegistry
from moorage.testing.database import create_all
from moorage_plugins.compute.agent import ComputeAgent
from moorage_plugins.drivers.simulated import SimulatedDriver
from moorage_plugins.filters.type_affinity import TypeAffinityFilter
from tests.simulation import schedules
from tests.simulation.cases import Case, Recorder, Replay
from tests.simulation.kernel import Kernel, Process
from tests.simulation.memory import Memory
from tests.simulation.network import SimNetwork, SimTransport
from tests.simulation.primitives import SimPrimitives
from tests.simulation.store import Backing, SimDatabase

__all__ = ["Base", "SimClock", "World"]

#: Where plugins raise or hang.
_PLUGIN_CALLS: Sequence[tuple[Any, str]] = (
    (TypeAffinityFilter, "mask_rows"),
    (SimulatedDriver, "spawn"),
    (SimulatedDriver, "destroy"),
    (SimulatedDriver, "inspect"),
    (SimulatedDriver, "prepare"),
    (SimulatedDriver, "transfer"),
    (SimulatedDriver, "start"),
    (SimulatedDriver, "stop"),
)

#: Memory where there is a RAM disk.
FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


class SimClock:
    """The clock of one simulated process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic(self) -> float:
        """What the process's clock shows."""
        return self._process.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        if seconds > 0:
            self._process.kernel.block(None, seconds, "sleep")

    def wait(self, event: threads.Event, seconds: float | None) -> bool:
        """Wait for the event."""
        return event.wait(seconds)

    def boottime(self) -> float:
        """What the machine's clock shows."""
        return self._process.boottime()

    def wall(self) -> float:
        """For people."""
        return self._process.monotonic()


class _Source(randomness.RandomSource):
    """Numbers of the seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    @override
    def generator(self) -> random.Random:
        return random.Random(self._random.getrandbits(64))

    @override
    def new_uuid(self) -> str:
        bits = f"{self._random.getrandbits(128):032x}"
        return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-a{bits[17:20]}-{bits[20:]}"

    @override
    def secret(self, size: int) -> bytes:
        return self._random.randbytes(size)


class _NoProcessorTime:
    """In the place of :class:`moorage.clock.ThreadTime`: what the real machine needs decides nothing here."""

    @staticmethod
    def seconds() -> float:
        """None."""
        return 0.0


class _NoTraceback:
    """In the place of :mod:`faulthandler` in production's modules: what hangs is a fault of the schedule."""

    @staticmethod
    def dump_traceback(**_: Any) -> None:
        """Nothing."""


class Base:
    """What is made once for all schedules of a workload: configuration, database.

    :param fill: writes what is in the store at the beginning. :param engine: "memory", "postgresql" or "mariadb".
    :param reloaded: what a reload changes of the settings.
    """

    def __init__(
        self,
        settings: Mapping[tuple[str, str], Any],
        fill: Callable[[Database, Any], None],
        engine: str = "memory",
        reloaded: Mapping[tuple[str, str], Any] = MappingProxyType({}),
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="moorage-simulation-", dir=FOLDER)
        # Forked processes end without this.
        atexit.register(self.remove)
        self.backing = _backing(engine, self.folder)
        url = self.backing.url
        self.conf, self.other_conf = (
            config.load(files=["/dev/null"], state_dir=self.folder, overrides={("database", "connection"): url, **each})
            for each in (settings, {**settings, **reloaded})
        )
        database = Database(url)
        create_all(database)
        fill(database, self.conf)
        database.close()
        self.backing.filled()
        self.tables = sorted(name for each in migrations.discover() for name in each.metadata.tables)
        self.installed = extensions._read()
        self.cache: dict[Any, Any] = {}
        #: Threads of schedules that are over and did not end.
        self.stuck = 0

    def remove(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _backing(engine: str, folder: str) -> Backing:
    if engine == "memory":
        return Memory(folder)
    from tests.simulation.stepping import Servers

    return Servers(engine)


@dataclass
class _Streams:
    """Separate random streams, so that a change of one leaves the others as they are."""

    faults: random.Random
    messages: random.Random
    schedule: random.Random


class World:
    """One schedule's world.

    :param points: about how many guarded points a schedule has, for the policies.
    :param case: what the schedule goes without.
    """

    def __init__(self, base: Base, seed: str, points: int, *, keep: bool = False, case: Case | None = None) -> None:
        self.base = base
        self.conf = base.conf
        self.seed = seed
        self.case = case or Case()
        self.random = _Streams(*(random.Random(f"{seed}/{name}") for name in ("faults", "messages", "schedule")))
        self._workload: dict[str, random.Random] = {}
        self.policy_name, policy = schedules.draw(self.random.schedule, points)
        self.recorder = Recorder(policy) if self.case.switches is None else Replay(self.case.switches, self.case.pauses)
        self.kernel = Kernel(self.recorder, keep=keep)
        self.folder = Path(base.folder, f"world-{os.getpid()}")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.site = base.backing.site(self.kernel, str(self.folder))
        self.network = SimNetwork(self.kernel, self.random.messages)
        for each in (self.conf, base.other_conf):
            # To set an option makes oslo.config forget all values that it has looked up.
            if each.control_plane.state_dir != str(self.folder):
                each.set_override("state_dir", str(self.folder), group="control_plane")
        #: Between what a process's clock may show in one true second.
        self.rates = (0.9, 1.1)
        #: Seconds of the clocks of machines in one true second.
        self.boot_rates: Sequence[float] = (1.0,)
        #: Facts that checkers collect.
        self.facts: dict[str, Any] = {}
        self.platforms: dict[str, Platform] = {}
        #: Decisions by their ids, and when they began.
        self._began: dict[int, tuple[Any, float]] = {}
        #: Called in filters and drivers with what is called: raises, or takes its time.
        self.at_plugin: Callable[[str], None] = lambda name: None
        #: Called with the same when they have returned.
        self.after_plugin: Callable[[str], None] = lambda name: None
        #: Called with a scheduler, the fleet that it has ranked, its work, and when that work began: it refuses the request.
        self.at_refusal: Callable[[Scheduler, Any, Any, float], None] = lambda scheduler, fleet, work, began: None
        #: Called with a scheduler, its work, and a claim of it that holds.
        self.at_claim: Callable[[Scheduler, Any, Any], None] = lambda scheduler, work, node: None

    # -- processes ------------------------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """A process with a clock of its own."""
        clock = random.Random(f"{self.seed}/clock/{name}")
        rate = 1.0 if clock.random() < 0.5 else clock.uniform(*self.rates)
        made = self.kernel.process(name, rate=rate, offset=clock.uniform(0, 10_000))
        # All processes of a machine see one clock.
        machine = random.Random(f"{self.seed}/machine/{name.partition('#')[0]}")
        made.boot_rate = machine.choice(self.boot_rates)
        return made

    def workload(self) -> random.Random:
        """What the running process draws its work from: its own numbers, whatever other clients there are."""
        name = self.kernel.in_process().name
        if name not in self._workload:
            self._workload[name] = random.Random(f"{self.seed}/workload/{name}")
        return self._workload[name]

    def database(self, process: Process) -> SimDatabase:
        """A database object of a process."""
        made = self.base.backing.database()
        made.open_for(self.site, process, SimClock(process))
        return made

    def spawn(self, process: Process, name: str, work: Callable[[], object]) -> Any:
        """Start a thread in a process."""
        made = self.kernel.call_as(process, lambda: threads.thread(work, name=name))
        made.start()
        return made

    def platform(
        self,
        process: Process,
        binary: str,
        *,
        beats: bool = True,
        cluster: str | None = None,
        offers: Sequence[str] | None = None,
    ) -> Platform:
        """What production's role of a process stands on; called in a thread of the process.

        :param offers: what an agent offers; None: what it does in this release.
        """
        clock = SimClock(process)
        database = self.database(process)
        transport: SimTransport = self.network.transport(self.conf, clock, process)
        registry = ServiceRegistry(database, clock)
        host = process.name.partition("#")[0]
        if beats:
            if offers is None and binary == "agent":
                offers = ["compute", *ComputeAgent.powers(self.conf)]
            identity = registry.enlist(binary, host, cluster=cluster, rpc_version="1.0", offers=offers)
        else:
            identity = ServiceIdentity(randomness.new_uuid(), host, binary, cluster, 1)
        sender = RpcSender(transport, identity.uuid, identity.epoch, timeout=self.conf.rpc.call_timeout)

        def fatal(reason: str) -> None:
            process.lost = reason
            self.kernel.kill(process)
            self.kernel.point("fatal")

        section = self.conf.services
        heartbeat = Heartbeat(
            registry, identity, clock, interval=section.report_interval, service_down_time=section.service_down_time,
            on_lost=fatal,
        )  # fmt: skip
        if beats:
            heartbeat.start()
        made = Platform(
            host, clock, database, registry, identity, transport, sender, fatal,
            lambda: heartbeat.valid_until if beats else float("-inf"), heartbeat.renew,
        )  # fmt: skip
        self.platforms[process.name] = made
        return made

    # -- running --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Production's threads, locks and randomness are simulated inside of the block."""
        primitives = threads.use(SimPrimitives(self.kernel))
        source = randomness.use(_Source(self.seed))
        point = extensions.ExtensionPoint
        try:
            with contextlib.ExitStack() as patched:
                for owner, name, new in (
                    (point, "load", self._cached(point.load)),
                    (point, "load_all", self._cached(point.load_all)),
                    # Nothing is installed during a schedule: no look for changed distributions.
                    (extensions, "_read", lambda: self.base.installed),
                    # A simulation collects between schedules only.
                    (plugin_runner, "faulthandler", _NoTraceback),
                    # Less often than in production: most of a schedule would be these looks.
                    (scheduler_role, "_REFUSALS", 10.0),
                    (scheduler_role, "_STATES", 4.0),
                    (scheduler_role, "_HEALING", 2.0),
                    (scheduler_role, "REFRESH_INTERVAL", 30.0),
                    (scheduler_role, "POLL", 5.0),
                    (scheduler_role, "GATHER", 0.5),
                    (engine_role, "POLL", 10.0),
                    (bounded_pool, "ThreadTime", _NoProcessorTime),
                    (Scheduler, "_work", self._timed(Scheduler._work)),
                    (Scheduler, "_refusal", self._watched_refusal(Scheduler._refusal)),
                    (Scheduler, "_placed", self._watched_claim(Scheduler._placed)),
                    *((owner, name, self._misbehaving(owner, name)) for owner, name in _PLUGIN_CALLS),
                ):
                    patched.enter_context(mock.patch.object(owner, name, new))
                try:
                    yield
                finally:
                    self._close()
        finally:
            randomness.use(source)
            threads.use(primitives)

    def _close(self) -> None:
        self.base.backing.disconnect()
        self.base.stuck += self.kernel.close()
        self.base.backing.release()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _misbehaving(self, owner: Any, name: str) -> Any:
        """The method of a plugin, with a fault before it."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(*args: Any) -> Any:
            self.at_plugin(f"{owner.__name__}.{name}")
            result = method(*args)
            self.after_plugin(f"{owner.__name__}.{name}")
            return result

        return call

    def _timed(self, make: Any) -> Any:
        """The method that begins a scheduler's work, which notes when that was."""

        def work(*args: Any) -> Any:
            made = make(*args)
            self._began[id(made.decision)] = made.decision, self.kernel.now
            return made

        return work

    def _watched_refusal(self, refuse: Any) -> Any:
        def refusal(scheduler: Scheduler, fleet: Any, ranking: Any, work: Any) -> Any:
            self.at_refusal(scheduler, fleet, work, self._began[id(work.decision)][1])
            return refuse(scheduler, fleet, ranking, work)

        return refusal

    def _watched_claim(self, place: Any) -> Any:
        def placed(scheduler: Scheduler, work: Any, *arguments: Any) -> Any:
            made = place(scheduler, work, *arguments)
            self.at_claim(scheduler, work, made)
            return made

        return placed

    def _cached(self, load: Any) -> Any:
        """Plugins are imported once: importing is no part of a schedule."""
        cache = self.base.cache

        def found(point: Any, names: Any) -> Any:
            key = point.group, names if isinstance(names, str) else tuple(names)
            if key not in cache:
                cache[key] = load(point, names)
            return cache[key]

        return found
