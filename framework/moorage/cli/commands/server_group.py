# SPDX-License-Identifier: Apache-2.0
"""moorage server group create|list|show|delete."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base

__all__ = ["ServerGroupCreate", "ServerGroupDelete", "ServerGroupList", "ServerGroupShow"]

COLUMNS = ("name", "policy", "max_server_per_host", "members", "project_id", "uuid")


class ServerGroupCreate(base.ApiShow):
    """Create a server group: instances that are placed together on one node, or on different nodes."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name")
        parser.add_argument(
            "--policy", required=True, choices=["affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"]
        )
        parser.add_argument(
            "--max-server-per-host", type=int, default=1, help="for anti-affinity: how many may be on one node"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Creates the object and prints it."""
        return base.one(
            base.connection(parsed_args).create_server_group(
                parsed_args.name, parsed_args.policy, parsed_args.max_server_per_host
            )
        )


class ServerGroupList(base.ApiLister):
    """List server groups."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.table(COLUMNS, base.connection(parsed_args).server_groups())


class _OfOne(base.ApiCommand):
    """Base class of commands about one server group."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("group", help="name or uuid")
        return parser


class ServerGroupShow(_OfOne, base.ApiShow):
    """Show a server group with its members."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).server_group(parsed_args.group))


class ServerGroupDelete(_OfOne):
    """Remove a server group; its members stay where they are."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        base.connection(parsed_args).delete_server_group(parsed_args.group)
