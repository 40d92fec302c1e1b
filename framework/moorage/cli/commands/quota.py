# SPDX-License-Identifier: Apache-2.0
"""moorage quota show|set|unset."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base

__all__ = ["QuotaSet", "QuotaShow", "QuotaUnset"]


class QuotaShow(base.ApiLister):
    """Show limits of projects with what is used of them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which project."""
        parser = super().get_parser(prog_name)
        parser.add_argument("project", nargs="?", help="only of this project; members see their own project only")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        found = base.connection(parsed_args).quotas(parsed_args.project)
        rows = [each | {"free": max(0, each["limit"] - each["used"])} for each in found]
        return base.table(("project", "resource_class", "limit", "used", "free"), rows)


class QuotaSet(base.ApiShow):
    """Set how much of a resource class the instances of a project may hold; nothing is taken from those that hold more."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the project, the resource class and the limit."""
        parser = super().get_parser(prog_name)
        parser.add_argument("project")
        parser.add_argument("resource_class", help="VCPU, MEMORY_MB, DISK_GB, CUSTOM_...")
        parser.add_argument("limit", type=int, help="units of the class")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Write it."""
        api = base.connection(parsed_args)
        return base.one(api.set_quota(parsed_args.project, parsed_args.resource_class, parsed_args.limit))


class QuotaUnset(base.ApiCommand):
    """Remove a limit of a project."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which project and class."""
        parser = super().get_parser(prog_name)
        parser.add_argument("project")
        parser.add_argument("resource_class")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Remove it."""
        base.connection(parsed_args).unset_quota(parsed_args.project, parsed_args.resource_class)
