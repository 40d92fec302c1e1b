# SPDX-License-Identifier: Apache-2.0
"""A process whose threads claim at once and share a transaction, and that kills itself at a moment of it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from typing_extensions import override

from moorage.allocation.interface import BatchCompanion, ClaimRequest
from moorage.db import Database
from moorage_plugins.stores.combiner import Combiner, Member
from tests import servers
from tests.conformance.allocation.stores import sql_store

__all__ = ["BETWEEN", "CLIENTS", "FIRST", "main"]

#: Clients whose claims share the transaction.
CLIENTS = 8
#: The claim during which the others come.
FIRST = "first"
#: Answers after which the process is killed between answers.
BETWEEN = 3


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _Killer:
    """Kills the process at the moment.

    :param moment: ``before`` or ``after`` the commit, ``between`` the answers, or ``never``.
    """

    def __init__(self, combiner: Combiner, moment: str) -> None:
        self._moment = moment
        self._together = combiner._together
        self._inside = False
        self._answers = 0
        combiner._together = self._made
        event.listen(sa.Engine, "commit", self._commit)

    def _made(self, members: Sequence[Member]) -> None:
        self._inside = True
        self._together(members)
        self._inside = False
        if self._moment == "after":
            _kill()

    def _commit(self, connection: sa.Connection) -> None:
        if self._inside and self._moment == "before":
            _kill()

    def answered(self) -> None:
        self._answers += 1
        if self._moment == "between" and self._answers == BETWEEN:
            _kill()


class _Gathers(BatchCompanion):
    """Holds the first transaction up until all clients wait."""

    def __init__(self, combiner: Combiner) -> None:
        self._combiner = combiner

    @override
    def __call__(self, transaction: Any) -> None:
        servers.wait_until(lambda: len(self._combiner._gathering._waiting) == CLIENTS, "all clients wait", 60)

    @classmethod
    @override
    def together(cls, transaction: Any, companions: Sequence[Any]) -> None:
        raise AssertionError("the first claim meets no other")


def main(pipe: Connection, url: str, provider: str, moment: str) -> None:
    """Claim for all clients; for each answer send ("claimed" or "repeated", consumer)."""
    database = Database(url, pool_size=CLIENTS + 1)
    store = sql_store(database, claims_per_transaction=64)
    combiner = store._combiner
    assert combiner is not None
    # All of them share one transaction.
    combiner._gathering._most_leaders = 1
    killer, lock = _Killer(combiner, moment), threading.Lock()

    def claim(consumer: str) -> None:
        companion = _Gathers(combiner) if consumer == FIRST and moment != "never" else None
        outcome = store.claim(ClaimRequest(consumer, {provider: {"VCPU": 1}}, f"req-{consumer}"), companion)
        with lock:
            pipe.send(("repeated" if outcome.repeated else "claimed", consumer))
            if consumer != FIRST:
                killer.answered()

    threads = [threading.Thread(target=claim, args=(FIRST,))]
    threads[0].start()
    servers.wait_until(
        lambda: combiner._gathering._leaders or not threads[0].is_alive(), "the first claim is being made", 60
    )
    threads += [threading.Thread(target=claim, args=(f"client-{number}",)) for number in range(CLIENTS)]
    for each in threads[1:]:
        each.start()
    for each in threads:
        each.join()
    pipe.close()
    database.close()
