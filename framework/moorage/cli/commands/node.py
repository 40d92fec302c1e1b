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

__all__ = ["NodeImport", "NodeList", "NodeSet", "NodeShow"]

COLUMNS = ("uuid", "name", "host", "shard", "resource_class")
BATCH = 500


class NodeImport(base.ApiShow):
    """Enrol the nodes of a file; repeating it changes only what differs.

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
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        found = base.connection(parsed_args).nodes(
            host=parsed_args.host, shard=parsed_args.shard, sharded=parsed_args.sharded
        )
        return base.table(COLUMNS, found)


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
    """Change properties of a node, which filters and weighers read, or its shard.

    The shard of a node changes when nothing is on it and nobody has reserved it. A value of a property that is JSON (a number,
    true, a list, an object) is taken as such, everything else as text.
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
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Change and print."""
        changes: dict[str, Any] = {
            name: _json_or_text(value) for name, value in base.pairs(parsed_args.property, "--property")
        }
        changes |= dict.fromkeys(parsed_args.unset)
        moved = parsed_args.shard is not None or parsed_args.no_shard
        if not changes and not moved:
            raise errors.InvalidInput("Say what is to be changed: --property NAME=VALUE, --unset NAME or --shard NAME.")
        api = base.connection(parsed_args)
        if moved:
            answer = api.assign_shards([{"node": parsed_args.node, "shard": parsed_args.shard}])
            if answer["conflicts"]:
                raise errors.Conflict(f"Node {parsed_args.node} was left alone: {answer['conflicts'][0]['reason']}.")
        return base.one(api.change_node(parsed_args.node, changes) if changes else api.node(parsed_args.node))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
