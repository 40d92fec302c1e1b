# SPDX-License-Identifier: Apache-2.0
"""moorage ring show, moorage periodic list|show|pause|resume|run."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base

__all__ = ["PeriodicList", "PeriodicPause", "PeriodicResume", "PeriodicRun", "PeriodicShow", "RingShow"]

RING_COLUMNS = ("group", "ring", "host", "worker", "share", "token", "silent_for_s", "member")
TASK_COLUMNS = ("name", "enabled", "paused", "reason", "tick", "ended", "owned", "handled", "failed", "milliseconds")
RUN_COLUMNS = (
    *(
        "started_at",
        "member",
        "tick",
        "token",
        "ended",
        "owned",
        "handled",
        "acted",
        "failed",
        "fenced",
        "lost",
        "skipped",
    ),
    *("milliseconds", "problem"),
)


class RingShow(base.ApiLister):
    """Show the members of the ring: their shares, the ring that each works under, the age of each heartbeat."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--owner-of", metavar="OBJECT", help="only the member that owns this object")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        rows = []
        for ring in base.connection(parsed_args).rings(parsed_args.owner_of):
            for member in ring["members"]:
                if parsed_args.owner_of is None or member["member"] == ring.get("owner"):
                    rows.append({**member, "group": ring["group"], "ring": ring["token"]})
        return base.table(RING_COLUMNS, rows)


class PeriodicList(base.ApiLister):
    """List the periodic tasks and their last sweeps."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).periodic_tasks()
        return base.table(TASK_COLUMNS, ({**(each["last_run"] or {}), **each} for each in found))


class _TaskCommand(base.ApiShow):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("task", help="name of the periodic task")
        return parser


class PeriodicShow(base.ApiLister):
    """Show the last sweeps of a task."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("task", help="name of the periodic task")
        parser.add_argument("--limit", type=int, default=20)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.table(RUN_COLUMNS, base.connection(parsed_args).periodic_runs(parsed_args.task, parsed_args.limit))


class PeriodicPause(_TaskCommand):
    """Pause a task: no engine begins a sweep of it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--reason", default="", help="why, for other operators")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        return base.one(base.connection(parsed_args).pause_periodic_task(parsed_args.task, reason=parsed_args.reason))


class PeriodicResume(_TaskCommand):
    """Resume a paused task."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        return base.one(base.connection(parsed_args).resume_periodic_task(parsed_args.task))


class PeriodicRun(_TaskCommand):
    """Run one sweep of a task now, even if the task is paused."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--object", help="only this object, by the engine that owns it")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the name of the tick."""
        return base.one(base.connection(parsed_args).run_periodic_task(parsed_args.task, parsed_args.object))
