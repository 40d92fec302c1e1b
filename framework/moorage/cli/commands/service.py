# SPDX-License-Identifier: Apache-2.0
"""moorage service list|set."""

from __future__ import annotations

import argparse
from typing import Any

from moorage import errors
from moorage.cli import base

__all__ = ["ServiceList", "ServiceSet"]

COLUMNS = ("uuid", "binary", "host", "cluster", "state", "disabled", "forced_down", "epoch", "rpc_version", "offers")


class ServiceList(base.ApiLister):
    """List the services and whether they are up."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Filters."""
        parser = super().get_parser(prog_name)
        parser.add_argument("--binary", help="only this kind: api, scheduler, agent, engine")
        parser.add_argument("--host", help="only those of this host")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Ask and print."""
        found = base.connection(parsed_args).services(binary=parsed_args.binary, host=parsed_args.host)
        return base.table(COLUMNS, found)


class ServiceSet(base.ApiShow):
    """Disable or enable a service, or say that it is dead."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """What to change."""
        parser = super().get_parser(prog_name)
        parser.add_argument("service", help="uuid, or BINARY:HOST (agent:agent-1)")
        state = parser.add_mutually_exclusive_group()
        state.add_argument("--disable", dest="disabled", action="store_true", default=None, help="give it nothing new")
        state.add_argument("--enable", dest="disabled", action="store_false", default=None, help="give it work again")
        parser.add_argument("--disable-reason", help="why, for other operators")
        life = parser.add_mutually_exclusive_group()
        life.add_argument("--forced-down", action="store_true", default=None, help="treat it as dead whatever it says")
        life.add_argument("--up", dest="forced_down", action="store_false", default=None, help="believe it again")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Any:
        """Change and print."""
        changes = {
            "disabled": parsed_args.disabled,
            "disabled_reason": parsed_args.disable_reason,
            "forced_down": parsed_args.forced_down,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        if not changes:
            raise errors.InvalidInput("Nothing to change: give --disable, --enable, --forced-down or --up.")
        api = base.connection(parsed_args)
        uuid = parsed_args.service
        if ":" in uuid:
            binary, _, host = uuid.partition(":")
            found = api.services(binary=binary, host=host)
            if not found:
                raise errors.NotFound(f"There is no service {uuid}; moorage service list shows all.")
            uuid = found[0]["uuid"]
        return base.one(api.set_service(uuid, **changes))
