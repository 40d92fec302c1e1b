# SPDX-License-Identifier: Apache-2.0
"""Pauses processes (SIGSTOP) outside of their writes: one that stands still in a write to SQLite holds up all others for ever."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil

from moorage import errors
from moorage.db import Database
from tests.servers import wait_until

__all__ = ["pause"]


def pause(pid: int, url: str) -> None:
    """Pause a process at a moment at which it does not hold the turn to write.

    :param url: of the database that it writes to.
    """
    database = Database(url, lock_timeout=1, attempts=1)

    def paused() -> bool:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it stands still")
        with contextlib.suppress(errors.Unavailable):
            # It ends at the first write that does not have to wait for the paused process.
            with database.write():
                pass
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    with contextlib.closing(database):
        wait_until(paused, "it stands still outside of a write")
