# SPDX-License-Identifier: Apache-2.0
"""One role in this process: ``python -m moorage.cli.roles ROLE`` and the commands ``moorage api|scheduler|agent|engine``."""

from __future__ import annotations

import argparse
import os
import pkgutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oslo_config import cfg

from moorage.control_plane import config, process
from moorage.control_plane.accepted_config import ConfigSource

__all__ = ["ROLES", "add_role_arguments", "load", "main", "run"]

#: Where each role's class is. It is imported when it runs: a process needs no other's libraries, and starts the quicker.
ROLES: Mapping[str, str] = {
    "api": "moorage.control_plane.api_role:ApiRole",
    "scheduler": "moorage.control_plane.scheduler_role:SchedulerRole",
    "agent": "moorage.control_plane.agent_role:Agent",
    "engine": "moorage.control_plane.engine_role:Engine",
}


def add_role_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of every role's process."""
    parser.add_argument("--name", default=socket.gethostname(), help="host name of the service (the machine's name)")
    parser.add_argument("--config-file", action="append", default=[], help="may be repeated; later ones win")
    parser.add_argument("--state-dir", help="the folder of everything; wins over [control_plane] state_dir")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.OPTION=VALUE", help="wins over the files")


def load(arguments: argparse.Namespace) -> cfg.ConfigOpts:
    """Loads the configuration that the arguments of :func:`add_role_arguments` name."""
    return _loader(arguments)(arguments.config_file, False)


def _loader(arguments: argparse.Namespace) -> Callable[[Sequence[str], bool], cfg.ConfigOpts]:
    overrides: dict[tuple[str, str], Any] = {}
    for text in arguments.set:
        name, _, value = text.partition("=")
        group, _, option = name.partition(".")
        overrides[group, option] = value
    return lambda files, alone: config.load(
        files=files, state_dir=arguments.state_dir, overrides=overrides, alone=alone
    )


def run(role: str, arguments: argparse.Namespace) -> int:
    """Run the role until SIGTERM."""
    source = ConfigSource(
        _loader(arguments), arguments.config_file, arguments.state_dir, f"{role}-{arguments.name}", os.environ
    )
    return process.run(pkgutil.resolve_name(ROLES[role])(), arguments.name, source)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the supervisor's children: quicker than the whole command line."""
    parser = argparse.ArgumentParser(prog="moorage")
    parser.add_argument("role", choices=sorted(ROLES))
    add_role_arguments(parser)
    arguments = parser.parse_args(argv)
    return run(arguments.role, arguments)


if __name__ == "__main__":
    sys.exit(main())
