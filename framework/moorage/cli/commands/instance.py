# SPDX-License-Identifier: Apache-2.0
"""moorage instance create|list|show|delete and the actions on instances; moorage select."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.clock import SystemClock
from moorage.plugin_isolation import escape_unprintable

__all__ = [
    "DecisionShow",
    "InstanceConfirmResize",
    "InstanceConsole",
    "InstanceCreate",
    "InstanceDelete",
    "InstanceList",
    "InstanceMigrate",
    "InstanceReboot",
    "InstanceRebuild",
    "InstanceReset",
    "InstanceResize",
    "InstanceRevertMove",
    "InstanceRevertResize",
    "InstanceShelve",
    "InstanceShow",
    "InstanceStart",
    "InstanceStop",
    "InstanceUnshelve",
    "InstanceUsage",
    "Select",
]

_CLOCK = SystemClock()

COLUMNS = ("uuid", "name", "status", "host", "node", "flavorid", "flavor_version", "project_id")


def add_flavor_arguments(parser: argparse.ArgumentParser) -> None:
    """A size."""
    parser.add_argument(
        "--flavor",
        metavar="ID",
        help="flavor of the catalogue (moorage flavor list); with --resource the name of a size of your own (default: custom)",
    )
    add_size_arguments(parser)


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """The contents of a flavor."""
    parser.add_argument(
        "--resource", action="append", default=[], metavar="CLASS=UNITS", help="for example VCPU=2; may be repeated"
    )
    parser.add_argument("--extra-spec", action="append", default=[], metavar="NAME=VALUE", help="of the flavor")


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked for: a flavor and hints."""
    add_flavor_arguments(parser)
    parser.add_argument(
        "--hint", action="append", default=[], metavar="NAME=VALUE", help="scheduler hint; may be repeated"
    )
    parser.add_argument("--force-host", help="this host, without asking the filters")
    parser.add_argument("--zone", help="availability zone")
    parser.add_argument("--server-group", metavar="GROUP", help="name or uuid of the server group it belongs to")
    add_image_arguments(parser)


def add_image_arguments(parser: argparse.ArgumentParser) -> None:
    """An image."""
    parser.add_argument("--image", metavar="ID", help="id of the image")
    parser.add_argument(
        "--image-property", action="append", default=[], metavar="NAME=VALUE", help="of the image; may be repeated"
    )


def image_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the JSON of the image that the options describe; empty when they describe none."""
    properties = dict(base.pairs(arguments.image_property, "--image-property"))
    if not arguments.image and not properties:
        return {}
    return {**({"id": arguments.image} if arguments.image else {}), "properties": properties}


def resources_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Returns the resources that the options describe.

    :raises InvalidInput: an option is not CLASS=UNITS.
    """
    resources: dict[str, int] = {}
    for name, value in base.pairs(arguments.resource, "--resource"):
        if not value.isdigit() or not int(value):
            raise errors.InvalidInput(f"--resource {name}={value}: the units must be a positive whole number.")
        resources[name] = int(value)
    return resources


def flavor_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the JSON of the flavor that the options describe.

    :raises InvalidInput: an option is not NAME=VALUE, or neither a flavor nor resources are asked for.
    """
    resources = resources_of(arguments)
    if arguments.flavor and not resources and not arguments.extra_spec:
        return {"flavorid": arguments.flavor}
    if not resources:
        raise errors.InvalidInput(
            "Say what is asked for: a flavor of the catalogue (--flavor NAME, without --extra-spec), or resources, for example: "
            "--resource VCPU=1 --resource MEMORY_MB=512"
        )
    return {
        "flavorid": arguments.flavor or "custom",
        "resources": resources,
        "extra_specs": dict(base.pairs(arguments.extra_spec, "--extra-spec")),
    }


def request_body(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the JSON of the request that the options describe.

    :raises InvalidInput: an option is not NAME=VALUE, or no resource is asked for.
    """
    hints: dict[str, list[str]] = {}
    for name, value in base.pairs(arguments.hint, "--hint"):
        hints.setdefault(name, []).append(value)
    body: dict[str, Any] = {"flavor": flavor_body(arguments), "hints": hints}
    if arguments.force_host:
        body["force_hosts"] = [arguments.force_host]
    named = {
        "availability_zone": arguments.zone,
        "server_group": arguments.server_group,
        "image": image_body(arguments),
    }
    body.update({name: value for name, value in named.items() if value})
    return body


class InstanceCreate(base.ApiShow):
    """Place and build an instance."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--name", default="")
        parser.add_argument("--uuid", help="of the new instance; a repetition with the same uuid finds the first one")
        parser.add_argument("--wait", action="store_true", help="until it is active or in error")
        parser.add_argument("--count", type=int, default=1, help="so many alike, all or none; prints the first")
        parser.add_argument(
            "--command",
            metavar="LINE",
            help="what the instance runs, in one argument that is split into words as a shell does it: 'sleep 60'; needs a "
            "compute driver that runs commands",
        )
        add_request_arguments(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Creates the object, waits for it if asked to, and prints it."""
        api = base.connection(parsed_args)
        body = {"name": parsed_args.name, **request_body(parsed_args)}
        if parsed_args.uuid:
            body["uuid"] = parsed_args.uuid
        if parsed_args.command is not None:
            body["command"] = _words(parsed_args.command)
        count = parsed_args.count
        created = api.create_instances(body, count)[0] if count != 1 else api.create_instance(body)
        while parsed_args.wait and created["status"] == "building":
            _CLOCK.sleep(0.2)
            created = api.instance(created["uuid"])
        return base.one(created)


class InstanceList(base.ApiLister):
    """List instances."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host")
        parser.add_argument("--status")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).instances(host=parsed_args.host, status=parsed_args.status)
        return base.table(COLUMNS, found)


class InstanceShow(base.ApiShow):
    """Show an instance."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instance", metavar="UUID")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).instance(parsed_args.instance))


class InstanceConsole(base.ApiCommand):
    """Print the last lines that an instance wrote. Characters that a terminal would obey are escaped."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the instance and the number of lines."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instance", metavar="UUID")
        parser.add_argument("--lines", type=int, default=100, help="how many at most; 100 unless given")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Sends the request and prints the answer."""
        written = base.connection(parsed_args).instance_console(parsed_args.instance, parsed_args.lines)
        for line in written.splitlines():
            self.app.stdout.write(f"{escape_unprintable(line.expandtabs())}\n")


class InstanceUsage(base.ApiShow):
    """Show the processor time and the memory that an instance uses."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the instance."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instance", metavar="UUID")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).instance_usage(parsed_args.instance))


class InstanceDelete(base.ApiCommand):
    """Delete instances and release their resources."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instances", metavar="UUID", nargs="+")
        parser.add_argument("--force", action="store_true", help="take over from an operation that is in progress")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Deletes one after the other."""
        api = base.connection(parsed_args)
        for uuid in parsed_args.instances:
            api.delete_instance(uuid, force=parsed_args.force)


class InstanceReset(base.ApiShow):
    """Set the status of an instance. The operation in progress on it ends."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the instance and the status."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instance", metavar="UUID")
        parser.add_argument("--status", choices=("active", "error"), default="active", help="active unless given")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the instance."""
        path, body = f"/instances/{parsed_args.instance}/reset-state", {"status": parsed_args.status}
        return base.one(base.connection(parsed_args).request("POST", path, body=body))


class _Action(base.ApiShow):
    """Begin an operation on an instance, perhaps wait for its end, and print the instance."""

    action = ""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("instance", metavar="UUID")
        parser.add_argument("--wait", action="store_true", help="until the operation has ended")
        return parser

    def body(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """What the action is to do."""
        return {}

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request."""
        api = base.connection(parsed_args)
        found = api.act_on_instance(parsed_args.instance, self.action, self.body(parsed_args))
        while parsed_args.wait and found["pending"] and found["status"] != "resized":
            _CLOCK.sleep(0.2)
            found = api.instance(parsed_args.instance)
        return base.one(found)


class _Move(_Action):
    """One for which a scheduler looks for a place."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--to-host", metavar="HOST", help="this host; the filters are asked all the same")
        return parser

    def body(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Where to."""
        return {"host": parsed_args.to_host} if parsed_args.to_host else {}


class InstanceRebuild(_Action):
    """Rebuild an instance on its node, from its present image or another one."""

    action = "rebuild"

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the image."""
        parser = super().get_parser(prog_name)
        add_image_arguments(parser)
        return parser

    def body(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """Returns the image, if the options give one."""
        return {"image": image} if (image := image_body(parsed_args)) else {}


class InstanceStop(_Action):
    """Stop an instance. It keeps its node and its resources."""

    action = "stop"


class InstanceStart(_Action):
    """Start an instance that was stopped or has ended."""

    action = "start"


class InstanceReboot(_Action):
    """Stop an instance if it runs, and start it again."""

    action = "reboot"


class InstanceShelve(_Action):
    """Shelve an instance: remove it from its host and release its resources."""

    action = "shelve_offload"


class InstanceUnshelve(_Move):
    """Unshelve an instance: place and build it again."""

    action = "unshelve"


class InstanceMigrate(_Move):
    """Move an instance to another node: while it runs, or cold."""

    action = "live_migrate"

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the kind of move."""
        parser = super().get_parser(prog_name)
        parser.add_argument(
            "--cold",
            action="store_true",
            help="stop it first and start it there; for drivers that cannot move what runs",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Begins the move."""
        if parsed_args.cold:
            self.action = "migrate"
        return super().take_action(parsed_args)


class InstanceRevertMove(_Action):
    """Revert a move that is not committed; the instance stays on its source."""

    action = "revert_move"


class InstanceConfirmResize(_Action):
    """Confirm a resize: keep the new flavor, and release what the old flavor held."""

    action = "confirm_resize"


class InstanceRevertResize(_Action):
    """Revert a resize: give the instance its old flavor and its old node back."""

    action = "revert_resize"


class InstanceResize(_Move):
    """Give an instance another flavor, perhaps on another node."""

    action = "resize"

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        add_flavor_arguments(parser)
        return parser

    def body(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        """To what, and where."""
        return {"flavor": flavor_body(parsed_args), **super().body(parsed_args)}


class Select(base.ApiShow):
    """Show where an instance would be placed, and why other nodes are refused. Claims nothing."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--count", type=int, default=1, help="for how many instances alike")
        parser.add_argument("--explain", action="store_true", help="say for each filter how many nodes it removed")
        add_request_arguments(parser)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        body = {
            **request_body(parsed_args),
            "count": parsed_args.count,
            "dry_run": True,
            "explain": parsed_args.explain,
        }
        answer = base.connection(parsed_args).select(body)
        return base.one(_readable(answer) if parsed_args.formatter == "table" else answer)


class DecisionShow(base.ApiShow):
    """Explain the decision on a request, by the id of the request or the uuid of the instance."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("request", metavar="REQUEST_ID")
        parser.add_argument("--node", help="also say what the filters say of this node now")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        answer = base.connection(parsed_args).decision(parsed_args.request, parsed_args.node)
        return base.one(_readable(answer) if parsed_args.formatter == "table" else answer)


def _words(line: str) -> list[str]:
    """Returns the words of a command line.

    :raises InvalidInput: there are none, or a quotation is not closed.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise errors.InvalidInput(f"--command {line}: {error}.") from error
    if not words:
        raise errors.InvalidInput("--command: say what to run, for example: --command 'sleep 60'")
    return words


def _readable(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer of a scheduler in lines for people."""
    shown = dict(answer)
    for name in ("selections", "best"):
        if name in shown:
            shown[name] = "\n".join(_place(each) for each in shown[name])
    if "removed" in shown:
        left = shown.get("considered", 0)
        lines = []
        for name, count in shown["removed"].items():
            left -= count
            lines.append(f"{name}: removed {count}, left {left}")
        shown["removed"] = "\n".join(lines)
    if "refused_nodes" in shown:
        shown["refused_nodes"] = "\n".join(
            f"{node}: {'; '.join(f'{name}: {why}' for name, why in reasons.items())}"
            for node, reasons in shown["refused_nodes"].items()
        )
    if "reasons_now" in shown:
        shown["reasons_now"] = "\n".join(f"{name}: {why}" for name, why in shown["reasons_now"].items())
    return shown


def _place(each: dict[str, Any]) -> str:
    others = ", ".join(f"{other['host']}/{other['node']}" for other in each.get("alternates", ()))
    return f"{each['host']}/{each['node']} (weight {each['weight']:g}" + (f"; next {others})" if others else ")")
