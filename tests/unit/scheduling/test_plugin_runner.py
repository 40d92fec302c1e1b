# SPDX-License-Identifier: Apache-2.0
"""A plugin that hangs: the request answers, the process is told to end, and who did it too often is not run any more."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import threading
import unittest
from dataclasses import dataclass
from typing import Any
from unittest import mock

from typing_extensions import override

from moorage import errors, plugin_isolation
from moorage.clock import SystemClock
from moorage.scheduling import filter_and_weigh, plugin_runner
from moorage.scheduling.interface import HostFilter, HostWeigher
from moorage.scheduling.plugin_runner import PluginRunner
from moorage.testing import fleets
from tests.servers import wait_until

SLEEPY = "moorage.filters:sleepy"


@dataclass(frozen=True)
class Plugin:
    name: str
    group: str = "moorage.filters"
    distribution: str = "somebody"
    advisory: bool = False

    @property
    def who(self) -> str:
        return f"plugin '{self.name}' ({self.group}, of {self.distribution} 1.0)"


class Incidents:
    def __init__(self) -> None:
        self.recorded: list[str] = []

    def record(self, plugin: str) -> None:
        self.recorded.append(plugin)

    def count(self, plugin: str) -> int:
        return self.recorded.count(plugin)


class SteppedClock(SystemClock):
    """Time passes when the test says so."""

    now = 0.0

    @override
    def monotonic(self) -> float:
        return self.now


class Leaves(HostFilter):
    """A filter that raises a given error."""

    api_version = (1, 0)

    def __init__(self, error: BaseException) -> None:
        super().__init__(conf=None)
        self.error = error

    @override
    def host_passes(self, host_state: Any, spec_obj: Any) -> bool:
        raise self.error


class Weighs(HostWeigher):
    """A weigher that raises a given error."""

    api_version = (1, 0)

    def __init__(self, error: BaseException) -> None:
        super().__init__(conf=None)
        self.error = error

    @override
    def weigh_rows(self, fleet: Any, rows: Any, spec: Any) -> Any:
        raise self.error


class GuardTests(unittest.TestCase):
    def setUp(self) -> None:
        self.incidents = Incidents()
        self.fatal: list[str] = []
        self.release = threading.Event()
        self.addCleanup(self.release.set)

    def make(self, deadline: float = 60.0, clock: SystemClock | None = None) -> PluginRunner:
        made = PluginRunner(
            clock or SystemClock(), self.incidents, self.fatal.append, deadline=deadline, threshold=2, window=300,
            skip_advisory=True,
        )  # fmt: skip
        self.addCleanup(made.close)
        return made

    def hang(self, guard: PluginRunner) -> None:
        with guard.slot() as slot:
            slot.begin(Plugin("sleepy"))
            self.release.wait(60)

    def test_a_hang_is_answered_told_and_ends_the_process(self) -> None:
        guard = self.make(0.1)
        stacks = io.StringIO()
        with contextlib.redirect_stderr(stacks), self.assertRaises(errors.PluginTimeout) as caught:
            guard.request(lambda: self.hang(guard))
        self.assertIn("'sleepy'", caught.exception.message)
        self.assertIn("restarted", caught.exception.message)
        self.assertEqual(self.incidents.recorded, [SLEEPY])
        wait_until(lambda: len(self.fatal) == 1, "the process is ended", 60)
        self.assertIn("sleepy", self.fatal[0])

    def test_a_request_may_take_long_when_no_single_plugin_does(self) -> None:
        clock = SteppedClock()
        guard = self.make(0.05, clock)

        def work() -> str:
            with guard.slot() as slot:
                for number in range(8):
                    slot.begin(Plugin(f"quick-{number}"))
                    self.release.wait(0.02)
                    clock.now += 0.04
            return "done"

        self.assertEqual(guard.request(work), "done")
        self.assertEqual((self.incidents.recorded, self.fatal), ([], []))

    def test_a_process_that_was_stopped_for_a_while_blames_nobody(self) -> None:
        clock = SteppedClock()
        guard = self.make(0.5, clock)

        def work() -> str:
            with guard.slot() as slot:
                slot.begin(Plugin("quick"))
                # All at once it is an hour later; the plugin needs a little more of the time that really passes.
                clock.now += 3600
                self.release.wait(0.12)
            return "done"

        self.assertEqual(guard.request(work), "done")
        self.assertEqual((self.incidents.recorded, self.fatal), ([], []))

    def test_a_hang_counts_once_however_many_requests_wait_for_it(self) -> None:
        guard = self.make(0.1)
        answers: list[str] = []

        def ask() -> None:
            with contextlib.redirect_stderr(io.StringIO()):
                try:
                    guard.request(lambda: self.hang(guard))
                except errors.PluginTimeout as error:
                    answers.append(error.message)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        self.assertEqual((len(answers), self.incidents.recorded), (4, [SLEEPY]))
        wait_until(lambda: len(self.fatal) == 1, "the process is ended", 60)

    def test_a_timeout_of_the_work_itself_comes_out_and_so_does_an_answer_of_the_last_moment(self) -> None:
        def late() -> None:
            raise TimeoutError("the store's own")

        with self.assertRaisesRegex(TimeoutError, "the store's own"):
            self.make().request(late)

    def test_who_hung_too_often_is_not_run_any_more(self) -> None:
        plugins = (Plugin("good"), Plugin("sleepy"))
        self.incidents.recorded = [SLEEPY]
        self.make().check_breakers(plugins)
        self.incidents.recorded = [SLEEPY, SLEEPY]
        with self.assertRaisesRegex(errors.PluginTimeout, "'sleepy'.*hung or exited 2 times.*Take it out"):
            self.make().check_breakers(plugins)
        # A weigher of the same name has done nothing.
        self.make().check_breakers((Plugin("sleepy", group="moorage.weighers"),))

    def test_one_that_exits_refuses_its_request_by_its_name_and_counts_like_one_that_hangs(self) -> None:
        guard = self.make()
        fleet = fleets.random_fleet(random.Random(1), 30).snapshot()
        spec = fleets.random_request(random.Random(1))
        for error in (SystemExit(5), KeyboardInterrupt()):
            for made, name in (
                (filter_and_weigh.of([Leaves(error)]), "Leaves"),
                (filter_and_weigh.of([], [Weighs(error)]), "Weighs"),
            ):
                self.incidents.recorded = []
                with self.assertRaises(errors.PluginFailed) as caught, self.assertLogs("moorage.scheduling", "ERROR"):
                    guard.request(lambda: made.run(guard, fleet, fleet.all_rows, spec))  # noqa: B023
                self.assertIn(f"'{name}'", caught.exception.message)
                self.assertIn(repr(error), caught.exception.message)
                self.assertEqual(1, len(self.incidents.recorded))
        self.assertEqual(guard.request(lambda: "the next one is answered"), "the next one is answered")
        self.assertEqual(self.fatal, [])

    def test_whatever_ends_a_request_it_does_not_end_who_waits_for_it(self) -> None:
        with self.assertRaises(plugin_isolation.PluginExit):
            self.make().request(lambda: sys.exit(5))

    def test_what_a_request_raises_comes_out(self) -> None:
        def work() -> None:
            raise errors.NoValidHost("there is none")

        with self.assertRaises(errors.NoValidHost):
            self.make().request(work)

    # -- in the thread of the request -----------------------------------------------------------------------------

    def test_a_hang_in_the_thread_of_the_request_is_answered_in_its_place(self) -> None:
        self.assert_hangs_are_answered(self.make(0.1))

    def assert_hangs_are_answered(self, guard: PluginRunner) -> None:
        """Asserts that two requests that hang in threads of their own are answered in their place."""
        answers: list[errors.MoorageError] = []
        outcomes: list[str] = []

        def ask() -> None:
            self.hang(guard)
            outcomes.append(threading.current_thread().name)

        for times in (1, 2):
            with contextlib.redirect_stderr(io.StringIO()):
                asking = threading.Thread(target=lambda: guard.request(ask, answers.append), name="mine")
                asking.start()
                wait_until(lambda times=times: len(answers) == times, "the answer", 60)  # type: ignore[misc]
            self.assertIsInstance(answers[-1], errors.PluginTimeout)
            self.assertIn("'sleepy'", answers[-1].message)
            self.release.set()
            asking.join(60)
            self.release.clear()
            # The second one comes when nothing is watched.
            wait_until(lambda: guard._watch._sleeps or not guard._watch._thread, "the watching thread sleeps", 60)
        self.assertEqual((["mine"] * 2, [SLEEPY]), (outcomes, self.incidents.recorded))
        wait_until(lambda: len(self.fatal) == 1, "the process is ended", 60)

    def test_a_request_in_its_own_thread_may_take_long_when_no_single_plugin_does(self) -> None:
        guard = self.make(0.2)

        def work() -> int:
            with guard.slot() as slot:
                for number in range(6):
                    slot.begin(Plugin(f"quick-{number}"))
                    self.release.wait(0.1)
            return threading.get_ident()

        self.assertEqual(threading.get_ident(), guard.request(work, self.fail))
        self.assertEqual((self.incidents.recorded, self.fatal, guard._watch._requests), ([], [], {}))

    def test_what_ends_a_request_in_its_own_thread_comes_out(self) -> None:
        guard = self.make()
        with self.assertRaises(plugin_isolation.PluginExit):
            guard.request(lambda: sys.exit(5), self.fail)
        with self.assertRaises(ZeroDivisionError):
            guard.request(lambda: 1 / 0, self.fail)
        self.assertEqual({}, guard._watch._requests)

    def test_the_thread_that_watches_ends_when_no_request_comes_and_the_next_one_starts_another(self) -> None:
        with mock.patch.object(plugin_runner, "_IDLE", 0.01):
            guard = self.make(0.1)
            for _ in range(3):
                guard.request(lambda: None, self.fail)
                wait_until(lambda: guard._watch._thread is None, "the thread has ended", 60)
            self.assert_hangs_are_answered(guard)

    def test_an_answer_that_fails_does_not_end_the_watch(self) -> None:
        guard = self.make(0.1)
        answers: list[errors.MoorageError] = []

        def fails(error: errors.MoorageError) -> None:
            raise OSError("the connection is lost")

        with contextlib.redirect_stderr(io.StringIO()), self.assertLogs("moorage.scheduling.plugin_runner", "ERROR"):
            for answer in (fails, answers.append):
                threading.Thread(target=guard.request, args=(lambda: self.hang(guard), answer)).start()
            wait_until(lambda: answers, "the other answer", 60)

    def test_where_no_thread_can_be_started_to_watch_the_runner_raises_the_error(self) -> None:
        guard = self.make(0.1)
        with mock.patch("moorage.threads.try_start", return_value=None):
            self.assertFalse(guard._watch.begin(lambda: False, self.fail))
        self.assertEqual({}, guard._watch._requests)
        with (
            mock.patch.object(guard._watch, "begin", return_value=False),
            contextlib.redirect_stderr(io.StringIO()),
            self.assertRaises(errors.PluginTimeout),
        ):
            guard.request(lambda: self.hang(guard), self.fail)

    def test_a_run_inside_of_a_run_gives_the_place_back(self) -> None:
        guard = self.make()
        with guard.slot() as outer:
            outer.begin(Plugin("outer"))
            with guard.slot() as inner:
                inner.begin(Plugin("inner"))
            self.assertEqual([slot.plugin for slot in guard._running.values()], [Plugin("outer")])
        self.assertEqual(guard._running, {})
