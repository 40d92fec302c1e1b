# SPDX-License-Identifier: Apache-2.0
"""Events that signals' handlers set."""

from __future__ import annotations

import subprocess
import sys
import threading
import unittest
from typing import Any

from moorage import threads

#: Ends only if no handler waits for what the thread that it interrupts holds.
_HAMMERED = """
import signal
from moorage import threads
event = threads.signal_event()
signal.signal(signal.SIGALRM, lambda *_: event.set())
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
for _ in range(10000):
    event.wait(0.0001)
    event.clear()
signal.setitimer(signal.ITIMER_REAL, 0)
print("ended")
"""


class SignalEventTests(unittest.TestCase):
    def test_a_handler_may_set_it_whatever_it_interrupts(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", _HAMMERED], capture_output=True, text=True, timeout=120, check=False
        )
        self.assertEqual(("ended\n", ""), (done.stdout, done.stderr))

    def test_it_is_set_by_who_is_in_the_middle_of_a_wait_for_it(self) -> None:
        event: Any = threads.signal_event()

        def interrupted() -> None:
            with event._cond:
                event.set()

        thread = threading.Thread(target=interrupted, daemon=True)
        thread.start()
        thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertTrue(event.is_set())

    def test_who_waits_in_another_thread_is_woken(self) -> None:
        event: Any = threads.signal_event()
        threading.Timer(0.05, event.set).start()
        self.assertTrue(event.wait(60))
