# SPDX-License-Identifier: Apache-2.0
"""moorage node import|list|show|set|enable|disable|maintenance|drain|remove."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.fleet import importer
from moorage.fleet.interface import STATES

__all__ = [
    "NodeDisable",
    "NodeDrain",
    "NodeEnable",
    "NodeImport",
    "NodeList",
    "NodeMaintenance",
    "NodeRemove",
    "NodeSet",
    "NodeShow",
]

COLUMNS = ("uuid", "name", "host", "shard", "resource_class", "disabled", "maintenance", "draining", "dead")


class NodeImport(base.ApiShow):
    """Enrol the nodes of a file, or merge the file into nodes that exist; what the file does not give stays.

    The file is JSON lines (the openb format, or our own) or CSV, see the documentation; .gz is read too.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("file", type=Path, help="JSON lines or CSV, possibly .gz")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Reads the whole file first, so that a bad line changes nothing. Then sends it in batches."""
        specs = list(importer.read_nodes(parsed_args.file))
        api = base.connection(parsed_args)
        total: dict[str, Any] = {"read": len(specs), "created": 0, "changed": 0, "same": 0}
        for page in importer.to_pages(specs):
            report = api.import_nodes(page)
            for name in ("created", "changed", "same"):
                total[name] += report[name]
        return base.one(total)


class NodeList(base.ApiLister):
    """List nodes."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only those of this agent")
        parser.add_argument("--shard", help="only those of this shard")
        sharded = parser.add_mutually_exclusive_group()
        sharded.add_argument("--sharded", action="store_true", default=None, help="only those that have a shard")
        sharded.add_argument("--unsharded", dest="sharded", action="store_false", help="only those without a shard")
        parser.add_argument("--resource-class", help="only those of this resource class")
        for state in STATES:
            flag = parser.add_mutually_exclusive_group()
            flag.add_argument(f"--{state}", action="store_true", default=None, help=f"only those in the state {state}")
            flag.add_argument(f"--no-{state}", dest=state, action="store_false", help="only those that are not")
        base.add_page_arguments(parser, COLUMNS)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.page(
            parsed_args,
            "nodes",
            COLUMNS,
            ("host", "shard", "sharded", "resource_class", *STATES),
        )


class NodeShow(base.ApiShow):
    """Show a node."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("node", help="name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).node(parsed_args.node))


class NodeSet(base.ApiShow):
    """Change a node: its properties (filters and weighers read them) and its shard.

    A node without a shard may be given one, unless it is reserved. A node with an instance changes from one shard to another only
    after its agent was declared dead, or with --include-instances. A value of a property that is JSON (a number, true, a list, an
    object) is taken as such, everything else as text.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("node", help="name or uuid")
        parser.add_argument(
            "--property", action="append", default=[], metavar="NAME=VALUE", help="set it; may be repeated"
        )
        parser.add_argument(
            "--unset", action="append", default=[], metavar="NAME", help="take it away; may be repeated"
        )
        shard = parser.add_mutually_exclusive_group()
        shard.add_argument("--shard", help="the shard that it shall be in")
        shard.add_argument("--no-shard", action="store_true", help="take it out of its shard")
        parser.add_argument(
            "--include-instances",
            action="store_true",
            help="change the shard of a node with instances while its agent lives",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        changes: dict[str, Any] = {
            name: _json_or_text(value) for name, value in base.pairs(parsed_args.property, "--property")
        }
        changes |= dict.fromkeys(parsed_args.unset)
        moved = parsed_args.shard is not None or parsed_args.no_shard
        if not changes and not moved:
            raise errors.InvalidInput(
                "Say what is to be changed: --property NAME=VALUE, --unset NAME, --shard NAME or --no-shard. For its states "
                "there are moorage node disable, enable, maintenance and drain."
            )
        api = base.connection(parsed_args)
        if moved:
            assignment = {"node": parsed_args.node, "shard": parsed_args.shard}
            answer = api.assign_shards([assignment], include_instances=parsed_args.include_instances)
            if answer["conflicts"]:
                raise errors.Conflict(f"Node {parsed_args.node} was left alone: {answer['conflicts'][0]['reason']}.")
        if not changes:
            return base.one(api.node(parsed_args.node))
        return base.one(api.change_node(parsed_args.node, changes))


class _NodeCommand(base.ApiShow):
    """Base class of commands about one node."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("node", help="name or uuid")
        return parser

    def set_state(self, parsed_args: argparse.Namespace, flag: str, *, value: bool) -> dict[str, Any]:
        """Set or clear a state, with the reason of the command line."""
        reason = getattr(parsed_args, "reason", None)
        states = {flag: value, **({f"{flag}_reason": reason} if reason is not None else {})}
        return base.connection(parsed_args).change_node(parsed_args.node, **states)


def _add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", metavar="TEXT", help="why, for other operators")


class NodeDisable(_NodeCommand):
    """Disable a node: it gets no new instances and no moves. The instances on it stay."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        _add_reason(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        return base.one(self.set_state(parsed_args, "disabled", value=True))


class NodeEnable(_NodeCommand):
    """End the state disabled of a node. Maintenance and draining have commands of their own."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        return base.one(self.set_state(parsed_args, "disabled", value=False))


class NodeMaintenance(_NodeCommand):
    """Begin or end the maintenance of a node. It gets no new instances and no moves; the instances on it stay."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("state", choices=["on", "off"])
        _add_reason(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        return base.one(self.set_state(parsed_args, "maintenance", value=parsed_args.state == "on"))


class NodeDrain(_NodeCommand):
    """Begin to empty a node: it gets no new instances and no moves, and the command says how many instances are still on it.

    It moves no instance. Delete the instances, or move each with moorage instance migrate.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--stop", action="store_true", help="end the draining; the node gets new instances again")
        _add_reason(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        node = self.set_state(parsed_args, "draining", value=not parsed_args.stop)
        if not parsed_args.stop:
            # Not where -f json is read.
            self.app.stderr.write(_left(node))
        return base.one(node)


def _left(node: dict[str, Any]) -> str:
    count, departures = node["instances"], node["departures"]
    if not count and departures:
        return (
            f"Node {node['name']} has no instances, but host {node['host']} has not let go of {departures} evacuated or moved "
            f"ones. The node can be removed when the agent of the host has let go, or when the host is fenced: moorage host fence "
            f"{node['host']} --reason TEXT\n"
        )
    if not count:
        return f"Node {node['name']} is empty. It can be removed: moorage node remove {node['name']}\n"
    return (
        f"Node {node['name']} has {count} instance{'s' if count > 1 else ''}. Draining moves none: delete them, or move each "
        f"with moorage instance migrate. moorage host show {node['host']} lists them.\n"
    )


class NodeRemove(base.ApiCommand):
    """Remove a node on which nothing is. Otherwise the answer says what is on it.

    An agent that enrols its host makes the node again at its next start: end the agent first.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("node", help="name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request. Prints nothing."""
        base.connection(parsed_args).remove_node(parsed_args.node)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
