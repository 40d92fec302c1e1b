# SPDX-License-Identifier: Apache-2.0
"""moorage aggregate create|list|show|set|delete|add|remove."""

from __future__ import annotations

import argparse
from typing import Any

from moorage import errors
from moorage.cli import base

__all__ = [
    "AggregateAdd",
    "AggregateCreate",
    "AggregateDelete",
    "AggregateList",
    "AggregateRemove",
    "AggregateSet",
    "AggregateShow",
]

COLUMNS = ("name", "metadata", "hosts", "nodes", "uuid")


def _add_metadata(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metadata",
        action="append",
        default=[],
        metavar="KEY=TEXT",
        help="what filters and weighers read; may be repeated",
    )
    parser.add_argument("--zone", help="availability zone: the metadata availability_zone")


def _metadata(arguments: argparse.Namespace) -> dict[str, str]:
    zone = {"availability_zone": arguments.zone} if arguments.zone else {}
    return {**dict(base.pairs(arguments.metadata, "--metadata")), **zone}


class _OfOne(base.ApiShow):
    """Base class of commands about one aggregate."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("aggregate", help="name or uuid")
        return parser


class AggregateCreate(base.ApiShow):
    """Create an aggregate: a named set of nodes with metadata."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name")
        _add_metadata(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Creates the object and prints it."""
        return base.one(base.connection(parsed_args).create_aggregate(parsed_args.name, _metadata(parsed_args)))


class AggregateList(base.ApiLister):
    """List aggregates."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.table(COLUMNS, base.connection(parsed_args).aggregates())


class AggregateShow(_OfOne):
    """Show an aggregate."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).aggregate(parsed_args.aggregate))


class AggregateSet(_OfOne):
    """Change the name or the metadata of an aggregate."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--name", help="another name")
        _add_metadata(parser)
        parser.add_argument("--unset", action="append", default=[], metavar="KEY", help="take it away; may be repeated")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        metadata: dict[str, str | None] = {**_metadata(parsed_args), **dict.fromkeys(parsed_args.unset)}
        changes: dict[str, Any] = {"metadata": metadata} if metadata else {}
        if parsed_args.name:
            changes["name"] = parsed_args.name
        if not changes:
            raise errors.InvalidInput("Say what is to be changed: --name, --metadata KEY=TEXT, --zone or --unset KEY.")
        return base.one(base.connection(parsed_args).change_aggregate(parsed_args.aggregate, **changes))


class AggregateDelete(base.ApiCommand):
    """Remove an aggregate; its members stay."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("aggregate", help="name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        base.connection(parsed_args).delete_aggregate(parsed_args.aggregate)


class _OfMember(_OfOne):
    """Base class of commands about a member of an aggregate."""

    method: str

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        member = parser.add_mutually_exclusive_group(required=True)
        member.add_argument("--host", help="a host, with all nodes that its agent manages now or later")
        member.add_argument("--node", help="one node, by name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        kind = "host" if parsed_args.host else "node"
        api = base.connection(parsed_args)
        return base.one(
            api.change_member(self.method, parsed_args.aggregate, kind, parsed_args.host or parsed_args.node)
        )


class AggregateAdd(_OfMember):
    """Add a host or a node to an aggregate."""

    method = "PUT"


class AggregateRemove(_OfMember):
    """Remove a host or a node from an aggregate."""

    method = "DELETE"
