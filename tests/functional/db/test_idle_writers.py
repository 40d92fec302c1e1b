# SPDX-License-Identifier: Apache-2.0
"""A writer that sleeps inside of its transaction, as a process that was paused does, does not hold its locks for ever."""

from __future__ import annotations

import time
import unittest

from moorage import errors
from tests.functional.db.databases import DatabaseCase, add_one, poll


class IdleWriterTests(DatabaseCase, unittest.TestCase):
    kind = "postgresql"

    def test_it_is_rolled_back_and_told_and_others_go_on(self) -> None:
        sleeper, other = self.another(lock_timeout=1), self.another(lock_timeout=1)
        with self.assertRaises((errors.StoreUnavailable, errors.StoreBusy)), sleeper.write() as tx:
            add_one(tx)
            asleep = time.monotonic()

            def goes_on() -> bool:
                try:
                    other.run(add_one, attempts=1)
                except errors.StoreBusy:
                    return False
                return True

            poll(goes_on, "another writer to go on", 60)
            self.assertGreater(time.monotonic() - asleep, 2)
            add_one(tx)
        self.assertEqual(self.value(), 1)


class MariadbIdleWriterTests(IdleWriterTests):
    kind = "mariadb"
