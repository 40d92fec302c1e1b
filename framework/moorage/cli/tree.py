# SPDX-License-Identifier: Apache-2.0
"""All that can be typed: programs, their commands and options, from the very parsers; for completion and the manual."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moorage.cli import manage, status

__all__ = ["PROGRAMS", "Entry", "entries"]

PROGRAMS = ("moorage", "moorage-manage", "moorage-status")


@dataclass(frozen=True, slots=True)
class Entry:
    """A program or one of its commands.

    :param path: what is typed, the program first.
    :param words: what may come next: commands, then options.
    :param parser: None for a word that only stands before others (``moorage shard``).
    """

    path: tuple[str, ...]
    words: tuple[str, ...]
    parser: argparse.ArgumentParser | None


def entries(application: Any) -> Iterator[Entry]:
    """Every program and command, a program before its commands. Imports all commands that are installed.

    :param application: cliff's, with the commands of ``moorage``.
    """
    yield from _of_cliff(application)
    for parser in (manage.make_parser(), status.make_parser()):
        yield from _of_argparse((parser.prog,), parser)


def _of_cliff(application: Any) -> Iterator[Entry]:
    parsers = {}
    for name, point in sorted(application.command_manager.commands.items()):
        parsers[tuple(name.split())] = point.load()(application, None).get_parser(f"{PROGRAMS[0]} {name}")
    paths = {path[:length] for path in parsers for length in range(len(path))} | set(parsers)
    for path in sorted(paths):
        parser = parsers.get(path) if path else application.parser
        below = sorted({each[len(path)] for each in paths if len(each) > len(path) and each[: len(path)] == path})
        yield Entry((PROGRAMS[0], *path), (*below, *(_options(parser) if parser else ())), parser)


def _of_argparse(path: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Entry]:
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below |= action.choices
    yield Entry(path, (*sorted(below), *_options(parser)), parser)
    for name, each in sorted(below.items()):
        yield from _of_argparse((*path, name), each)


def _options(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    # argparse has no other way to ask; cliff does the same.
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    return tuple(sorted({text for action in shown for text in action.option_strings if text.startswith("--")}))
