# SPDX-License-Identifier: Apache-2.0
"""What only transport local has: sockets, a key, a run folder, and processes that die, stop and fork."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any
from unittest import mock

from moorage import errors, threads
from moorage.clock import SystemClock
from moorage.rpc.interface import Message
from moorage.testing.transport import PATIENCE, Recorder, eventually
from moorage.testing.transport_peer import configuration
from moorage_plugins.transports import local_listener
from moorage_plugins.transports.local import LocalTransport
from moorage_plugins.transports.local_registry import Registry

#: Serves topic t as 'peer'. ``fork`` leaves a child behind that only sleeps, and tells its pid; ``hang`` never answers.
PEER = """
import os, signal, sys, time
from moorage.clock import SystemClock
from moorage.testing.transport_peer import configuration
from moorage_plugins.transports.local import LocalTransport

def handle(message):
    if message.method == "hang":
        print("hanging", flush=True)
        time.sleep(1000)
    if message.method == "fork":
        child = os.fork()
        if not child:
            try:
                signal.pause()
            finally:
                os._exit(0)
        return child
    return message.args

transport = LocalTransport(conf=configuration({}), url=sys.argv[1], clock=SystemClock())
transport.serve("t", "peer", handle)
print("ready", flush=True)
sys.stdin.read()
"""


class LocalTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.url = f"local://{self.folder}"

    def transport(self, **options: Any) -> LocalTransport:
        transport = LocalTransport(conf=configuration(options), url=self.url, clock=SystemClock())
        self.addCleanup(transport.close)
        return transport

    @contextmanager
    def peer(self) -> Iterator[subprocess.Popen[str]]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with subprocess.Popen(
            [sys.executable, "-c", PEER, self.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            self.assertEqual("ready\n", process.stdout.readline())
            try:
                yield process
            finally:
                process.kill()

    def sockets(self) -> list[Path]:
        return sorted(Path(self.folder).rglob("*.sock"))

    def test_another_thread_answers_a_call_that_hangs_and_the_next_call_is_read(self) -> None:
        release = threading.Event()
        self.addCleanup(release.set)

        def handle(message: Message) -> str:
            if message.method == "hang":
                assert message.answer_early is not None
                threading.Thread(target=message.answer_early, args=(errors.Unavailable("it hangs"),)).start()
                self.assertTrue(release.wait(PATIENCE))
            return "late"

        self.transport().serve("t", "one", handle)
        caller = self.transport()
        for _ in range(2):
            with self.assertRaisesRegex(errors.Unavailable, "it hangs"):
                caller.call("t", Message("hang"), timeout=PATIENCE)
            self.assertEqual("late", caller.call("t", Message("other"), timeout=PATIENCE))
        release.set()
        for _ in range(3):
            self.assertEqual("late", caller.call("t", Message("other"), timeout=PATIENCE))

    def test_an_early_answer_that_comes_after_the_answer_changes_nothing(self) -> None:
        given: list[Message] = []

        def handle(message: Message) -> str:
            given.append(message)
            return "answered"

        self.transport().serve("t", "one", handle)
        caller = self.transport()
        for _ in range(2):
            self.assertEqual("answered", caller.call("t", Message("other"), timeout=PATIENCE))
            answer_early = given[-1].answer_early
            assert answer_early is not None
            answer_early(errors.Unavailable("too late"))
        self.assertEqual("answered", caller.call("t", Message("other"), timeout=PATIENCE))

    # -- who may talk ---------------------------------------------------------------------------------------------

    def test_key_and_folders_are_for_their_owner_only(self) -> None:
        self.transport().serve("t", "one", Recorder())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(self.folder).rglob("*")}
        self.assertEqual(0o600, modes.pop("key"))
        self.assertEqual(0o700, modes.pop("t"))
        self.assertTrue(all(mode & 0o077 == 0 for name, mode in modes.items() if not name.endswith(".sock")), modes)

    def test_a_key_that_others_can_read_is_refused(self) -> None:
        self.transport().serve("t", "one", Recorder())
        Path(self.folder, "key").chmod(0o644)
        with self.assertRaisesRegex(errors.ConfigError, "chmod 600"):
            self.transport().call("t", Message("x"), timeout=PATIENCE)

    def test_a_folder_that_others_can_write_is_refused(self) -> None:
        Path(self.folder).chmod(0o777)
        with self.assertRaisesRegex(errors.ConfigError, "chmod 700"):
            self.transport().serve("t", "one", Recorder())

    def test_a_damaged_key_is_refused(self) -> None:
        Path(self.folder, "key").touch(0o600)
        with self.assertRaisesRegex(errors.ConfigError, "damaged"):
            self.transport().serve("t", "one", Recorder())

    def test_many_that_start_at_once_agree_on_one_key(self) -> None:
        barrier = threading.Barrier(8)

        def read(_: int) -> bytes:
            barrier.wait(PATIENCE)
            return Registry(self.folder, SystemClock()).key()

        with ThreadPoolExecutor(8) as pool:
            self.assertEqual(1, len(set(pool.map(read, range(8)))))
        self.assertEqual(["key"], os.listdir(self.folder))

    def test_a_wrong_key_is_refused_on_both_sides(self) -> None:
        transport, recorder = self.transport(), Recorder()
        transport.serve("t", "one", recorder)
        key = Path(self.folder, "key")
        right = key.read_bytes()
        key.write_bytes(b"0" * 64)
        with self.assertLogs("moorage_plugins.transports.local_listener", "WARNING") as logs:
            with self.assertRaisesRegex(errors.TransportError, "different keys") as caught:
                self.transport().call("t", Message("x"), timeout=PATIENCE)
            self.assertIs(errors.TransportError, type(caught.exception))
            eventually(lambda: logs.output, "the listener's warning")
        self.assertEqual([], recorder.messages)
        key.write_bytes(right)
        self.assertEqual({}, self.transport().call("t", Message("x"), timeout=PATIENCE))

    # -- junk -----------------------------------------------------------------------------------------------------

    def connected(self) -> Connection[Any, Any]:
        key = Path(self.folder, "key").read_bytes().strip()
        connection = Client(str(self.sockets()[0]), "AF_UNIX", authkey=key)
        self.addCleanup(connection.close)
        return connection

    def test_junk_before_the_handshake_harms_nobody(self) -> None:
        transport = self.transport()
        transport.serve("t", "one", Recorder())
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x05hello", b"\x7f\xff\xff\xff"):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(self.sockets()[0]))
                raw.sendall(junk)
        self.assertEqual({}, transport.call("t", Message("x"), timeout=PATIENCE))

    def test_junk_after_the_handshake_is_answered_and_harms_nobody(self) -> None:
        transport, recorder = self.transport(), Recorder()
        transport.serve("t", "one", recorder)
        connection = self.connected()
        for junk in (
            b"",
            b"\x80\x04K\x01.",
            b"{}",
            b"[]",
            b'{"k":"call"}',
            b'{"k":"call","m":1}',
            b'{"k":"no","m":{"method":"x"}}',
        ):
            connection.send_bytes(junk)
            self.assertIn(b'"refused"', connection.recv_bytes())
        connection.send_bytes(b'{"k":"call","t":"x","m":{"method":"x"}}')
        self.assertIn(b'"refused"', connection.recv_bytes())
        self.assertEqual([], recorder.messages)
        self.assertEqual({}, transport.call("t", Message("x"), timeout=PATIENCE))

    def test_a_frame_that_is_too_large_is_refused_before_its_body_is_sent(self) -> None:
        transport = self.transport(max_message_bytes=4096)
        transport.serve("t", "one", Recorder())
        connection = self.connected()
        os.write(connection.fileno(), (1 << 30).to_bytes(4, "big"))
        self.assertIn(b"moorage.message_too_large", connection.recv_bytes())
        self.assertEqual({}, transport.call("t", Message("x"), timeout=PATIENCE))

    @mock.patch.object(local_listener, "STALL_SECONDS", 10 * PATIENCE)
    def test_one_that_connects_and_says_nothing_delays_nobody(self) -> None:
        transport = self.transport()
        transport.serve("t", "one", Recorder())
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(self.sockets()[0]))
            self.assertEqual({}, transport.call("t", Message("x"), timeout=PATIENCE))

    def test_one_for_whom_no_thread_can_be_started_is_let_go_and_the_next_one_served(self) -> None:
        recorder = Recorder()
        self.transport().serve("t", "server", recorder)
        start = threads.start

        def fails(target: Any, *, name: str, args: tuple[Any, ...] = ()) -> Any:
            if name == "rpc-t-read":
                raise RuntimeError("can't start new thread")
            return start(target, name=name, args=args)

        with mock.patch.object(threads, "start", fails), self.assertRaises(errors.TransportError):
            self.transport().call("t", Message("hello"), timeout=PATIENCE)
        self.transport().call("t", Message("hello"), timeout=PATIENCE)
        self.assertEqual(1, len(recorder.messages))

    def test_a_fanout_to_others_leaves_out_the_servers_of_the_sender(self) -> None:
        sender, other, own, others = self.transport(), self.transport(), Recorder(), Recorder()
        subscription = sender.serve("t", "own", own)
        # Another topic of the sender is none of this.
        sender.serve("more", "own", Recorder())
        sender.fanout("t", Message("alone", to_others=True))
        other.serve("t", "other", others)
        for method, to_others in (("a", False), ("b", True), ("c", False)):
            sender.fanout("t", Message(method, to_others=to_others))
        eventually(lambda: [each.method for each in others.messages] == ["a", "b", "c"], "the other one got all")
        eventually(lambda: [each.method for each in own.messages] == ["a", "c"], "the own one got the others")
        subscription.stop(PATIENCE)
        other.serve("t", "own", own)
        sender.fanout("t", Message("d", to_others=True))
        eventually(lambda: [each.method for each in own.messages] == ["a", "c", "d"], "its successor is another one")

    def test_a_listener_does_not_keep_threads_of_those_who_left(self) -> None:
        recorder = Recorder()
        self.transport().serve("t", "one", recorder)
        before = threading.active_count()
        for _ in range(5):
            caller = self.transport()
            caller.call("t", Message("x"), timeout=PATIENCE)
            caller.fanout("t", Message("x"))
            caller.close()
        eventually(lambda: recorder.finished == 10, "all handled")
        # Handling threads stay (at most 8 and 1); reading and sending ones end.
        eventually(lambda: threading.active_count() <= before + 9, "the threads ended")
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "rpc-t-read"], "the readers ended")

    # -- death ----------------------------------------------------------------------------------------------------

    def test_the_socket_of_a_dead_process_is_removed_and_its_name_is_free(self) -> None:
        transport = self.transport()
        with self.peer() as process:
            process.kill()
            process.wait()
            self.assertEqual(1, len(self.sockets()))
            self.assertEqual([], transport.listeners("t"))
            with self.assertRaises(errors.NoListener):
                transport.call("t", Message("x"), server="peer", timeout=PATIENCE)
            self.assertEqual([], self.sockets())
            transport.serve("t", "peer", Recorder())
            self.assertEqual(["peer"], transport.listeners("t"))

    def test_a_dead_process_can_be_succeeded_without_anybody_noticing_it_first(self) -> None:
        transport = self.transport()
        with self.peer() as process:
            process.kill()
            process.wait()
            transport.serve("t", "peer", Recorder())
            self.assertEqual({}, transport.call("t", Message("x"), server="peer", timeout=PATIENCE))

    def test_kept_connections_to_a_dead_process_are_replaced_by_one_to_its_successor(self) -> None:
        transport, recorder = self.transport(), Recorder()
        with self.peer() as process:
            place, pool = str(self.sockets()[0]), transport._pool
            transport.call("t", Message("x"), server="peer", timeout=PATIENCE)
            in_use = pool.take(place)
            assert in_use is not None
            transport.call("t", Message("x"), server="peer", timeout=PATIENCE)
            pool.give(place, in_use)
            self.assertEqual(2, len(pool._idle[place]))
            process.kill()
            process.wait()
            transport.serve("t", "peer", recorder)
            self.assertEqual({}, transport.call("t", Message("x"), server="peer", timeout=PATIENCE))
            transport.cast("t", Message("x"), server="peer")
        eventually(lambda: recorder.finished == 2, "each message was handled once")
        self.assertEqual(1, len(pool._idle[place]))

    def test_the_socket_of_a_living_process_is_never_removed(self) -> None:
        transport, registry = self.transport(), Registry(self.folder, SystemClock())
        transport.serve("t", "one", Recorder())
        self.assertFalse(registry.sweep(registry.place("t", "one")))
        self.assertEqual({}, transport.call("t", Message("x"), timeout=PATIENCE))

    def test_death_in_the_middle_of_a_call_is_a_lost_peer(self) -> None:
        transport = self.transport()
        with self.peer() as process, ThreadPoolExecutor(1) as pool:
            call = pool.submit(transport.call, "t", Message("hang"), server="peer", timeout=60)
            assert process.stdout is not None
            self.assertEqual("hanging\n", process.stdout.readline())
            process.kill()
            with self.assertRaises(errors.PeerLost):
                call.result(PATIENCE)

    def test_an_undirected_message_goes_past_a_dead_server(self) -> None:
        transport, recorder = self.transport(), Recorder()
        transport.serve("t", "alive", recorder)
        with self.peer() as process:
            process.kill()
            process.wait()
            for _ in range(4):
                transport.cast("t", Message("x"))
                self.assertEqual({}, transport.call("t", Message("x"), timeout=PATIENCE))
        eventually(lambda: recorder.finished == 8, "all handled by the living one")

    def test_a_stopped_process_delays_calls_and_casts_by_a_bound(self) -> None:
        transport = self.transport()
        with self.peer() as process:
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            with self.assertRaises(errors.Busy):
                transport.cast("t", Message("x"), server="peer")
            with self.assertRaises(errors.TransportError):
                transport.call("t", Message("x"), server="peer", timeout=0.5)
            with self.assertRaises(errors.Busy):
                transport.call("t", Message("x", {"value": "x" * 5_000_000}), server="peer", timeout=30)
            self.assertLess(time.monotonic() - started, PATIENCE)
            process.send_signal(signal.SIGCONT)
            self.assertEqual({"a": 1}, transport.call("t", Message("x", {"a": 1}), server="peer", timeout=PATIENCE))

    # -- fork -----------------------------------------------------------------------------------------------------

    def test_a_child_does_not_keep_its_parents_listener_alive(self) -> None:
        transport = self.transport()
        with self.peer() as process, ThreadPoolExecutor(1) as pool:
            child = transport.call("t", Message("fork"), server="peer", timeout=PATIENCE)
            self.addCleanup(os.kill, child, signal.SIGKILL)
            call = pool.submit(transport.call, "t", Message("hang"), server="peer", timeout=60)
            assert process.stdout is not None
            self.assertEqual("hanging\n", process.stdout.readline())
            process.kill()
            process.wait()
            with self.assertRaises(errors.PeerLost):
                call.result(PATIENCE)
            with self.assertRaises(errors.NoListener):
                transport.call("t", Message("x"), server="peer", timeout=PATIENCE)

    def test_parent_and_child_of_a_fork_both_send(self) -> None:
        transport, recorder = self.transport(), Recorder()
        transport.serve("t", "one", recorder)
        transport.call("t", Message("x", {"value": "before"}), timeout=PATIENCE)
        transport.fanout("t", Message("x", {"value": "before"}))
        child = os.fork()
        if not child:
            code = 1
            try:
                answer = transport.call("t", Message("x", {"value": "child"}), timeout=PATIENCE)
                transport.fanout("t", Message("x", {"value": "child"}))
                transport.close()  # flushes the fanout, and must not take away the parent's socket
                code = 0 if answer == {"value": "child"} else 2
            finally:
                os._exit(code)
        self.assertEqual(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        self.assertEqual({"value": "after"}, transport.call("t", Message("x", {"value": "after"}), timeout=PATIENCE))
        eventually(lambda: recorder.values().count("child") == 2, "both messages of the child")
        self.assertEqual(["one"], transport.listeners("t"))


if __name__ == "__main__":
    unittest.main()
