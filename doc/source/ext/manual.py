# SPDX-License-Identifier: Apache-2.0
"""``.. commands:: PROGRAM``: what a program and each of its commands takes, from the very parsers, so that it cannot be stale."""

from __future__ import annotations

import os
from typing import Any, ClassVar
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive

from moorage.cli import tree
from moorage.cli.main import MoorageApp


class Commands(Directive):
    """A title and the help of each command."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        # As wide as a manual, and without what the environment of the build says of passwords.
        environment = {"COLUMNS": "78", "PATH": os.environ.get("PATH", "")}
        with mock.patch.dict(os.environ, environment, clear=True):
            for entry in tree.entries(MoorageApp()):
                if entry.path[0] == self.arguments[0] and entry.parser is not None:
                    text = entry.parser.format_help().rstrip()
                    found.append(nodes.rubric("", " ".join(entry.path)))
                    found.append(nodes.literal_block(text, text, language="text"))
        return found


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
