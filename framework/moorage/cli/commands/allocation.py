# SPDX-License-Identifier: Apache-2.0
"""moorage allocation list|audit, moorage usage list, moorage pool list|set|delete."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from moorage import errors, randomness
from moorage.cli import base

__all__ = ["AllocationAudit", "AllocationList", "PoolDelete", "PoolList", "PoolSet", "UsageList"]


class AllocationList(base.ApiLister):
    """List stored allocations."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--consumer", help="only of this consumer (an instance's uuid)")
        parser.add_argument("--provider", help="only of this provider (a node's or pool's uuid)")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).allocations(consumer=parsed_args.consumer, provider=parsed_args.provider)
        return base.table(("consumer", "provider", "resource_class", "used"), found)


class AllocationAudit(base.ApiLister):
    """Compare counters with allocations, use with capacity, nodes with providers, and instances with their allocations.

    Each line is a finding; an empty list means that nothing is wrong.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--repair",
            action="store_true",
            help="correct wrong counters, make missing providers, delete empty providers without a node, and claim again what "
            "instances without an allocation use, if it fits",
        )
        parser.add_argument(
            "--release-orphans",
            action="store_true",
            help="release what is held by consumers that the enabled detectors know to be gone",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer. Prints what is still wrong to stderr too."""
        report = base.connection(parsed_args).audit_allocations(
            repair=parsed_args.repair, release_orphans=parsed_args.release_orphans
        )
        repaired = set(report["repaired"])
        rows = [
            each
            | {"finding": "drift", "capacity": None, "used": each["counted"], "repaired": each["provider"] in repaired}
            for each in report["drift"]
        ] + [each | {"finding": "overuse", "held": None, "repaired": False} for each in report["overuse"]]
        rows += [each | {"finding": "orphan", "repaired": each["released"]} for each in report["orphans"]]
        rows += [each | {"finding": each["kind"]} for each in report["findings"]]
        left = sum(not each["repaired"] for each in rows)
        self.app.stderr.write(f"{report['providers']} providers, {len(rows)} findings, {left} of them not repaired.\n")
        columns = (
            "finding",
            "provider",
            "consumer",
            "resource_class",
            "used",
            "held",
            "capacity",
            "repaired",
            "message",
        )
        return base.table(columns, rows)


class UsageList(base.ApiLister):
    """Show capacity and usage per resource. Shared pools are counted once."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--provider", help="only of this provider (a node's or pool's uuid)")
        parser.add_argument("--by-provider", action="store_true", help="a line for each provider, not for each class")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request, adds the answer up, and prints the sums."""
        found = base.connection(parsed_args).usages(provider=parsed_args.provider)
        rows = [
            {"provider": usage["name"], "uuid": usage["uuid"], "can_host": usage["can_host"]}
            | inventory
            | {"free": max(0, inventory["capacity"] - inventory["used"])}
            for usage in found
            for inventory in usage["inventories"]
        ]
        if parsed_args.by_provider:
            columns = (
                "provider",
                "uuid",
                "can_host",
                "resource_class",
                "total",
                "reserved",
                "capacity",
                "used",
                "free",
            )
            return base.table(columns, rows)
        return base.table(
            ("resource_class", "providers", "total", "reserved", "capacity", "used", "free"), totals(rows)
        )


def totals(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of providers added up by resource class, ordered by it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["resource_class"]
        total = found.setdefault(name, {"resource_class": name, "providers": 0})
        total["providers"] += 1
        for column in ("total", "reserved", "capacity", "used", "free"):
            total[column] = total.get(column, 0) + row[column]
    return [found[name] for name in sorted(found)]


class PoolList(base.ApiLister):
    """List pools: providers without a node, which several nodes share."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        rows = [
            {
                "uuid": pool["uuid"],
                "name": pool["name"],
                "members": len(pool["members"]),
                "used": {each["resource_class"]: each["used"] for each in pool["inventories"]},
                "capacity": {each["resource_class"]: each["capacity"] for each in pool["inventories"]},
            }
            for pool in base.connection(parsed_args).pools()
        ]
        return base.table(("uuid", "name", "members", "used", "capacity"), rows)


class PoolSet(base.ApiShow):
    """Create a pool, or change the pool with this name. Values that are not given stay as they are."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("name")
        parser.add_argument(
            "--resource", action="append", default=[], metavar="CLASS=TOTAL", help="DISK_GB=1000; may be repeated"
        )
        parser.add_argument("--member", action="append", default=[], metavar="NODE", help="a node that takes of it")
        parser.add_argument(
            "--remove-member", action="append", default=[], metavar="NODE", help="one that does no more"
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Reads the pool, changes it and writes it."""
        api = base.connection(parsed_args)
        known = {pool["name"]: pool for pool in api.pools()}.get(parsed_args.name)
        fields = ("total", "reserved", "min_unit", "max_unit", "step_size", "allocation_ratio")
        items = {
            each["resource_class"]: {name: each[name] for name in fields}
            for each in (known or {}).get("inventories", ())
        }
        for text in parsed_args.resource:
            name, total = _resource(text)
            items[name] = items.get(name, {}) | {"total": total}
        members = set((known or {}).get("members", ()))
        members |= {api.node(each)["uuid"] for each in parsed_args.member}
        members -= {api.node(each)["uuid"] for each in parsed_args.remove_member}
        made = api.set_pool(
            known["uuid"] if known else randomness.new_uuid(),
            {"name": parsed_args.name, "members": sorted(members), "inventories": items},
        )
        return base.one(made)


class PoolDelete(base.ApiCommand):
    """Remove a pool from which no consumer holds resources."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("pool", help="name or uuid")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Finds the object and removes it."""
        api = base.connection(parsed_args)
        for pool in api.pools():
            if parsed_args.pool in {pool["uuid"], pool["name"]}:
                api.delete_pool(pool["uuid"])
                return
        raise errors.NotFound(f"There is no pool {parsed_args.pool}; moorage pool list shows all.")


def _resource(text: str) -> tuple[str, int]:
    name, equals, total = text.partition("=")
    if not equals or not name or not total.isdecimal():
        raise errors.InvalidInput(f"--resource {text} cannot be read; write CLASS=TOTAL, as in DISK_GB=1000.")
    return name, int(total)
