# SPDX-License-Identifier: Apache-2.0
"""Processes that fail at a chosen point of a transaction."""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.allocation.interface import ClaimRequest, GenerationConflict, InventoryItem
from moorage.db import Database
from tests.conformance.allocation.stores import sql_store


def die_between_providers(url: str, consumer: str, resources: Mapping[str, Mapping[str, int]]) -> None:
    """Claim, and be killed before the second provider's turn."""
    logging.disable()
    turns = []

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE resource_providers"):
            turns.append(statement)
            if len(turns) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    sql_store(Database(url)).claim(ClaimRequest(consumer, resources, "r"))


def pause_before_writing(pipe: Connection, url: str, provider: str) -> None:
    """Read a provider, stop before the write that it decides, and say after being woken what came of the write."""
    logging.disable()
    store = sql_store(Database(url))
    generation = store.provider(provider).generation
    pipe.send(("read", generation))
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        store.set_inventories(provider, [InventoryItem("VCPU", 1)], generation)
        pipe.send(("wrote", generation))
    except GenerationConflict as error:
        pipe.send(("refused", error.details["present"]))


def fill_the_disk(pipe: Connection, url: str, path: str, providers: list[str]) -> None:
    """Claim of all the providers until the disk is full; files may not grow beyond a limit, as on a full disk."""
    logging.disable()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    database = Database(url)
    store = sql_store(database)
    # The log beside the file is larger than the file: nothing has been moved out of it.
    limit = max(os.path.getsize(each) for each in (path, f"{path}-wal")) + 200_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    acknowledged = []
    number = 0
    try:
        while True:
            consumer = f"consumer-{number}"
            store.claim(ClaimRequest(consumer, {each: {"VCPU": 1} for each in providers}, "r"))
            acknowledged.append(consumer)
            number += 1
    except errors.StoreUnavailable as error:
        pipe.send(("full", acknowledged, error.message))
    except Exception as error:
        pipe.send(("error", acknowledged, repr(error)))
    database.close()
