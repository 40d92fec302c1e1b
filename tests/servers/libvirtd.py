# SPDX-License-Identifier: Apache-2.0
"""Runs libvirtd, starts it again when it ends, and ends with it all that it has started.

Arguments: the user that it runs as, empty for this one; the command. SIGTERM ends it.

Machines and the log daemon leave their parent, as those of a service do. So this process has the kernel give them to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None)


def _end(_number: int, _frame: FrameType | None) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Again: one of them may have started another one just now.
        while children := [
            each for each in psutil.Process().children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE
        ]:
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
            _, left = psutil.wait_procs(children, timeout=5)
            if left:
                break
    os._exit(0)


def main() -> None:
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, _end)
    user, *command = sys.argv[1:]
    account: dict[str, Any] = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}
    while True:
        # It ends with this process, also with one that is killed.
        child = subprocess.Popen(command, preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), **account)
        # Of the others too, which are not ours until their parent ends.
        while os.wait()[0] != child.pid:
            pass


if __name__ == "__main__":
    main()
