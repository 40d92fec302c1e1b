# SPDX-License-Identifier: Apache-2.0
"""Lists all commands with one line each, without importing them.

cliff imports every command for the first line of its docstring, which took two seconds. Here the line is read from the source.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TextIO

__all__ = ["write"]


def write(out: TextIO, commands: Mapping[str, Sequence[metadata.EntryPoint]], own: str) -> None:
    """Write a line for each command: its name, what it does, and its distribution where that is another than ``own``."""
    out.write("\nCommands:\n")
    width = max(map(len, commands), default=0)
    for name, owners in sorted(commands.items()):
        module, _, path = owners[0].value.partition(" ")[0].partition(":")
        line = _descriptions(module).get(path, "(no description)").rstrip(".")
        of = {each.dist.name for each in owners if each.dist is not None} - {own}
        out.write(f"  {name:<{width}}  {line}{''.join(f' ({each})' for each in sorted(of))}\n")


@functools.cache
def _descriptions(module: str) -> Mapping[str, str]:
    """Returns the first line of the docstring of each class in a module's source; nothing where the source cannot be read."""
    try:
        spec = importlib.util.find_spec(module)
        source = Path((spec and spec.origin) or "").read_text(encoding="utf-8")
        body: Iterable[ast.stmt] = ast.parse(source).body
    except (ImportError, OSError, SyntaxError, ValueError):
        return {}
    classes = [each for each in body if isinstance(each, ast.ClassDef)]
    return {each.name: (ast.get_docstring(each) or "(no description)").partition("\n")[0] for each in classes}
