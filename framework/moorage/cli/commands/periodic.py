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
        """A question."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--owner-of", metavar="OBJECT", help="only the member that owns this object")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        rows = []
        for ring in base.connection(parsed_args).rings(parsed_args.owner_of):
            for member in ring["members"]:
                if parsed_args.owner_of is None or member["member"] == ring.get("owner"):
                    rows.append({**member, "group": ring["group"], "ring": ring["token"]})
        return base.table(RING_COLUMNS, rows)


class PeriodicList(base.ApiLister):
    """List the periodic tasks and their last sweeps."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        found = base.connection(parsed_args).periodic_tasks()
        return base.table(TASK_COLUMNS, ({**(each["last_run"] or {}), **each} for each in found))


class _TaskCommand(base.ApiShow):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which task."""
        parser = super().get_parser(prog_name)
        parser.add_argument("task", help="name of the periodic task")
        return parser


class PeriodicShow(base.ApiLister):
    """Show the last sweeps of a task."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which task, and how many."""
        parser = super().get_parser(prog_name)
        parser.add_argument("task", help="name of the periodic task")
        parser.add_argument("--limit", type=int, default=20)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        return base.table(RUN_COLUMNS, base.connection(parsed_args).periodic_runs(parsed_args.task, parsed_args.limit))


class PeriodicPause(_TaskCommand):
    """Begin no sweep of a task any more, in any engine."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Why."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--reason", default="", help="why, for other operators")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Change and print."""
        return base.one(base.connection(parsed_args).pause_periodic_task(parsed_args.task, reason=parsed_args.reason))


class PeriodicResume(_TaskCommand):
    """Let a task that was paused go on."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Change and print."""
        return base.one(base.connection(parsed_args).resume_periodic_task(parsed_args.task))


class PeriodicRun(_TaskCommand):
    """Have a task swept once more now, paused or not."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """All objects or one."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--object", help="only this object, by the engine that owns it")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask for it and print what its tick is called."""
        return base.one(base.connection(parsed_args).run_periodic_task(parsed_args.task, parsed_args.object))
