# SPDX-License-Identifier: Apache-2.0
"""The common life of every role's process: open store and messages, enlist, send heartbeats, serve, reload, drain."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging as standard_logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, plugin_isolation, randomness, threads
from moorage.clock import Clock, SystemClock
from moorage.control_plane import logs, systemd
from moorage.control_plane.accepted_config import ConfigSource
from moorage.control_plane.interface import AGENT_SERVICES
from moorage.control_plane.observing import close_unused, open_observers, settings_of, source_of
from moorage.control_plane.sharding_factories import declared_shard
from moorage.control_plane.supervisor import EXIT_CONFIG, EXIT_FATAL
from moorage.db import Database, migrations
from moorage.observers.hub import ObserverHub
from moorage.observers.interface import ObserverEvent, ServiceFenced, ServiceUp
from moorage.rpc import client as rpc_client
from moorage.rpc import interface as rpc_interface
from moorage.rpc import loading as rpc_loading
from moorage.services import options as services_options
from moorage.services.heartbeat import Heartbeat, HostLease
from moorage.services.interface import AGENT, ServiceIdentity
from moorage.services.registry import ServiceRegistry

__all__ = [
    "RPC_VERSION",
    "Platform",
    "Role",
    "check_schema",
    "exempt_from_collection",
    "run",
    "anonymous_platform",
    "without_collection",
]

LOG = logging.getLogger(__name__)

#: Of the messages that this release sends; schedulers and agents of different ones work together.
RPC_VERSION = "1.0"
#: Seconds between looks for the parent's death while the process starts.
_PAUSE = 0.2
#: Milliseconds between such looks later, where the system does not report the death by itself.
_LONG_PAUSE = 1000
#: Seconds that the start may still take when SIGTERM comes meanwhile, and that the last words of a fenced process may.
_GRACE = 2.0
#: Garbage is collected when so many more objects were made than freed.
_YOUNG = 50_000
#: Characters of a service's host name; the column of the table of services has this many.
_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class Platform:
    """What a role stands on."""

    name: str
    clock: Clock
    database: Database
    registry: ServiceRegistry
    identity: ServiceIdentity
    transport: rpc_interface.Transport
    sender: rpc_client.RpcSender
    #: Ends the process at once; does not return.
    fatal: Callable[[str], None]
    #: Time, on the monotonic scale, until which no service can declare this service dead.
    valid_until: Callable[[], float] = lambda: float("-inf")
    #: Has heartbeats renew the lease of a host that fences itself.
    renew: Callable[[HostLease], None] = lambda lease: None
    #: Tells the observers of an event that has happened; never waits, never raises.
    tell: Callable[[ObserverEvent], None] = lambda event: None


class Role(Protocol):
    """One of the four roles."""

    #: The name of the role, which is its services' ``binary`` and its topic.
    binary: str
    #: Whether others may take over what it does when it is silent. One that owns nothing goes on while the store is away.
    owns_work: bool

    def start(self, platform: Platform, conf: cfg.ConfigOpts) -> None:
        """Begin to serve; returns when it is ready."""

    def reload(self, conf: cfg.ConfigOpts) -> None:
        """Take a new configuration, all of it or (by an error) nothing."""

    def stop(self, drain_seconds: float) -> None:
        """Take nothing new and end what is running."""


def check_schema(database: Database) -> None:
    """Refuse to work on a database that was not upgraded.

    :raises ConfigError: says which command does it.
    """
    behind = [each.name for each in migrations.discover() if each.version(database) != each.head()]
    if behind:
        raise errors.ConfigError(
            f"The database {database.url_safe} is not at the newest revision of {', '.join(behind)}. "
            "Run: moorage-manage db upgrade"
        )


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collects no garbage while a process loads what it keeps, and excludes it from later collections.

    Full collections took a quarter of the time of loading a fleet, and one afterwards a second with a million instances.
    """
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def exempt_from_collection() -> None:
    """Excludes all objects that exist now from later garbage collections, and has garbage collected less often.

    A process keeps what it has after its start. A full collection visits all of these objects, which was a quarter of the cost of
    an answer with many objects. By default, Python collects after 700 new objects. That was 7 % of
    the processor time of a busy agent.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)


def anonymous_platform(binary: str, conf: cfg.ConfigOpts, clock: Clock, opened: contextlib.ExitStack) -> Platform:
    """Returns the platform of a process without work of its own: it is in no list of services and sends no heartbeats.

    Its identity only distinguishes its messages from those of other processes.

    :param opened: closes what is opened here.
    :raises ConfigError: the store or the messages cannot be used as they are configured.
    """
    services_options.check(conf)
    name = f"{os.uname().nodename}-{os.getpid()}"
    database = Database.from_config(conf, clock=clock, service=f"{binary}:{name}")
    opened.callback(database.close)
    check_schema(database)
    transport = rpc_loading.open_transport(conf, clock, needs=frozenset({rpc_interface.CROSS_PROCESS}))
    opened.callback(transport.close)
    identity = ServiceIdentity(randomness.new_uuid(), name, binary, None, 1)
    sender = rpc_client.RpcSender(transport, identity.uuid, identity.epoch, timeout=conf.rpc.call_timeout)
    hub = ObserverHub(source_of(identity), clock)
    hub.use(open_observers(conf, clock, source_of(identity)), settings_of(conf))
    opened.callback(hub.close, _GRACE)
    registry = ServiceRegistry(database, clock)
    return Platform(identity.host, clock, database, registry, identity, transport, sender, _end_at_once, tell=hub.tell)


def _offers(conf: cfg.ConfigOpts) -> frozenset[str]:
    """Returns the names of the agent services that an agent with this configuration offers, and of what they can do.

    :raises PluginLoadError: one of them cannot be used.
    """
    loaded = AGENT_SERVICES.load_all(conf.agent.services)
    return frozenset(name for each in loaded for name in (each.name, *each.plugin.offers, *each.plugin.powers(conf)))


def _end_at_once(reason: str) -> None:
    LOG.critical("The process stops at once: %s", reason)
    _flush()
    os._exit(EXIT_FATAL)


def run(role: Role, name: str, source: ConfigSource, clock: Clock | None = None) -> int:
    """Run a role until SIGTERM; the exit status.

    :param name: the host name of the service (``agent-1``).
    :param source: where the configuration is read, also on SIGHUP.
    """
    if problem := _problem_of_name(name):
        # Another configuration does not help.
        _say(role, name, problem)
        return EXIT_CONFIG
    faulthandler.enable()
    process: _Process | None = None
    try:
        conf = source.load()
        logs.setup(conf, f"moorage-{role.binary}")
        if warning := source.warning():
            LOG.warning("%s %s: %s", role.binary, name, warning)
        process = _Process(role, name, source, clock or SystemClock())
        return process.run(conf)
    except Exception as error:
        if isinstance(error, errors.MoorageError):
            said = error.message
        else:
            LOG.error("%s %s fails.", role.binary, name, exc_info=error)
            said = f"It failed ({type(error).__name__}: {error}); the log has it in full."
        _say(role, name, said)
        status, start_again = 1, None
        if isinstance(error, errors.ConfigError):
            status, start_again = EXIT_CONFIG, source.fall_back(said)
    if process is not None:
        process.abandon()
    if start_again is not None:
        sys.stderr.write(f"moorage {role.binary} {name}: it starts again with the copy that was accepted last.\n")
        _flush()
        start_again()
    if process is None:
        return status
    # A thread that a library or a plugin has begun must not hold up the end.
    os._exit(status)


def _problem_of_name(name: str) -> str:
    """Returns why a service may not have this host name, which also names folders; empty: it may."""
    if not 1 <= len(name) <= _LONGEST_NAME:
        wrong = f"has {len(name)} characters, and 1 to {_LONGEST_NAME} are allowed"
    elif not name.isprintable():
        wrong = f"has characters that cannot be printed: {ascii(name)}"
    elif "/" in name:
        wrong = "has a slash; folders are named after it"
    elif name in (".", ".."):
        wrong = "is the name of a folder"
    else:
        return ""
    return f"The name of the service {wrong}. Choose another --name, such as the machine's host name."


def _say(role: Role, name: str, said: str) -> None:
    line = f"moorage {role.binary} {plugin_isolation.escape_unprintable(name)}: {said}"
    _tell_parent(line)
    sys.stderr.write(f"{line}\n")


class _Attempt:
    """One call in another thread, and how it ended."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._error: Exception | None = None
        self.ended = threads.event()

    def run(self) -> None:
        """Call it."""
        try:
            with plugin_isolation.isolate_plugin_call():
                self._work()
        except Exception as error:  # noqa: BLE001  (raised by check)
            self._error = error
        finally:
            self.ended.set()

    def check(self) -> None:
        """Raise what the call raised."""
        if self._error is not None:
            raise self._error


class _Wakeups:
    """Waits for a signal or for the end of the parent; a process that gets neither does not wake. For the main thread.

    Signals that came since the object was made, or since the last wait, end a wait at once.
    """

    def __init__(self) -> None:
        self._signals, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._pause: int | None = None

    def watch(self, parent: int) -> None:
        """Have the end of the process ``parent`` wake this one."""
        try:
            # Readable when the process has ended.
            self._poll.register(os.pidfd_open(parent), select.POLLIN)
        except OSError as error:
            # The process is gone, or the kernel is older than 5.3.
            LOG.debug("The end of the supervisor cannot be waited for (%s); it is looked for each second.", error)
            self._pause = _LONG_PAUSE

    def wait(self) -> None:
        """Wait."""
        self._poll.poll(self._pause)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._signals, 1024):
                pass


class _Process:
    def __init__(self, role: Role, name: str, source: ConfigSource, clock: Clock) -> None:
        self._role = role
        self._name = name
        self._source = source
        self._clock = clock
        self._stop = threads.signal_event()
        self._reload = threads.signal_event()
        self._parent = int(os.environ.get("MOORAGE_PARENT", "0"))
        self._drain = 30.0
        self._heartbeat: Heartbeat | None = None
        self._hub: ObserverHub | None = None

    def run(self, conf: cfg.ConfigOpts) -> int:
        """Start, serve until something ends it, and end in good order."""
        self._wakeups = _Wakeups()
        for number, asked in ((signal.SIGTERM, self._stop), (signal.SIGINT, self._stop), (signal.SIGHUP, self._reload)):
            signal.signal(number, functools.partial(self._note, asked))
        self._drain = float(conf.control_plane.drain_timeout)
        # In a thread of its own: the store or the broker may be away, and signals must be heard meanwhile.
        starting = _Attempt(functools.partial(self._start, conf))
        threads.start(starting.run, name="start")
        if not self._await(starting.ended):
            LOG.info("%s %s was ended while it started.", self._role.binary, self._name)
            self.abandon()
            # The thread may hang in a library. What it has begun is what any process leaves that ends at that moment.
            os._exit(0)
        starting.check()
        self._source.accept()
        return self._wait()

    def _note(self, asked: threads.Event, *signalled: object) -> None:
        asked.set()

    def abandon(self) -> None:
        """Records the stop before the process exits at once, so that no service waits for its heartbeats."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._retire()
        _flush()

    def _await(self, started: threads.Event) -> bool:
        """Wait until the start has succeeded or failed; False when the process is asked to end and the start goes on."""
        while not self._clock.wait(started, _PAUSE):
            self._look_for_parent()
            if self._stop.is_set():
                return self._clock.wait(started, _GRACE)
        return True

    def _start(self, conf: cfg.ConfigOpts) -> None:
        # Before other services can learn of this service.
        services_options.check(conf)
        # A frozen process must not hold locks longer than it counts as a member of its group.
        self._database = Database.from_config(
            conf,
            clock=self._clock,
            idle_timeout=conf.coordination.session_timeout,
            service=f"{self._role.binary}:{self._name}",
        )
        check_schema(self._database)
        # Every role is a process of its own.
        self._transport = rpc_loading.open_transport(conf, self._clock, needs=frozenset({rpc_interface.CROSS_PROCESS}))
        self._registry = ServiceRegistry(self._database, self._clock)
        is_agent = self._role.binary == AGENT
        self._identity = self._registry.enlist(
            self._role.binary,
            self._name,
            cluster=(conf.agent.cluster or None) if is_agent else None,
            rpc_version=RPC_VERSION,
            offers=_offers(conf) if is_agent else None,
            shard=declared_shard(conf) if is_agent else None,
        )
        me = self._identity
        hub = ObserverHub(source_of(me), self._clock)
        hub.use(open_observers(conf, self._clock, source_of(me)), settings_of(conf))
        self._hub = hub
        sender = rpc_client.RpcSender(
            self._transport, self._identity.uuid, self._identity.epoch, timeout=conf.rpc.call_timeout
        )
        platform = Platform(
            self._name,
            self._clock,
            self._database,
            self._registry,
            self._identity,
            self._transport,
            sender,
            self._give_up,
            self._certain_until,
            self._renew,
            hub.tell,
        )
        heartbeat = Heartbeat(
            self._registry,
            self._identity,
            self._clock,
            interval=conf.services.report_interval,
            service_down_time=conf.services.service_down_time,
            on_lost=self._give_up,
            owns_work=self._role.owns_work,
        )
        heartbeat.start()
        self._heartbeat = heartbeat
        self._role.start(platform, conf)
        exempt_from_collection()
        LOG.info("%s %s is ready (service %s, epoch %d).", self._role.binary, self._name, *_identity(self._identity))
        hub.tell(ServiceUp(me.uuid, me.binary, me.host, me.epoch))
        _tell_parent("ready")
        systemd.notify("READY=1")

    def _certain_until(self) -> float:
        """Returns the time until which no service can declare this service dead; minus infinity without heartbeats."""
        return float("-inf") if self._heartbeat is None else self._heartbeat.valid_until

    def _renew(self, lease: HostLease) -> None:
        if self._heartbeat is not None:
            self._heartbeat.renew(lease)

    def _wait(self) -> int:
        """Serve until something ends it."""
        if self._parent:
            self._wakeups.watch(self._parent)
            self._look_for_parent()
        while not self._stop.is_set():
            self._wakeups.wait()
            if self._reload.is_set():
                self._reload.clear()
                self._take_configuration()
            self._look_for_parent()
        return self._end()

    def _look_for_parent(self) -> None:
        if self._parent and os.getppid() != self._parent and not self._stop.is_set():
            LOG.warning("The supervisor is gone; %s ends too.", self._name)
            self._stop.set()

    def _end(self) -> int:
        LOG.info("%s %s drains.", self._role.binary, self._name)
        systemd.notify("STOPPING=1")
        self._role.stop(self._drain)
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._retire()
        if self._hub is not None:
            self._hub.close(_GRACE)
        self._transport.close()
        self._database.close()
        LOG.info("%s %s has ended.", self._role.binary, self._name)
        return 0

    def _retire(self) -> None:
        try:
            self._registry.retire(self._identity)
        except errors.Unavailable as error:
            LOG.warning("The service could not be marked as stopped: %s", error)

    def _give_up(self, reason: str) -> None:
        """End at once, in whatever thread this is called and whatever the others do: start, reload, drain or work.

        What lost its right to work, or hangs, must not try to end in good order.
        """

        def say() -> None:
            LOG.critical("%s %s stops at once: %s", self._role.binary, self._name, reason)
            _flush()
            self._tell_the_end(reason)

        # In a thread of its own: a log that cannot be written must not hold up the end.
        last_words = threads.try_start(say, name="last-words")
        if last_words is not None:
            last_words.join(_GRACE)
        os._exit(EXIT_FATAL)

    def _tell_the_end(self, reason: str) -> None:
        """Observers get what is left of the time for last words."""
        if self._hub is not None:
            me = self._identity
            self._hub.tell(ServiceFenced(me.uuid, me.binary, me.host, me.epoch, reason))
            self._hub.close(_GRACE / 2)

    def _reload_with(self, conf: cfg.ConfigOpts) -> None:
        observers = open_observers(conf, self._clock, source_of(self._identity))
        try:
            self._role.reload(conf)
        except BaseException:
            close_unused(observers)
            raise
        if self._hub is not None:
            self._hub.use(observers, settings_of(conf))

    def _take_configuration(self) -> None:
        try:
            with plugin_isolation.isolate_plugin_call():
                self._reload_with(self._source.load())
        except errors.MoorageError as error:
            LOG.error("The new configuration is not taken, the old one stays: %s", error.message)
        except Exception:
            LOG.exception("The new configuration is not taken, the old one stays.")
        else:
            self._source.accept()
            LOG.info("The new configuration is in force.")
            self._record_reload()

    def _record_reload(self) -> None:
        try:
            self._registry.record_reload(self._identity)
        except errors.Unavailable as error:
            LOG.warning("The journal does not say that the configuration changed: %s", error.message)


def _flush() -> None:
    """Write out what the log handlers still hold."""
    for handler in standard_logging.getLogger().handlers:
        with contextlib.suppress(OSError, ValueError):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _identity(identity: Any) -> tuple[str, int]:
    return identity.uuid, identity.epoch


def _tell_parent(text: str) -> None:
    descriptor = os.environ.get("MOORAGE_READY_FD")
    if descriptor is None:
        return
    try:
        os.write(int(descriptor), text.encode() + b"\n")
        os.close(int(descriptor))
    except OSError as error:
        LOG.debug("The supervisor does not listen: %s", error)
    del os.environ["MOORAGE_READY_FD"]
