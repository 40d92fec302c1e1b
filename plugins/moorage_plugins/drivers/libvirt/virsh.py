# SPDX-License-Identifier: Apache-2.0
"""Talks to libvirt through its program virsh: one process for each request, which ends after ``[driver_libvirt] timeout``.

A request that changes something gets the descriptor of a lock, which virsh keeps open until libvirt has answered. So the lock of an
agent that was killed is free only when its last request is done. A request that takes longer than the timeout may still be done
later.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from oslo_log import log as logging

from moorage.drivers.interface import DriverError

__all__ = ["Domain", "Virsh", "VirshError"]

LOG = logging.getLogger(__name__)
_UNREACHABLE = "failed to connect to the hypervisor"
#: Of virDomainState.
_PAUSED, _SHUTOFF, _CRASHED = 3, 5, 6
#: Of virDomainShutoffReason.
_SHUTDOWN, _DESTROYED, _KILLED, _SAVED = 1, 2, 3, 5


class VirshError(DriverError):
    """libvirt refused or failed. ``detail`` is what it said, which is for the log alone."""

    def __init__(self, text: str, detail: str) -> None:
        super().__init__(text)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Domain:
    """A machine as libvirt sees it.

    :param state: a number of virDomainState. :param reason: why it is in this state: a number whose meaning depends on the state.
    """

    state: int
    reason: int

    @property
    def active(self) -> bool:
        """Whether it has a hypervisor process."""
        return self.state not in (_SHUTOFF, _CRASHED)

    @property
    def paused(self) -> bool:
        """Whether it has a hypervisor process that does not execute it."""
        return self.state == _PAUSED

    @property
    def shut_down(self) -> bool:
        """Whether it ended by itself, in order."""
        return self.state == _SHUTOFF and self.reason == _SHUTDOWN

    @property
    def ended_because(self) -> str:
        """A sentence for people: why it has no hypervisor process, where it ended otherwise."""
        if self.state == _SHUTOFF and self.reason in (_DESTROYED, _SAVED):
            return "It was ended through libvirt, outside of Moorage."
        if self.state == _CRASHED or self.reason == _KILLED:
            return "Its hypervisor process ended: it was killed, or it crashed."
        return "It does not run any more; the machine of the host may have been started again."


class Virsh:
    """Requests to one libvirt."""

    def __init__(self, program: str, uri: str, timeout: float) -> None:
        self._command = (program, "--quiet", "--connect", uri)
        self._timeout = timeout

    def domains(self, prefix: str) -> Mapping[str, Domain]:
        """Name -> domain, of all that have a name with this beginning.

        :raises DriverError: libvirt does not answer.
        """
        return {
            name: Domain(int(values["state.state"]), int(values.get("state.reason", 0)))
            for name, values in self._stats("--state").items()
            if name.startswith(prefix) and "state.state" in values
        }

    def usage(self, prefix: str) -> Mapping[str, tuple[float, int]]:
        """Returns the seconds of processor time and the bytes of memory that each running domain has used, by name.

        :raises DriverError: libvirt does not answer.
        """
        return {
            name: (int(values["cpu.time"]) / 1e9, int(values["balloon.rss"]) * 1024)
            for name, values in self._stats("--nowait", "--list-active", "--cpu-total", "--balloon").items()
            if name.startswith(prefix) and "cpu.time" in values and "balloon.rss" in values
        }

    def capabilities(self) -> str:
        """What the host has and can run, as XML.

        :raises DriverError: libvirt does not answer.
        """
        return self.run("capabilities")

    def run(self, *arguments: str, lock: int | None = None) -> str:
        """Does one request; what virsh wrote.

        :param lock: the descriptor that virsh keeps open.
        :raises VirshError: libvirt does not answer in time, or refuses.
        """
        try:
            done = subprocess.run(  # noqa: S603  (no shell, and no argument is a user's text)
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                cwd="/",
                env={**os.environ, "LC_ALL": "C"},
                pass_fds=() if lock is None else (lock,),
                start_new_session=True,
                timeout=self._timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise VirshError(
                f"the hypervisor of this host has not answered within {self._timeout:g} seconds",
                f"No answer within [driver_libvirt] timeout to {arguments}.",
            ) from error
        if done.returncode:
            unreachable = _UNREACHABLE in done.stderr
            text = "does not answer" if unreachable else "refused or failed"
            raise VirshError(
                f"the hypervisor of this host {text}; the log of the agent says more",
                done.stderr.strip() or "no reason",
            )
        return done.stdout

    def _stats(self, *options: str) -> Mapping[str, Mapping[str, str]]:
        found: dict[str, dict[str, str]] = {}
        values: dict[str, str] = {}
        for line in self.run("domstats", "--raw", *options).splitlines():
            if line.startswith("Domain: "):
                values = found[line.removeprefix("Domain: ").strip("'")] = {}
            elif "=" in line:
                name, _, value = line.strip().partition("=")
                values[name] = value
        return found
