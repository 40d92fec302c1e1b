# SPDX-License-Identifier: Apache-2.0
"""Authentication: from a request to the caller's identity, by noauth, http_basic or Keystone.

An administrator is a caller with role ``admin`` and system scope; policies and handlers of all mounts ask for that alone. Where
tokens have no system scope, ``[api] enforce_scope = false`` gives it to every caller with role ``admin``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import ipaddress
import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bcrypt
from oslo_config import cfg

from moorage import errors, randomness, threads
from moorage.context import RequestContext

__all__ = [
    "KEYSTONE_FAILURE",
    "Authenticator",
    "authenticator",
    "challenge",
    "ensure_users",
    "refuse_open_noauth",
    "remove_user",
    "set_user",
    "users_file",
]

#: From a WSGI environment to the caller's identity; raises Unauthenticated.
Authenticator = Callable[[Mapping[str, Any]], RequestContext]

#: Name in the WSGI environment: the error to answer when Keystone could not check a token.
KEYSTONE_FAILURE = "moorage.keystone_failure"
#: The token that keystoneauth sends with its authentication type none.
_UNUSED = "notused"
_ADMIN = ("admin", "manager", "member", "reader")
_CACHE = 1024
#: Bytes of a password that bcrypt looks at.
_LONGEST_PASSWORD = 72


def refuse_open_noauth(strategy: str, bind: str) -> None:
    """Refuse noauth on an address that other machines can reach, because it makes every caller an administrator.

    :raises ConfigError: noauth, and the address is not a loopback one.
    """
    host = bind.rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if strategy == "noauth" and not loopback:
        raise errors.ConfigError(
            f"auth_strategy = noauth makes everybody an administrator and is refused on {bind}; bind to 127.0.0.1, or use "
            "http_basic or keystone."
        )


def authenticator(conf: cfg.ConfigOpts) -> Authenticator:
    """Returns the authenticator that the configuration names. Keystone's middleware has checked a token before it is asked."""
    strategy = conf.api.auth_strategy
    if strategy == "http_basic":
        return _Basic(users_file(conf))
    trusted = _by_what_the_caller_says if strategy == "noauth" else _from_keystone
    return trusted if conf.api.enforce_scope else _admin_of_the_system(trusted)


def _admin_of_the_system(authenticate: Authenticator) -> Authenticator:
    """Give every caller with role admin system scope, as services do that do not ask for scopes."""

    def widened(environ: Mapping[str, Any]) -> RequestContext:
        context = authenticate(environ)
        if "admin" in context.roles:
            context.system_scope = "all"
        return context

    return widened


def challenge(conf: cfg.ConfigOpts) -> Sequence[tuple[str, str]]:
    """Headers that a 401 needs. With Keystone there are none here, because the middleware before the application adds its own."""
    return () if conf.api.auth_strategy == "keystone" else (("WWW-Authenticate", 'Basic realm="moorage"'),)


def users_file(conf: cfg.ConfigOpts) -> Path:
    """Where http_basic's users are."""
    return Path(conf.api.http_basic_auth_user_file or Path(conf.control_plane.state_dir) / "users")


def ensure_users(path: Path, credentials: Path) -> tuple[str, str]:
    """Make the file of users and the administrator's password where they are missing; returns user and password.

    If only the password is missing, the administrator gets a new one and all other users stay. Only its owner can read
    ``credentials``.
    """
    if path.exists() and credentials.exists():
        data = json.loads(credentials.read_text(encoding="utf-8"))
        return str(data["username"]), str(data["password"])
    password = _generate_password()
    set_user(path, "admin", password, ["admin"])
    _write_private(credentials, json.dumps({"username": "admin", "password": password}) + "\n")
    return "admin", password


def _generate_password() -> str:
    """24 random characters with 143.9 bits of entropy.

    The first is never ``-``: command lines would take the password for an option.
    """
    while (password := base64.urlsafe_b64encode(randomness.secret(18)).decode()).startswith("-"):
        pass
    return password


def set_user(path: Path, user: str, password: str, roles: Sequence[str]) -> None:
    """Add a user to a file of users, or replace what it says of one; services notice it.

    :raises InvalidInput: a name, password or role that cannot be kept.
    :raises ConfigError: the file cannot be read or written.
    """
    if not user or any(character in user for character in ":,#\n\r") or user != user.strip():
        raise errors.InvalidInput(
            f"{user!r} cannot be a user's name: no colon, comma, # or line break in it.", path="user"
        )
    if not password or len(password.encode()) > _LONGEST_PASSWORD:
        raise errors.InvalidInput(
            f"A password has 1 to {_LONGEST_PASSWORD} bytes; more of it would not be looked at.", path="password"
        )
    unknown = sorted(set(roles) - {*_ADMIN, "service"})
    if unknown or not roles:
        raise errors.InvalidInput(
            f"Roles are {', '.join((*_ADMIN, 'service'))}; give one or more of them, not {', '.join(unknown) or 'none'}.",
            path="role",
        )
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(10)).decode()
    _write_users(path, [*_lines_without(path, user), f"{user}:{hashed}:{','.join(roles)}"])


def remove_user(path: Path, user: str) -> None:
    """Take a user out of a file of users.

    :raises NotFound: there is none of that name.
    """
    lines = _lines_without(path, user)
    if len(lines) == len(_lines_without(path, None)):
        raise errors.NotFound(f"{path} has no user {user}.")
    _write_users(path, lines)


def _lines_without(path: Path, user: str | None) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"The file of users {path} cannot be read ({error}).") from error
    return [line for line in lines if user is None or line.partition(":")[0] != user]


def _write_users(path: Path, lines: Sequence[str]) -> None:
    try:
        _write_private(path, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise errors.ConfigError(f"The file of users {path} cannot be written ({error.strerror}).") from error


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    owner, group, mode = _ownership(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        # A user other than root owns the files, and may lack a group.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, owner if os.geteuid() == 0 else -1, group)
            os.fchmod(descriptor, mode)
        stream.write(text)
    os.replace(temporary, path)


def _ownership(path: Path) -> tuple[int, int, int]:
    """Owner, group and mode of the file as it is, or as its folder has them: root writes what a service must be able to read."""
    try:
        found = path.stat()
    except FileNotFoundError:
        found = path.parent.stat()
        # A folder of root's with a group of its own is that group's to read.
        return found.st_uid, found.st_gid, 0o640 if found.st_uid == 0 != found.st_gid else 0o600
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode) & 0o660 | 0o600


def _by_what_the_caller_says(environ: Mapping[str, Any]) -> RequestContext:
    """Believe the token, as Placement's noauth2 does: ``user[:project]``. Without a token the caller is the administrator.

    The user ``admin`` has every role and system scope. Any other user is a member of the project (by default the project with the
    user's name). X-Roles, a list with commas, gives other roles.
    """
    token = str(environ.get("HTTP_X_AUTH_TOKEN") or _UNUSED)
    user, _, project = ("admin" if token == _UNUSED else token).partition(":")
    given = environ.get("HTTP_X_ROLES")
    administrator = user == "admin"
    if given is not None:
        roles = _with_implied(tuple(role.strip() for role in str(given).split(",") if role.strip()))
    else:
        roles = (*_ADMIN, "service") if administrator else ("member", "reader")
    return RequestContext(
        user_id=user,
        project_id=project or (None if administrator else user),
        roles=list(roles),
        system_scope="all" if administrator else None,
        overwrite=False,
    )


def _from_keystone(environ: Mapping[str, Any]) -> RequestContext:
    failure = environ.get(KEYSTONE_FAILURE)
    if isinstance(failure, errors.MoorageError):
        raise failure
    if environ.get("HTTP_X_IDENTITY_STATUS") != "Confirmed":
        raise errors.Unauthenticated("The token is missing, wrong or expired; ask Keystone for a new one.")
    context: RequestContext = RequestContext.from_environ(dict(environ), overwrite=False)
    return context


@dataclass(frozen=True, slots=True)
class _Users:
    """One reading of the file; ``verified`` are the passwords that were right for it, by a keyed hash, oldest first.

    They stay with the reading: a password that is being checked while the file changes is not remembered for the new one.
    """

    stamp: tuple[int, int, int]
    known: Mapping[str, tuple[bytes, tuple[str, ...]]]
    verified: dict[bytes, None] = field(default_factory=dict)


class _Basic:
    """Users of a file. A password that was right is remembered by a keyed hash, because bcrypt takes a tenth of a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threads.lock()
        self._key = randomness.secret(32)
        #: A hash that no password is known to have.
        self._unknown = bcrypt.hashpw(randomness.secret(32), bcrypt.gensalt(10))
        self._users: _Users | None = None
        self._read()

    def __call__(self, environ: Mapping[str, Any]) -> RequestContext:
        kind, _, encoded = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if kind.lower() != "basic":
            raise errors.Unauthenticated("A user and password are needed (HTTP basic authentication).")
        try:
            user, _, password = binascii.a2b_base64(encoded.strip(), strict_mode=True).decode("utf-8").partition(":")
        except ValueError:  # what is no ASCII, no base64 or no UTF-8
            raise errors.Unauthenticated("The header Authorization is malformed.") from None
        users = self._read()
        # An unknown user costs as much time as a wrong password, so that the time does not tell which it was.
        hashed, roles = users.known.get(user, (self._unknown, ()))
        # Unlike OpenSSL's HMAC, it keeps the interpreter's lock: a busy thread would wait until it has the lock again.
        digest = hashlib.blake2b(f"{user}\0{password}".encode(), key=self._key).digest()
        if digest not in users.verified:
            if not _matches(password, hashed):
                raise errors.Unauthenticated("The user or the password is wrong.")
            with self._lock:
                users.verified[digest] = None
                while len(users.verified) > _CACHE:
                    del users.verified[next(iter(users.verified))]
        # The application sets the id of the request; oslo.context would make one up.
        return RequestContext(user_id=user, roles=list(roles), system_scope="all", request_id="-", overwrite=False)

    def _read(self) -> _Users:
        try:
            state = os.stat(self._path)
            stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
            if self._users is not None and stamp == self._users.stamp:
                return self._users
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise errors.ConfigError(f"The file of users {self._path} cannot be read ({error}).") from error
        found = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            user, _, rest = line.strip().partition(":")
            hashed, _, roles = rest.partition(":")
            if not user or not hashed.startswith("$2"):
                raise errors.ConfigError(f"{self._path}, line {number}: write user:bcrypt-hash[:role,role...].")
            given = tuple(role.strip() for role in roles.split(",") if role.strip()) or ("admin",)
            found[user] = (hashed.encode(), _with_implied(given))
        users = self._users = _Users(stamp, found)
        return users


def _with_implied(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Keystone's implications: admin, manager, member, reader, each with all after it."""
    implied = set(roles)
    for role in roles:
        if role in _ADMIN:
            implied |= set(_ADMIN[_ADMIN.index(role) :])
    return tuple(sorted(implied))


def _matches(password: str, hashed: bytes) -> bool:
    try:
        # bcrypt refuses more than it looks at.
        return bcrypt.checkpw(password.encode()[:_LONGEST_PASSWORD], hashed)
    except ValueError:
        return False
