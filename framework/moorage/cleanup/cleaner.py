# SPDX-License-Identifier: Apache-2.0
"""Cleans up after dead services: takes orphans in batches, and calls the handler of their type for each.

One failing row never stops a pass: it is given back with a reason, tried again at growing distances, and put into quarantine in the
end. Leases are renewed while handlers work; a lease that is lost stops nothing here, because the handler's last write is refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oslo_log import log as logging

from moorage import errors, plugin_isolation, randomness, threads
from moorage.bounded_pool import BoundedPool, Overdue
from moorage.cleanup.conditions import OrphanSelector
from moorage.cleanup.dry_run import (
    Key,
    blocked_reason,
    predict,
    stale_reason,
)
from moorage.cleanup.interface import (
    CleanupHandler,
    Disposition,
    Outcome,
    SetCleanupHandler,
)
from moorage.cleanup.orphans import (
    LAST,
    Claimed,
    CleanLease,
    OrphanStore,
    refused,
)
from moorage.clock import Clock
from moorage.extensions import origin_of
from moorage.work.interface import Operation

__all__ = ["Cleaner", "Policy"]

LOG = logging.getLogger(__name__)
#: The first owner's try is no cleanup.
_FIRST_TRY = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """What a reload may change; see the options of ``[cleanup]``."""

    batch: int = 2000
    max_attempts: int = 5
    backoff: float = 2.0
    backoff_longest: float = 300.0
    unclaimed_timeout: float = 300.0
    paused: frozenset[str] = frozenset()
    limits: Mapping[str, int] | None = None

    @classmethod
    def from_config(cls, section: object) -> Policy:
        """Returns the policy of the ``[cleanup]`` section.

        :raises ConfigError: a limit is no positive number.
        """
        given = dict(getattr(section, "limits"))  # noqa: B009  (the section has no type)
        limits: dict[str, int] = {}
        for kind, text in given.items():
            if not str(text).isdigit() or not int(text):
                raise errors.ConfigError(f"[cleanup] limits gives {kind}:{text}; write a type and a positive number.")
            limits[kind] = int(text)
        names = ("batch", "max_attempts", "backoff", "backoff_longest", "unclaimed_timeout")
        values = {name: getattr(section, name) for name in names}
        return cls(**values, paused=frozenset(getattr(section, "paused")), limits=limits)  # noqa: B009


class _Hangs(Exception):
    """A handler does not come back."""


class _Helper:
    """Cleans orphans of one type in a second thread, so that the cleaner claims one set while the database commits another."""

    def __init__(self, kind: str, clean: Callable[[Counter[str]], None]) -> None:
        self._kind = kind
        self._clean = clean
        self._done: Counter[str] = Counter()
        self._thread: threads.Thread | None = None
        self.error: Exception | None = None

    def start(self) -> None:
        """Starts the thread if it was not started before. If the system can start none now, a later call tries again."""
        if self._thread is None:
            self._thread = threads.try_start(self._run, name=f"cleaner-{self._kind}-2")

    @property
    def started(self) -> bool:
        """Whether a thread was started."""
        return self._thread is not None

    def join(self) -> Counter[str]:
        """Waits until the thread has ended, if it was started, and returns the number of rows by outcome."""
        if self._thread is not None:
            self._thread.join()
        return self._done

    def _run(self) -> None:
        try:
            with plugin_isolation.isolate_plugin_call(self._kind):
                self._clean(self._done)
        except Exception as error:  # noqa: BLE001  (the first thread raises it)
            self.error = error


class Cleaner:
    """Cleans with one set of handlers. Passes may be asked for by several threads; each row goes to one of them.

    :param handlers: resource type -> handler, in the order in which types are cleaned.
    """

    def __init__(
        self,
        orphans: OrphanStore,
        handlers: Mapping[str, CleanupHandler],
        clock: Clock,
        random: randomness.Random,
        policy: Policy | None = None,
    ) -> None:
        self._orphans = orphans
        self._handlers = handlers
        self._random = random
        self.policy = policy or Policy()
        self._stopping = threads.event()
        self._renewer = orphans.workers.renewer("clean-renew")
        #: Who calls the handlers: one pool for each type, so that a type that hangs holds up no other one.
        self._pools = {kind: BoundedPool(f"clean-{kind}", clock, 1) for kind in handlers}

    @property
    def handlers(self) -> Mapping[str, CleanupHandler]:
        """Resource type -> handler."""
        return self._handlers

    def stop(self, patience: float | None = None) -> None:
        """Take nothing more; passes end after the rows that they are at.

        :param patience: seconds to wait for those; what takes longer is left to its leases.
        """
        self._stopping.set()
        self._renewer.stop(patience)

    def clean(self, wanted: OrphanSelector, *, own: bool = False, types: Collection[str] | None = None) -> Counter[str]:
        """One pass over all types, or some, one after the other; how many rows had which outcome.

        :param own: the cleaner's own earlier incarnations: types whose service goes on by itself are left to it.
        """
        done: Counter[str] = Counter()
        for kind, handler in self._handlers.items():
            if types is not None and kind not in types:
                continue
            if blocked_reason(kind, self.policy.paused, self._handlers) or (own and not handler.cleans_own):
                continue
            if wanted.resource_type not in ("", kind):
                continue
            try:
                with plugin_isolation.isolate_plugin_call(kind):
                    self._clean_type(kind, handler, wanted, done)
            except errors.Unavailable:
                raise
            except _Hangs as error:
                LOG.error("%s Nothing more of the type %s is taken in this pass.", error, kind)
            except Exception:
                LOG.exception("Orphans of the type %s cannot be cleaned.", kind)
            finally:
                self._orphans.counts.flush()
        if done:
            LOG.info("Cleaned after %s: %s.", wanted, ", ".join(f"{n} {what}" for what, n in done.items()))
        return done

    def predict(self, transaction: Any, rows: Sequence[Operation], *, own: bool = False) -> dict[Key, str]:
        """What a pass would not clean of rows that it may take, and why not; see :mod:`moorage.cleanup.dry_run`."""
        return predict(transaction, rows, self._handlers, self.policy.paused, own=own)

    def _clean_type(self, kind: str, handler: CleanupHandler, wanted: OrphanSelector, done: Counter[str]) -> None:
        policy = self.policy
        given = (policy.limits or {}).get(kind)
        self._pools[kind].size = concurrency = given or handler.concurrency
        in_sets = isinstance(handler, SetCleanupHandler)
        # A set is cleaned at the same time.
        limit = min(policy.batch, (given or policy.batch) if in_sets else concurrency * 4)
        # Cleaners begin at different ids, so that several of them share the work and do not wait for each other. The second thread
        # begins half of all ids away.
        begin = self._random.getrandbits(32)
        clean = functools.partial(self._clean_round, kind, handler, wanted, limit)
        helper = _Helper(kind, functools.partial(clean, (begin + 2**31) % 2**32))
        try:
            clean(begin, done, helper.start if in_sets and given is None and concurrency > 1 else None)
        finally:
            done.update(helper.join())
        if helper.error is not None:
            raise helper.error
        if helper.started:
            # Each thread skips the rows that the other one has locked. MariaDB also locks the row behind the last one of a set,
            # which that thread does not take. Without another round, such a row would wait for the next pass.
            clean(begin, done)

    def _clean_round(
        self,
        kind: str,
        handler: CleanupHandler,
        wanted: OrphanSelector,
        limit: int,
        begin: int,
        done: Counter[str],
        many: Callable[[], None] | None = None,
    ) -> None:
        """Cleans all orphans of one type in the order of their ids, and begins in the middle: the ids form a circle.

        :param begin: where it begins; the first 32 bits of an id.
        :param many: called each time that one transaction has claimed ``limit`` orphans.
        """
        place = f"{begin:08x}"
        for ids in ((place, LAST), ("", place)):
            self._clean_range(kind, handler, wanted, ids, 1, done, alone=True)
            self._clean_range(kind, handler, wanted, ids, limit, done, many=many)

    def _clean_range(
        self,
        kind: str,
        handler: CleanupHandler,
        wanted: OrphanSelector,
        ids: tuple[str, str],
        limit: int,
        done: Counter[str],
        *,
        alone: bool = False,
        many: Callable[[], None] | None = None,
    ) -> None:
        #: How many are still to be claimed one by one, because together they could not be read.
        single = 0
        at: str | None = ids[0]
        while at is not None and not self._stopping.is_set():
            if self._pools[kind].stuck:
                LOG.warning("All %d threads that clean %s hang; nothing more is taken.", self._pools[kind].size, kind)
                break
            claim = functools.partial(self._orphans.claim, kind, wanted=wanted, after=at, last=ids[1], alone=alone)
            try:
                claimed = self._claim(kind, handler, functools.partial(claim, limit=1 if single else limit))
            except (errors.Unavailable, _Hangs):
                raise
            except Exception as error:
                if not single:
                    LOG.exception("%d orphans of %s could not be taken together; one by one now.", limit, kind)
                    single = limit
                    continue
                # This is the one. It is tried again later, and put into quarantine in the end.
                claimed = claim(handler=None, limit=1)
                done.update(self._requeue(held, refused(error)) for held in claimed.leases.values())
            else:
                if many is not None and len(claimed.leases) == limit:
                    many()
                done.update(self._process(kind, handler, claimed))
            single = max(0, single - 1)
            at = claimed.last

    def _claim(self, kind: str, handler: CleanupHandler, claim: Callable[..., Claimed]) -> Claimed:
        """Claims orphans and has the handler read and stamp them. The handler's code may hang here.

        :raises _Hangs: it hangs. If it returns later, what it took stays without a cleaner until the leases end.
        """
        try:
            return self._pools[kind].call(functools.partial(claim, handler=handler), handler.deadline)
        except Overdue as error:
            raise _Hangs(
                f"The {origin_of(handler)} has not read what it is to clean within {handler.deadline:g} seconds."
            ) from error

    # -- what was taken -------------------------------------------------------------------------------------------

    def _process(self, kind: str, handler: CleanupHandler, claimed: Claimed) -> Counter[str]:
        if not claimed.leases:
            return Counter()
        self._renewer.keep(claimed.leases.values())
        try:
            ready, done = self._sort_out(handler, claimed)
            if isinstance(handler, SetCleanupHandler) and ready:
                ready = self._settle_in_time(kind, handler, ready, claimed, done)
            return done + self._each(kind, handler, ready, claimed.resources)
        finally:
            self._renewer.forget(claimed.leases.values())

    def _each(
        self, kind: str, handler: CleanupHandler, ready: Sequence[CleanLease], resources: Mapping[str, Any]
    ) -> Counter[str]:
        """Clean rows one by one, several at a time; how many had which outcome."""
        outcomes: dict[str, str] = {}

        def one(held: CleanLease) -> None:
            outcome = self._one(handler, held, resources[held.resource_id])
            self._renewer.forget([held])
            # An abandoned call that returns after all has its outcome already.
            outcomes.setdefault(held.resource_id, outcome)

        def overdue(held: CleanLease) -> None:
            self._renewer.forget([held])
            reason = f"its handler has not ended after {handler.deadline:g} seconds"
            outcomes[held.resource_id] = self._requeue(held, reason)

        for held in self._pools[kind].for_each(ready, one, handler.deadline, overdue):
            self._renewer.forget([held])
            outcomes[held.resource_id] = self._requeue(held, "all threads of its type hang", at_once=True)
        return Counter(outcomes.values())

    def _settle_in_time(
        self,
        kind: str,
        handler: SetCleanupHandler,
        ready: list[CleanLease],
        claimed: Claimed,
        done: Counter[str],
    ) -> list[CleanLease]:
        """Returns the rows that must be cleaned one by one. A set that hangs becomes free when its leases end."""
        counted: Counter[str] = Counter()
        left = ready
        try:
            settle = functools.partial(self._settle, handler, ready, claimed, counted)
            left = self._pools[kind].call(settle, handler.deadline)
        except Overdue:
            LOG.error("A set of %d %s has not ended after %s seconds.", len(ready), kind, handler.deadline)
            done["overdue"] += len(ready)
            return []
        except errors.Unavailable:
            done.update(counted)
            raise
        except Exception:
            LOG.exception("A set of %d %s could not be cleaned together; one by one now.", len(ready), kind)
        done.update(counted)
        return left

    def _sort_out(self, handler: CleanupHandler, claimed: Claimed) -> tuple[list[CleanLease], Counter[str]]:
        """Returns the leases to clean. Ends the others, and requeues operations whose cleaners died too often."""
        ready: list[CleanLease] = []
        stale: dict[str, list[CleanLease]] = {}
        done: Counter[str] = Counter()
        for uuid, held in claimed.leases.items():
            resource = claimed.resources.get(uuid)
            status = None if resource is None else resource.status
            if held.attempts > self.policy.max_attempts + _FIRST_TRY:
                reason = f"its cleaners died, or lost it, {held.attempts - 1 - _FIRST_TRY} times"
                done[self._requeue(held, reason)] += 1
            elif status != held.status or status not in handler.cleanable:
                stale.setdefault(stale_reason(status, held.status), []).append(held)
            else:
                ready.append(held)
        for reason, some in stale.items():
            done.update(self._drop(some, reason))
        return ready, done

    def _settle(
        self, handler: SetCleanupHandler, ready: list[CleanLease], claimed: Claimed, done: Counter[str]
    ) -> list[CleanLease]:
        """Cleans a set in one transaction, without lost leases. Returns the leases that must be cleaned one by one."""
        while ready:
            leases = {held.resource_id: held for held in ready}
            resources = {uuid: claimed.resources[uuid] for uuid in leases}
            try:
                self._orphans.database.run(functools.partial(self._settle_in, handler, leases, resources))
            except errors.Unavailable:
                raise
            except Exception as error:  # noqa: BLE001  (whatever it is, each row is now tried for itself)
                lost = self._orphans.lost_of(ready) if isinstance(error, errors.Fenced) else ()
                if not lost:
                    LOG.info("%d rows are cleaned one by one: %s", len(ready), refused(error))
                    return ready
                done.update(self._lost(held, refused(error)) for held in lost)
                ready = [leases[uuid] for uuid in leases.keys() - {held.resource_id for held in lost}]
                continue
            done["done"] += len(ready)
            try:
                with plugin_isolation.isolate_plugin_call(origin_of(handler)):
                    handler.after_commit(leases, resources)
            except Exception:
                LOG.exception("What lies outside of the store of %d rows was not removed.", len(ready))
            break
        return []

    def _settle_in(
        self, handler: SetCleanupHandler, leases: Mapping[str, CleanLease], resources: Mapping[str, Any], tx: Any
    ) -> None:
        self._orphans.end_many(tx, list(leases.values()), "done")
        with plugin_isolation.isolate_plugin_call(origin_of(handler)):
            handler.finish_batch(tx, leases, resources)

    def _one(self, handler: CleanupHandler, held: CleanLease, resource: object) -> str:
        """Clean one; the name of what became of it. Raises nothing."""
        if self._stopping.is_set():
            return self._requeue(held, "the cleaner is stopping", at_once=True)
        try:
            with plugin_isolation.isolate_plugin_call(origin_of(handler)):
                outcome = handler.cleanup(held, resource)
        except errors.Fenced as error:
            return self._lost(held, error.message)
        except Exception as error:
            if not isinstance(error, errors.MoorageError):
                LOG.exception(
                    "The %s raised %s for %s. It is tried again, and put aside in the end (moorage cleanup list); repair it, or "
                    "take it out of [cleanup] enabled_handlers.",
                    origin_of(handler), type(error).__name__, held.resource_id,
                )  # fmt: skip
            outcome = Outcome(Disposition.RETRY, refused(error))
        if not _makes_sense(outcome):
            nonsense = f"the {origin_of(handler)} answered {outcome!r}, and not DONE, CONTINUES, STALE or retry(reason)"
            LOG.error("Of %s %s %s.", held.resource_type, held.resource_id, nonsense)
            return self._finished(held, nonsense)
        return self._conclude(held, outcome)

    def _conclude(self, held: CleanLease, outcome: Outcome) -> str:
        if outcome.result is Disposition.RETRY:
            return self._requeue(held, outcome.reason or "the handler gave no reason")
        if outcome.result is Disposition.STALE:
            return self._drop([held], outcome.reason or "the handler found nothing to do")[0]
        if outcome.result is Disposition.CONTINUES:
            return "continues"
        return self._finished(held, "its handler said that it was done and did not finish the lease")

    def _finished(self, held: CleanLease, otherwise: str) -> str:
        """Returns ``done`` if the row shows that the lease has ended; otherwise puts the row back, with the reason."""
        try:
            row = self._orphans.workers.get(held.resource_type, held.resource_id)
        except errors.Unavailable as error:
            return self._unknown(held, error)
        if row is not None and row.token == held.token:
            return self._requeue(held, otherwise)
        return "done"

    def _drop(self, some: Sequence[CleanLease], reason: str) -> Sequence[str]:
        """End rows that need nothing; what became of each."""
        try:
            self._orphans.database.run(lambda tx: self._orphans.end_many(tx, some, "stale", reason))
        except errors.Fenced as error:
            if len(some) == 1:
                return [self._lost(some[0], error.message)]
            return [outcome for held in some for outcome in self._drop([held], reason)]
        except errors.Unavailable as error:
            return [self._unknown(held, error) for held in some]
        return ["stale"] * len(some)

    def _requeue(self, held: CleanLease, reason: str, *, at_once: bool = False) -> str:
        policy = self.policy
        tries = held.attempts - _FIRST_TRY
        quarantine = not at_once and tries >= policy.max_attempts
        delay = min(policy.backoff_longest, policy.backoff * 2 ** max(0, tries - 1)) * self._random.uniform(0.5, 1.0)
        try:
            kept = self._orphans.requeue(
                held, reason, delay=0 if at_once else delay, quarantine=quarantine, untried=at_once
            )
        except errors.Unavailable as error:
            return self._unknown(held, error)
        if not kept:
            return self._lost(held, reason)
        level = logging.ERROR if quarantine else logging.WARNING
        LOG.log(
            level,
            "%s %s (%s) could not be cleaned, try %d: %s%s",
            held.resource_type, held.resource_id, held.status, tries, reason,
            "; it is in quarantine now (moorage cleanup retry, or discard)" if quarantine else "",
        )  # fmt: skip
        return "quarantined" if quarantine else "retry"

    def _lost(self, held: CleanLease, reason: str) -> str:
        LOG.warning("%s", reason)
        try:
            self._orphans.tell_lost(held, reason)
        except errors.Unavailable as error:
            return self._unknown(held, error)
        return "fenced"

    def _unknown(self, held: CleanLease, error: errors.MoorageError) -> str:
        LOG.warning("%s %s stays until its lease ends: %s", held.resource_type, held.resource_id, error.message)
        return "retry"


def _makes_sense(answer: Any) -> bool:
    """Returns whether a handler answered what its interface asks for; it may not be ours, and not be checked by types."""
    return isinstance(answer, Outcome) and type(answer.result) is Disposition
