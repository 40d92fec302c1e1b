# SPDX-License-Identifier: Apache-2.0
"""The command ``moorage licence list``."""

from __future__ import annotations

import argparse
from typing import Any

from moorage.cli import base

__all__ = ["LicenceList"]


class LicenceList(base.ApiLister):
    """List the licences of software."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """Ask the API."""
        found = base.connection(parsed_args).request("GET", "/acme/licences")["licences"]
        return base.table(("uuid", "product", "status", "holder"), found)
