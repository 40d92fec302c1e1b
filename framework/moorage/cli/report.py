# SPDX-License-Identifier: Apache-2.0
"""The report of a replay for a person, and its progress on a terminal."""

from __future__ import annotations

from typing import TextIO

from moorage.client.replay import ReplayReport
from moorage.clock import SystemClock

__all__ = ["ReportProgress", "readable"]

_CLOCK = SystemClock()

_WIDTH = 40


class ReportProgress:
    """A bar on a terminal; nothing anywhere else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown_at = 0.0
        self._terminal = stream.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Show it, ten times a second at most."""
        if not self._terminal or (_CLOCK.monotonic() - self._shown_at < 0.1 and done < total):
            return
        self._shown_at = _CLOCK.monotonic()
        filled = _WIDTH * done // total
        self._stream.write(f"\r[{'#' * filled}{'.' * (_WIDTH - filled)}] {done}/{total} requests")
        self._stream.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._terminal:
            self._stream.write("\n")


def readable(report: ReplayReport) -> str:
    """Returns the report as text."""
    lines = [
        f"{report.requests} requests on {report.hosts} nodes in {report.seconds:.1f} s",
        f"  placed          {report.placed}  ({report.claims_per_s:.0f} per second)",
        f"  refused         {report.refused}",
    ]
    lines += [f"                  {count} because {reason}" for reason, count in report.refused_because.items()]
    lines += [
        f"  released        {report.released}",
        f"  asked again     {report.repeated}",
        f"  without answer  {report.unanswered}",
        f"  failed          {report.failed}",
        f"  answered within {report.p50_ms:.1f} ms (median), {report.p99_ms:.1f} ms (99 of 100)",
    ]
    lines += [f"                  {count} x {text}" for text, count in report.failures.items()]
    if report.killed:
        lines.append(f"  killed          {report.killed}, in the middle")
    fill = ", ".join(f"{name} {share:.0%}" for name, share in report.fill.items())
    for count, text in (
        (report.broken, "could not be built; their claims were given back"),
        (report.unsettled, "are still being built or deleted"),
    ):
        if count:
            lines.append(f"                  {count} {text}")
    lines += [
        f"  fill            {fill}",
        f"  stored          allocations of {report.stored_consumers} consumers; {report.lost} acknowledged ones are missing, "
        f"{report.left_over} that should be gone are there",
        f"  over-allocated  {report.over_allocated} (summed from the stored allocations)",
    ]
    return "\n".join(lines) + "\n"
