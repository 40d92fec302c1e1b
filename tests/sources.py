# SPDX-License-Identifier: Apache-2.0
"""What a source file imports of Moorage, without running it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

__all__ = ["imported", "imported_by"]


def imported(path: Path) -> set[str]:
    """The modules of the core that a file imports, wherever in it."""
    return imported_by(path.read_text(encoding="utf-8"))


def imported_by(source: str) -> set[str]:
    """The same of a text."""
    return set(_imports(ast.parse(source)))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _ours(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _ours(node.module):
            for alias in node.names:
                # ``from moorage import errors`` imports a module, ``from moorage.db import now`` a name of one.
                inner = f"{node.module}.{alias.name}"
                yield inner if _is_module(inner) else node.module


def _ours(name: str) -> bool:
    return name.split(".")[0] == "moorage"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
