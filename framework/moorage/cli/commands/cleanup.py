# SPDX-License-Identifier: Apache-2.0
"""moorage cleanup run|auto|list|show|history|retry|discard."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.clock import SystemClock

__all__ = [
    "CleanupAuto",
    "CleanupDiscard",
    "CleanupHistory",
    "CleanupList",
    "CleanupRequests",
    "CleanupRetry",
    "CleanupRun",
    "CleanupShow",
]

_CLOCK = SystemClock()

SERVICE_COLUMNS = ("result", "binary", "host", "cluster", "state", "request")
ROW_COLUMNS = ("resource_type", "resource_id", "status", "host", "phase", "would")
_PAUSE = 0.3


class _Ask(base.ApiLister):
    """Sends a request for cleanup and prints the services that it is about."""

    path = "/cleanup"

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--dry-run", action="store_true", help="write nothing; list what would become of each row")
        parser.add_argument("--wait", action="store_true", help="until everything is cleaned or in quarantine")
        parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of --wait")
        return parser

    def body(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Returns the request."""
        return {"dry_run": True} if arguments.dry_run else {}

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request, waits for its end if asked to, and prints the result."""
        api = base.connection(parsed_args)
        answer = api.request("POST", self.path, body=self.body(parsed_args))
        if parsed_args.dry_run and not parsed_args.wait:
            if answer.get("left_out"):
                self.app.stderr.write(
                    f"{answer['left_out']} more rows are not listed; give --resource-type to see others.\n"
                )
            return base.table(ROW_COLUMNS, answer["would_clean"])
        asked = {each["service"]: each["uuid"] for each in answer["requests"]}
        if parsed_args.wait:
            for uuid in asked.values():
                self._await(api, uuid, parsed_args.timeout)
        rows = [
            {**service, "result": kind, "request": asked.get(service["uuid"], "")}
            for kind in ("cleaning", "unavailable")
            for service in answer[kind]
        ]
        return base.table(SERVICE_COLUMNS, rows)

    def _await(self, api: Any, uuid: str, timeout: float) -> None:
        deadline = _CLOCK.monotonic() + timeout
        shown = ""
        while True:
            found = api.request("GET", f"/cleanup/requests/{uuid}")
            text = f"{uuid}: left {_counts(found['left'])}; outcomes {_counts(found['outcomes'])}"
            waits = "; ".join(found.get("waits_for", ()))
            if waits:
                text += f"; waits: {waits}"
            if text != shown:
                self.app.stderr.write(text + "\n")
                shown = text
            if found["state"] == "done":
                return
            if _CLOCK.monotonic() > deadline:
                raise errors.Unavailable(
                    f"The cleanup request {uuid} is not done within {timeout:g} seconds; it goes on, and waits: "
                    f"{waits or 'for nothing any more'}. Next: moorage cleanup list"
                )
            _CLOCK.sleep(_PAUSE)


class CleanupRun(_Ask):
    """Clean up after dead services. Without filters: after all of them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        for name in ("service", "cluster", "host", "binary", "resource-type", "resource-id"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--is-up", action="store_true", help="what earlier incarnations of living services left")
        state = parser.add_mutually_exclusive_group()
        state.add_argument("--disabled", dest="disabled", action="store_true", default=None)
        state.add_argument("--enabled", dest="disabled", action="store_false", default=None)
        return parser

    def body(self, arguments: argparse.Namespace) -> dict[str, Any]:
        """Returns the filters that were given."""
        names = ("service", "cluster", "host", "binary", "resource_type", "resource_id", "disabled")
        given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
        if arguments.is_up:
            given["is_up"] = True
        return {**given, **super().body(arguments)}


class CleanupAuto(_Ask):
    """Clean up after all services that have been dead for long enough, even if automatic cleanup is off."""

    path = "/cleanup/auto"


class CleanupList(base.ApiLister):
    """List operations in progress, with their owners and what they wait for."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        for name in ("resource-type", "resource-id", "host", "status"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--phase", choices=["waiting", "working", "cleaning", "retrying", "quarantined"])
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        names = ("resource_type", "resource_id", "host", "status", "phase")
        query = {name: getattr(parsed_args, name) for name in names}
        found = base.connection(parsed_args).pages("/workers", "workers", query)
        columns = ("resource_type", "resource_id", "operation", "status", "phase", "attempts", "why")
        return base.table(columns, found)


class CleanupRequests(base.ApiLister):
    """List requests for cleanup."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).pages("/cleanup/requests", "requests")
        return base.table(("uuid", "state", "kind", "host", "service", "epoch", "requested_by"), found)


class CleanupShow(base.ApiShow):
    """Show a request for cleanup with its progress."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("request")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).request("GET", f"/cleanup/requests/{parsed_args.request}"))


class CleanupHistory(base.ApiLister):
    """List the results of cleanup: what became of the operations of dead services."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        for name in ("resource-type", "resource-id", "outcome"):
            parser.add_argument(f"--{name}")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        query = {name: getattr(parsed_args, name) for name in ("resource_type", "resource_id", "outcome")}
        found = base.connection(parsed_args).pages("/cleanup/history", "history", query)
        columns = ("id", "resource_type", "resource_id", "operation", "status", "outcome", "attempts", "reason")
        return base.table(columns, found)


class _OfRow(base.ApiCommand):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("resource_type")
        parser.add_argument("resource_id")
        return parser


class CleanupRetry(_OfRow):
    """Release an operation from quarantine, and clean it up again."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        path = f"/workers/{parsed_args.resource_type}/{parsed_args.resource_id}/retry"
        base.connection(parsed_args).request("POST", path)


class CleanupDiscard(_OfRow):
    """End an operation in quarantine without cleaning it up. Its resource stays as it is."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        path = f"/workers/{parsed_args.resource_type}/{parsed_args.resource_id}"
        base.connection(parsed_args).request("DELETE", path)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing"
