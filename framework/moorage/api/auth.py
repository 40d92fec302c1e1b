# SPDX-License-Identifier: Apache-2.0
"""Who is calling: noauth, http_basic or Keystone."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bcrypt
from oslo_config import cfg

from moorage import errors
from moorage.context import RequestContext

__all__ = ["Authenticator", "authenticator", "ensure_users", "refuse_open_noauth"]

#: From a WSGI environment to who is calling; raises Unauthenticated.
Authenticator = Callable[[Mapping[str, Any]], RequestContext]

_ADMIN = ("admin", "manager", "member", "reader")
_CACHE = 1024


def refuse_open_noauth(strategy: str, bind: str) -> None:
    """Everybody an administrator is for one's own machine only.

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
    """The authenticator of the configuration; Keystone's tokens are checked by a filter of its own before it."""
    strategy = conf.api.auth_strategy
    if strategy == "http_basic":
        return _Basic(users_file(conf))
    return _everybody if strategy == "noauth" else _from_keystone


def users_file(conf: cfg.ConfigOpts) -> Path:
    """Where http_basic's users are."""
    return Path(conf.api.http_basic_auth_user_file or Path(conf.control_plane.state_dir) / "users")


def ensure_users(path: Path, credentials: Path) -> tuple[str, str]:
    """Make a file of users with one administrator, and its password, where they are missing; user and password.

    ``credentials`` is readable by its owner alone.
    """
    if path.exists() and credentials.exists():
        data = json.loads(credentials.read_text(encoding="utf-8"))
        return str(data["username"]), str(data["password"])
    password = secrets.token_urlsafe(18)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(10)).decode()
    _write_private(path, f"admin:{hashed}:admin\n")
    _write_private(credentials, json.dumps({"username": "admin", "password": password}) + "\n")
    return "admin", password


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)


def _everybody(environ: Mapping[str, Any]) -> RequestContext:
    return RequestContext(user_id="admin", roles=list(_ADMIN), system_scope="all", overwrite=False)


def _from_keystone(environ: Mapping[str, Any]) -> RequestContext:
    if environ.get("HTTP_X_IDENTITY_STATUS") != "Confirmed":
        raise errors.Unauthenticated("The token is missing, wrong or expired; ask Keystone for a new one.")
    context = RequestContext.from_environ(dict(environ), overwrite=False)
    return context  # noqa: RET504  (named for the type checker)


class _Basic:
    """Users of a file. A password that was right is remembered by a keyed hash, because bcrypt takes a tenth of a second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)
        self._stamp: tuple[int, int, int] | None = None
        self._users: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        self._verified: dict[bytes, str] = {}
        self._read()

    def __call__(self, environ: Mapping[str, Any]) -> RequestContext:
        kind, _, encoded = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if kind.lower() != "basic":
            raise errors.Unauthenticated("A user and password are needed (HTTP basic authentication).")
        try:
            user, _, password = base64.b64decode(encoded.strip(), validate=True).decode("utf-8").partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise errors.Unauthenticated("The header Authorization is malformed.") from None
        self._read()
        known = self._users.get(user)
        digest = hmac.new(self._key, f"{user}\0{password}".encode(), hashlib.sha256).digest()
        if known is None or (digest not in self._verified and not _matches(password, known[0])):
            raise errors.Unauthenticated("The user or the password is wrong.")
        with self._lock:
            self._verified[digest] = user
            while len(self._verified) > _CACHE:
                self._verified.pop(next(iter(self._verified)))
        return RequestContext(user_id=user, roles=list(known[1]), system_scope="all", overwrite=False)

    def _read(self) -> None:
        try:
            state = self._path.stat()
            stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
            if stamp == self._stamp:
                return
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise errors.ConfigError(f"The file of users {self._path} cannot be read ({error.strerror}).") from error
        users = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            user, _, rest = line.strip().partition(":")
            hashed, _, roles = rest.partition(":")
            if not user or not hashed.startswith("$2"):
                raise errors.ConfigError(f"{self._path}, line {number}: write user:bcrypt-hash[:role,role...].")
            given = tuple(role.strip() for role in roles.split(",") if role.strip()) or ("admin",)
            users[user] = (hashed.encode(), _with_implied(given))
        with self._lock:
            self._users, self._stamp, self._verified = users, stamp, {}


def _with_implied(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Keystone's implications: admin, manager, member, reader, each with all after it."""
    implied = set(roles)
    for role in roles:
        if role in _ADMIN:
            implied |= set(_ADMIN[_ADMIN.index(role) :])
    return tuple(sorted(implied))


def _matches(password: str, hashed: bytes) -> bool:
    try:
        # bcrypt reads 72 bytes at most and refuses more.
        return bcrypt.checkpw(password.encode()[:72], hashed)
    except ValueError:
        return False
