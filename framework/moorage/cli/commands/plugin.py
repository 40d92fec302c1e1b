# SPDX-License-Identifier: Apache-2.0
"""moorage plugin list|show|check|new."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from cliff import command, lister

from moorage import errors, options
from moorage.cli import base
from moorage.cli.scaffold.distribution import write
from moorage.cli.scaffold.families import FAMILIES
from moorage.control_plane.extension_points import extension_points, survey
from moorage.extensions import PluginState, SurveyResult

__all__ = ["PluginCheck", "PluginList", "PluginNew", "PluginShow"]

COLUMNS = ("group", "name", "state", "distribution", "version", "summary")


class PluginList(lister.Lister):
    """List installed plugins and whether they can be used."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--group", help="only this entry-point group, for example moorage.filters")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Reads what is installed and prints it."""
        found = [each for each in survey() if parsed_args.group in (None, each.group)]
        return base.table(COLUMNS, [_row(each) for each in found])


class PluginShow(base.LocalShow):
    """Show one plugin."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name")
        parser.add_argument("--group", help="where several groups have the name")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Reads what is installed and prints it."""
        found = [
            finding
            for point in extension_points()
            if parsed_args.group in (None, point.group) and parsed_args.name in point.installed()
            for finding in point.survey([parsed_args.name])
        ]
        if not found:
            raise errors.NotFound(f"No installed plugin is named {parsed_args.name}; moorage plugin list shows all.")
        if len(found) > 1:
            groups = ", ".join(each.group for each in found)
            raise errors.InvalidInput(f"Several groups have a plugin {parsed_args.name}: {groups}. Give --group.")
        return base.one(
            {
                **_row(found[0]),
                "target": found[0].target,
                "problem": found[0].problem,
                "remedy": found[0].remedy,
                "warning": found[0].warning,
            }
        )


class PluginCheck(command.Command):
    """Check that all installed plugins can be used, and that their options can be read. Exit status 1: one cannot."""

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Checks the plugins, and prints what is wrong or deprecated."""
        found = survey()
        for each in found:
            if each.warning:
                self.app.stdout.write(f"deprecated: {each.sentence()}\n")
        wrong = [each for each in found if each.state is not PluginState.READY]
        for each in wrong:
            self.app.stdout.write(f"{each.state.value}: {each.sentence()}\n")
        unread = options.problems()
        for sentence in unread:
            self.app.stdout.write(f"broken: {sentence}\n")
        self.app.stdout.write(f"{len(found) - len(wrong)} plugins can be used, {len(wrong)} cannot.\n")
        return 1 if wrong or unread else 0


class PluginNew(base.LocalCommand):
    """Write a new distribution with one plugin: class, entry point, options, tests on the conformance kit."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("family", help=f"one of: {', '.join(FAMILIES)}")
        parser.add_argument("name", help="as the configuration will name it, for example gpu_model")
        parser.add_argument("--into", type=Path, default=Path(), help="the folder to write it into (default: this one)")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Writes the distribution and prints the next steps."""
        written = write(parsed_args.family, parsed_args.name, parsed_args.into)
        names = written.names
        listed = "".join(f"  {written.folder / path}\n" for path in written.files)
        chosen = "".join(f"  {line}\n" for line in names["choose"].splitlines())
        self.app.stdout.write(
            f"{listed}Next:\n  pip install {_as_a_path(written.folder)}\n  moorage plugin show {names['plugin']}\n"
            f"Then, in the configuration:\n{chosen}"
        )
        return 0


def _as_a_path(folder: Path) -> str:
    """Returns the path of a folder in the form that pip takes for a path, not for the name of a distribution in an index."""
    return shlex.quote(str(folder) if folder.is_absolute() else f"./{folder}")


def _row(finding: SurveyResult) -> dict[str, Any]:
    return {name: getattr(finding, name) for name in COLUMNS} | {"state": finding.state.value}
