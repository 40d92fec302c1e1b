# SPDX-License-Identifier: Apache-2.0
"""Decides whether a call hangs.

A process can itself be stopped for a while (SIGSTOP, a suspended machine), and the time that passes then is not the call's. So a
limit counts only as far as the call was seen to run.
"""

from __future__ import annotations

from moorage.clock import Clock

__all__ = ["LOOKS", "HangDetector", "Progress"]

#: How often a call is looked at within its limit.
LOOKS = 10
#: Share of a pause after which the next look counts: waits may end a little early.
_EARLY = 0.9
#: What is timed: anything that is equal as long as the same step runs, and when it began. None: nothing that counts runs.
Progress = tuple[object, float] | None


class HangDetector:
    """Decides whether a step hangs, by looking at it again and again.

    A step hangs when its limit is over *and* ten looks, spread over the limit, saw it running. So a process that was stopped
    for hours and goes on does not take its steps for hung.

    :param limit: seconds that a step may take.
    """

    def __init__(self, clock: Clock, limit: float) -> None:
        self._clock = clock
        self._limit = limit
        self._seen: object = None
        self._looks = 0
        self._counted = float("-inf")

    @property
    def pause(self) -> float:
        """Seconds to wait before each look."""
        return self._limit / LOOKS

    def look(self, progress: Progress) -> bool:
        """Look; True when the step hangs. Looks that follow each other within a pause count once."""
        if progress is None:
            self._seen = None
            return False
        step, began = progress
        now = self._clock.monotonic()
        if step != self._seen:
            self._seen, self._looks = step, 0
        elif now - self._counted < self.pause * _EARLY:
            return False
        self._looks, self._counted = self._looks + 1, now
        return self._looks >= LOOKS and now - began > self._limit
