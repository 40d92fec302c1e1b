# SPDX-License-Identifier: Apache-2.0
"""moorage up, moorage api|scheduler|agent|engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from moorage import errors
from moorage.cli import base, roles
from moorage.cli.up import ControlPlane, LaunchPlan
from moorage.control_plane.supervisor import EXIT_CONFIG

__all__ = ["AgentCommand", "ApiCommandRole", "EngineCommand", "SchedulerCommand", "Up"]


class Up(base.LocalCommand):
    """Start a whole control plane on this machine; ends on SIGTERM or Ctrl-C."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--state-dir", type=Path, required=True, help="the folder that everything is kept in")
        parser.add_argument("--bind", default="127.0.0.1:8780", metavar="HOST:PORT", help="port 0 takes a free one")
        parser.add_argument("--auth-strategy", default="http_basic", choices=["noauth", "http_basic", "keystone"])
        parser.add_argument(
            "--driver",
            metavar="NAME",
            default="",
            help="[compute] driver of the agents: process runs commands on this machine and enrols it",
        )
        for name, count in (("schedulers", 2), ("engines", 1)):
            parser.add_argument(f"--{name}", type=_count, default=count, metavar="N")
        parser.add_argument(
            "--agents", type=_count, metavar="N", help="2, or 1 where the agent enrols this machine (unless given)"
        )
        parser.add_argument("--config-file", action="append", default=[], metavar="F")
        parser.add_argument(
            "--mount",
            action="append",
            default=[],
            type=_mount,
            metavar="DIALECT=PATH",
            help="serve a dialect of the API at another path than its own: placement=/ (may be repeated)",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Starts the processes, prints one line, and watches them."""
        plan = LaunchPlan(
            parsed_args.state_dir,
            parsed_args.bind,
            parsed_args.auth_strategy,
            parsed_args.schedulers,
            parsed_args.agents,
            parsed_args.engines,
            parsed_args.config_file,
            dict(parsed_args.mount),
            driver=parsed_args.driver,
        )
        plane = ControlPlane(plan)
        plane.handle_signals()
        plane.start()
        self.app.stdout.write(
            f"moorage is ready at {plane.url} (state in {plane.plan.state_dir}; next: moorage service list --state-dir "
            f"{plane.plan.state_dir})\n"
        )
        self.app.stdout.flush()
        plane.run()

    @override
    def status_of(self, error: errors.MoorageError) -> int:
        """The status of a configuration error stops service managers from starting the command again."""
        return EXIT_CONFIG if isinstance(error, errors.ConfigError) else 1


class _RoleCommand(base.LocalCommand):
    role: ClassVar[str]

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        roles.add_role_arguments(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Runs until SIGTERM."""
        return roles.run(self.role, parsed_args)


class ApiCommandRole(_RoleCommand):
    """Run the API in this process."""

    role = "api"


class SchedulerCommand(_RoleCommand):
    """Run a scheduler in this process."""

    role = "scheduler"


class AgentCommand(_RoleCommand):
    """Run the agent of a host in this process."""

    role = "agent"

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--enrol",
            dest="set",
            action="append_const",
            const="agent.enrol=true",
            help="make the node of this host with what its driver sees, or bring it in line; short for [agent] enrol = true",
        )
        return parser


class EngineCommand(_RoleCommand):
    """Run an engine, which does the periodic work, in this process."""

    role = "engine"


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 100:
        raise argparse.ArgumentTypeError("must be from 1 to 100")
    return number


def _mount(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if not name or not path.startswith("/") or "," in path:
        raise argparse.ArgumentTypeError("write DIALECT=/PATH, for example placement=/")
    return name, path
