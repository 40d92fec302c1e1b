# SPDX-License-Identifier: Apache-2.0
"""moorage instance create|list|show|delete and moorage select, host list, host show."""

from __future__ import annotations

import argparse
import time
from typing import Any

from moorage import errors
from moorage.cli import base

__all__ = ["HostList", "HostShow", "InstanceCreate", "InstanceDelete", "InstanceList", "InstanceShow", "Select"]

COLUMNS = ("uuid", "name", "status", "host", "node", "flavorid", "project_id")
HOST_COLUMNS = ("host", "node", "up", "enabled", "instances", "capacity", "used")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked for: a flavor and hints."""
    parser.add_argument("--flavor", default="custom", metavar="ID", help="name of the size (compared by type_affinity)")
    parser.add_argument(
        "--resource", action="append", default=[], metavar="CLASS=UNITS", help="for example VCPU=2; may be repeated"
    )
    parser.add_argument(
        "--hint", action="append", default=[], metavar="NAME=VALUE", help="scheduler hint; may be repeated"
    )
    parser.add_argument("--extra-spec", action="append", default=[], metavar="NAME=VALUE", help="of the flavor")
    parser.add_argument("--force-host", help="this host, without asking the filters")
    parser.add_argument("--zone", help="availability zone")
    parser.add_argument("--server-group", metavar="GROUP", help="name or uuid of the server group it belongs to")
    parser.add_argument("--image", metavar="ID", help="id of the image")
    parser.add_argument(
        "--image-property", action="append", default=[], metavar="NAME=VALUE", help="of the image; may be repeated"
    )


def request_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON of the request that the options describe.

    :raises InvalidInput: an option is not NAME=VALUE, or no resource is asked for.
    """
    resources: dict[str, int] = {}
    for name, value in base.pairs(arguments.resource, "--resource"):
        if not value.isdigit() or not int(value):
            raise errors.InvalidInput(f"--resource {name}={value}: the units must be a positive whole number.")
        resources[name] = int(value)
    if not resources:
        raise errors.InvalidInput("Say what is asked for, for example: --resource VCPU=1 --resource MEMORY_MB=512")
    hints: dict[str, list[str]] = {}
    for name, value in base.pairs(arguments.hint, "--hint"):
        hints.setdefault(name, []).append(value)
    body: dict[str, Any] = {
        "flavor": {
            "flavorid": arguments.flavor,
            "resources": resources,
            "extra_specs": dict(base.pairs(arguments.extra_spec, "--extra-spec")),
        },
        "hints": hints,
    }
    if arguments.force_host:
        body["force_hosts"] = [arguments.force_host]
    properties = dict(base.pairs(arguments.image_property, "--image-property"))
    if arguments.image or properties:
        body["image"] = {**({"id": arguments.image} if arguments.image else {}), "properties": properties}
    named = {"availability_zone": arguments.zone, "server_group": arguments.server_group}
    body.update({name: value for name, value in named.items() if value})
    return body


class InstanceCreate(base.ApiShow):
    """Place and build an instance."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """What to create."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--name", default="")
        parser.add_argument("--wait", action="store_true", help="until it is active or in error")
        add_request_arguments(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Create, perhaps wait, and print."""
        api = base.connection(parsed_args)
        created = api.create_instance({"name": parsed_args.name, **request_body(parsed_args)})
        while parsed_args.wait and created["status"] == "building":
            time.sleep(0.2)
            created = api.instance(created["uuid"])
        return base.one(created)


class InstanceList(base.ApiLister):
    """List instances."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host")
        parser.add_argument("--status")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        found = base.connection(parsed_args).instances(host=parsed_args.host, status=parsed_args.status)
        return base.table(COLUMNS, found)


class InstanceShow(base.ApiShow):
    """Show an instance."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instance", metavar="UUID")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        return base.one(base.connection(parsed_args).instance(parsed_args.instance))


class InstanceDelete(base.ApiCommand):
    """Delete instances and give back their claims."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instances", metavar="UUID", nargs="+")
        parser.add_argument("--force", action="store_true", help="take over from an operation that is in progress")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Delete one after the other."""
        api = base.connection(parsed_args)
        for uuid in parsed_args.instances:
            api.delete_instance(uuid, force=parsed_args.force)


class HostList(base.ApiLister):
    """List hosts and nodes as a scheduler sees them."""

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        return base.table(HOST_COLUMNS, base.connection(parsed_args).hosts())


class HostShow(base.ApiShow):
    """Show a host with its nodes and instances as a scheduler sees them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Which."""
        parser = super().get_parser(prog_name)
        parser.add_argument("host")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        return base.one(base.connection(parsed_args).host(parsed_args.host))


class Select(base.ApiShow):
    """Ask where an instance would go, and why not elsewhere; claims nothing."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """What is asked for."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--count", type=int, default=1, help="for how many instances alike")
        parser.add_argument("--explain", action="store_true", help="say for each filter how many nodes it removed")
        add_request_arguments(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        body = {
            **request_body(parsed_args),
            "count": parsed_args.count,
            "dry_run": True,
            "explain": parsed_args.explain,
        }
        return base.one(base.connection(parsed_args).select(body))
