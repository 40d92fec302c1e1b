# SPDX-License-Identifier: Apache-2.0
"""Keeping leases while their work goes on: the one place that does it, for agents, cleaners and tracked operations."""

from __future__ import annotations

from collections.abc import Iterable

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, threads
from moorage.clock import Clock
from moorage.work.interface import Lease, OperationStore, Renewer

__all__ = ["ThreadRenewer"]

LOG = logging.getLogger(__name__)


class ThreadRenewer(Renewer):
    """Renews at a third of the lease, all in one transaction. Its thread lives while there is something to renew.

    :param name: of the thread.
    """

    def __init__(self, workers: OperationStore, clock: Clock, name: str) -> None:
        self._workers = workers
        self._clock = clock
        self._name = name
        self._lock = threads.lock()
        self._kept: dict[tuple[str, str], Lease] = {}
        self._lost: set[Lease] = set()
        self._thread: threads.Thread | None = None
        self._stopping = False
        self._wake = threads.event()

    @override
    def keep(self, leases: Iterable[Lease]) -> None:
        with self._lock:
            for held in leases:
                earlier = self._kept.get(_key(held), held)
                if earlier is not held:
                    # It stays lost after the later lease has ended.
                    self._lost.add(earlier)
                self._kept[_key(held)] = held
            if self._kept and (self._thread is None or not self._thread.is_alive()):
                self._stopping = False
                self._wake.clear()
                # Where none can be started, the leases last as long as they are, and the next one to keep tries again.
                self._thread = threads.try_start(self._run, name=self._name)

    @override
    def forget(self, leases: Iterable[Lease]) -> None:
        with self._lock:
            for held in leases:
                if self._kept.get(_key(held)) is held:
                    del self._kept[_key(held)]
                self._lost.discard(held)
            if self._stopping and not self._kept:
                self._wake.set()

    @override
    def keeps(self, resource_type: str, resource_id: str, token: int | None = None) -> bool:
        with self._lock:
            held = self._kept.get((resource_type, resource_id))
        return held is not None and token in (None, held.token)

    @override
    def lost(self, lease: Lease) -> bool:
        with self._lock:
            return lease in self._lost or self._kept.get(_key(lease), lease) is not lease

    @override
    def stop(self, patience: float | None = None) -> None:
        with self._lock:
            thread, self._stopping = self._thread, True
            self._wake.set()
        if thread is None:
            return
        thread.join(patience)
        if thread.is_alive():
            with self._lock:
                self._kept.clear()
                self._wake.set()

    def _run(self) -> None:
        while True:
            self._clock.wait(self._wake, self._workers.lease_seconds / 3)
            with self._lock:
                self._wake.clear()
                held = [each for each in self._kept.values() if each not in self._lost]
                if not self._kept:
                    self._thread = None
                    return
            self._renew(held)

    def _renew(self, held: list[Lease]) -> None:
        try:
            lost = self._workers.renew_many(held)
        except errors.Unavailable as error:
            LOG.warning("%d leases were not renewed: %s", len(held), error.message)
            return
        except Exception:
            LOG.exception("%d leases were not renewed.", len(held))
            return
        with self._lock:
            # Those that have ended meanwhile were lost to nobody.
            lost = [each for each in lost if self._kept.get(_key(each)) is each]
            self._lost.update(lost)
        for each in lost:
            LOG.info(
                "The %s of %s %s has been taken over, or has just ended.",
                each.operation, each.resource_type, each.resource_id,
            )  # fmt: skip


def _key(held: Lease) -> tuple[str, str]:
    return held.resource_type, held.resource_id
