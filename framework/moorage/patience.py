# SPDX-License-Identifier: Apache-2.0
"""Whether a call hangs, as somebody sees who looks at it again and again.

A process can itself be stopped for a while (SIGSTOP, a machine that is suspended): the time that passes then is not the call's. So
it is late only when its deadline is over *and* it was seen running by several looks, spread over the deadline.
"""

from __future__ import annotations

from moorage.clock import Clock

__all__ = ["Patience"]

#: Looks within a deadline.
_LOOKS = 10


class Patience:
    """What one watcher knows of one place where calls run, one after the other.

    :param deadline: seconds that a call may take.
    """

    def __init__(self, clock: Clock, deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline
        self._seen: object = None
        self._looks = 0

    @property
    def pause(self) -> float:
        """Seconds to wait before each look."""
        return self._deadline / _LOOKS

    def look(self, call: object, since: float) -> bool:
        """Look after a pause; True when the call hangs.

        :param call: what runs: equal as long as it is the same call. None: nothing runs.
        :param since: when it began, by the clock's ``monotonic``.
        """
        if call is None or call != self._seen:
            self._seen, self._looks = call, 0
        if call is None:
            return False
        self._looks += 1
        return self._looks >= _LOOKS and self._clock.monotonic() - since > self._deadline
