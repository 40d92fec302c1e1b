# SPDX-License-Identifier: Apache-2.0
"""moorage node import|list|show|set."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.fleet import importer
from moorage.fleet.interface import check_states

__all__ = ["NodeImport", "NodeList", "NodeSet", "NodeShow"]

COLUMNS = ("uuid", "name", "host", "shard", "resource_class", "disabled", "maintenance")
STATES = ("disabled", "disabled_reason", "maintenance", "maintenance_reason")
BATCH = 500


class NodeImport(base.ApiShow):
    """Enrol the nodes of a file, or merge the file into nodes that exist; what the file does not give stays.

    The file is JSON lines (the openb format, or our own) or CSV, see the documentation; .gz is read too.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """The file."""
        parser = super().get_parser(prog_name)
        parser.add_argument("file", type=Path, help="JSON lines or CSV, possibly .gz")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Read all of the file first, so that a bad line changes nothing; then send it in batches."""
        nodes = [importer.to_json(spec) for spec in importer.read_nodes(parsed_args.file)]
        api = base.connection(parsed_args)
        total: dict[str, Any] = {"read": len(nodes), "created": 0, "changed": 0, "same": 0}
        remaining = iter(nodes)
        while batch := list(itertools.islice(remaining, BATCH)):
            report = api.import_nodes(batch)
            for name in ("created", "changed", "same"):
                total[name] += report[name]
        return base.one(total)


class NodeList(base.ApiLister):
    """List nodes."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only those of this agent")
        parser.add_argument("--shard", help="only those of this shard")
        sharded = parser.add_mutually_exclusive_group()
        sharded.add_argument("--sharded", action="store_true", default=None, help="only those that have a shard")
        sharded.add_argument("--unsharded", dest="sharded", action="store_false", help="only those without a shard")
        parser.add_argument("--resource-class", help="only those of this resource class")
        for state in ("disabled", "maintenance"):
            flag = parser.add_mutually_exclusive_group()
            flag.add_argument(f"--{state}", action="store_true", default=None, help=f"only those in the state {state}")
            flag.add_argument(f"--no-{state}", dest=state, action="store_false", help="only those that are not")
        base.add_page_arguments(parser, COLUMNS)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        return base.page(
            parsed_args,
            "nodes",
            COLUMNS,
            ("host", "shard", "sharded", "resource_class", "disabled", "maintenance"),
        )


class NodeShow(base.ApiShow):
    """Show a node."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which."""
        parser = super().get_parser(prog_name)
        parser.add_argument("node", help="name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        return base.one(base.connection(parsed_args).node(parsed_args.node))


class NodeSet(base.ApiShow):
    """Change a node: its properties (filters and weighers read them), its shard, disable it, or begin or end its maintenance.

    A disabled node and a node in maintenance get no new instances and no moves; the instances on them stay. A node
    without a shard may be given one, unless it is reserved. A node with an instance changes from one shard to another only after
    its agent was declared dead, or with --include-instances. A value of a property that is JSON (a number, true, a list, an object)
    is taken as such, everything else as text.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """What to change."""
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
        for flag, begin, end, what in (
            ("disabled", "--disable", "--enable", "new instances and moves"),
            ("maintenance", "--maintenance", "--no-maintenance", "new instances and moves while it is being repaired"),
        ):
            state = parser.add_mutually_exclusive_group()
            state.add_argument(begin, dest=flag, action="store_true", default=None, help=f"keep {what} away")
            state.add_argument(end, dest=flag, action="store_false", default=None, help=f"end {begin}")
            option = "--disable-reason" if flag == "disabled" else "--maintenance-reason"
            parser.add_argument(option, dest=f"{flag}_reason", metavar="TEXT", help=f"why; needs {begin}")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Change and print."""
        changes: dict[str, Any] = {
            name: _json_or_text(value) for name, value in base.pairs(parsed_args.property, "--property")
        }
        changes |= dict.fromkeys(parsed_args.unset)
        states = {name: getattr(parsed_args, name) for name in STATES if getattr(parsed_args, name) is not None}
        moved = parsed_args.shard is not None or parsed_args.no_shard
        if not changes and not moved and not states:
            raise errors.InvalidInput(
                "Say what is to be changed: --property NAME=VALUE, --unset NAME, --shard NAME, --disable, --enable, --maintenance "
                "or --no-maintenance."
            )
        # Before the shard is changed: a request that is wrong must not be done by half.
        check_states(states)
        api = base.connection(parsed_args)
        if moved:
            assignment = {"node": parsed_args.node, "shard": parsed_args.shard}
            answer = api.assign_shards([assignment], include_instances=parsed_args.include_instances)
            if answer["conflicts"]:
                raise errors.Conflict(f"Node {parsed_args.node} was left alone: {answer['conflicts'][0]['reason']}.")
        if not changes and not states:
            return base.one(api.node(parsed_args.node))
        return base.one(api.change_node(parsed_args.node, changes, **states))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
