# SPDX-License-Identifier: Apache-2.0
"""What the commands share: where the control plane is, and who asks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cliff import command, lister, show

from moorage import client, errors

__all__ = [
    "ApiCommand",
    "ApiLister",
    "ApiShow",
    "LocalCommand",
    "LocalShow",
    "add_connection_arguments",
    "connection",
    "one",
    "pairs",
    "read_client_file",
    "say",
    "table",
]


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the control plane is; each has an environment variable."""
    group = parser.add_argument_group("connection")
    group.add_argument("--url", default=os.environ.get("MOORAGE_URL"), help="URL of the API (MOORAGE_URL)")
    group.add_argument(
        "--state-dir",
        default=os.environ.get("MOORAGE_STATE_DIR"),
        help="state folder of a control plane on this machine: URL and credentials are read there (MOORAGE_STATE_DIR)",
    )
    group.add_argument(
        "--auth-type",
        default=os.environ.get("MOORAGE_AUTH_TYPE"),
        choices=["none", "http_basic", "password"],
        help="none, http_basic or password, which is Keystone (MOORAGE_AUTH_TYPE)",
    )
    group.add_argument("--username", default=os.environ.get("MOORAGE_USERNAME", os.environ.get("OS_USERNAME", "")))
    group.add_argument("--password", default=os.environ.get("MOORAGE_PASSWORD", os.environ.get("OS_PASSWORD", "")))
    group.add_argument("--auth-url", default=os.environ.get("OS_AUTH_URL", ""), help="URL of Keystone (OS_AUTH_URL)")
    group.add_argument("--project-name", default=os.environ.get("OS_PROJECT_NAME", ""))


def connection(arguments: argparse.Namespace) -> client.Client:
    """The client that the options describe.

    :raises ConfigError: nothing says where the control plane is, or the state folder is not one.
    """
    url, kind, username, password = arguments.url, arguments.auth_type, arguments.username, arguments.password
    if arguments.state_dir:
        known = read_client_file(Path(arguments.state_dir))
        url = url or known["url"]
        kind = kind or known.get("auth_type")
        username = username or known.get("username", "")
        password = password or known.get("password", "")
    if not url:
        raise errors.ConfigError(
            "Where is the control plane? Give --state-dir DIR of one on this machine, or --url (or MOORAGE_URL)."
        )
    kind = kind or ("http_basic" if username else "none")
    return client.connect(
        url,
        auth_type=kind,
        username=username,
        password=password,
        auth_url=arguments.auth_url,
        project_name=arguments.project_name,
    )


def read_client_file(state_dir: Path) -> dict[str, Any]:
    """What ``moorage up`` wrote for clients into its state folder."""
    path = state_dir / "client.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise errors.ConfigError(
            f"{path} does not exist: no control plane was started in {state_dir}. Start one: moorage up --state-dir {state_dir}"
        ) from None
    except (OSError, ValueError) as error:
        raise errors.ConfigError(f"{path} cannot be read: {error}") from error
    return dict(data)


class LocalCommand(command.Command):
    """A command with Moorage's way of saying what went wrong."""

    def run(self, parsed_args: argparse.Namespace) -> int:
        """Run the command; a known error is told on stderr, with its reasons, and gives exit status 1."""
        try:
            return int(super().run(parsed_args) or 0)
        except errors.MoorageError as error:
            return say(self.app.stderr, error)


class LocalShow(LocalCommand, show.ShowOne):
    """A command that prints one thing of this machine."""


class ApiCommand(LocalCommand):
    """A command that talks to the API."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the connection's options to the command's own."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        add_connection_arguments(parser)
        return parser


class ApiLister(ApiCommand, lister.Lister):
    """A command that prints a table."""


class ApiShow(ApiCommand, show.ShowOne):
    """A command that prints one thing."""


def pairs(texts: Sequence[str], option: str) -> list[tuple[str, str]]:
    """NAME=VALUE of an option that may be repeated.

    :raises InvalidInput: one is not of that form.
    """
    found = [text.partition("=") for text in texts]
    for name, equals, _ in found:
        if not equals or not name:
            raise errors.InvalidInput(f"{option} {name}: write NAME=VALUE.")
    return [(name, value) for name, _, value in found]


def say(stream: Any, error: errors.MoorageError) -> int:
    """Tell an error and what it counts; the exit status."""
    stream.write(f"moorage: {error.message}\n")
    reasons = error.details.get("reasons")
    if isinstance(reasons, dict):
        for name, count in reasons.items():
            stream.write(f"  {name}: {count}\n")
    return 1


def table(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows as cliff's Lister wants them."""
    return tuple(columns), [tuple(_plain(row.get(column)) for column in columns) for row in rows]


def one(data: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and values as cliff's ShowOne wants them."""
    return tuple(data), tuple(_plain(value) for value in data.values())


def _plain(value: Any) -> Any:
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return "" if value is None else value
