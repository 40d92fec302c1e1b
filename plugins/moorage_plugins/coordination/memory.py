# SPDX-License-Identifier: Apache-2.0
"""Members in the memory of this process, for tests and simulations: several engines of one process see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from typing_extensions import override

from moorage import errors, threads
from moorage.coordination.interface import (
    MEMBER_PREFIX,
    BackendCapability,
    BackendTools,
    CoordinationBackend,
    NotMember,
    View,
)

__all__ = ["MemoryBackend", "MemoryServer"]


class MemoryServer:
    """What a server would keep: sessions that end when they are not renewed, by the server's clock.

    :param monotonic: the server's clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threads.lock()
        self._groups: dict[str, dict[bytes, float]] = {}

    def put(self, group: str, member: bytes, seconds: float) -> None:
        """A new session of that many seconds."""
        with self._lock:
            self._groups.setdefault(group, {})[member] = self._monotonic() + seconds

    def renew(self, group: str, member: bytes, seconds: float) -> bool:
        """Make it last from now; False when it is over."""
        with self._lock:
            living = self._living(group)
            if member not in living:
                return False
            living[member] = self._monotonic() + seconds
            return True

    def remove(self, group: str, member: bytes) -> None:
        """End the session."""
        with self._lock:
            self._groups.get(group, {}).pop(member, None)

    def members(self, group: str) -> frozenset[bytes]:
        """Whose sessions last."""
        with self._lock:
            return frozenset(self._living(group))

    def wipe(self) -> None:
        """Forget everything, as a server does that lost its data."""
        with self._lock:
            self._groups.clear()

    def _living(self, group: str) -> dict[bytes, float]:
        now = self._monotonic()
        kept = {member: end for member, end in self._groups.get(group, {}).items() if end > now}
        self._groups[group] = kept
        return kept


_servers: dict[str, MemoryServer] = {}
_servers_lock = threads.lock()


class MemoryBackend(CoordinationBackend):
    """Members in the memory of this process.

    :param server: which one; without it, the one of the URL (all clients of the process that name it share it).
    :param fault: called with the name of each call before it is made; what it raises is raised.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    cautions = ("the memory backend sees this process alone; it is for tests",)

    def __init__(
        self,
        tools: BackendTools,
        server: MemoryServer | None = None,
        fault: Callable[[str], None] = lambda call: None,
    ) -> None:
        super().__init__(tools)
        self.capabilities: frozenset[BackendCapability] = frozenset()
        if server is None:
            with _servers_lock:
                server = _servers.setdefault(tools.url, MemoryServer(tools.clock.monotonic))
        self._server = server
        self._fault = fault
        self._group = ""
        self._member = b""

    @override
    def start(self) -> None:
        self._fault("start")

    @override
    def join(self, group: str, member_id: bytes) -> float:
        self._fault("join")
        began = self.tools.clock.monotonic()
        self._server.put(group, member_id, self.tools.session_timeout)
        self._group, self._member = group, member_id
        self._fault("joined")
        return began + self.tools.session_timeout

    @override
    def renew(self) -> float:
        self._fault("renew")
        self._joined()
        began = self.tools.clock.monotonic()
        if not self._server.renew(self._group, self._member, self.tools.session_timeout):
            raise NotMember(f"The session of {self._member.decode()} is over.")
        self._fault("renewed")
        return began + self.tools.session_timeout

    @override
    def members(self) -> View:
        self._fault("members")
        began = self.tools.clock.monotonic()
        self._joined()
        found = self._server.members(self._group)
        self._fault("seen")
        return View(frozenset(member for member in found if member.startswith(MEMBER_PREFIX)), began)

    @override
    def leave(self) -> None:
        self._fault("leave")
        self._server.remove(self._group, self._member)

    @override
    def close(self) -> None:
        self._group = ""

    def _joined(self) -> None:
        if not self._group:
            raise errors.Unavailable("This client is in no group.")
