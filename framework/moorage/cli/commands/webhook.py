# SPDX-License-Identifier: Apache-2.0
"""moorage webhook create|list|show|set|delete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from moorage import errors
from moorage.cli import base

__all__ = ["WebhookCreate", "WebhookDelete", "WebhookList", "WebhookSet", "WebhookShow"]

COLUMNS = ("name", "url", "kinds", "projects", "status", "position", "lag", "missed", "last_error")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        action="append",
        metavar="KIND",
        help="only events of this kind (instance.delete, or instance.* for all of instances); may be repeated",
    )
    parser.add_argument(
        "--project", action="append", metavar="ID", help="only events of this project's instances; may be repeated"
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the key of the signatures, whsec_ and base64; - reads standard input",
    )
    parser.add_argument(
        "--after", metavar="NUMBER", help="deliver the events after the one of this number; or oldest, or latest"
    )


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {
        "kinds": arguments.kind,
        "projects": arguments.project,
        "secret": _secret(arguments.secret_file) if arguments.secret_file else None,
        "after": arguments.after,
    }
    return {name: value for name, value in given.items() if value is not None}


def _secret(path: str) -> str:
    """Reads the secret from a file: other users could read an argument in the list of processes."""
    try:
        return (sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"--secret-file {path} cannot be read: {error}") from error


class _OfOne(base.ApiShow):
    """Base class of commands about one webhook."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("webhook", help="name or uuid")
        return parser


class WebhookCreate(base.ApiShow):
    """Create a webhook: a URL that gets the events of the journal. Prints the secret of its signatures once."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name")
        # Not url, which is that of the API.
        parser.add_argument("target", metavar="URL", help="where events are sent: https://host/path")
        parser.add_argument("--disable", action="store_true", help="deliver nothing before it is enabled")
        _add_settings(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Creates the object and prints it."""
        settings = _settings(parsed_args) | ({"enabled": False} if parsed_args.disable else {})
        return base.one(base.connection(parsed_args).create_webhook(parsed_args.name, parsed_args.target, **settings))


class WebhookList(base.ApiLister):
    """List webhooks, each with its cursor in the journal and its last error."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.table(COLUMNS, base.connection(parsed_args).webhooks())


class WebhookShow(_OfOne):
    """Show a webhook."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).webhook(parsed_args.webhook))


class WebhookSet(_OfOne):
    """Change a webhook, or move its cursor. A failed delivery is tried again at once."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--target", metavar="URL", help="another URL that events are sent to")
        _add_settings(parser)
        parser.add_argument("--all-kinds", action="store_true", help="events of all kinds")
        parser.add_argument("--all-projects", action="store_true", help="events of all projects")
        state = parser.add_mutually_exclusive_group()
        state.add_argument("--enable", dest="enabled", action="store_true", default=None, help="deliver events")
        state.add_argument("--disable", dest="enabled", action="store_false", help="deliver no events; keep the cursor")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        given = {
            "url": parsed_args.target,
            "enabled": parsed_args.enabled,
            "kinds": [] if parsed_args.all_kinds else None,
            "projects": [] if parsed_args.all_projects else None,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        settings = _settings(parsed_args)
        both = [f"--{name[:-1]} and --all-{name}" for name in changes if name in settings]
        if both:
            raise errors.InvalidInput(f"{both[0]} contradict each other.")
        if not changes and not settings:
            raise errors.InvalidInput("Say what is to be changed: --target, --kind, --project, --enable, --after, ...")
        return base.one(base.connection(parsed_args).change_webhook(parsed_args.webhook, **changes, **settings))


class WebhookDelete(base.ApiCommand):
    """Remove a webhook."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("webhook", help="name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        base.connection(parsed_args).delete_webhook(parsed_args.webhook)
