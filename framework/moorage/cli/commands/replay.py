# SPDX-License-Identifier: Apache-2.0
"""moorage replay."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moorage import client as client_package
from moorage import errors
from moorage import threads as threads_module
from moorage.cli import base
from moorage.cli.kill import kill_one_scheduler
from moorage.cli.report import ReportProgress, readable
from moorage.cli.up import ControlPlane, LaunchPlan
from moorage.client.replay import ReplayReport, replay
from moorage.client.workload import read_requests
from moorage.clock import SystemClock
from moorage.fleet import importer

__all__ = ["Replay", "replay_files"]


class Replay(base.LocalCommand):
    """Replay a recorded workload against a control plane, and report the results.

    Without --url or --state-dir of a running one, a control plane is started for the replay and ended after it.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        base.add_connection_arguments(parser)
        parser.add_argument("--nodes", type=Path, required=True, metavar="FILE", help="nodes: openb or our own format")
        parser.add_argument(
            "--requests", type=Path, required=True, metavar="FILE", help="requests: openb, SURF or our own"
        )
        parser.add_argument("--limit", type=int, help="only the first N requests")
        parser.add_argument("--clients", type=int, default=8, help="requests that are under way at the same time")
        parser.add_argument(
            "--release", action="store_true", help="delete instances when their lifetime is over; otherwise all stay"
        )
        parser.add_argument("--kill", action="store_true", help="end one scheduler with SIGKILL in the middle")
        parser.add_argument("--json", action="store_true", help="one JSON object instead of the report")
        parser.add_argument("--schedulers", type=int, default=2)
        parser.add_argument("--agents", type=int, default=2)
        parser.add_argument(
            "--config-file", action="append", default=[], metavar="F", help="for the one that is started"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Replays the workload and prints a report. Returns 1 if a request failed, or if the store differs from an answer."""
        remote = parsed_args.url and not parsed_args.state_dir
        if parsed_args.kill and remote:
            raise errors.InvalidInput(
                "--kill needs the control plane on this machine: give --state-dir instead of --url."
            )
        with _target(parsed_args) as (url_source, state_dir):
            report = replay_files(
                url_source,
                state_dir,
                parsed_args.nodes,
                parsed_args.requests,
                limit=parsed_args.limit,
                threads=max(1, parsed_args.clients),
                release=parsed_args.release,
                kill=parsed_args.kill,
            )
        if parsed_args.json:
            self.app.stdout.write(json.dumps(report.to_json()) + "\n")
        else:
            self.app.stdout.write(readable(report))
        return 0 if report.good else 1


def replay_files(
    connections: argparse.Namespace,
    state_dir: Path | None,
    nodes: Path,
    requests: Path,
    *,
    limit: int | None,
    threads: int,
    release: bool,
    kill: bool,
) -> ReplayReport:
    """Read both files, enrol the nodes, replay the requests."""
    specs = list(importer.read_nodes(nodes))
    wanted = read_requests(requests)[:limit]
    if not specs or not wanted:
        raise errors.InvalidInput(f"{nodes if not specs else requests} is empty; there is nothing to replay.")
    clients: Sequence[client_package.Client] = [base.connection(connections) for _ in range(threads)]
    for page in importer.to_pages(specs):
        clients[0].import_nodes(page)
    _await_fleet(clients[0], len(specs))
    progress = ReportProgress(sys.stderr)
    report = replay(
        clients,
        wanted,
        SystemClock(),
        release=release,
        kill=(lambda: kill_one_scheduler(state_dir)) if kill and state_dir is not None else None,
        progress=progress,
    )
    progress.end()
    return report


def _await_fleet(api: client_package.Client, nodes: int) -> None:
    """Waits until the scheduler that answers has read the new nodes. Schedulers learn of them by a message."""
    clock = SystemClock()
    for _ in range(100):
        if sum(1 for _ in api.hosts(up=True, fields="uuid")) >= nodes:
            return
        clock.sleep(0.1)


@contextmanager
def _target(arguments: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, Path | None]]:
    """The control plane that the options name, or one of our own while the block runs."""
    if arguments.url or arguments.state_dir:
        yield arguments, Path(arguments.state_dir) if arguments.state_dir else None
        return
    with (
        tempfile.TemporaryDirectory(prefix="moorage-replay-") as folder,
        running(
            LaunchPlan(
                Path(folder),
                "127.0.0.1:0",
                schedulers=arguments.schedulers,
                agents=arguments.agents,
                config_files=arguments.config_file,
            )
        ),
    ):
        arguments.state_dir = folder
        yield arguments, Path(folder)


@contextmanager
def running(plan: LaunchPlan) -> Iterator[ControlPlane]:
    """A control plane while the block runs."""
    plane = ControlPlane(plan)
    plane.start()
    thread = threads_module.thread(plane.run, name="supervisor", daemon=False)
    thread.start()
    try:
        yield plane
    finally:
        plane.stop()
        thread.join()


def namespace(state_dir: Path) -> argparse.Namespace:
    """Connection arguments for a control plane on this machine."""
    parser = argparse.ArgumentParser()
    base.add_connection_arguments(parser)
    found = parser.parse_args(["--state-dir", str(state_dir)])
    # What the environment says is about another control plane.
    found.url, found.auth_type, found.username, found.password = None, None, "", ""
    return found
