# SPDX-License-Identifier: Apache-2.0
"""The ``moorage`` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from cliff import app, commandmanager
from cliff.help import HelpExit
from typing_extensions import override

from moorage import errors
from moorage.cli import overview
from moorage.extensions import ExtensionPoint
from moorage.part import PartPoint

__all__ = ["MoorageApp", "main"]

_COMMANDS: ExtensionPoint[Any] = PartPoint("moorage.cli", None, (1, 0), declared_in="commands")


class _Installed:
    """A command that is known by name; it is imported when it is asked for."""

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self.value = value

    def load(self) -> Any:
        """Returns the class.

        :raises PluginLoadError: it is broken, or two distributions bring it.
        """
        return _COMMANDS.load(self.name).plugin


class _Commands(commandmanager.CommandManager):
    """cliff's manager imports every installed command before it runs one; ours imports the one that is run.

    That is a second of processor time for each call, and a broken command of a stray package is nobody's matter until
    it is asked for.
    """

    def load_commands(self, namespace: str) -> None:
        self.group_list.append(namespace)
        for name, owners in _COMMANDS.installed().items():
            self.commands[name.replace("_", " ")] = _Installed(name, owners[0].value)  # type: ignore[assignment]

    def add_command(self, name: str, command_class: Any) -> None:
        """What is installed wins over the commands that cliff brings (``complete``)."""
        if name not in self.commands:
            super().add_command(name, command_class)


class MoorageApp(app.App):
    """cliff's application over all installed commands."""

    def __init__(self) -> None:
        super().__init__(
            description="Moorage: the control plane of a fleet",
            version=metadata.version("moorage"),
            command_manager=_Commands(_COMMANDS.group),
            deferred_help=True,
        )

    @override
    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        """As cliff's, with the program's own name: what makes the manual is another program."""
        parser: argparse.ArgumentParser = super().build_option_parser(
            description, version, {**(argparse_kwargs or {}), "prog": "moorage"}
        )
        return parser

    @override
    def run(self, argv: list[str]) -> int:
        """As cliff's, which would print the version of the program for ``moorage flavor show small --version 2``."""
        if argv and not argv[0].startswith("-"):
            self.parser._option_string_actions.pop("--version", None)
        return int(super().run(argv))

    @override
    def print_help_if_requested(self) -> None:
        """As cliff's, without importing every command."""
        if self.options.deferred_help:
            self.parser.print_help(self.stdout)
            installed = {name.replace("_", " "): owners for name, owners in _COMMANDS.installed().items()}
            overview.write(self.stdout, installed, "moorage")
            raise HelpExit

    @override
    def run_subcommand(self, argv: list[str]) -> int:
        """Runs a command. cliff takes an unknown option before the command for the command's name."""
        if argv[0].startswith("-"):
            self.stderr.write(
                f"moorage: {argv[0]} stands before the command. Write a command's options after it, for example: "
                "moorage service list --state-dir DIR\n"
            )
            return 2
        return int(super().run_subcommand(argv))

    def configure_logging(self) -> None:
        """Only warnings, and only from our own code: libraries talk too much for a command line."""
        super().configure_logging()
        for name in ("alembic", "keystoneauth", "urllib3", "stevedore", "oslo_service", "oslo_messaging", "amqp"):
            logging.getLogger(name).setLevel(logging.ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``moorage`` script."""
    try:
        return int(MoorageApp().run(list(sys.argv[1:] if argv is None else argv)))
    except (errors.PluginLoadError, errors.PluginTimeout) as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


if __name__ == "__main__":
    sys.exit(main())
