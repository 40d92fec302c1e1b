# SPDX-License-Identifier: Apache-2.0
"""The supervisor over real processes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

from moorage import errors
from moorage.clock import SystemClock
from moorage.control_plane import config, supervisor
from moorage.db import Database
from moorage.services.heartbeat import Heartbeat

READY = "import os, sys, time\nos.write(int(os.environ['MOORAGE_READY_FD']), b'ready\\n')\n"
SLEEP = READY + "time.sleep(600)\n"


def until(condition: Callable[[], bool], seconds: float = 90.0) -> bool:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie: nobody may take the status of an orphan."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestSupervisor(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def make(self, codes: dict[str, str], **settings: float) -> supervisor.Supervisor:
        programs = [supervisor.Program(name, name, [sys.executable, "-c", code]) for name, code in codes.items()]
        arguments = {"delay": 0.05, "longest_delay": 0.2, "max_rss": 2**31, "drain_timeout": 60, "start_timeout": 90}
        arguments.update(settings)
        return supervisor.Supervisor(programs, self.folder, SystemClock(), **arguments)  # type: ignore[arg-type]

    def run_in_thread(self, keeper: supervisor.Supervisor) -> threading.Thread:
        keeper.start()
        thread = threading.Thread(target=keeper.run)
        thread.start()

        def end() -> None:
            keeper.stop()
            thread.join(90)

        self.addCleanup(end)
        return thread

    def table(self) -> dict[str, dict[str, int]]:
        return {row["name"]: row for row in json.loads((self.folder / "run" / "processes.json").read_text())}

    def test_a_killed_process_is_started_again_and_the_others_are_left_alone(self) -> None:
        self.run_in_thread(self.make({"one": SLEEP, "two": SLEEP}))
        before = self.table()
        os.kill(before["one"]["pid"], signal.SIGKILL)
        self.assertTrue(until(lambda: self.table()["one"]["pid"] not in (None, before["one"]["pid"])))
        self.assertEqual(1, self.table()["one"]["restarts"])
        self.assertEqual(before["two"], self.table()["two"])

    def test_a_process_that_grows_too_large_is_started_anew(self) -> None:
        grow = (
            READY
            + "x = bytearray(200 * 2**20) if not os.path.exists(sys.argv[1]) else 0\nopen(sys.argv[1], 'w')\ntime.sleep(600)"
        )
        keeper = self.make({}, max_rss=100 * 2**20)
        mark = str(self.folder / "grew")
        keeper._children.append(supervisor._Child(supervisor.Program("big", "big", [sys.executable, "-c", grow, mark])))
        self.run_in_thread(keeper)
        self.assertTrue(until(lambda: self.table()["big"]["restarts"] == 1))

    def test_a_process_that_stays_stopped_is_started_anew(self) -> None:
        self.run_in_thread(self.make({"one": SLEEP, "two": SLEEP}, stopped_timeout=0.3))
        before = self.table()
        os.kill(before["one"]["pid"], signal.SIGSTOP)
        self.assertTrue(until(lambda: self.table()["one"]["pid"] not in (None, before["one"]["pid"])))
        self.assertEqual(before["two"], self.table()["two"])

    def test_a_process_that_goes_on_in_time_is_left_alone(self) -> None:
        self.run_in_thread(keeper := self.make({"one": SLEEP}, stopped_timeout=600))
        before = self.table()
        os.kill(before["one"]["pid"], signal.SIGSTOP)
        self.assertTrue(until(lambda: keeper._children[0].stopped_at is not None))
        os.kill(before["one"]["pid"], signal.SIGCONT)
        self.assertTrue(until(lambda: keeper._children[0].stopped_at is None))
        self.assertEqual(before, self.table())

    def test_a_stopped_process_is_killed_when_it_holds_the_writers_turn(self) -> None:
        path = self.folder / "x.sqlite"
        writes = f"""
import os, signal, sys
from moorage.db import Database
from moorage.services.heartbeat import Heartbeat
database = Database("sqlite:///{path}", lock_timeout=60)
if not os.path.exists("{path}.made"):
    open("{path}.made", "w").close()
    with database.write() as tx:
        tx.exec_driver_sql("CREATE TABLE t (n INTEGER)")
        {READY.replace(chr(10), chr(10) + "        ")}
        os.kill(os.getpid(), signal.SIGSTOP)
{READY}
signal.pause()
"""
        database = Database(f"sqlite:///{path}", lock_timeout=60)
        self.addCleanup(database.close)
        keeper = self.make({"one": writes}, writer_timeout=0.5)
        keeper._writer = database.current_writer
        self.run_in_thread(keeper)
        # What waits for the turn gets it, and the killed transaction left nothing.
        with database.write() as tx:
            self.assertEqual(0, tx.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar())
        self.assertTrue(until(lambda: self.table()["one"]["restarts"] == 1))

    def test_a_writer_is_killed_before_the_heartbeats_of_all_others_are_too_old(self) -> None:
        clock = SystemClock()
        for down, stopped in ((6.0, 30.0), (60.0, 30.0), (600.0, 30.0), (60.0, 0.0)):
            overrides: dict[tuple[str, str], object] = {
                ("services", "service_down_time"): down,
                ("services", "report_interval"): 1.0,
                ("control_plane", "stopped_timeout"): stopped,
            }
            conf = config.load(files=["/dev/null"], overrides=overrides)
            unused: Any = mock.sentinel.unused
            heartbeat = Heartbeat(unused, unused, clock, interval=1.0, service_down_time=down, on_lost=unused)
            patience = heartbeat.valid_until - clock.monotonic()
            limit = supervisor.writer_limit(conf)
            self.assertLess(supervisor._RUNNING_WRITER * limit, patience)
            self.assertEqual(limit == 0, stopped == 0)

    def test_a_refused_configuration_ends_the_start_with_the_childs_own_words(self) -> None:
        refuse = (
            "import os, sys\nos.write(int(os.environ['MOORAGE_READY_FD']), b'the plugin x is missing\\n')\n"
            f"sys.exit({supervisor.EXIT_CONFIG})"
        )
        keeper = self.make({"good": SLEEP, "bad": refuse})
        with self.assertRaises(errors.ConfigError) as caught:
            keeper.start()
        self.assertEqual("the plugin x is missing", caught.exception.message)
        self.assertIsNone(keeper._children[0].pid, "the other process was left running")

    def test_a_process_that_was_ready_before_the_others_and_ended_is_started_again(self) -> None:
        marks = str(self.folder / "marks")
        early = (
            READY
            + f"open({marks!r}, 'a').write('x')\nif len(open({marks!r}).read()) < 3: sys.exit(1)\ntime.sleep(600)\n"
        )
        wait = f"import os, time\nwhile not os.path.exists({marks!r}) or len(open({marks!r}).read()) < 3: time.sleep(0.02)\n"
        keeper = self.make({"early": early, "late": wait + SLEEP})
        self.run_in_thread(keeper)
        self.assertEqual([True, True], [child.ready for child in keeper._children])
        self.assertEqual(2, self.table()["early"]["restarts"])

    def test_a_process_that_gave_up_before_it_was_ready_is_started_again(self) -> None:
        marks = str(self.folder / "marks")
        text = f"import os\nopen({marks!r}, 'a').write('x')\n"
        text += f"if len(open({marks!r}).read()) < 3: os._exit({supervisor.EXIT_FATAL})\n"
        keeper = self.make({"weary": text + SLEEP})
        self.run_in_thread(keeper)
        self.assertTrue(keeper._children[0].ready)
        self.assertEqual(2, self.table()["weary"]["restarts"])

    def test_a_process_that_always_gives_up_fails_the_start_by_name(self) -> None:
        keeper = self.make({"weary": f"import os; os._exit({supervisor.EXIT_FATAL})"}, start_timeout=2)
        with self.assertRaises(errors.Unavailable) as caught:
            keeper.start()
        self.assertRegex(caught.exception.message, r"weary \(started again \d+ times\)")

    def test_a_process_that_is_never_ready_fails_the_start_by_name(self) -> None:
        keeper = self.make({"slow": "import time; time.sleep(600)"}, start_timeout=0.5)
        with self.assertRaises(errors.Unavailable) as caught:
            keeper.start()
        self.assertIn("slow", caught.exception.message)

    def test_a_process_that_fails_for_another_reason_is_no_configuration_error(self) -> None:
        keeper = self.make({"bad": "import sys; sys.exit(1)"})
        with self.assertRaises(errors.Unavailable) as caught:
            keeper.start()
        self.assertIn("bad ended at its start (exit status 1)", caught.exception.message)

    def test_a_process_that_ignores_sigterm_is_killed_in_the_end(self) -> None:
        deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
        keeper = self.make({"deaf": deaf}, drain_timeout=0.5)
        thread = self.run_in_thread(keeper)
        keeper.stop()
        thread.join(90)
        self.assertFalse(thread.is_alive())
        self.assertIsNone(self.table()["deaf"]["pid"])

    def test_an_api_that_hangs_does_not_take_the_time_that_others_need_to_drain(self) -> None:
        mark = self.folder / "drained"
        deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
        drains = (
            f"import pathlib, signal, sys\n{READY}signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
            f"signal.sigwait([signal.SIGTERM])\ntime.sleep(0.5)\npathlib.Path({str(mark)!r}).write_text('x')\n"
        )
        keeper = self.make({"api": deaf, "agent": drains})
        keeper.start()
        api = keeper._children[0].process
        assert api is not None

        class ApisTime(SystemClock):
            """An hour passes while the API is awaited, and nothing while the agent is."""

            def __init__(self, api: subprocess.Popen[bytes]) -> None:
                self.api = api
                self.now = 0.0

            def monotonic(self) -> float:
                return self.now

            def sleep(self, seconds: float) -> None:
                time.sleep(seconds)
                self.now += 3600 if self.api.poll() is None else 0

        keeper._clock = ApisTime(api)
        keeper.stop()
        keeper.run()
        self.assertTrue(mark.exists(), "the agent was killed while it drained")
        self.assertEqual({"api": None, "agent": None}, {name: row["pid"] for name, row in self.table().items()})

    def forking(self) -> str:
        """A program that is copied; both ignore what asks them to end, and the copy tells its number."""
        copied = str(self.folder / "copied")
        return (
            "import os, pathlib, signal, time\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
            f"if not os.fork():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    new = pathlib.Path({copied!r} + '.new')\n"
            f"    new.write_text(str(os.getpid()))\n    new.rename({copied!r})\n    time.sleep(600)\n" + SLEEP
        )

    def copy(self) -> int:
        mark = self.folder / "copied"
        self.assertTrue(until(mark.exists))
        return int(mark.read_text())

    def test_a_copy_that_a_child_made_ends_with_it_and_not_before(self) -> None:
        self.run_in_thread(keeper := self.make({"one": self.forking()}))
        first, pid = self.copy(), self.table()["one"]["pid"]
        keeper.reload()
        self.assertTrue(until(lambda: not keeper._reload.is_set()))
        self.assertTrue(runs(first))
        (self.folder / "copied").unlink()
        os.kill(pid, signal.SIGKILL)
        self.assertTrue(until(lambda: not runs(first)), "the copy outlives its process")
        self.assertTrue(runs(self.copy()), "what was restarted was ended too")

    def test_no_copy_is_left_when_all_has_ended(self) -> None:
        thread = self.run_in_thread(keeper := self.make({"one": self.forking()}))
        copy = self.copy()
        keeper.stop()
        thread.join(90)
        self.assertTrue(until(lambda: not runs(copy)), "the copy outlives the supervisor")

    def test_sighup_reaches_the_children(self) -> None:
        mark = self.folder / "reloaded"
        code = f"import signal\nsignal.signal(signal.SIGHUP, lambda *_: open({str(mark)!r}, 'w').close())\n{READY}"
        keeper = self.make({"one": code + "\nwhile True: time.sleep(0.05)"})
        self.run_in_thread(keeper)
        keeper.reload()
        self.assertTrue(until(mark.exists))

    def test_a_configuration_that_is_refused_here_reaches_no_child(self) -> None:
        mark = self.folder / "hup"
        code = (
            f"import pathlib, signal\nsignal.signal(1, lambda *_: pathlib.Path({str(mark)!r}).write_text('x'))\n"
            + SLEEP
        )
        keeper = self.make({"one": code})
        asked: list[bool] = []
        answers = [False, True]

        def may() -> bool:
            asked.append(mark.exists())
            return answers.pop(0)

        keeper._may_reload = may
        self.run_in_thread(keeper)
        keeper.reload()
        self.assertTrue(until(lambda: len(asked) == 1))
        keeper.reload()
        self.assertTrue(until(mark.exists))
        self.assertEqual([False, False], asked)

    def test_a_child_that_cannot_be_started_again_now_is_started_later_and_the_table_may_be_lost(self) -> None:
        keeper = self.make({"one": SLEEP, "two": SLEEP})
        self.run_in_thread(keeper)
        pids = {name: row["pid"] for name, row in self.table().items()}
        log, away = self.folder / "log", self.folder / "away"
        log.rename(away)
        (self.folder / "run").rename(self.folder / "ran")
        os.kill(pids["one"], signal.SIGKILL)
        self.assertTrue(until(lambda: keeper._children[0].delay > 0.05), "it was not tried")
        os.kill(pids["two"], 0)
        (self.folder / "ran").rename(self.folder / "run")
        away.rename(log)
        self.assertTrue(until(lambda: self.table()["one"]["pid"] not in (None, pids["one"])))
        self.assertEqual(pids["two"], self.table()["two"]["pid"])

    def test_an_end_that_was_asked_for_before_the_start_is_not_forgotten(self) -> None:
        asked = threading.Event()
        asked.set()
        programs = [supervisor.Program("one", "one", [sys.executable, "-c", SLEEP])]
        keeper = supervisor.Supervisor(
            programs, self.folder, SystemClock(),
            delay=1, longest_delay=1, max_rss=2**31, drain_timeout=60, start_timeout=90, stopping=asked,
        )  # fmt: skip
        keeper.start()
        keeper.run()
        self.assertIsNone(self.table()["one"]["pid"])
