# SPDX-License-Identifier: Apache-2.0
"""The conformance kit of agent services: a mix-in for :class:`unittest.TestCase` that tests a :class:`moorage.work.job.Work`.

Derive from it and from TestCase, and give it a database, the work of a service, and a way to ask for an operation::

    class LicenceWorkTests(WorkTests, unittest.TestCase):
        expected = {"taking": "held", "returning": "available"}

        def make_work(self, store, identity):
            return LicenceWork(self.database, store, identity, self.folder)

        def asked(self, operation, store, host):                 # record an operation, addressed to the host
            ...
            return "licence", uuid

        def status(self, uuid):                                  # None when it is gone
            ...

Each test lets a service die, stand still or repeat itself at one of the steps between taking an operation and its end.
"""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import sqlalchemy as sa

from moorage.clock import SystemClock
from moorage.db import Database
from moorage.services.interface import ServiceIdentity
from moorage.work.job import Job, Work
from moorage.work.operations import SqlOperationStore
from moorage.work.tables import workers
from moorage.work.work_loop import WorkLoop

__all__ = ["WorkTests"]

_HOST = "host-1"
_SERVICE = str(uuid_module.uuid5(uuid_module.NAMESPACE_OID, _HOST))


class WorkTests:
    """What every work must do; see the module for what a subclass gives."""

    #: Operation -> the status of its resource afterwards; None: it goes.
    expected: ClassVar[Mapping[str, str | None]]
    database: Database

    # -- what a subclass gives ------------------------------------------------------------------------------------

    def make_work(self, store: Any, identity: ServiceIdentity) -> Work[Any]:
        """Returns the work of one incarnation of the service."""
        raise NotImplementedError

    def asked(self, operation: str, store: Any, host: str) -> tuple[str, str]:
        """Makes a resource and records the operation with ``store.create``, addressed to the host; its type and id."""
        raise NotImplementedError

    def status(self, resource_id: str) -> str | None:
        """Returns the stored status of the resource; None: it was removed."""
        raise NotImplementedError

    def assert_tidy(self, resource_id: str) -> None:
        """Checks that nothing is left outside of the store that should not be there; nothing by itself."""

    # -- tests ----------------------------------------------------------------------------------------------------

    def test_an_operation_reaches_its_state_and_its_row_goes(self) -> None:
        """A sweep finds the operation: its message was lost."""
        for kind, uuid, end in self._operations():
            self._finish(epoch=1)
            self._check(kind, uuid, end)

    def test_what_a_service_leaves_half_done_its_next_epoch_does_again(self) -> None:
        """A service dies after the effect and before the end."""
        for kind, uuid, end in self._operations():
            work = self._work(1)
            for job in work.take(kind, [uuid]):
                work.do(job)
            self._finish(epoch=2)
            self._check(kind, uuid, end)

    def test_doing_it_twice_under_one_lease_changes_nothing_more(self) -> None:
        """The end could not be written at first; the work is done again."""
        for kind, uuid, end in self._operations():
            work = self._work(1)
            (job,) = work.take(kind, [uuid])
            work.do(job)
            WorkLoop("again", work, SystemClock(), operations=1).run(job)
            self._check(kind, uuid, end)

    def test_a_service_that_was_overtaken_changes_nothing(self) -> None:
        """A service stands still before or after the effect; its next epoch does the operation, and then the first one goes on."""
        for before in (True, False):
            for kind, uuid, end in self._operations():
                early = self._work(1)
                (job,) = early.take(kind, [uuid])
                loop = WorkLoop("zombie", early, SystemClock(), operations=1)
                self._stand_still(early, before=before, meanwhile=lambda: self._finish(epoch=2))
                loop.run(job)
                self._check(kind, uuid, end)

    def test_a_message_about_an_operation_that_has_ended_changes_nothing(self) -> None:
        """The message comes late, or twice."""
        for kind, uuid, end in self._operations():
            self._finish(epoch=1)
            _require(not list(self._work(1).take(kind, [uuid])), f"{kind} {uuid} was taken again")
            self._check(kind, uuid, end)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _store(self) -> SqlOperationStore:
        return SqlOperationStore(self.database, lease_seconds=60)

    def _work(self, epoch: int) -> Work[Any]:
        return self.make_work(self._store(), ServiceIdentity(_SERVICE, _HOST, "agent", None, epoch))

    def _operations(self) -> Iterator[tuple[str, str, str | None]]:
        for operation, end in self.expected.items():
            kind, uuid = self.asked(operation, self._store(), _HOST)
            yield kind, uuid, end

    def _finish(self, *, epoch: int) -> None:
        """Lets an incarnation do all that it may take, in this thread."""
        work = self._work(epoch)
        loop = WorkLoop("finish", work, SystemClock(), operations=1)
        for kind in work.types:
            for found in work.source(kind, "", 500):
                for job in work.take(kind, [found.resource_id]):
                    loop.run(job)

    @staticmethod
    def _stand_still(work: Work[Any], *, before: bool, meanwhile: Callable[[], None]) -> None:
        """Has something happen before or after the effect of the next call."""
        real = work.do

        def do(job: Job[Any]) -> Any:
            if before:
                meanwhile()
            result = real(job)
            if not before:
                meanwhile()
            return result

        work.do = do  # type: ignore[method-assign]

    def _rows(self) -> int:
        with self.database.read() as tx:
            return int(tx.execute(sa.select(sa.func.count()).select_from(workers)).scalar_one())

    def _check(self, kind: str, uuid: str, end: str | None) -> None:
        found = self.status(uuid)
        _require(found == end, f"{kind} {uuid} is {found}, not {end}")
        _require(self._rows() == 0, f"a row of {kind} {uuid} is left")
        self.assert_tidy(uuid)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise AssertionError(otherwise)
