# SPDX-License-Identifier: Apache-2.0
"""Webhooks: URLs that get the events of the journal, each with a subscription of its own."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.db import Database, Duplicate, JournalEvent, now, record
from moorage.db.tables import event_sequence
from moorage.journal.delivery import Selection
from moorage.journal.reader import JournalReader
from moorage.journal.subscriptions import Subscription, SubscriptionStore
from moorage.journal.tables import subscriptions, webhooks

__all__ = ["Webhook", "WebhookStore", "new_secret", "read_secret", "read_url"]

#: What a secret begins with; the rest is base64. As https://www.standardwebhooks.com has it.
_PREFIX = "whsec_"
#: Bytes of a new secret, and of secrets that are given.
_SIZE, _SHORTEST, _LONGEST = 32, 24, 64
_URL = re.compile(r"[\x21-\x7e]+")
_SEQUENCE = sa.select(event_sequence.c.purged, event_sequence.c.last)
_COLUMNS = tuple(webhooks.c[name] for name in (
    "uuid", "name", "url", "secret", "kinds", "projects", "enabled", "generation", "created_at", "updated_at",
))  # fmt: skip
_BOTH = (
    sa.select(*_COLUMNS, *subscriptions.c)
    .join_from(webhooks, subscriptions, subscriptions.c.name == sa.literal("webhook/").concat(webhooks.c.uuid))
    .order_by(webhooks.c.name)
)
_ENABLED = sa.select(*_COLUMNS).where(webhooks.c.enabled == sa.true())


@dataclass(frozen=True, slots=True, repr=False)
class Webhook:
    """A webhook. Times are microseconds since the Unix epoch.

    :param secret: the key of the signatures, as receivers have it; never shown again.
    """

    uuid: str
    name: str
    url: str
    secret: str
    kinds: Sequence[str]
    projects: Sequence[str]
    enabled: bool
    generation: int
    created_at: int
    updated_at: int

    @property
    def subscription(self) -> str:
        """The name of its subscription."""
        return f"webhook/{self.uuid}"

    @property
    def wanted(self) -> Selection:
        """The events that it gets."""
        return Selection(frozenset(self.kinds), frozenset(self.projects))


def new_secret() -> str:
    """Returns a new random secret."""
    return _PREFIX + base64.b64encode(randomness.secret(_SIZE)).decode()


def read_secret(text: str) -> bytes:
    """Returns the key that a secret contains.

    :raises InvalidInput: it is none. The message does not contain it.
    """
    try:
        key = base64.b64decode(text.removeprefix(_PREFIX), validate=True) if text.startswith(_PREFIX) else b""
    except (binascii.Error, ValueError):
        key = b""
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise errors.InvalidInput(
            f"The secret must be {_PREFIX} and the base64 of {_SHORTEST} to {_LONGEST} bytes. Leave it out to get a new one.",
            path="secret",
        )
    return key


def read_url(text: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path (with the query) of a webhook's URL.

    :raises InvalidInput: it is no URL that a webhook can have.
    """

    def refuse(why: str) -> errors.InvalidInput:
        return errors.InvalidInput(f"The URL {why}. Write it as https://host/path.", path="url")

    if not _URL.fullmatch(text):
        raise refuse("has spaces, control characters or letters that are not ASCII")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise refuse("has a host or port that cannot be read") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
        raise refuse("has no scheme http or https, or no host")
    if parts.username is not None or parts.password is not None:
        raise refuse("contains a user or password, which lists of webhooks would show")
    if parts.fragment:
        raise refuse("has a fragment (#), which servers do not get")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme], path


class WebhookStore:
    """The webhooks of the store. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._subscriptions = SubscriptionStore(database)
        self._reader = JournalReader(database)

    def create(self, name: str, url: str, *, after: str = "latest", **settings: Any) -> Webhook:
        """Returns a new webhook.

        :param after: it gets the events after this number; ``latest``: those after now; ``oldest``: all that are left.
        :param settings: ``secret`` (None: a new one), ``kinds``, ``projects``, ``enabled``.
        :raises InvalidInput: the URL or the secret cannot be used.
        :raises AlreadyExists: the name is taken.
        :raises Gone: the journal has no such place.
        """
        values = {
            "uuid": randomness.new_uuid(),
            "name": name,
            "url": url,
            "secret": settings.get("secret") or new_secret(),
            "kinds": sorted(settings.get("kinds", ())),
            "projects": sorted(settings.get("projects", ())),
            "enabled": settings.get("enabled", True),
        }
        _check(values)
        self._check_place(after)

        def work(tx: sa.Connection) -> Webhook:
            position = _place(tx, after)
            tx.execute(sa.insert(webhooks).values(generation=1, created_at=now(), updated_at=now(), **values))
            found = _get(tx, values["uuid"])
            self._subscriptions.insert(tx, found.subscription, position)
            _record(tx, "create", found)
            return found

        try:
            return self._database.run(work)
        except Duplicate:
            raise errors.AlreadyExists(f"There is a webhook {name} already.") from None

    def enabled(self) -> Sequence[Webhook]:
        """Returns the webhooks that are enabled; one read."""
        return self._database.read_run(lambda tx: [Webhook(*row) for row in tx.execute(_ENABLED)])

    def list(self, *, after: str = "", limit: int = 1000) -> tuple[Sequence[tuple[Webhook, Subscription]], int]:
        """Webhooks by name, a page of ``limit`` after the given name, and the number of the newest event."""
        query = _BOTH.where(webhooks.c.name > after).limit(limit)
        return self._database.read_run(lambda tx: (_pairs(tx.execute(query).all()), _sequence(tx)[1]))

    def get(self, name_or_uuid: str) -> tuple[Webhook, Subscription, int]:
        """One webhook with its subscription, and the number of the newest event.

        :raises NotFound: there is none of that name or uuid.
        """

        def read(tx: sa.Connection) -> tuple[Webhook, Subscription, int]:
            found = _get(tx, name_or_uuid)
            pair = _pairs(tx.execute(_BOTH.where(webhooks.c.uuid == found.uuid)).all())[0]
            return *pair, _sequence(tx)[1]

        return self._database.read_run(read)

    def change(self, name_or_uuid: str, *, after: str | None = None, **changes: Any) -> None:
        """Change ``url``, ``secret``, ``kinds``, ``projects`` or ``enabled``, and try again at once what failed.

        :param after: go on with the events after this number, ``latest`` or ``oldest``; None: where it is.
        :raises NotFound: there is none of that name or uuid.
        :raises InvalidInput: the URL or the secret cannot be used.
        :raises Gone: the journal has no such place.
        """
        _check(changes)
        self._check_place(after)
        values = {key: sorted(value) if key in {"kinds", "projects"} else value for key, value in changes.items()}

        def work(tx: sa.Connection) -> None:
            position = None if after is None else _place(tx, after)
            before = _get(tx, name_or_uuid)
            uuid = before.uuid
            statement = sa.update(webhooks).where(webhooks.c.uuid == uuid)
            if (
                tx.execute(statement.values(generation=webhooks.c.generation + 1, updated_at=now(), **values)).rowcount
                != 1
            ):
                raise _missing(name_or_uuid)
            found = _get(tx, uuid)
            self._subscriptions.reset(tx, found.subscription, position)
            # The names alone: a secret is no state that people see.
            changed = [name for name in sorted(values) if getattr(before, name) != getattr(found, name)]
            _record(tx, "change", found, changed=[*changed, *(["position"] if position is not None else [])])

        self._database.run(work)

    def remove(self, name_or_uuid: str) -> None:
        """Remove a webhook with its subscription. A delivery that runs may still arrive.

        :raises NotFound: there is none of that name or uuid.
        """

        def work(tx: sa.Connection) -> None:
            found = _get(tx, name_or_uuid)
            if tx.execute(sa.delete(webhooks).where(webhooks.c.uuid == found.uuid)).rowcount != 1:
                raise _missing(name_or_uuid)
            self._subscriptions.remove(tx, found.subscription)
            _record(tx, "delete", found)

        self._database.run(work)

    def _check_place(self, after: str | None) -> None:
        """Wait until this node of a cluster has the event that the caller has seen at another one."""
        if after is not None and after.isdecimal():
            self._reader.check(int(after))


def _check(values: Mapping[str, Any]) -> None:
    if "url" in values:
        read_url(values["url"])
    if "secret" in values:
        read_secret(values["secret"])


def _sequence(tx: sa.Connection) -> tuple[int, int]:
    row = tx.execute(_SEQUENCE).first()
    return (0, 0) if row is None else (row.purged, row.last)


def _place(tx: sa.Connection, after: str) -> int:
    purged, last = _sequence(tx)
    if after in {"latest", "oldest"}:
        return last if after == "latest" else purged
    if not purged <= int(after) <= last:
        raise errors.Gone(
            f"The journal has the events {purged + 1} to {last}; after must be from {purged} to {last}, and is {after}.",
            oldest=purged + 1,
            newest=last,
        )
    return int(after)


def _get(tx: sa.Connection, name_or_uuid: str) -> Webhook:
    named = sa.or_(webhooks.c.uuid == name_or_uuid, webhooks.c.name == name_or_uuid)
    rows = [Webhook(*row) for row in tx.execute(sa.select(*_COLUMNS).where(named))]
    if not rows:
        raise _missing(name_or_uuid)
    # A name may look like the uuid of another webhook; the uuid counts.
    return next((row for row in rows if row.uuid == name_or_uuid), rows[0])


def _missing(name_or_uuid: str) -> errors.NotFound:
    return errors.NotFound(f"There is no webhook {name_or_uuid}; moorage webhook list shows all.")


def _pairs(rows: Sequence[Any]) -> Sequence[tuple[Webhook, Subscription]]:
    size = len(_COLUMNS)
    return [(Webhook(*row[:size]), Subscription(*row[size:])) for row in rows]


def _record(tx: sa.Connection, what: str, found: Webhook, **more: Any) -> None:
    # Not the URL: its path or query may be a secret of the receiver.
    state = {"name": found.name, "kinds": list(found.kinds), "projects": list(found.projects), "enabled": found.enabled}
    record(tx, JournalEvent(f"webhook.{what}", found.subscription, found.generation, state | more))
