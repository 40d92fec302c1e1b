# SPDX-License-Identifier: Apache-2.0
"""moorage host list|show|fence|evacuate."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.client.client import Client
from moorage.plugin_isolation import escape_unprintable

__all__ = ["HostEvacuate", "HostFence", "HostList", "HostShow"]

#: Characters that the API takes.
_LONGEST_REASON = 255
_IN_ERROR = (
    "not evacuated, because it is in error: delete it, or run moorage instance reset-state and repeat the command"
)
HOST_COLUMNS = ("host", "node", "up", "enabled", "instances", "capacity", "used")


class HostList(base.ApiLister):
    """List nodes with their hosts as a scheduler sees them, by uuid."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--host", help="only those of this agent")
        parser.add_argument("--node", help="only the node of this name")
        for yes, no in (("up", "down"), ("enabled", "disabled")):
            flag = parser.add_mutually_exclusive_group()
            flag.add_argument(
                f"--{yes}", dest=yes, action="store_true", default=None, help=f"only those that are {yes}"
            )
            flag.add_argument(f"--{no}", dest=yes, action="store_false", help=f"only those that are {no}")
        base.add_page_arguments(parser, HOST_COLUMNS)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.page(parsed_args, "hosts", HOST_COLUMNS, ("host", "node", "up", "enabled"))


class HostShow(base.ApiShow):
    """Show a host with its nodes and instances as a scheduler sees them."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("host")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        return base.one(base.connection(parsed_args).host(parsed_args.host))


class HostFence(base.ApiShow):
    """Fence a host: declare that nothing runs on it, because its agent is dead. Its instances may then be evacuated.

    With --power-off, the command turns the machines of its nodes off first, through their BMCs.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the host and the reason."""
        parser = super().get_parser(prog_name)
        parser.add_argument("host")
        parser.add_argument(
            "--reason", required=True, type=_reason, help="how you know, for other operators and the journal"
        )
        parser.add_argument(
            "--power-off",
            action="store_true",
            help="turn the machines of its nodes off first; the host is fenced only if they are seen to be off",
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the agent."""
        api = base.connection(parsed_args)
        fence = api.turn_off_and_fence if parsed_args.power_off else api.fence_service
        return base.one(fence(_agent(api, parsed_args.host)["uuid"], parsed_args.reason))


class HostEvacuate(base.ApiCommand):
    """Rebuild the instances of a dead host on other hosts. Repeat it to evacuate instances that are left.

    The host must be fenced: by an operator's word (--fenced), or by itself where its compute driver does that.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the host, the fence and the destination."""
        parser = super().get_parser(prog_name)
        parser.add_argument("host")
        parser.add_argument("--to-host", metavar="HOST", help="this host; the filters are asked all the same")
        parser.add_argument(
            "--fenced", action="store_true", help="say first that nothing runs on the host any more: its power is off"
        )
        parser.add_argument("--reason", type=_reason, help="how you know; with --fenced")
        parser.add_argument("--dry-run", action="store_true", help="only list the instances; not with --fenced")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Evacuates one instance after the other, and prints what became of each."""
        _check(parsed_args)
        api, host = base.connection(parsed_args), parsed_args.host
        agent = _agent(api, host)
        if parsed_args.fenced:
            api.fence_service(agent["uuid"], parsed_args.reason)
        elif not agent["fenced"] and not parsed_args.dry_run:
            # A host that fences itself needs no word.
            api.fence_service_by_itself(agent["uuid"])
        found = list(api.pages("/instances", "instances", {"host": host}))
        failed = 0
        for instance in found:
            if instance["status"] == "error":
                outcome = _IN_ERROR
            elif parsed_args.dry_run:
                outcome = instance["status"]
            else:
                done, outcome = self._evacuate(api, instance, parsed_args.to_host)
                failed += not done
            self.app.stdout.write(f"{instance['uuid']} {escape_unprintable(instance['name'])}: {outcome}\n")
        if failed:
            raise errors.Conflict(
                f"{failed} of {len(found)} instances are still on host {host}; see the lines above, and repeat the command."
            )

    def _evacuate(self, api: Client, instance: Mapping[str, Any], to_host: str | None) -> tuple[bool, str]:
        """Returns whether the evacuation of an instance has begun, and its destination or the reason."""
        try:
            moving = api.act_on_instance(instance["uuid"], "evacuate", {"host": to_host} if to_host else {})
        except errors.MoorageError as error:
            return False, error.message
        return True, f"evacuating to host {moving['host']}"


def _check(parsed_args: argparse.Namespace) -> None:
    """Refuses what cannot be meant, before anything is sent.

    :raises InvalidInput: says what.
    """
    if parsed_args.fenced != bool(parsed_args.reason):
        raise errors.InvalidInput(
            "--fenced needs --reason, and --reason needs --fenced: how do you know that the host is off?"
        )
    if parsed_args.fenced and parsed_args.dry_run:
        raise errors.InvalidInput("--dry-run changes nothing, so it does not fence the host; leave out --fenced.")
    if parsed_args.to_host == parsed_args.host:
        raise errors.InvalidInput(f"--to-host {parsed_args.host} is the host that is evacuated; name another one.")


def _reason(text: str) -> str:
    if not 1 <= len(text) <= _LONGEST_REASON:
        raise argparse.ArgumentTypeError(
            f"a reason has 1 to {_LONGEST_REASON} characters, and this one has {len(text)}"
        )
    return text


def _agent(api: Client, host: str) -> dict[str, Any]:
    """Returns the agent of a host.

    :raises NotFound: there is none.
    """
    found = api.services(binary="agent", host=host)
    if not found:
        raise errors.NotFound(f"There is no agent {host}; moorage service list --binary agent shows all.")
    return dict(found[0])
