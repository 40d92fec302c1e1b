# SPDX-License-Identifier: Apache-2.0
"""The conformance kit of cleanup handlers: a mix-in for :class:`unittest.TestCase`.

Derive from it and from TestCase, and give it a database, a way to make a resource whose operation was interrupted, and what shall
become of it::

    class VolumeHandlerTests(CleanupHandlerTests, unittest.TestCase):
        resource_type = "volume"
        expected = {"creating": "error", "deleting": None}      # None: it is gone

        def setUp(self):
            self.database = ...                                  # moorage.db.Database with all tables
            self.handler_class = VolumeHandler

        def interrupted(self, status, identity):                 # begin an operation as that service, and leave it
            ...
            return uuid

        def status(self, uuid):                                  # None when it is gone
            ...
"""

from __future__ import annotations

import random
import uuid as uuid_module
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from moorage import errors
from moorage.cleanup.cleaner import Cleaner, Policy
from moorage.cleanup.conditions import OrphansOfService
from moorage.cleanup.interface import CleanupHandler, Outcome, SetCleanupHandler
from moorage.cleanup.orphans import OrphanStore
from moorage.clock import SystemClock
from moorage.db import Database
from moorage.services.interface import ServiceIdentity
from moorage.work.interface import Lease
from moorage.work.operations import SqlOperationStore

__all__ = ["CleanupHandlerTests", "Tools"]

#: A lease that has expired when it is next looked at.
_MOMENT = 0.000001
#: Seconds.
_PATIENCE = 60.0


class Tools:
    """What a handler is given; a subclass may have more."""

    def __init__(self, database: Database, identity: ServiceIdentity, conf: Any = None) -> None:
        self.conf = conf
        self.clock = SystemClock()
        self.database = database
        self.identity = identity
        self.workers = SqlOperationStore(database, lease_seconds=60)


class CleanupHandlerTests:
    """What every handler must do; see the module for what a subclass gives."""

    resource_type: ClassVar[str]
    #: Status of an interrupted operation -> what becomes of the resource; None: it goes.
    expected: ClassVar[Mapping[str, str | None]]
    handler_class: type[CleanupHandler]
    database: Database

    # -- what a subclass gives ------------------------------------------------------------------------------------

    def interrupted(self, status: str, identity: ServiceIdentity) -> str:
        """Make a resource with an operation of that status, which the service has begun and will not end; its uuid."""
        raise NotImplementedError

    def status(self, uuid: str) -> str | None:
        """Returns the stored status of the resource; None: it was removed."""
        raise NotImplementedError

    def tools(self, identity: ServiceIdentity) -> Any:
        """What the handler is built with; override it for handlers that need more than a database."""
        return Tools(self.database, identity)

    def assert_tidy(self, uuid: str) -> None:
        """Whether nothing is left outside of the store that should not be; nothing by itself."""

    # -- what it offers -------------------------------------------------------------------------------------------

    def service(self, name: str) -> ServiceIdentity:
        """Returns a service with a name. Its uuid follows from the name."""
        return ServiceIdentity(str(uuid_module.uuid5(uuid_module.NAMESPACE_OID, name)), name, "agent", None, 1)

    @property
    def worker_rows(self) -> SqlOperationStore:
        """The worker rows, for :meth:`interrupted`."""
        return SqlOperationStore(self.database, lease_seconds=60)

    @property
    def dead(self) -> ServiceIdentity:
        """Who left the operations."""
        return self.service("dead")

    def cleaner(self, name: str, handler: CleanupHandler | None = None, *, lease_seconds: float = 60.0) -> Cleaner:
        """Returns a cleaner with this handler alone."""
        identity = self.service(name)
        made = handler or self.handler_class(self.tools(identity))
        store = OrphanStore(
            self.database, SqlOperationStore(self.database, lease_seconds=lease_seconds), identity, SystemClock()
        )
        policy = Policy(backoff=0.01, backoff_longest=0.01, max_attempts=3)
        return Cleaner(store, {self.resource_type: made}, SystemClock(), random.Random(1), policy)  # noqa: S311

    def clean(self, name: str = "cleaner", handler: CleanupHandler | None = None) -> Mapping[str, int]:
        """One pass after the dead service."""
        cleaner = self.cleaner(name, handler)
        try:
            return cleaner.clean(OrphansOfService(self.dead.uuid, self.dead.epoch + 1))
        finally:
            cleaner.stop()

    # -- the tests ------------------------------------------------------------------------------------------------

    def test_its_statuses_are_those_that_are_documented(self) -> None:
        """``cleanable`` is what ``expected`` lists."""
        self._same(self.handler_class.cleanable, set(self.expected), "cleanable and expected differ")

    def test_every_status_reaches_its_documented_state_and_the_row_goes(self) -> None:
        """One by one, each ends as it is documented."""
        for status, becomes in self.expected.items():
            uuid = self.interrupted(status, self.dead)
            self._same(dict(self.clean()), {"done": 1}, status)
            self._same(self.status(uuid), becomes, status)
            self._same(SqlOperationStore(self.database, lease_seconds=60).get(self.resource_type, uuid), None, status)
            self.assert_tidy(uuid)

    def test_several_are_cleaned_in_one_pass(self) -> None:
        """Two of each status at once."""
        made = {self.interrupted(status, self.dead): becomes for status, becomes in self.expected.items() for _ in "ab"}
        self._same(dict(self.clean()), {"done": len(made)}, "all of them")
        for uuid, becomes in made.items():
            self._same(self.status(uuid), becomes, uuid)
            self.assert_tidy(uuid)

    def test_what_is_gone_is_not_read(self) -> None:
        """``read`` leaves out what is not there."""
        uuid = self.interrupted(next(iter(self.expected)), self.dead)
        handler = self.handler_class(self.tools(self.service("cleaner")))
        with self.database.read() as tx:
            found = handler.read(tx, [uuid, str(uuid_module.uuid4())])
        self._same(list(found), [uuid], "read gives those that there are")
        self._same(found[uuid].status, next(iter(self.expected)), "with their status")

    def test_a_cleaner_that_was_paused_changes_nothing_when_it_goes_on(self) -> None:
        """Its lease expired and another one has cleaned: its own last write is refused."""
        for status, becomes in self.expected.items():
            uuid = self.interrupted(status, self.dead)
            outcomes = self._paused(self._followed)
            self._same(outcomes, {"fenced": 1}, f"{status}: a cleanup whose lease was lost must not succeed")
            self._same(self.status(uuid), becomes, status)
            self.assert_tidy(uuid)

    def test_an_operation_that_was_forced_meanwhile_is_left_alone(self) -> None:
        """A person has forced another operation: the cleaner leaves it alone."""
        workers = SqlOperationStore(self.database, lease_seconds=60)
        for status in self.expected:
            uuid = self.interrupted(status, self.dead)

            def force(uuid: str = uuid, status: str = status) -> None:
                self.database.run(
                    lambda tx: workers.create(
                        tx, self.resource_type, uuid, "forced", status, target_host="here", force=True
                    )
                )

            self._same(self._paused(force), {"fenced": 1}, f"{status}: the forced operation must win")
            self._same(self.status(uuid), status, status)
            row = workers.get(self.resource_type, uuid)
            self._same(row and row.operation, "forced", status)

    def test_a_cleaner_that_dies_is_followed_by_another(self) -> None:
        """Killed before its handler has done anything, and after it has done all but the end of the row."""
        for status, becomes in self.expected.items():
            for after in (False, True):
                uuid = self.interrupted(status, self.dead)
                self._killed(after)
                self._same(self._followed(), {"done": 1}, status)
                self._same(self.status(uuid), becomes, status)
                self.assert_tidy(uuid)

    def _followed(self) -> Mapping[str, int]:
        """What another cleaner did, once the lease of the one before has expired."""
        clock = SystemClock()
        end = clock.monotonic() + _PATIENCE
        while clock.monotonic() < end:
            found = dict(self.clean("second"))
            if found:
                return found
            clock.sleep(0.005)
        raise AssertionError(f"Nothing was left for another cleaner within {_PATIENCE:g} seconds.")

    # -- inside ---------------------------------------------------------------------------------------------------

    def _paused(self, meanwhile: Callable[[], object]) -> dict[str, int]:
        """A pass whose handler is called only after something else has happened, and its lease is over."""
        identity = self.service("first")
        made = self.handler_class(self.tools(identity))

        def late(held: Lease, resource: Any) -> Outcome:
            meanwhile()
            return self.handler_class.cleanup(made, held, resource)

        made.cleanup = late  # type: ignore[method-assign,assignment]
        if isinstance(made, SetCleanupHandler):
            # One by one: a set is fenced as each of its leases is.
            made.finish_batch = _Once(made.finish_batch)  # type: ignore[method-assign,assignment]
        cleaner = self.cleaner("first", made, lease_seconds=_MOMENT)
        try:
            return dict(cleaner.clean(OrphansOfService(self.dead.uuid, self.dead.epoch + 1)))
        finally:
            cleaner.stop()

    def _killed(self, after: bool) -> None:
        """A cleaner that takes the row and never ends it."""
        identity = self.service("killed")
        store = OrphanStore(
            self.database, SqlOperationStore(self.database, lease_seconds=_MOMENT), identity, SystemClock()
        )
        handler = self.handler_class(self.tools(identity))
        target = OrphansOfService(self.dead.uuid, self.dead.epoch + 1)
        claimed = store.claim(self.resource_type, handler, target, after="", last="\U0010ffff", limit=10)
        if not after:
            return
        # The last transaction.
        store.end_many = _die  # type: ignore[method-assign,assignment]
        for uuid, held in claimed.leases.items():
            try:
                handler.cleanup(held, claimed.resources[uuid])
            except (_Died, errors.Fenced):
                continue
            raise AssertionError("The handler did not end its lease by finish, finish_with or end.")

    def _same(self, found: object, wanted: object, what: str) -> None:
        if found != wanted:
            raise AssertionError(f"{what}: {found!r}, and not {wanted!r}")


class _Once:
    """Fails the first time it is called, so that the set is done one by one."""

    def __init__(self, finish_batch: Callable[..., None]) -> None:
        self._finish_batch = finish_batch
        self._called = False

    def __call__(self, *arguments: Any) -> None:
        if not self._called:
            self._called = True
            raise RuntimeError("This set is done one by one, for the test.")
        self._finish_batch(*arguments)


class _Died(Exception):
    """What stands for the death of a process."""


def _die(*arguments: Any) -> None:
    raise _Died
