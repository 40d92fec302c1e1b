# SPDX-License-Identifier: Apache-2.0
"""Prints what a schedule did, by process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.runner import Result

__all__ = ["lines"]

#: Columns of a line.
WIDTH = 200


def lines(result: Result) -> Iterator[str]:
    """Each point with its moment; a blank line wherever another process goes on. The statement that broke an invariant is marked.

    That is the last COMMIT or message of the process that was looked at when the invariant did not hold.
    """
    broken = _broken(result)
    before = ""
    for number, (when, who, kind, what) in enumerate(result.timeline):
        process = who.partition("/")[0]
        if process != before:
            yield f"-- {process or 'the scheduler'}"
            before = process
        mark = ">>>" if number == broken else "   "
        yield f"{mark} {when:10.4f}  {who:30} {kind:10} {what}"[:WIDTH].rstrip()


def _broken(result: Result) -> int:
    """The number of the line that broke an invariant; -1: none did."""
    end = next((number for number, each in enumerate(result.timeline) if each[2] == "violated"), -1)
    who = result.timeline[end][1]
    kinds = ("write", "commit", "send", "committed")
    before = (number for number in range(end - 1, -1, -1) if result.timeline[number][1] == who)
    return next((number for number in before if result.timeline[number][2] in kinds), end)
