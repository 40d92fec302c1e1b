# SPDX-License-Identifier: Apache-2.0
"""A whole control plane on one machine: all roles as processes under one supervisor."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.cli import validation
from moorage.clock import SystemClock
from moorage.control_plane import config
from moorage.control_plane.accepted_config import AcceptedCopy, load_unchanged
from moorage.control_plane.supervisor import Program, Supervisor, command, writer_limit
from moorage.db import Database, migrations
from moorage.drivers.interface import COMPUTE_DRIVERS, ComputeDriver
from moorage.http import authentication

__all__ = ["ControlPlane", "LaunchPlan", "enrols"]

LOG = logging.getLogger(__name__)
_LAST_PORT = 65535
#: Agents of a fleet that is simulated.
_AGENTS = 2


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What shall run, and where."""

    state_dir: Path
    bind: str = "127.0.0.1:8780"
    auth_strategy: str = "http_basic"
    schedulers: int = 2
    #: None: one where the agent enrols this machine, else two.
    agents: int | None = None
    engines: int = 1
    config_files: Sequence[str] = ()
    #: Dialect -> path, where it is not to be at its own place.
    mounts: Mapping[str, str] = field(default_factory=dict)
    #: The backend of coordination, where the configuration says nothing.
    coordination: str = ""
    #: The driver of the agents, where the command line says one.
    driver: str = ""
    #: Whether the agent makes the node of this machine, where the configuration says nothing.
    enrol: bool = False

    @property
    def overrides(self) -> dict[tuple[str, str], Any]:
        """What the command line says of the configuration."""
        found: dict[tuple[str, str], Any] = {("api", "bind"): self.bind, ("api", "auth_strategy"): self.auth_strategy}
        if self.coordination:
            found["coordination", "periodic_coordination_backend"] = self.coordination
        if self.driver:
            found["compute", "driver"] = self.driver
        if self.enrol:
            found["agent", "enrol"] = True
        if self.mounts:
            found["api", "mounts"] = ",".join(f"{name}:{path}" for name, path in self.mounts.items())
        return found

    def load(self) -> cfg.ConfigOpts:
        """Returns the configuration of the plan, not checked."""
        return config.load(files=self.config_files, state_dir=str(self.state_dir), overrides=self.overrides)

    def arguments(self) -> list[str]:
        """The same for the children."""
        given = [item for file in self.config_files for item in ("--config-file", os.path.abspath(file))]
        given += ["--state-dir", str(self.state_dir)]
        return given + [
            item for (group, name), value in self.overrides.items() for item in ("--set", f"{group}.{name}={value}")
        ]


class ControlPlane:
    """Starts, watches and ends the processes of a plan. Everything it writes lies in the state folder.

    :raises ConfigError: from :meth:`start`, when the configuration cannot be used; nothing is left running then.
    :raises Unavailable: from :meth:`start`, when something else went wrong that a later try may not meet.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self.plan = replace(plan, state_dir=plan.state_dir.absolute(), bind=_with_port(plan.bind))
        self._supervisor: Supervisor | None = None
        self._accepted = AcceptedCopy(self.plan.state_dir / "accepted" / "up")
        # Signals may come before there is a supervisor.
        self._stopping = threads.signal_event()
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """Where the API is."""
        host, _, port = self.plan.bind.rpartition(":")
        shown = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}.get(host, host)  # noqa: S104
        return f"http://{shown}:{port}"

    def load(self) -> Any:
        """Returns the configuration of this plan, with everything checked that a start would refuse.

        All processes, also those that are restarted later, get a copy of exactly what was checked.
        """
        conf, contents = load_unchanged(self.plan.config_files, self.plan.load)
        validation.check(conf)
        try:
            self._accepted.store(contents)
        except OSError as error:
            raise errors.Unavailable(
                f"The accepted configuration cannot be copied to {self._accepted.folder}: {error.strerror}."
            ) from error
        return conf

    def start(self) -> None:
        """Prepare the folder and the database, start all processes, wait until all are ready."""
        plan = self.plan
        authentication.refuse_open_noauth(plan.auth_strategy, plan.bind)
        try:
            plan.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _only_one(plan.state_dir)
        except OSError as error:
            raise errors.ConfigError(f"The state folder {plan.state_dir} cannot be used: {error.strerror}.") from error
        if _chooses_no_coordination(plan):
            # One machine has all that this backend needs; without one, every engine would do all of the work.
            self.plan = plan = replace(plan, coordination="database")
        if enrols(plan):
            self.plan = plan = replace(plan, enrol=True, agents=1)
        conf = self._running = self.load()
        client: dict[str, Any] = {"url": self.url, "auth_type": "none"}
        if plan.auth_strategy == "http_basic" and not conf.api.http_basic_auth_user_file:
            user, password = authentication.ensure_users(
                authentication.users_file(conf), plan.state_dir / "credentials"
            )
            client = {"url": self.url, "auth_type": "http_basic", "username": user, "password": password}
        database = Database.from_config(conf)
        migrations.upgrade_all(database)
        database.close()
        section = conf.control_plane
        self._supervisor = Supervisor(
            self._programs(),
            plan.state_dir,
            SystemClock(),
            delay=section.restart_delay,
            longest_delay=section.restart_delay_longest,
            max_rss=section.max_rss * 2**20,
            drain_timeout=section.drain_timeout,
            start_timeout=section.start_timeout,
            stopped_timeout=section.stopped_timeout,
            writer=database.current_writer,
            writer_timeout=writer_limit(conf),
            environment={**os.environ, **self._accepted.environment()},
            stopping=self._stopping,
            may_reload=self._may_reload,
        )
        self._supervisor.start()
        _write_client(plan.state_dir / "client.json", client)

    def run(self) -> None:
        """Watch until :meth:`stop`, or a SIGTERM where :meth:`handle_signals` was called."""
        assert self._supervisor is not None  # noqa: S101  (start comes first)
        self._supervisor.run()

    def stop(self) -> None:
        """Have :meth:`start` and :meth:`run` drain and end; may be called from a signal handler."""
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.stop()

    def reload(self) -> None:
        """Have :meth:`run` take the configuration again; may be called from a signal handler."""
        if self._supervisor is not None:
            self._supervisor.reload()

    def _may_reload(self) -> bool:
        """Check the new configuration here first, so that either every process takes it or none does.

        A process that is restarted after a refusal gets the copy that was accepted last, and logs that it does.
        """
        try:
            with plugin_isolation.isolate_plugin_call():
                conf = self.load()
        except Exception as error:  # noqa: BLE001  (whatever is wrong with it, the processes run on)
            said = error.message if isinstance(error, errors.MoorageError) else f"{type(error).__name__}: {error}"
            self._accepted.explain_refusal(said)
            sys.stderr.write(
                f"moorage: the new configuration is not taken, the old one stays: {said}\n"
                f"moorage: processes that restart use the accepted copy in {self._accepted.folder}.\n"
            )
            return False
        waiting = config.need_restart(self._running, conf)
        if waiting:
            sys.stderr.write(f"moorage: a reload does not change {', '.join(waiting)}; restart for that.\n")
        return True

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT end, SIGHUP reloads."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGINT, lambda *_: self.stop())
        signal.signal(signal.SIGHUP, lambda *_: self.reload())

    def _programs(self) -> list[Program]:
        plan = self.plan
        arguments = plan.arguments()
        counts = (
            ("api", 1),
            ("scheduler", plan.schedulers),
            ("engine", plan.engines),
            ("agent", plan.agents or _AGENTS),
        )
        return [
            Program(f"{role}-{number}", role, command(role, f"{role}-{number}", arguments))
            for role, count in counts
            for number in range(1, count + 1)
        ]


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until the condition holds; False when it did not within the time."""
    clock = SystemClock()
    deadline = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() > deadline:
            return False
        clock.sleep(0.05)
    return True


def _with_port(bind: str) -> str:
    """Port 0 made a free one now, because several processes must agree on it."""
    host, _, port = bind.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _LAST_PORT:
        raise errors.ConfigError(
            f"--bind {bind}: write HOST:PORT with a port from 0 to {_LAST_PORT}, for example 127.0.0.1:8780."
        )
    if port != "0":
        return bind
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return f"{host}:{probe.getsockname()[1]}"


def _chooses_no_coordination(plan: LaunchPlan) -> bool:
    return not _says(plan.load(), "coordination", "periodic_coordination_backend")


def _says(conf: cfg.ConfigOpts, group: str, option: str) -> bool:
    """Returns whether a file or the command line sets an option."""
    found = conf.get_location(option, group)
    return found is None or found.location is not cfg.Locations.opt_default


def enrols(plan: LaunchPlan) -> bool:
    """Returns whether the one agent of the plan makes the node of this machine: its driver sees the machine.

    :raises ConfigError: the driver cannot be used, or several agents would each enrol the one machine.
    """
    conf = plan.load()
    if _says(conf, "agent", "enrol"):
        if conf.agent.enrol and (plan.agents or 1) > 1:
            raise errors.ConfigError(
                f"[agent] enrol with --agents {plan.agents}: each agent would enrol all of this machine. Give --agents 1."
            )
        return bool(conf.agent.enrol)
    chosen = COMPUTE_DRIVERS.chosen(conf) if "compute" in conf.agent.services else ()
    if not any(each.plugin.resources is not ComputeDriver.resources for each in chosen):
        return False
    if (plan.agents or 1) > 1:
        sys.stderr.write(
            f"moorage: {plan.agents} agents share this machine, so none enrols it. Import their nodes, or give --agents 1.\n"
        )
        return False
    return True


def _only_one(folder: Path) -> IO[str]:
    """Hold the folder until the process ends.

    :raises InUse: another control plane holds it.
    """
    held = open(folder / "lock", "a", encoding="utf-8")  # noqa: SIM115  (held until the process ends)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        held.close()
        raise errors.InUse(
            f"Another control plane runs on {folder}; end it first, or give another --state-dir."
        ) from None
    return held


def _write_client(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(data, stream)
    os.replace(temporary, path)
