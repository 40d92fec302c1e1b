# SPDX-License-Identifier: Apache-2.0
"""A process that claims, and says over a pipe what was acknowledged."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection

from moorage import errors
from moorage.allocation.interface import AllocationStore, ClaimRequest
from moorage.db import Database
from tests.conformance.allocation.stores import sql_store

PATIENCE = 60.0


def main(pipe: Connection, url: str, name: str, providers: Sequence[str]) -> None:
    """Claim one VCPU of each provider for one new consumer after the other, until one is refused for lack of room.

    Sends ("ready", ""), begins when something is received, then ("ok", consumer) for each claim that was acknowledged, and at
    the end ("full", "") or ("error", text). The consumers follow from the name, so that a process of the same name repeats the
    claims of an earlier one. When the store cannot be reached, the same claim is repeated until it is answered.
    """
    logging.disable()
    store = sql_store(Database(url))
    resources = {provider: {"VCPU": 1} for provider in providers}
    pipe.send(("ready", ""))
    pipe.recv()
    number = 0
    try:
        while True:
            consumer = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{number}"))
            _persistently(store, ClaimRequest(consumer, resources, f"{name}-{number}"))
            pipe.send(("ok", consumer))
            number += 1
    except errors.CapacityExceeded:
        pipe.send(("full", ""))
    except Exception as error:
        pipe.send(("error", repr(error)))


def _persistently(store: AllocationStore, request: ClaimRequest) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            store.claim(request)
            return
        except (errors.StoreUnavailable, errors.StoreBusy):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
