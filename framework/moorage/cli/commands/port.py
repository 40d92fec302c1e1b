# SPDX-License-Identifier: Apache-2.0
"""moorage port list, moorage port group list."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base

__all__ = ["PortGroupList", "PortList"]


class _Attached(base.ApiLister):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--shard", help="only those of nodes in these shards (NAME,NAME...); none: without a shard")
        parser.add_argument("--node", help="only those of this node, by uuid or name")
        parser.add_argument(
            "--mount", default="/baremetal", help="where the bare metal dialect is mounted (/baremetal)"
        )
        return parser


class PortList(_Attached):
    """List ports."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args).baremetal(parsed_args.mount)
        columns = ("uuid", "address", "node_uuid", "physical_network")
        return base.table(columns, api.ports(shard=parsed_args.shard, node=parsed_args.node, fields=columns))


class PortGroupList(_Attached):
    """List portgroups."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args).baremetal(parsed_args.mount)
        columns = ("uuid", "name", "address", "node_uuid")
        return base.table(columns, api.port_groups(shard=parsed_args.shard, node=parsed_args.node, fields=columns))
