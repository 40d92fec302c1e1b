# SPDX-License-Identifier: Apache-2.0
"""Any coordination server that tooz drives, with the rules that tooz leaves to its users.

Each rule comes from something that was seen to go wrong: member ids are bytes (text ids never match what comes back); foreign ids
are dropped; every wait is bounded; every exception, of tooz or of the library under it, becomes one of ours; the own id is looked
for in every heartbeat (after a session has ended tooz goes on beating for a member that is none); a member joins once, and a new
client is made for the next time (a ZooKeeper that lost its data is never joined again otherwise).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qs, urlsplit

from moorage_plugins import eventlet_import  # noqa: F401  (before tooz)

# isort: split
import tooz
from tooz import coordination
from typing_extensions import override

from moorage import errors
from moorage.bounded_pool import BoundedPool, Overdue
from moorage.coordination.interface import (
    MEMBER_PREFIX,
    BackendCapability,
    BackendTools,
    CoordinationBackend,
    NotMember,
    View,
)

__all__ = ["ToozBackend"]

T = TypeVar("T")
_numbers = itertools.count(1)

_HOSTS = frozenset({BackendCapability.ACROSS_PROCESSES, BackendCapability.ACROSS_HOSTS})
#: What each driver of tooz is good for here. (etcd's does not declare that it works across hosts, though it does.)
_CAPABILITIES: Mapping[str, frozenset[BackendCapability]] = {
    "zookeeper": _HOSTS | {BackendCapability.SURVIVES_RESTART},
    "kazoo": _HOSTS | {BackendCapability.SURVIVES_RESTART},
    "etcd3+http": _HOSTS | {BackendCapability.SURVIVES_RESTART},
    "etcd3+https": _HOSTS | {BackendCapability.SURVIVES_RESTART},
    "redis": _HOSTS,
    "memcached": _HOSTS,
    "file": frozenset({BackendCapability.ACROSS_PROCESSES, BackendCapability.SURVIVES_RESTART}),
}
_CAUTIONS: Mapping[str, Sequence[str]] = {
    "file": ("members in files see the members of one machine alone",),
    "memcached": (
        "memcached forgets its members when it restarts, and may evict them when it is full",
        "memcached ends sessions up to one second early; keep [coordination] lease_margin at 1 or more",
    ),
    "redis": ("a redis that restarts without its data forgets its members; they join again",),
}
#: What only the configuration may say.
_TIMEOUTS = frozenset({"timeout", "membership_timeout"})
#: Options in URLs that drivers read as numbers when they connect, when it is too late to refuse them.
_NUMBERS = frozenset({"db", "health_check_interval", "socket_connect_timeout", "socket_timeout"})
#: Drivers that have locks and no groups.
_LOCKS_ONLY = frozenset({"mysql", "postgresql", "ipc", "kubernetes"})


class ToozBackend(CoordinationBackend):
    """Any tooz URL that has groups: zookeeper://, etcd3+http://, redis://, memcached://, file://."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: BackendTools) -> None:
        super().__init__(tools)
        self._scheme = _checked(tools.url)
        try:
            # What the driver itself refuses can never work, and what it lacks is not there later either. It does not connect.
            self._made(b"%bprobe" % MEMBER_PREFIX)
        except Exception as error:
            said = " ".join(str(error).replace(urlsplit(tools.url).password or "\0", "***").split())[:200]
            raise errors.ConfigError(
                f"The URL of the coordination backend ({self._where}) cannot be used: {type(error).__name__}: {said}. Correct it, "
                "or install what its driver needs."
            ) from error
        self.capabilities = _CAPABILITIES[self._scheme]
        self.cautions = _CAUTIONS.get(self._scheme, ())
        self._calls: BoundedPool | None = None
        self._client: Any = None
        self._group = b""
        self._member = b""

    @property
    def session_timeout(self) -> float:
        """Seconds after which the server really ends a silent session; at most what was asked for."""
        return min(self.tools.session_timeout, self._seconds)

    @property
    def _seconds(self) -> int:
        """What the drivers take: whole seconds."""
        return max(1, int(self.tools.session_timeout))

    # -- the interface --------------------------------------------------------------------------------------------

    @override
    def start(self) -> None:
        """Only sees that the server answers; the session is made with the member's id, by ``join``."""
        self._connect(b"%bprobe.%d" % (MEMBER_PREFIX, next(_numbers)))
        self._disconnect()

    @override
    def join(self, group: str, member_id: bytes) -> float:
        self._connect(member_id)
        self._group, self._member = group.encode(), member_id
        self._call(self._join_group)
        # On some servers the session began with the connection, so it is renewed at once.
        return self.renew()

    @override
    def renew(self) -> float:
        began = self.tools.clock.monotonic()
        found = self._call(self._beat)
        if self._member not in found:
            raise NotMember(f"{self._where} does not know {self._member.decode()} any more: its session ended.")
        return began + self.session_timeout

    @override
    def members(self) -> View:
        began = self.tools.clock.monotonic()
        found = self._call(self._read)
        return View(frozenset(member for member in found if member.startswith(MEMBER_PREFIX)), began)

    @override
    def leave(self) -> None:
        self._call(lambda: self._client.leave_group(self._group).get(timeout=self.tools.call_timeout))

    @override
    def close(self) -> None:
        self._disconnect()

    # -- what a driver needs to be different ----------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """What the driver is given besides the URL; what the URL says itself goes before it."""
        seconds = self._seconds
        call = max(1, round(self.tools.call_timeout))
        given: dict[str, Any] = {"timeout": seconds, "membership_timeout": seconds}
        if self._scheme.startswith("etcd3"):
            # There, it is that of a request.
            given["timeout"] = call
        elif self._scheme == "redis":
            given |= {"timeout": seconds, "socket_timeout": call, "socket_connect_timeout": call}
        elif self._scheme == "memcached":
            given |= {"timeout": call}
        return given

    def connected(self, client: Any) -> None:
        """Called with a client that has just been made, before it is started."""

    def _beat(self) -> frozenset[bytes]:
        """A heartbeat, then who is there; runs in the client's own thread."""
        self._client.heartbeat()
        return self._read()

    def _read(self) -> frozenset[bytes]:
        """Who is there; runs in the client's own thread."""
        found = self._client.get_members(self._group).get(timeout=self.tools.call_timeout)
        return frozenset(each if isinstance(each, bytes) else str(each).encode() for each in found)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        parts = urlsplit(self.tools.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def _connect(self, member_id: bytes) -> None:
        self._disconnect()
        calls = self._calls = BoundedPool(f"tooz-{self._scheme}", self.tools.clock, 1)
        made: list[Any] = []

        def start() -> Any:
            client = self._made(member_id)
            made.append(client)
            self.connected(client)
            client.start()
            return client

        try:
            self._client = self._translated(functools.partial(calls.call, start, self.tools.connect_timeout))
        except errors.MoorageError:
            # A client whose start was given up may connect later, and would keep that connection for ever.
            self._calls = None
            _end(calls, lambda: [each.stop() for each in made])
            raise

    def _made(self, member_id: bytes) -> Any:
        """Returns a client that is not connected. Options in the URL override the configuration."""
        said = parse_qs(urlsplit(self.tools.url).query)
        given = {name: value for name, value in self.options().items() if name not in said}
        return coordination.get_coordinator(self.tools.url, member_id, **given)

    def _disconnect(self) -> None:
        calls, self._calls = self._calls, None
        client, self._client = self._client, None
        if calls is not None:
            _end(calls, client.stop if client is not None else lambda: None)

    def _join_group(self) -> None:
        """Join, making the group where there is none; others may do the same at this moment."""
        seconds = self.tools.call_timeout
        for _ in range(3):
            try:
                self._client.join_group(self._group).get(timeout=seconds)
                return
            except coordination.GroupNotCreated:
                try:
                    self._client.create_group(self._group).get(timeout=seconds)
                except coordination.GroupAlreadyExist:
                    continue
        raise errors.Unavailable(f"The group {self._group.decode()} on {self._where} is deleted again and again.")

    def _call(self, work: Callable[[], T]) -> T:
        calls = self._calls
        if calls is None or self._client is None:
            raise errors.Unavailable(f"There is no connection to {self._where}.")
        # Two calls of the driver may be made in one of ours.
        return self._translated(functools.partial(calls.call, work, self.tools.call_timeout))

    def _translated(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Overdue as error:
            raise errors.Unavailable(f"{self._where}: {error}.") from error
        except coordination.GroupNotCreated as error:
            raise NotMember(f"{self._where} has lost the group {self._group.decode()}, with all members.") from error
        except errors.MoorageError as error:
            if isinstance(error, errors.Unavailable):
                raise errors.Unavailable(f"{self._where}: {error.message}") from error
            raise
        except tooz.NotImplemented as error:
            raise errors.ConfigError(f"{self._where} cannot be used: its driver in tooz has no groups.") from error
        except Exception as error:
            # Drivers let the exceptions of their libraries through.
            said = " ".join(str(error).split())[:200] or "no details"
            raise errors.Unavailable(f"{self._where} does not work: {type(error).__name__}: {said}") from error


def _end(calls: BoundedPool, last: Callable[[], object]) -> None:
    """Call ``last`` after the call that runs, then end the thread. Does not wait."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            last()

    calls.start(quietly)
    calls.close()


def _checked(url: str) -> str:
    """Returns the scheme of a URL that can be used.

    :raises ConfigError: it cannot, and why.
    """
    scheme, separator, rest = url.partition("://")
    known = ", ".join(f"{name}://" for name in sorted(_CAPABILITIES))
    if not separator:
        raise errors.ConfigError(
            f"The coordination backend needs a URL, not {url!r}; set [coordination] backend_url to one of: {known}"
        )
    if scheme in _LOCKS_ONLY:
        raise errors.ConfigError(
            f"The driver of tooz for {scheme}:// has locks but no groups, so it cannot say who is there. Use the backend "
            f"'database' for members in Moorage's own database, or one of: {known}"
        )
    if scheme not in _CAPABILITIES:
        raise errors.ConfigError(f"No driver of tooz is known for {scheme}://; use one of: {known}")
    if not rest.strip("/"):
        raise errors.ConfigError(f"The URL {url} of the coordination backend names no server.")
    for name in _TIMEOUTS & _options_of(scheme, url).keys():
        raise errors.ConfigError(
            f"The URL of the coordination backend sets {name}, which members would not know of: they would work on after the "
            "server has dropped them. Set [coordination] session_timeout and call_timeout instead."
        )
    return scheme


def _options_of(scheme: str, url: str) -> Mapping[str, Sequence[str]]:
    """Returns the options of a URL whose servers and numbers can be read.

    :raises ConfigError: they cannot. What stands there is not repeated, since it may be a part of a password.
    """
    wrong = "its server cannot be read, or a port is no number from 0 to 65535"
    try:
        parts = urlsplit(url)
        for server in parts.netloc.rpartition("@")[2].split(","):
            _ = urlsplit(f"//{server}").port
        found = parse_qs(parts.query)
        for name in sorted(_NUMBERS & found.keys()):
            wrong = f"{name} is no number"
            float(found[name][-1])
    except ValueError:
        raise errors.ConfigError(
            f"The URL {scheme}://... of the coordination backend cannot be used: {wrong}. Write it as {scheme}://host:port."
        ) from None
    return found
