# SPDX-License-Identifier: Apache-2.0
"""Counts what the roles of a control plane send to the store and to each other."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import CacheStats
from typing_extensions import override

from moorage.control_plane.process import Platform
from moorage.db import Database
from moorage.services.registry import ServiceRegistry
from tests.functional.scheduling.plane import Plane

__all__ = ["CountedPlane", "Counts"]

#: What begins transactions and savepoints, and sets connections up.
_PLUMBING = ("PRAGMA", "BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK")


@dataclass
class Counts:
    """What one role did.

    :ivar writes: transactions that were committed; each is one fsync of SQLite's log.
    :ivar reads: read transactions.
    :ivar built: statements whose object had not been sent before: they were built for this call.
    """

    statements: list[str] = field(default_factory=list)
    writes: int = 0
    reads: int = 0
    built: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The numbers that a test pins."""
        return {
            "statements": len(self.statements),
            "writes": self.writes,
            "reads": self.reads,
            "messages": sorted(self.messages),
            "built": self.built,
        }


class CountedPlane(Plane):
    """A plane whose roles have a database object each, so that what they send can be told apart.

    :ivar only: threads whose names begin so are counted; empty: all.
    """

    only: tuple[str, ...] = ()

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._roles: dict[sa.Engine, tuple[str, bool]] = {}
        self._counting = threading.Lock()
        self._known: dict[int, Any] = {}
        #: By the name of the role.
        self.databases: dict[str, Database] = {}
        self.counted: dict[str, Counts] = collections.defaultdict(Counts)
        super().__init__(*arguments, **more)
        for name, listener in (
            ("before_cursor_execute", self._executes),
            ("commit", self._commits),
            ("rollback", self._rolls_back),
        ):
            sa.event.listen(sa.Engine, name, listener)
            self.test.addCleanup(sa.event.remove, sa.Engine, name, listener)

    @override
    def platform(self, binary: str, name: str) -> Platform:
        database = Database.from_config(self.conf, clock=self.clock, service=f"{binary}:{name}")
        self.test.addCleanup(database.close)
        self.databases[name] = database
        self._roles |= {database._writers.engine: (binary, True), database._readers.engine: (binary, False)}
        platform = super().platform(binary, name)

        def count(method: str) -> None:
            if self._counts():
                with self._counting:
                    self.counted[binary].messages.append(method)

        def counted(send: Callable[..., Any], suffix: str) -> Callable[..., Any]:
            def send_counted(topic: str, method: str, *rest: Any, **more: Any) -> Any:
                count(method + suffix)
                return send(topic, method, *rest, **more)

            return send_counted

        for each, suffix in (("fanout", "*"), ("cast", ""), ("call", ""), ("begin_call", "")):
            setattr(platform.sender, each, counted(getattr(platform.sender, each), suffix))
        return dataclasses.replace(platform, database=database, registry=ServiceRegistry(database, self.clock))

    def begin(self) -> None:
        """Count from now on."""
        with self._counting:
            self.counted.clear()

    def counts(self) -> dict[str, Counts]:
        """What was counted, by role."""
        with self._counting:
            return dict(self.counted)

    def _counts(self) -> bool:
        return not self.only or threading.current_thread().name.startswith(self.only)

    def _of(self, connection: sa.Connection) -> tuple[str, bool] | None:
        return self._roles.get(connection.engine) if self._counts() else None

    def _executes(
        self, connection: sa.Connection, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        role = self._of(connection)
        if role is None or statement.startswith(_PLUMBING):
            return
        with self._counting:
            counts = self.counted[role[0]]
            counts.statements.append(statement)
            invoked = context.invoked_statement
            if invoked is not None and (
                id(invoked) not in self._known or context.cache_hit is not CacheStats.CACHE_HIT
            ):
                # Kept, so that its id stays its own.
                self._known[id(invoked)] = invoked
                counts.built.append(statement)

    def _commits(self, connection: sa.Connection) -> None:
        self._ended(connection, "writes")

    def _rolls_back(self, connection: sa.Connection) -> None:
        self._ended(connection, "reads")

    def _ended(self, connection: sa.Connection, kind: str) -> None:
        role = self._of(connection)
        if role is not None:
            with self._counting:
                counts = self.counted[role[0]]
                setattr(counts, kind, getattr(counts, kind) + 1)
