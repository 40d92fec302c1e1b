# SPDX-License-Identifier: Apache-2.0
"""moorage quota show|set|unset."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base

__all__ = ["QuotaSet", "QuotaShow", "QuotaUnset"]


class QuotaShow(base.ApiLister):
    """Show the limits of projects and their use."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("project", nargs="?", help="only of this project; members see their own project only")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).quotas(parsed_args.project)
        rows = [each | {"free": max(0, each["limit"] - each["used"])} for each in found]
        return base.table(("project", "resource_class", "limit", "used", "free"), rows)


class QuotaSet(base.ApiShow):
    """Set the limit of a resource class for the instances of a project. A project that holds more keeps it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the project, the resource class and the limit."""
        parser = super().get_parser(prog_name)
        parser.add_argument("project")
        parser.add_argument("resource_class", help="VCPU, MEMORY_MB, DISK_GB, CUSTOM_...")
        parser.add_argument("limit", type=int, help="units of the class")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request."""
        api = base.connection(parsed_args)
        return base.one(api.set_quota(parsed_args.project, parsed_args.resource_class, parsed_args.limit))


class QuotaUnset(base.ApiCommand):
    """Remove a limit of a project."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("project")
        parser.add_argument("resource_class")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request."""
        base.connection(parsed_args).unset_quota(parsed_args.project, parsed_args.resource_class)
