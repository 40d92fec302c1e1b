# SPDX-License-Identifier: Apache-2.0
"""moorage service list|show|set."""

from __future__ import annotations

import argparse
from typing import Any

from moorage import errors
from moorage.cli import base
from moorage.client.client import Client

__all__ = ["ServiceList", "ServiceSet", "ServiceShow"]

COLUMNS = (
    "uuid", "binary", "host", "cluster", "state", "disabled", "forced_down", "fenced", "self_fenced", "epoch", "rpc_version",
    "offers",
)  # fmt: skip
_IDENT = "uuid, or BINARY:HOST (agent:agent-1)"


class ServiceList(base.ApiLister):
    """List the services and whether they are up."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--binary", help="only this kind: api, scheduler, agent, engine")
        parser.add_argument("--host", help="only those of this host")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        found = base.connection(parsed_args).services(binary=parsed_args.binary, host=parsed_args.host)
        return base.table(COLUMNS, found)


class ServiceShow(base.ApiShow):
    """Show a service, and why it is disabled or its host is fenced."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("service", help=_IDENT)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the request and prints the answer."""
        api = base.connection(parsed_args)
        return base.one(api.service(_uuid(api, parsed_args.service)))


class ServiceSet(base.ApiShow):
    """Disable or enable a service, or declare it dead."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Adds the arguments of the command."""
        parser = super().get_parser(prog_name)
        parser.add_argument("service", help=_IDENT)
        state = parser.add_mutually_exclusive_group()
        state.add_argument("--disable", dest="disabled", action="store_true", default=None, help="give it nothing new")
        state.add_argument("--enable", dest="disabled", action="store_false", default=None, help="give it work again")
        parser.add_argument("--disable-reason", help="why, for other operators")
        life = parser.add_mutually_exclusive_group()
        life.add_argument("--forced-down", action="store_true", default=None, help="treat it as dead whatever it says")
        life.add_argument("--up", dest="forced_down", action="store_false", default=None, help="believe it again")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Sends the change and prints the result."""
        changes = {
            "disabled": parsed_args.disabled,
            "disabled_reason": parsed_args.disable_reason,
            "forced_down": parsed_args.forced_down,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            raise errors.InvalidInput("Nothing to change: give --disable, --enable, --forced-down or --up.")
        api = base.connection(parsed_args)
        return base.one(api.set_service(_uuid(api, parsed_args.service), **changes))


def _uuid(api: Client, ident: str) -> str:
    """Returns the uuid of a service.

    :raises NotFound: there is none of that binary and host.
    """
    if ":" not in ident:
        return ident
    binary, _, host = ident.partition(":")
    found = api.services(binary=binary, host=host)
    if not found:
        raise errors.NotFound(f"There is no service {ident}; moorage service list shows all.")
    return str(found[0]["uuid"])
