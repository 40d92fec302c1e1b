# SPDX-License-Identifier: Apache-2.0
"""A process that claims, and says over a pipe what was acknowledged."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from random import Random

from moorage import errors
from moorage.allocation.interface import AllocationChange, AllocationStore, ClaimRequest, Expect
from moorage.db import Database
from moorage_plugins.stores.sql import SqlStore
from tests.conformance.allocation.stores import sql_store

PATIENCE = 60.0
#: Rounds of :func:`churn`.
CHURN = 40


def main(pipe: Connection, url: str, name: str, providers: Sequence[str], project: str = "") -> None:
    """Claim one VCPU of each provider for one new consumer after the other, until one is refused for lack of room, or
    by a limit of the project.

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
            _persistently(store, ClaimRequest(consumer, resources, f"{name}-{number}", project))
            pipe.send(("ok", consumer))
            number += 1
    except (errors.CapacityExceeded, errors.QuotaExceeded):
        pipe.send(("full", ""))
    except Exception as error:
        pipe.send(("error", repr(error)))


def of_project(pipe: Connection, url: str, name: str, providers: Sequence[str]) -> None:
    """As :func:`main`, for the project ``p``."""
    main(pipe, url, name, providers, "p")


def churn(pipe: Connection, url: str, name: str, providers: Sequence[str]) -> None:
    """Claim, move and release for two projects by turns; some processes set and remove limits meanwhile.

    Sends ("ready", ""), begins when something is received, and sends ("full", "") after a number of rounds or ("error", text).
    """
    logging.disable()
    random = Random(name)
    store = sql_store(Database(url))
    pipe.send(("ready", ""))
    pipe.recv()
    try:
        for number in range(CHURN):
            _round(store, random, f"{name}/{number}", providers)
        pipe.send(("full", ""))
    except Exception as error:
        pipe.send(("error", repr(error)))


def _round(store: SqlStore, random: Random, name: str, providers: Sequence[str]) -> None:
    consumer, moved = (str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}/{part}")) for part in ("here", "there"))
    project = random.choice("pq")
    wanted = {"VCPU": random.randint(1, 3), "MEMORY_MB": random.randint(1, 3)}
    begin = ClaimRequest(consumer, {providers[0]: wanted}, name, project)
    there = {providers[1]: {"VCPU": random.randint(1, 3)}}
    move = AllocationChange(moved, there, Expect.NOTHING, project, request_id=name, counts_with=consumer)
    steps = [lambda: store.claim(begin), lambda: store.replace([move])]
    steps += [functools.partial(store.release, each) for each in (consumer, moved) if random.random() < 0.8]
    limits = [
        lambda: store.set_quota(project, "VCPU", 10),
        lambda: store.set_quota(project, "MEMORY_MB", 12),
        lambda: store.unset_quota(project, random.choice(["VCPU", "MEMORY_MB"])),
        lambda: store.recount_quotas(project),
    ]
    steps += [random.choice(limits)] if random.random() < 0.3 else []
    for step in steps:
        with contextlib.suppress(errors.QuotaExceeded):
            _again(step)


def _persistently(store: AllocationStore, request: ClaimRequest) -> None:
    _again(lambda: store.claim(request))


def _again(step: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            step()
            return
        except (errors.StoreUnavailable, errors.StoreBusy):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
