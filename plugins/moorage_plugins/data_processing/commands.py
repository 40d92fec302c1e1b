# SPDX-License-Identifier: Apache-2.0
"""moorage cluster|job|proxy user ..., over the routes of data processing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.clock import SystemClock
from moorage_plugins.data_processing.statuses import ENDED, RESETTABLE

__all__ = [
    "ClusterCreate",
    "ClusterDelete",
    "ClusterList",
    "ClusterReset",
    "ClusterShow",
    "JobCancel",
    "JobCreate",
    "JobDelete",
    "JobList",
    "JobShow",
    "ProxyUserList",
]

_CLOCK = SystemClock()

_PREFIX = "/data-processing/v1"
_PAGE = 1000
_PAUSE = 0.2
_PATIENCE = 600.0
CLUSTER_COLUMNS = ("uuid", "name", "host", "status", "transient", "health")
JOB_COLUMNS = ("uuid", "cluster", "status", "exit_code", "command")


def _ask(arguments: argparse.Namespace, method: str, path: str, body: Any = None) -> Any:
    return base.connection(arguments).request(method, path, body=body, prefix=_PREFIX)


def _all(arguments: argparse.Namespace, path: str, key: str, by: str, **filters: Any) -> list[dict[str, Any]]:
    api = base.connection(arguments)
    query: dict[str, Any] = {"limit": _PAGE, **{name: value for name, value in filters.items() if value}}
    rows: list[dict[str, Any]] = []
    while True:
        page = api.request("GET", path, query=query, prefix=_PREFIX)[key]
        rows += page
        if len(page) < _PAGE:
            return rows
        query["marker"] = page[-1][by]


def _await(arguments: argparse.Namespace, path: str, over: Callable[[str], bool]) -> Any:
    deadline = _CLOCK.monotonic() + _PATIENCE
    while True:
        found = _ask(arguments, "GET", path)
        if over(found["status"]):
            return found
        if _CLOCK.monotonic() > deadline:
            raise errors.Unavailable(f"{path.lstrip('/')} is still {found['status']} after {_PATIENCE:g} seconds.")
        _CLOCK.sleep(_PAUSE)


class _OfCluster(base.ApiShow):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("cluster", help="uuid")
        return parser


class _OfJob(base.ApiShow):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("job", help="uuid")
        return parser


class ClusterCreate(base.ApiShow):
    """Create a cluster on the host of an agent."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name")
        parser.add_argument("--host", help="of a living agent; any, where it is not said")
        parser.add_argument(
            "--transient", action="store_true", help="terminated when nothing has run in it for a while"
        )
        parser.add_argument("--wait", action="store_true", help="until it is made, or has failed")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Creates the object, waits for it if asked to, and prints it."""
        body = {"name": parsed_args.name, "transient": parsed_args.transient}
        if parsed_args.host:
            body["host"] = parsed_args.host
        made = _ask(parsed_args, "POST", "/clusters", body)
        if parsed_args.wait:
            made = _await(parsed_args, f"/clusters/{made['uuid']}", lambda status: status != "Starting")
        return base.one(made)


class ClusterList(base.ApiLister):
    """List clusters."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--status")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.table(
            CLUSTER_COLUMNS, _all(parsed_args, "/clusters", "clusters", "uuid", status=parsed_args.status)
        )


class ClusterShow(_OfCluster):
    """Show a cluster."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(_ask(parsed_args, "GET", f"/clusters/{parsed_args.cluster}"))


class ClusterReset(_OfCluster):
    """Set the status of a cluster. The operation in progress on it ends."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the status."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--status", choices=RESETTABLE, default="Active", help="Active unless given")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the cluster."""
        path = f"/clusters/{parsed_args.cluster}/reset-state"
        return base.one(_ask(parsed_args, "POST", path, {"status": parsed_args.status}))


class ClusterDelete(_OfCluster):
    """Terminate a cluster, with everything that runs in it."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(_ask(parsed_args, "DELETE", f"/clusters/{parsed_args.cluster}"))


class JobCreate(_OfCluster):
    """Run a command in a cluster: moorage job create CLUSTER -- sleep 10."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--wait", action="store_true", help="until it has ended and that was written down")
        parser.add_argument("command", nargs="+", help="program and arguments")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Starts the job, waits for its end if asked to, and prints it."""
        made = _ask(parsed_args, "POST", "/jobs", {"cluster": parsed_args.cluster, "command": parsed_args.command})
        if parsed_args.wait:
            made = _await(parsed_args, f"/jobs/{made['uuid']}", lambda status: status in ENDED)
        return base.one(made)


class JobList(base.ApiLister):
    """List jobs."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--status")
        parser.add_argument("--cluster", help="uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        filters = {"status": parsed_args.status, "cluster": parsed_args.cluster}
        return base.table(JOB_COLUMNS, _all(parsed_args, "/jobs", "jobs", "uuid", **filters))


class JobShow(_OfJob):
    """Show a job."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(_ask(parsed_args, "GET", f"/jobs/{parsed_args.job}"))


class JobCancel(_OfJob):
    """Kill a job."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(_ask(parsed_args, "POST", f"/jobs/{parsed_args.job}/cancel"))


class JobDelete(base.ApiCommand):
    """Delete a job that has ended."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("job", help="uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        _ask(parsed_args, "DELETE", f"/jobs/{parsed_args.job}")


class ProxyUserList(base.ApiLister):
    """List the proxy users of jobs."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.table(("name", "job"), _all(parsed_args, "/proxy-users", "proxy_users", "name"))
