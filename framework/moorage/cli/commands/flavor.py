# SPDX-License-Identifier: Apache-2.0
"""moorage flavor create|list|show|deprecate."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base
from moorage.cli.commands.instance import add_size_arguments, resources_of

__all__ = ["FlavorCreate", "FlavorDeprecate", "FlavorList", "FlavorShow"]

COLUMNS = ("flavorid", "version", "resources", "extra_specs", "implicit", "deprecated", "successor")


class FlavorCreate(base.ApiShow):
    """Create a flavor, or its next version. If the newest version has these contents, nothing changes."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name", metavar="NAME")
        add_size_arguments(parser)
        parser.add_argument(
            "--expected-version",
            type=int,
            default=0,
            metavar="N",
            help="the newest version that you know, for the next version of a flavor (default: 0, a new flavor)",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request."""
        resources = resources_of(parsed_args)
        extra_specs = dict(base.pairs(parsed_args.extra_spec, "--extra-spec"))
        api, expected = base.connection(parsed_args), parsed_args.expected_version
        return base.one(api.create_flavor(parsed_args.name, resources, extra_specs, expected_version=expected))


class FlavorList(base.ApiLister):
    """List flavors, each with its newest version."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--implicit", action="store_true", help="also sizes that only instances have; they cannot be requested"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        query = {"implicit": True} if parsed_args.implicit else {}
        return base.table(COLUMNS, base.connection(parsed_args).flavors(**query))


class FlavorShow(base.ApiShow):
    """Show a version of a flavor, and the numbers of all versions."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("--version", type=int, metavar="N", help="the newest one unless given")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).flavor(parsed_args.name, parsed_args.version))


class FlavorDeprecate(base.ApiLister):
    """Refuse new requests for a flavor or a version of it. Instances keep what they have."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name", metavar="NAME")
        parser.add_argument("--version", type=int, metavar="N", help="this version; all versions unless given")
        parser.add_argument("--successor", metavar="NAME", help="the flavor that refusals name")
        parser.add_argument("--undo", action="store_true", help="accept new requests again")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the versions."""
        changed = base.connection(parsed_args).deprecate_flavor(
            parsed_args.name,
            parsed_args.version,
            deprecated=not parsed_args.undo,
            successor=parsed_args.successor,
        )
        return base.table(COLUMNS, changed)
