# SPDX-License-Identifier: Apache-2.0
"""What the commands share: where the control plane is, and who asks."""

from __future__ import annotations

import argparse
import datetime
import itertools
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
    "add_page_arguments",
    "connection",
    "one",
    "page",
    "pairs",
    "read_client_file",
    "say",
    "table",
    "time_text",
]

#: The largest page that a list of the API has.
_PAGE = 1000


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
    group.add_argument(
        "--system-scope",
        default=os.environ.get("OS_SYSTEM_SCOPE", ""),
        choices=["", "all"],
        help="all: a token of the system, for administrators, in place of one of the project (OS_SYSTEM_SCOPE)",
    )


def connection(arguments: argparse.Namespace) -> client.Client:
    """Returns the client that the options describe.

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
        system_scope=arguments.system_scope,
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
        """Run the command; a known error is printed on stderr, with its reasons."""
        try:
            return int(super().run(parsed_args) or 0)
        except errors.MoorageError as error:
            say(self.app.stderr, error, as_json=getattr(parsed_args, "formatter", "") == "json")
            return self.status_of(error)

    def status_of(self, error: errors.MoorageError) -> int:
        """Returns the exit status for a known error."""
        return 1


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


def say(stream: Any, error: errors.MoorageError, *, as_json: bool = False) -> int:
    """Print an error with its counts and the id of the request; returns the exit status.

    :param as_json: one JSON object, for ``-f json``.
    """
    request_id = error.details.get("request_id")
    if as_json:
        shown = {**errors.to_wire(error), **({"request_id": request_id} if request_id else {})}
        stream.write(json.dumps({"error": shown}, default=str) + "\n")
        return 1
    stream.write(f"moorage: {error.message}\n")
    if request_id:
        stream.write(f"  request id: {request_id}\n")
    reasons = error.details.get("reasons")
    if isinstance(reasons, dict):
        for name, count in reasons.items():
            stream.write(f"  {name}: {count}\n")
    return 1


def table(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Columns and rows as cliff's Lister wants them."""
    return tuple(columns), [tuple(_shown(column, row.get(column)) for column in columns) for row in rows]


def add_page_arguments(parser: argparse.ArgumentParser, columns: Sequence[str]) -> None:
    """Add the options of a list that is read page by page."""
    parser.add_argument("--limit", type=int, metavar="N", help="no more than so many")
    parser.add_argument("--marker", metavar="UUID", help="only those after the one of this uuid")
    parser.add_argument(
        "--fields", metavar="NAME,NAME", help=f"what is asked for and shown (default: {','.join(columns)})"
    )


def page(
    parsed_args: argparse.Namespace, what: str, columns: Sequence[str], filters: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Reads a list as its options say; see :func:`add_page_arguments`. Fields that are not shown are not asked for.

    :param what: the list and its path: ``nodes`` of ``/nodes``.
    :param filters: the options that are filters of the API.
    """
    limit = parsed_args.limit
    if limit is not None and limit < 1:
        raise errors.InvalidInput(f"--limit is {limit}; it must be 1 or more.")
    shown = columns if parsed_args.fields is None else [name.strip() for name in parsed_args.fields.split(",")]
    query = {name: getattr(parsed_args, name) for name in filters}
    query |= {"after": parsed_args.marker, "fields": ",".join(shown)}
    found = connection(parsed_args).pages(f"/{what}", what, query, limit=min(limit or _PAGE, _PAGE))
    return table(shown, itertools.islice(found, limit))


def one(data: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names and values as cliff's ShowOne wants them."""
    return tuple(data), tuple(_shown(name, value) for name, value in data.items())


def time_text(micros: int | None) -> str:
    """Formats a time in UTC as text; empty for no time.

    :param micros: microseconds since the Unix epoch, as the API has all times; 0 is none too.
    """
    if not micros:
        return ""
    return datetime.datetime.fromtimestamp(micros / 1_000_000, datetime.UTC).isoformat(timespec="milliseconds")


def _shown(name: str, value: Any) -> Any:
    """Returns a value of the API as a cell; names of times end in ``_at``."""
    value = _with_times(name, value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return "" if value is None else value


def _with_times(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {each: _with_times(each, inner) for each, inner in value.items()}
    if isinstance(value, list):
        return [_with_times(name, each) for each in value]
    return time_text(value) if name.endswith("_at") and type(value) is int else value
