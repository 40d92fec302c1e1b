# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of periodic tasks.

Mix it into a ``unittest.TestCase`` whose ``setUp`` gives ``database``, and say how the task and objects for it are made::

    class ExpireTests(PeriodicTaskTests, unittest.TestCase):
        def setUp(self):
            self.database = ...                  # moorage.db.Database with all tables

        def make_task(self, tools):
            return Expire(tools)

        def make_due(self):                      # an object that the task should act on; its id
            ...

        def make_idle(self):                     # one that it should leave alone; its id
            ...

        def state(self, object_id):              # what the task may change of the object, as it is stored
            ...
"""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from oslo_config import cfg
from typing_extensions import override

from moorage import context, errors
from moorage.clock import SystemClock
from moorage.coordination.interface import PeriodicTask, TaskLease, TaskTools
from moorage.db import Database
from moorage.work.operations import SqlOperationStore

__all__ = ["KitLease", "PeriodicTaskTests", "Sent"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

T = TypeVar("T")
#: Larger than any id may be.
_LONGEST = 255


class Sent:
    """Where a task's messages go: they are kept, or (``away``) cannot be sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, Any]] = []
        self.away = False

    def cast(self, topic: str, method: str, args: Any = None, *, server: str | None = None) -> None:
        """Keep it.

        :raises NoListener: no server listens.
        """
        if self.away:
            raise errors.NoListener(f"Nobody listens on {topic}.")
        self.messages.append((topic, method, args))


class KitLease(TaskLease):
    """A lease over a real database, which the test can take away.

    :ivar lost: another engine has the object by now: nothing may be written any more.
    """

    __slots__ = ("finished", "lost")

    def __init__(self, database: Database, object_id: str, *, token: int = 5, lost: bool = False) -> None:
        super().__init__(database, "under-test", object_id, 1, token)
        self.lost = lost
        self.finished = 0

    @override
    def check(self) -> None:
        if self.lost:
            raise errors.Fenced(f"The lease of {self.object_id} was taken over.")

    @override
    def end(self, transaction: Any) -> None:
        """The kit has no row that ends."""

    @override
    def confirm(self) -> None:
        self.check()

    @override
    @contextlib.contextmanager
    def finish(self) -> Iterator[Any]:
        self._count()
        with super().finish() as tx:
            yield tx

    @override
    def finish_with(self, work: Callable[[Any], T]) -> T:
        self._count()
        return super().finish_with(work)

    def _count(self) -> None:
        self.finished += 1
        if self.finished > 1:
            raise AssertionError("A lease is finished at most once.")


class PeriodicTaskTests(_Base):
    """What every task must hold to."""

    database: Database
    sent: Sent

    # -- what a subclass gives ------------------------------------------------------------------------------------

    def make_task(self, tools: TaskTools) -> PeriodicTask:
        """Returns the task under test."""
        raise NotImplementedError

    def make_due(self) -> str:
        """Make an object that the task should act on; its id."""
        raise NotImplementedError

    def make_idle(self) -> str | None:
        """Make an object that the task should leave alone; its id. None where there is no such thing."""
        return None

    def state(self, object_id: str) -> object:
        """What the task may change of the object, as it is stored; comparable."""
        raise NotImplementedError

    def list_opts(self) -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
        """Returns the options that it reads, as its distribution registers them."""
        return ()

    def configure(self, conf: cfg.ConfigOpts) -> None:
        """Set what the test needs."""

    # -- helpers --------------------------------------------------------------------------------------------------

    def task(self) -> PeriodicTask:
        conf = cfg.ConfigOpts()
        conf.register_opts([cfg.StrOpt("state_dir")], group="control_plane")
        for group, options in self.list_opts():
            conf.register_opts(options, group=group)
        conf([])
        self.configure(conf)
        self.sent = Sent()
        self.workers = SqlOperationStore(self.database, lease_seconds=60)
        return self.make_task(
            TaskTools(conf, SystemClock(), self.database, self.sent, context.internal("kit"), self.workers)
        )

    def handle(self, object_id: str, *, lost: bool = False, token: int = 5) -> object:
        """One handling, by a task of its own."""
        return self.task().handle(object_id, KitLease(self.database, object_id, token=token, lost=lost))

    # -- the law --------------------------------------------------------------------------------------------------

    def test_it_lists_what_is_due_by_ids_that_fit(self) -> None:
        due = {self.make_due() for _ in range(3)}
        listed = self.task().list_objects()
        self.assertLessEqual(due, set(listed))
        self.assertEqual(len(listed), len(set(listed)), "an id is listed twice")
        for each in listed:
            self.assertIsInstance(each, str)
            self.assertTrue(0 < len(each) <= _LONGEST, each)

    def test_without_any_object_it_lists_none_and_never_fails(self) -> None:
        self.assertIsInstance(list(self.task().list_objects()), list)

    def test_the_whole_ring_holds_all_objects(self) -> None:
        due = self.make_due()
        found = self.task().objects_in([(0, 2**64)])
        if found is not None:
            self.assertIn(due, found)

    def test_what_is_due_is_acted_on_and_then_is_not_due_any_more(self) -> None:
        due = self.make_due()
        self.assertTrue(self.handle(due), "it says that it has done nothing")
        after = self.state(due)
        self.assertFalse(self.handle(due, token=6), "done twice, it says that it has acted twice")
        self.assertEqual(after, self.state(due))

    def test_what_is_not_due_is_left_alone(self) -> None:
        idle = self.make_idle()
        if idle is None:
            self.skipTest("every object is due")
        before = self.state(idle)
        self.assertFalse(self.handle(idle))
        self.assertEqual(before, self.state(idle))

    def test_an_object_that_is_gone_by_now_is_no_error(self) -> None:
        """It was listed, and removed before its turn came."""
        self.assertFalse(self.handle("00000000-0000-4000-8000-00000000dead"))

    def test_who_has_lost_the_lease_writes_nothing(self) -> None:
        due = self.make_due()
        before = self.state(due)
        with contextlib.suppress(errors.Fenced):
            self.assertFalse(self.handle(due, lost=True), "it says that it has acted, with a lease that was lost")
        self.assertEqual(before, self.state(due))

    def test_an_agent_that_is_away_ends_nothing(self) -> None:
        due, task = self.make_due(), self.task()
        self.sent.away = True
        task.handle(due, KitLease(self.database, due))
