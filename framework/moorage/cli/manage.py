# SPDX-License-Identifier: Apache-2.0
"""``moorage-manage``: the database, and the users of ``auth_strategy = http_basic``."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.cli.roles import load
from moorage.clock import SystemClock
from moorage.control_plane.factories import load_store
from moorage.db import Database, migrations
from moorage.fleet.nodes import NodeStore
from moorage.http import authentication
from moorage.instances.departures import Departures
from moorage.instances.flavor_adoption import FlavorAdoption
from moorage.instances.interface import INSTANCE_STORES, InstanceStore
from moorage.instances.reassign import Reassignment
from moorage.scheduling.flavors import FlavorStore
from moorage.services.registry import ServiceRegistry
from moorage.work.operations import SqlOperationStore

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line, for completion and the manual too."""
    parser = argparse.ArgumentParser(
        prog="moorage-manage", description="Manage the database and the users of a control plane."
    )
    parser.add_argument("--config-file", action="append", default=[], help="may be repeated; later ones win")
    parser.add_argument("--state-dir", help="wins over [control_plane] state_dir")
    parser.add_argument("--set", action="append", default=[], metavar="GROUP.OPTION=VALUE", help="wins over the files")
    areas = parser.add_subparsers(dest="area", required=True)
    database = areas.add_parser("db", help="the schema").add_subparsers(dest="action", required=True)
    for name, text in (
        ("upgrade", "bring the schema of all installed parts to the newest revision"),
        ("version", "show the revisions"),
        ("check", "compare the tables with what the code expects"),
    ):
        database.add_parser(name, help=text)
    users = areas.add_parser("user", help="who may call, with auth_strategy = http_basic")
    actions = users.add_subparsers(dest="action", required=True)
    setting = actions.add_parser("set", help="add a user, or change password and roles of one")
    setting.add_argument("user")
    setting.add_argument("--role", action="append", help="may be repeated (default: admin)")
    setting.add_argument("--password-file", type=argparse.FileType(), help="its first line is the password; - is stdin")
    actions.add_parser("remove", help="take a user out").add_argument("user")
    nodes = areas.add_parser("node", help="machines").add_subparsers(dest="action", required=True)
    sizes = areas.add_parser("flavor", help="the catalogue of flavors").add_subparsers(dest="action", required=True)
    sizes.add_parser(
        "adopt",
        help="record with each instance the version of its flavor; a size that the catalogue does not have becomes an implicit "
        "version. May be repeated, while the control plane runs",
    )
    reassign = nodes.add_parser("reassign", help="give all nodes of a shard, with their instances, to another host")
    reassign.add_argument("shard")
    reassign.add_argument("host", help="the agent that shall have them")
    reassign.add_argument("--preview", action="store_true", help="say what would happen, and change nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the ``moorage-manage`` script."""
    arguments = make_parser().parse_args(argv)
    try:
        conf = load(arguments)
        if arguments.area == "user":
            return _USER_ACTIONS[arguments.action](authentication.users_file(conf), arguments)
        if arguments.area == "flavor":
            return _adopt(conf, Database.from_config(conf, service="moorage-manage"))
        if arguments.area == "node":
            return _reassign(conf, Database.from_config(conf, service="moorage-manage"), arguments)
        return _ACTIONS[arguments.action](Database.from_config(conf))
    except errors.MoorageError as error:
        return base.say(sys.stderr, error)


def _upgrade(database: Database) -> int:
    changed = migrations.upgrade_all(database)
    print(f"Upgraded: {', '.join(changed)}." if changed else "Everything is at the newest revision already.")
    return 0


def _version(database: Database) -> int:
    for each in migrations.discover():
        print(f"{each.name}: {each.version(database) or 'nothing'} (newest: {each.head()})")
    left = migrations.removed(database)
    for name, revision in left.chains.items():
        print(f"{name}: {revision} (not installed)")
    if left.tables:
        print(f"Tables of parts that are not installed: {', '.join(left.tables)}.")
    return 0


def _check(database: Database) -> int:
    differences = [(each.name, text) for each in migrations.discover() for text in each.differences(database)]
    for distribution, text in differences:
        print(f"{distribution}: {text}")
    print("The tables differ." if differences else "The tables are what the code expects.")
    return 1 if differences else 0


def _set_user(path: Path, arguments: argparse.Namespace) -> int:
    if arguments.password_file is not None:
        password = arguments.password_file.readline().rstrip("\r\n")
    else:
        password = _asked_for(arguments.user)
    authentication.set_user(path, arguments.user, password, arguments.role or ["admin"])
    print(f"{arguments.user} is in {path}.")
    return 0


def _asked_for(user: str) -> str:
    if not sys.stdin.isatty():
        raise errors.InvalidInput(
            "There is no terminal to ask for a password; give it with --password-file (- is stdin)."
        )
    password = getpass.getpass(f"Password of {user}: ")
    if getpass.getpass("Once more: ") != password:
        raise errors.InvalidInput("The two passwords differ; nothing was changed.")
    return password


def _remove_user(path: Path, arguments: argparse.Namespace) -> int:
    authentication.remove_user(path, arguments.user)
    print(f"{arguments.user} is no longer in {path}.")
    return 0


_USER_ACTIONS = {"set": _set_user, "remove": _remove_user}


def _instances(conf: Any, database: Database) -> InstanceStore:
    loaded = INSTANCE_STORES.load(conf.control_plane.instance_store)
    return loaded.build(conf=conf, database=database, clock=SystemClock())


def _adopt(conf: Any, database: Database) -> int:
    report = FlavorAdoption(database, _instances(conf, database), FlavorStore(database)).run()
    print(f"{report.seen} instances were read, and {report.written} got the version of their flavor.")
    print(f"{report.versions} implicit versions are new.")
    if report.changed:
        print(f"Left: {report.changed} instances changed meanwhile. Run it again.", file=sys.stderr)
    return 1 if report.changed else 0


def _reassign(conf: Any, database: Database, arguments: argparse.Namespace) -> int:
    registry = ServiceRegistry(database, SystemClock())
    clock = SystemClock()
    workers = SqlOperationStore(database, lease_seconds=conf.cleanup.lease_seconds, clock=clock)
    departures = Departures(database, load_store(conf, database, clock), workers, registry)
    work = Reassignment(database, registry, NodeStore(database), _instances(conf, database), departures)
    preview = work.preview(arguments.shard, arguments.host)
    for host, count in sorted(preview.sources.items()):
        print(f"{count} nodes of {host or 'no host'} would go to {preview.host}.")
    print(f"{preview.already} nodes are {preview.host}'s already; {len(preview.instances)} instances would go along.")
    for problem in preview.problems:
        print(f"Refused: {problem}", file=sys.stderr)
    if preview.problems:
        return 1
    if arguments.preview:
        return 0
    report = work.execute(preview)
    print(f"{report.nodes} nodes and {report.instances} instances are {preview.host}'s now.")
    for sentence in report.left:
        print(f"Left: {sentence}", file=sys.stderr)
    return 1 if report.left else 0


_ACTIONS = {"upgrade": _upgrade, "version": _version, "check": _check}

if __name__ == "__main__":
    sys.exit(main())
