# SPDX-License-Identifier: Apache-2.0
"""What the process of a role does when it is fenced off, reloads or is ended at a bad moment."""

from __future__ import annotations

import contextlib
import io
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from moorage.clock import SystemClock
from moorage.control_plane import process
from moorage.control_plane.accepted_config import AcceptedCopy, ConfigSource
from moorage.control_plane.agent_role import Agent
from moorage.control_plane.supervisor import EXIT_CONFIG, EXIT_FATAL
from moorage.db import Database, migrations
from moorage.services.registry import ServiceRegistry
from tests import servers
from tests.forking import Command
from tests.functional.control_plane import role_process

#: It beats so that an eviction is seen at once, and is patient so that a loaded machine fences nobody.
CONF = "[services]\nreport_interval = 0.1\nservice_down_time = 600\n[control_plane]\ndrain_timeout = 600\n"
PATIENCE = 90.0


class ProcessCase(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        database = self.database = Database(f"sqlite:///{self.folder / 'moorage.sqlite'}")
        self.addCleanup(database.close)
        migrations.upgrade_all(database)
        self.registry = ServiceRegistry(database, SystemClock())

    def begin(self, *words: str, conf: str = CONF) -> Command:
        (self.folder / "moorage.conf").write_text(conf)
        (self.folder / "said").write_text("")
        process = Command([str(self.folder), *words], self.folder / "said", program=role_process.main)

        def end() -> None:
            process.kill()
            process.wait()

        self.addCleanup(end)
        return process

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def await_place(self, process: Command, place: str, times: int = 1) -> None:
        progress = self.folder / "progress"

        def there() -> bool:
            assert process.poll() is None, self.said()
            return progress.exists() and progress.read_text().splitlines().count(place) >= times

        servers.wait_until(there, place, PATIENCE)

    def evict(self) -> None:
        (row,) = self.registry.list()
        # It beats all the time, and an eviction needs the very beat that was seen.
        servers.wait_until(
            lambda: self.registry.evict(row.uuid, row.epoch, self.registry.get(row.uuid).beat), "eviction"
        )

    def assert_fenced(self, process: Command) -> None:
        self.evict()
        self.assertEqual(EXIT_FATAL, process.wait(PATIENCE))
        self.assertIn("stops at once: epoch 1 of service", self.said())


class NameTests(ProcessCase):
    def test_a_name_that_is_no_name_of_a_folder_is_refused_before_anything_is_written(self) -> None:
        for name, said in (
            ("", "has 0 characters"),
            ("n" * 256, "has 256 characters, and 1 to 255 are allowed"),
            ("./agent-1", "has a slash"),
            ("../../agent-1", "has a slash"),
            ("..", "is the name of a folder"),
            (".", "is the name of a folder"),
            ("agent\n1", r"cannot be printed: 'agent\n1'"),
        ):
            source, heard = mock.create_autospec(ConfigSource, instance=True), io.StringIO()
            with contextlib.redirect_stderr(heard):
                self.assertEqual(EXIT_CONFIG, process.run(Agent(), name, source))
            self.assertIn(said, heard.getvalue())
            self.assertEqual(1, heard.getvalue().count("\n"))
            self.assertEqual([], source.mock_calls)

    def test_an_agent_does_not_start_with_a_path_for_its_name(self) -> None:
        state = self.folder / "state"
        command = [
            sys.executable,
            "-m",
            "moorage.cli.roles",
            "agent",
            "--name",
            "../../outside",
            "--state-dir",
            str(state),
        ]
        done = subprocess.run(
            [*command, "--set", f"database.connection=sqlite:///{self.folder / 'moorage.sqlite'}"],
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        self.assertEqual(EXIT_CONFIG, done.returncode, done.stderr)
        self.assertIn("moorage agent ../../outside: The name of the service has a slash", done.stderr)
        self.assertEqual(([], False), (list(self.registry.list()), state.exists()))


class FenceTests(ProcessCase):
    """Its drain may take 600 seconds and what hangs hangs for ever, so only the fence can end it."""

    def test_it_ends_at_once_while_it_works(self) -> None:
        process = self.begin()
        self.await_place(process, "ready")
        self.assert_fenced(process)

    def test_it_ends_at_once_while_it_starts(self) -> None:
        process = self.begin("hang-start")
        self.await_place(process, "start")
        self.assert_fenced(process)

    def test_it_ends_at_once_while_it_reloads(self) -> None:
        process = self.begin("hang-reload")
        self.await_place(process, "ready")
        process.send_signal(signal.SIGHUP)
        self.await_place(process, "reload")
        self.assert_fenced(process)

    def test_it_ends_at_once_while_it_drains(self) -> None:
        process = self.begin("hang-stop")
        self.await_place(process, "ready")
        process.send_signal(signal.SIGTERM)
        self.await_place(process, "stop")
        self.assert_fenced(process)


class SilenceTests(ProcessCase):
    """The store takes no beats; what counts is who ends, and not when."""

    conf = (
        CONF.replace("service_down_time = 600", "service_down_time = 5")
        + "[database]\nlock_timeout = 1\nattempts = 1\n"
    )

    def begin_and_lock(self, *words: str) -> tuple[Command, contextlib.ExitStack]:
        process = self.begin(*words, conf=self.conf)
        self.await_place(process, "ready")
        held = contextlib.ExitStack()
        self.addCleanup(held.close)
        # Another process that stopped in the middle of a transaction would do the same.
        held.enter_context(self.database.write())
        return process, held

    def test_what_owns_work_ends_before_others_may_take_it_over(self) -> None:
        process, _ = self.begin_and_lock()
        self.assertEqual(EXIT_FATAL, process.wait(PATIENCE))
        self.assertIn("no heartbeat reached the store", self.said())

    def test_what_owns_nothing_stays_and_beats_again(self) -> None:
        process, held = self.begin_and_lock("own-nothing")
        servers.wait_until(lambda: "Heartbeat failed" in self.said(), "a beat that failed", PATIENCE)
        held.close()
        (row,) = self.registry.list()
        servers.wait_until(lambda: self.registry.get(row.uuid).beat > row.beat, "the next beat", PATIENCE)
        self.assertIsNone(process.poll())


class ReloadTests(ProcessCase):
    def test_whatever_a_reload_raises_the_old_configuration_stays_and_the_next_one_is_taken(self) -> None:
        process = self.begin("fail-reload")
        self.await_place(process, "ready")
        process.send_signal(signal.SIGHUP)
        servers.wait_until(lambda: "a mistake of the author" in self.said(), "the log", PATIENCE)
        self.assertIn("The new configuration is not taken, the old one stays.", self.said())
        process.send_signal(signal.SIGHUP)
        self.await_place(process, "reloaded")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(0, process.wait(PATIENCE))

    def test_a_plugin_that_exits_while_it_reloads_ends_nothing(self) -> None:
        process = self.begin("exit-reload")
        self.await_place(process, "ready")
        process.send_signal(signal.SIGHUP)
        servers.wait_until(lambda: "SystemExit(4)" in self.said(), "the log", PATIENCE)
        process.send_signal(signal.SIGHUP)
        self.await_place(process, "reloaded")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(0, process.wait(PATIENCE))


class AcceptedTests(ProcessCase):
    """A role that runs alone, and is killed while its file is wrong."""

    def conf_of(self, cluster: str) -> str:
        return f"{CONF}[agent]\ncluster = {cluster}\n"

    def kill(self, process: Command) -> None:
        process.kill()
        process.wait(PATIENCE)

    def test_after_a_refused_file_it_starts_with_the_accepted_copy_and_says_so(self) -> None:
        process = self.begin(conf=self.conf_of("first"))
        self.await_place(process, "ready")
        servers.wait_until(
            lambda: (self.folder / "accepted" / "agent-one" / "current").exists(), "the accepted copy", PATIENCE
        )
        for number, wrong in enumerate((self.conf_of("refused"), "[agent\n", f"{CONF}[rpc]\ncall_timeout = soon\n")):
            self.kill(process)
            process = self.begin(conf=wrong)
            self.await_place(process, "ready", number + 2)
            self.assertEqual(number + 2, self.progress().count("cluster first"))
            self.assertRegex(
                self.said(), r"WARNING.*The configuration in use is the copy in .*accepted at 20.*refused: "
            )
        # A reload tries the file again, and keeps what it accepts.
        (self.folder / "moorage.conf").write_text(self.conf_of("second"))
        process.send_signal(signal.SIGHUP)
        # The copy is written after the role has taken the file: killed in between, it would keep the copy before.
        copy = AcceptedCopy(self.folder / "accepted" / "agent-one")
        servers.wait_until(
            lambda: copy.contents() == [("moorage.conf", self.conf_of("second").encode())], "the new copy", PATIENCE
        )
        self.kill(process)
        process = self.begin(conf=self.conf_of("refused"))
        self.await_place(process, "cluster second", 2)

    def progress(self) -> list[str]:
        return (self.folder / "progress").read_text().splitlines()

    def test_a_wrong_file_at_the_first_start_is_an_error(self) -> None:
        process = self.begin(conf=self.conf_of("refused"))
        self.assertEqual(EXIT_CONFIG, process.wait(PATIENCE))
        self.assertIn("[agent] cluster = refused cannot be used", self.said())

    def test_only_the_owner_can_read_the_copy(self) -> None:
        process = self.begin()
        self.await_place(process, "ready")
        copies = self.folder / "accepted" / "agent-one"
        servers.wait_until(lambda: (copies / "current").exists(), "the copy", PATIENCE)
        (file,) = (copies / "current").iterdir()
        self.assertEqual((0o600, CONF), (file.stat().st_mode & 0o777, file.read_text()))
        self.assertEqual(0o700, copies.stat().st_mode & 0o777)

    def test_of_many_copies_the_last_two_stay(self) -> None:
        copy = AcceptedCopy(self.folder / "accepted" / "up")
        self.assertIsNone(copy.contents())
        for number in range(4):
            copy.store([("moorage.conf", b"[api]\n" * number), ("more.conf", b"")])
            self.assertEqual([("moorage.conf", b"[api]\n" * number), ("more.conf", b"")], copy.contents())
        self.assertEqual(2, len(list(copy.folder.glob("copy-*"))))


class StartTests(ProcessCase):
    def test_sigterm_ends_it_while_its_start_hangs(self) -> None:
        process = self.begin("hang-start")
        self.await_place(process, "start")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(0, process.wait(PATIENCE))
        (row,) = self.registry.list()
        self.assertTrue(row.stopped, "others wait for its heartbeats")

    def test_a_start_that_fails_ends_it(self) -> None:
        process = self.begin("fail-start")
        self.assertEqual(1, process.wait(PATIENCE))
        self.assertIn("a mistake of the author", self.said())

    def test_a_plugin_that_exits_while_it_starts_is_told(self) -> None:
        process = self.begin("exit-start")
        self.assertEqual(1, process.wait(PATIENCE))
        self.assertIn("It failed (PluginExit: SystemExit(4) would have ended the process)", self.said())

    def test_a_configuration_that_is_refused_ends_it_whatever_threads_there_are_and_nobody_waits_for_it(self) -> None:
        process = self.begin("refuse-start")
        self.assertEqual(EXIT_CONFIG, process.wait(PATIENCE))
        self.assertEqual("moorage agent one: an option is nonsense", self.said().splitlines()[-1])
        (row,) = self.registry.list()
        self.assertTrue(row.stopped, "others wait for its heartbeats")

    def test_messages_that_do_not_leave_a_process_are_refused(self) -> None:
        process = self.begin(conf=CONF + "[rpc]\ntransport_url = memory://\n")
        self.assertEqual(EXIT_CONFIG, process.wait(PATIENCE))
        self.assertIn("'memory', which is not cross-process", self.said())

    def test_a_broker_that_is_away_is_named_after_a_while(self) -> None:
        port = servers.free_port()
        conf = f"{CONF}[rpc]\nconnect_timeout = 1\ntransport_url = rabbit://somebody:secret@127.0.0.1:{port}/\n"
        process = self.begin("serve", conf=conf)
        self.assertEqual(1, process.wait(PATIENCE))
        self.assertIn(f"[rpc] transport_url names 127.0.0.1:{port}.", self.said())
        self.assertNotIn("secret", self.said())
        self.assertNotIn("Traceback", self.said())

    def test_sigterm_ends_it_while_it_waits_for_the_broker(self) -> None:
        conf = f"{CONF}[rpc]\nconnect_timeout = 600\ntransport_url = rabbit://a:b@127.0.0.1:{servers.free_port()}/\n"
        process = self.begin("serve", conf=conf)
        self.await_place(process, "start")
        process.send_signal(signal.SIGTERM)
        self.assertEqual(0, process.wait(PATIENCE))
