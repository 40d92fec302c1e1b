# SPDX-License-Identifier: Apache-2.0
"""Keeping leases while their work goes on."""

from __future__ import annotations

import tempfile
import threading

from moorage.clock import SystemClock
from moorage.work.operations import OperationLease
from moorage.work.renewer import ThreadRenewer
from tests.servers import wait_until
from tests.unit.work.operation_tests import (
    MINUTE,
    TYPE,
    ImpatientClock,
    WorkerCase,
    identity,
)

SOON = 60


class RenewerTests(WorkerCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.url = f"sqlite:///{folder.name}/test.sqlite"
        super().setUp()
        self.clock = ImpatientClock()
        # The thread of an earlier test may live a little longer.
        self.name = f"renew-{folder.name}"
        self.renewer = ThreadRenewer(self.store, self.clock, self.name)
        self.addCleanup(self.renewer.stop, 0)

    def begun(self, uuid: str = "one") -> OperationLease:
        self.create(uuid)
        return self.taken(uuid)

    def expires(self, uuid: str) -> int:
        row = self.store.get(TYPE, uuid)
        return 0 if row is None else row.expires_at

    def renewed(self, uuid: str) -> None:
        before = self.expires(uuid)
        wait_until(lambda: self.expires(uuid) > before, f"{uuid} is renewed", SOON)

    def threads(self) -> int:
        return sum(thread.name == self.name for thread in threading.enumerate())

    def test_all_that_is_kept_is_renewed_at_a_third_of_the_lease_until_it_is_forgotten(self) -> None:
        one, two = self.begun("one"), self.begun("two")
        self.renewer.keep([one])
        self.renewer.keep([two])
        for uuid in ("one", "two", "one", "two"):
            self.renewed(uuid)
        self.assertEqual((set(self.clock.asked), self.threads()), ({MINUTE / 3}, 1))
        self.renewer.forget([one])
        self.renewed("two")
        last = self.expires("one")
        self.renewed("two")
        self.assertEqual(self.expires("one"), last)

    def test_the_thread_lives_while_there_is_something_to_keep(self) -> None:
        held = self.begun()
        for _ in range(2):
            with self.renewer.keeping([held]):
                self.assertEqual(self.threads(), 1)
                self.renewed("one")
            wait_until(lambda: not self.threads(), "its thread has ended", SOON)

    def test_one_that_is_lost_is_known_and_not_renewed_again(self) -> None:
        held, other = self.begun(), self.begun("other")
        self.renewer.keep([held, other])
        self.assertFalse(self.renewer.lost(held))
        with self.assertLogs("moorage.work.renewer", "INFO") as logs:
            self.create(operation="delete", force=True)
            wait_until(lambda: self.renewer.lost(held), "its loss is found", SOON)
            for _ in range(3):
                self.renewed("other")
        self.assertEqual(len(logs.output), 1)
        self.assertIn("The build of thing one has been taken over", logs.output[0])
        self.assertTrue(self.renewer.keeps(TYPE, "one"), "somebody here is still at it")
        self.assertFalse(self.renewer.lost(other))
        self.renewer.forget([held])
        self.assertFalse(self.renewer.lost(held))

    def test_a_later_lease_of_a_resource_takes_the_place_of_an_earlier_one(self) -> None:
        first = self.begun()
        self.renewer.keep([first])
        self.create(operation="delete", force=True)
        second = self.taken("one", identity("b"))
        self.renewer.keep([second])
        self.assertEqual((self.renewer.lost(first), self.renewer.lost(second)), (True, False))
        self.renewer.forget([first])
        self.renewed("one")
        self.assertTrue(self.renewer.keeps(TYPE, "one"))
        self.renewer.forget([second])
        self.assertFalse(self.renewer.keeps(TYPE, "one"))

    def test_a_store_that_fails_is_asked_again(self) -> None:
        held = self.begun()
        with self.assertLogs("moorage.work.renewer", "WARNING"):
            with self.database.write() as tx:
                tx.exec_driver_sql("ALTER TABLE workers RENAME TO elsewhere")
            self.renewer.keep([held])
            failed = len(self.clock.asked) + 3
            wait_until(lambda: len(self.clock.asked) > failed, "it has tried", SOON)
            with self.database.write() as tx:
                tx.exec_driver_sql("ALTER TABLE elsewhere RENAME TO workers")
        self.renewed("one")
        self.assertFalse(self.renewer.lost(held))

    def test_a_stop_waits_for_what_goes_on_and_renews_it_meanwhile(self) -> None:
        held = self.begun()
        self.renewer.keep([held])
        stopped = threading.Thread(target=self.renewer.stop)
        stopped.start()
        self.renewed("one")
        self.assertTrue(stopped.is_alive())
        self.renewer.forget([held])
        stopped.join(SOON)
        self.assertEqual((stopped.is_alive(), self.threads()), (False, 0))

    def test_a_stop_that_loses_its_patience_leaves_them_to_their_leases(self) -> None:
        held = self.begun()
        self.renewer.keep([held])
        self.renewer.stop(0)
        wait_until(lambda: not self.threads(), "its thread has ended", SOON)
        self.assertFalse(self.renewer.keeps(TYPE, "one"))
        self.renewer.stop()

    def test_a_stop_does_not_wait_out_a_third_of_a_lease(self) -> None:
        renewer = ThreadRenewer(self.store, SystemClock(), self.name)
        held = self.begun()
        renewer.keep([held])
        stopped = threading.Thread(target=renewer.stop)
        stopped.start()
        renewer.forget([held])
        stopped.join(MINUTE / 6)
        self.assertFalse(stopped.is_alive())
