# SPDX-License-Identifier: Apache-2.0
"""moorage shard list|plan|show|apply|rollback|verify."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from moorage import client, errors
from moorage.cli import base
from moorage.clock import SystemClock

__all__ = ["ShardApply", "ShardList", "ShardPlan", "ShardRollback", "ShardShow", "ShardVerify"]

_CLOCK = SystemClock()

LINES = ("name", "before", "after", "incoming", "outgoing", "locked")
MOVES = ("node_uuid", "name", "source", "target", "status", "reason", "note")
_NUMBERS = ("lower_bound", "locked", "held", "withheld", "imbalance_before", "imbalance_after")
#: What ``plan`` ends with when something should change, so that a script can tell.
CHANGE_NEEDED = 2


class ShardList(base.ApiLister):
    """List the shards with the number of their nodes and the agents that serve them; the nameless one are nodes without a shard.

    Agents are shown where any agent declares a shard ([sharding] my_shard). A shard without agents is not served.
    """

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).shards()
        return ("name", "count", "agents"), [(each["name"], each["count"], " ".join(each["agents"])) for each in found]


class ShardPlan(base.ApiShow):
    """Make a plan that changes the shard of as few nodes as possible. Changes no node. Exit status 2: a change is needed."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--strategy", help="the plugin that says where nodes should be ([sharding] strategy)")
        parser.add_argument(
            "--shards", metavar="N|NAME,NAME...", help="how many, or which (those that there are); may be one name"
        )
        parser.add_argument(
            "--param",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="for the strategy; the value is JSON or a text",
        )
        parser.add_argument(
            "--params-file", type=argparse.FileType("r"), help="a file with all of them as a JSON object"
        )
        parser.add_argument(
            "--lock",
            action="append",
            default=[],
            choices=["maintenance", "state", "occupied"],
            help="leave such nodes where they are; may be repeated. Reserved nodes always stay, and so do nodes with an instance "
            "that have a shard already, unless their agent is declared dead. occupied: also those that have no shard yet",
        )
        parser.add_argument(
            "--include-instances",
            action="store_true",
            help="also move nodes with instances from shard to shard while their agents live",
        )
        parser.add_argument("--keep", action="append", default=[], metavar="NODE", help="leave this node where it is")
        parser.add_argument("--max-moves", type=int, help="no more than so many moves; plan again for the rest")
        parser.add_argument(
            "--threshold",
            type=_part,
            metavar="5%",
            help="nothing while the largest shard is no more than this above the mean",
        )
        return parser

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Make it and print it; 2 when something should change."""
        self._needed = False
        return super().run(parsed_args) or (CHANGE_NEEDED if self._needed else 0)

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        wanted: dict[str, Any] = {
            "strategy": parsed_args.strategy,
            "shards": _shards(parsed_args.shards),
            "params": _params(parsed_args),
            "locks": parsed_args.lock,
            "locked": parsed_args.keep,
            "max_moves": parsed_args.max_moves,
            "threshold": parsed_args.threshold,
            "include_instances": parsed_args.include_instances,
        }
        plan = base.connection(parsed_args).make_shard_plan({key: value for key, value in wanted.items() if value})
        self._needed = bool(plan["summary"]["needed"])
        return base.one(_numbers(plan))


class ShardShow(base.ApiLister):
    """List the stored plans, or show one: shard by shard, or move by move with its reason."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("plan", nargs="?", help="its uuid; without it all plans are listed")
        parser.add_argument(
            "--moves", action="store_true", help="every move: from where to where, why, and what became of it"
        )
        parser.add_argument(
            "--status", choices=["pending", "moved", "conflict", "undone", "stuck"], help="only such moves"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args)
        if parsed_args.plan is None:
            return base.table(("uuid", "status", "strategy", "moves"), [_short(plan) for plan in api.shard_plans()])
        if parsed_args.moves or parsed_args.status:
            return base.table(MOVES, api.shard_moves(parsed_args.plan, status=parsed_args.status))
        return base.table(LINES, api.shard_plan(parsed_args.plan)["summary"]["lines"])


class _Advance(base.ApiShow):
    """Base class of the commands that apply a plan or roll it back."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("plan", help="its uuid")
        parser.add_argument("--batch", type=int, default=5000, help="moves in one request (5000)")
        parser.add_argument("--rate", type=float, help="no more moves than this in a second")
        return parser

    def advance(self, api: client.Client, parsed_args: argparse.Namespace, step: Any) -> Any:
        """Step by step until nothing remains."""
        size = parsed_args.batch if not parsed_args.rate else max(1, min(parsed_args.batch, int(parsed_args.rate)))
        done = conflicts = 0
        while True:
            began = _CLOCK.monotonic()
            progress = step(parsed_args.plan, limit=size)
            done, conflicts = done + progress["done"], conflicts + progress["conflicts"]
            if not progress["remaining"]:
                break
            if self.app.stderr.isatty():
                self.app.stderr.write(f"\r{done} moved, {progress['remaining']} to go ")
            if parsed_args.rate:
                _CLOCK.sleep(max(0.0, size / parsed_args.rate - (_CLOCK.monotonic() - began)))
        if conflicts:
            self.app.stderr.write(
                f"moorage: {conflicts} nodes were left alone; moorage shard show {parsed_args.plan} --moves says why.\n"
            )
        return base.one({"plan": parsed_args.plan, "status": progress["status"], "done": done, "conflicts": conflicts})


class ShardApply(_Advance):
    """Apply a plan, or continue one. Nodes that changed meanwhile are skipped and listed."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Carries it out and prints the results."""
        api = base.connection(parsed_args)
        return self.advance(api, parsed_args, api.apply_shard_plan)


class ShardRollback(_Advance):
    """Roll back the moves that a plan has made. Nodes that changed since are skipped and listed."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Carries it out and prints the results."""
        api = base.connection(parsed_args)
        return self.advance(api, parsed_args, api.rollback_shard_plan)


class ShardVerify(base.ApiShow):
    """Compare a plan with the nodes, or check the shards of the fleet; ends with 1 when something is wrong.

    A plan is not ok while any node of the fleet has no shard.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "plan", nargs="?", help="its uuid; without it the names and counts of all shards are checked"
        )
        return parser

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Look and print; 1 when something is wrong."""
        self._ok = True
        return super().run(parsed_args) or int(not self._ok)

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args)
        found = api.verify_shard_plan(parsed_args.plan) if parsed_args.plan else api.check_shards()
        self._ok = bool(found["ok"])
        return base.one(found)


def _part(text: str) -> float:
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 5% nor 0.05") from None


def _shards(text: str | None) -> Any:
    if text is None:
        return None
    return int(text) if text.isdecimal() else [part.strip() for part in text.split(",") if part.strip()]


def _params(parsed_args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if parsed_args.params_file:
        try:
            found = json.load(parsed_args.params_file)
        except ValueError as error:
            raise errors.InvalidInput(f"{parsed_args.params_file.name} is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise errors.InvalidInput(f"{parsed_args.params_file.name} must hold a JSON object.")
    for text in parsed_args.param:
        name, equals, value = text.partition("=")
        if not equals:
            raise errors.InvalidInput(f"--param {text}: write NAME=VALUE.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _numbers(plan: Mapping[str, Any]) -> dict[str, Any]:
    summary = plan["summary"]
    shown = {"plan": plan["uuid"], "strategy": plan["strategy"], "shards": len(summary["shards"])}
    shown |= {"change_needed": summary["needed"], "moves": sum(plan["moves"].values())}
    shown |= {name: summary[name] for name in _NUMBERS}
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in shown.items()}


def _short(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plan[key] for key in ("uuid", "status", "strategy", "moves")}
