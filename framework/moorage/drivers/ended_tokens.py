# SPDX-License-Identifier: Apache-2.0
"""Remembers up to which token the workloads of instances were destroyed, so that a call that comes late creates none again.

An agent that stands still in the middle of a call may go on when another one has taken over, has moved the instance away, and has
destroyed what was here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil

from oslo_log import log as logging

from moorage.drivers.interface import DriverTools

__all__ = ["EndedTokens"]

LOG = logging.getLogger(__name__)
_DAY = 86_400


class EndedTokens:
    """The tokens of one host, for one day at least. Safe for use by several threads and processes.

    ``ended/DRIVER/HOST/DAY/UUID`` in the state folder is a symbolic link to the token: one call of the system makes it.

    :param driver: a name of the driver, which no other driver has.
    """

    def __init__(self, driver: str, tools: DriverTools) -> None:
        self._folder = os.path.join(tools.conf.control_plane.state_dir, "ended", driver, tools.host)
        self._clock = tools.clock
        self._today = -1

    def note(self, uuid: str, token: int) -> None:
        """Keep that what tokens up to this one left of an instance is destroyed; called before it is.

        Where it cannot be kept, for example on a full disk, the log says so: what frees the disk must not fail for that.
        """
        if token < 1:
            return
        try:
            self._note(uuid, token)
        except OSError as error:
            LOG.warning(
                "That instance %s is destroyed cannot be kept in %s (%s). An agent that stands still now may start it again.",
                uuid, self._folder, error.strerror,
            )  # fmt: skip

    def _note(self, uuid: str, token: int) -> None:
        day = int(self._clock.wall()) // _DAY
        folder = f"{self._folder}/{day}"
        if day != self._today or not os.path.isdir(folder):
            self._begin(folder, day)
        path = f"{folder}/{uuid}"
        try:
            os.symlink(str(token), path)
        except FileExistsError:
            self._raise(folder, path, token)

    def __call__(self, uuid: str) -> int:
        """Returns the highest token that was noted for an instance; 0 for none."""
        day = int(self._clock.wall()) // _DAY
        return max(_read(f"{self._folder}/{each}/{uuid}") for each in (day, day - 1))

    def _begin(self, folder: str, day: int) -> None:
        """Forget what was kept before yesterday."""
        os.makedirs(folder, exist_ok=True, mode=0o700)
        for name in os.listdir(self._folder):
            if name.isdigit() and int(name) < day - 1:
                shutil.rmtree(f"{self._folder}/{name}", ignore_errors=True)
        self._today = day

    @staticmethod
    def _raise(folder: str, path: str, token: int) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _read(path) < token:
                with contextlib.suppress(FileNotFoundError):
                    # A killed call has left it.
                    os.unlink(f"{path}.new")
                os.symlink(str(token), f"{path}.new")
                os.rename(f"{path}.new", path)
        finally:
            os.close(descriptor)


def _read(path: str) -> int:
    try:
        return int(os.readlink(path))
    except FileNotFoundError:
        return 0
