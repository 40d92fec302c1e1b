# SPDX-License-Identifier: Apache-2.0
"""The directives ``public-modules`` and ``extension-points``: tables that are made from the code, so that they cannot be stale."""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive, directives
from docutils.statemachine import StringList

import moorage
from moorage.cli.scaffold.families import FAMILIES
from moorage.control_plane.extension_points import extension_points
from moorage.public import PUBLIC, Audience


class _Table(Directive):
    """A list-table of rows of reStructuredText."""

    has_content = False

    def rows(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """Titles, and rows."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """The table."""
        titles, rows = self.rows()
        lines = [".. list-table::", "   :header-rows: 1", "   :widths: auto", ""]
        for row in (titles, *rows):
            lines += [f"   {'*' if not number else ' '} - {cell}" for number, cell in enumerate(row)]
        found = nodes.container()
        self.state.nested_parse(StringList(lines, source="code"), self.content_offset, found)
        return found.children


class PublicModules(_Table):
    """The modules for one audience, with what each is for."""

    required_arguments = 1

    def rows(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """One for each module that a pattern names."""
        wanted = Audience(self.arguments[0])
        there = [each.name for each in pkgutil.walk_packages(moorage.__path__, "moorage.")]
        rows: list[Sequence[str]] = []
        for pattern, audience in PUBLIC.items():
            if audience is wanted:
                for name in sorted(fnmatch.filter(there, pattern)):
                    said = (importlib.import_module(name).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
                    rows.append((f"``{name}``", said))
        return ("Module", "What it is for"), rows


class ExtensionPoints(_Table):
    """All extension points."""

    def rows(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        """One for each group."""
        templates = {family.group: family.name for family in FAMILIES.values()}
        rows: list[Sequence[str]] = [
            (
                f"``{point.group}``",
                f"``{point.option}``" if point.option else "",
                f"``{point.interface.__module__}.{point.interface.__qualname__}``" if point.interface else "",
                ".".join(map(str, point.api_version)),
                f"``moorage plugin new {templates[point.group]}``" if point.group in templates else "",
            )
            for point in extension_points()
        ]
        return ("Entry-point group", "Chosen by", "Interface", "Version", "Template"), rows


def setup(app: Any) -> dict[str, Any]:
    """Register them."""
    directives.register_directive("public-modules", PublicModules)
    directives.register_directive("extension-points", ExtensionPoints)
    return {"parallel_read_safe": True}
