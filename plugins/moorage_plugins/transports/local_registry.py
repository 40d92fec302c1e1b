# SPDX-License-Identifier: Apache-2.0
"""Who listens on this machine: the run folder of transport ``local``.

``run_dir/key`` is the secret that both ends of a connection prove to know. A listener is ``run_dir/t/TOPIC/SERVER.sock`` with
``SERVER.lock`` beside it (names are hashes; the lock file says them in clear, with the pid). A living listener holds an flock on
the lock file, which the kernel gives back however the process ends: so a socket is known to be dead, and may be removed, exactly
when the lock can be had.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from moorage import errors, randomness
from moorage.clock import Clock

__all__ = ["ListenerLock", "SocketPath", "Registry", "socket_address"]

#: Bytes that fit into sockaddr_un.sun_path on Linux, without the closing zero.
_LONGEST_ADDRESS = 107
#: Seconds to wait for a lock that another process holds for a moment, to test it.
_CLAIM_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SocketPath:
    """Where one server of one topic listens, or would."""

    socket: str
    lock: str


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """What to bind or connect to for a socket at ``path``: the path, or where it is too long, one through a folder's descriptor.

    :raises ConfigError: it is too long and this system has no /proc/self/fd.
    """
    if len(os.fsencode(path)) <= _LONGEST_ADDRESS:
        yield path
        return
    folder, name = os.path.split(path)
    if not os.path.isdir("/proc/self/fd"):
        raise errors.ConfigError(f"The path '{path}' is too long for a socket on this system; shorten [rpc] run_dir.")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class ListenerLock:
    """The right to listen at a place, held until :meth:`release` or the end of the process."""

    def __init__(self, place: SocketPath, descriptor: int) -> None:
        self.place = place
        self._descriptor = descriptor

    def release(self) -> None:
        """Take socket and lock file away and give the right back; idempotent."""
        if self._descriptor < 0:
            return
        # While the lock is held, no other listener can have put a new socket there.
        _unlink(self.place.socket)
        _unlink(self.place.lock)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor only: for the child of a fork, in which the parent's listener must stay as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Registry:
    """The run folder. Nothing is read or made before it is needed.

    :param run_dir: absolute path; made, for its owner only, when it is not there.
    """

    def __init__(self, run_dir: str, clock: Clock) -> None:
        self._run_dir = run_dir
        self._clock = clock

    def key(self) -> bytes:
        """Returns the shared secret; created by the first process that asks.

        :raises ConfigError: folder or file belong to another user or are open to others.
        """
        path = os.path.join(self._run_dir, "key")
        try:
            return self._read_key(path)
        except FileNotFoundError:
            self._make_folder(self._run_dir)
            self._make_key(path)
            return self._read_key(path)

    def place(self, topic: str, server: str) -> SocketPath:
        """Where (topic, server) listens."""
        return _place(self._run_dir, topic, server)

    def places(self, topic: str) -> list[SocketPath]:
        """Every place of a topic that has a socket, sorted; some may be dead."""
        folder = _folder(self._run_dir, topic)
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".sock"))
        except FileNotFoundError:
            return []
        return [_in_folder(folder, name.removesuffix(".sock")) for name in names]

    def servers(self, topic: str) -> list[str]:
        """Names of the live servers of a topic, sorted."""
        names = []
        for place in self.places(topic):
            with contextlib.suppress(OSError, ValueError, KeyError), open(place.lock, encoding="utf-8") as file:
                if not _lock(file.fileno(), fcntl.LOCK_SH):
                    names.append(str(json.load(file)["server"]))
        return sorted(names)

    def claim(self, topic: str, server: str) -> ListenerLock:
        """Become the one who listens at a place; the socket of a dead one is removed.

        :raises AlreadyExists: a living process listens there.
        """
        self.key()
        place = self.place(topic, server)
        self._make_folder(os.path.dirname(os.path.dirname(place.lock)))
        self._make_folder(os.path.dirname(place.lock))
        deadline = self._clock.monotonic() + _CLAIM_SECONDS
        while (descriptor := _take(place)) is None:
            if self._clock.monotonic() >= deadline:
                raise errors.AlreadyExists(
                    f"Topic '{topic}' is served under the name '{server}' by {_holder(place)}; "
                    f"stop that one, or choose another name (run folder: {self._run_dir})."
                )
            self._clock.sleep(0.01)
        claim = ListenerLock(place, descriptor)
        try:
            os.ftruncate(descriptor, 0)
            about = {"topic": topic, "server": server, "pid": os.getpid()}
            os.pwrite(descriptor, json.dumps(about).encode(), 0)
            _unlink(place.socket)
        except OSError:
            claim.forget()
            raise
        return claim

    def sweep(self, place: SocketPath) -> bool:
        """Remove what a dead listener left; True when it was dead (or is gone), False when it lives."""
        if not os.path.exists(place.lock):
            # A listener always has its lock file: there is none, or one that is just ending.
            return True
        descriptor = _take(place)
        if descriptor is None:
            return False
        ListenerLock(place, descriptor).release()
        return True

    def _make_folder(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)
        _check_private(path, os.stat(path), "folder")

    def _read_key(self, path: str) -> bytes:
        with open(path, "rb") as file:
            _check_private(path, os.fstat(file.fileno()), "key file")
            _check_private(self._run_dir, os.stat(self._run_dir), "folder")
            key = file.read().strip()
        if len(key) < 32:
            raise errors.ConfigError(
                f"The key file {path} is damaged; stop all services, remove it and start them again."
            )
        return key

    def _make_key(self, path: str) -> None:
        """Write the whole key under another name, then link it: no process can see half of it, and the first one wins."""
        draft = f"{path}.{os.getpid()}.{randomness.secret(4).hex()}"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, randomness.secret(32).hex().encode() + b"\n")
            os.fsync(descriptor)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.close(descriptor)
            os.unlink(draft)


def _check_private(path: str, status: os.stat_result, what: str) -> None:
    user = os.geteuid()
    if user not in (0, status.st_uid):
        raise errors.ConfigError(
            f"The {what} {path} belongs to user {status.st_uid}, this process runs as {user}; "
            "run all services of one [rpc] run_dir as one user."
        )
    allowed = 0o077 if what == "key file" else 0o022
    if stat.S_IMODE(status.st_mode) & allowed:
        raise errors.ConfigError(
            f"The {what} {path} is open to other users (mode {stat.S_IMODE(status.st_mode):03o}); "
            f"run: chmod {'600' if what == 'key file' else '700'} {path}"
        )


@functools.lru_cache(maxsize=4096)
def _hash(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _folder(run_dir: str, topic: str) -> str:
    return f"{run_dir}/t/{_hash(topic)}"


def _in_folder(folder: str, name: str) -> SocketPath:
    return SocketPath(f"{folder}/{name}.sock", f"{folder}/{name}.lock")


@functools.lru_cache(maxsize=4096)
def _place(run_dir: str, topic: str, server: str) -> SocketPath:
    return _in_folder(_folder(run_dir, topic), _hash(server))


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take(place: SocketPath) -> int | None:
    """Returns a descriptor that holds the lock of a place, or None when another process holds it."""
    while True:
        descriptor = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                return None
            # The file may have been removed between open and flock; then the lock is on nothing.
            if os.path.samestat(os.fstat(descriptor), os.stat(place.lock)):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _holder(place: SocketPath) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError), open(place.lock, encoding="utf-8") as file:
        return f"process {json.load(file)['pid']}"
    return "another process"


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
