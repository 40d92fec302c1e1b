# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: D102  (a test's name says what it pins)
"""The conformance kit of transports.

Mix :class:`TransportTests` into a ``unittest.TestCase``, name the class and the URL, and the tests apply; what a transport does
not declare in its ``capabilities`` is skipped::

    class MyTransportTests(TransportTests, unittest.TestCase):
        transport_class = MyTransport
        url = "mine://"
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import unittest
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from moorage import errors
from moorage.clock import SystemClock
from moorage.rpc.interface import (
    BOUNDED,
    CROSS_PROCESS,
    KNOWS_LISTENERS,
    ORDERED,
    QUEUES_FOR_ABSENT,
    Message,
    Origin,
    Transport,
)
from moorage.testing.transport_peer import configuration

__all__ = ["Recorder", "TransportTests", "eventually"]

if TYPE_CHECKING:
    _Base = unittest.TestCase
else:
    _Base = object

#: Seconds that a test waits for what must happen; reached only when it fails.
PATIENCE = 60.0


def eventually(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Poll until ``condition`` gives something true, and return that; AssertionError naming ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"Not within {seconds:g} seconds: {what}")
        time.sleep(0.005)
    return found


class Recorder:
    """A handler that keeps what it gets, and answers with the arguments; ``gate`` makes it wait while cleared."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.finished = 0
        self.most_at_once = 0
        self.gate = threading.Event()
        self.gate.set()
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> Any:
        """Handle one message."""
        with self._lock:
            self.messages.append(message)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        try:
            if not self.gate.wait(PATIENCE):
                raise AssertionError("the gate stayed closed")
            return dict(message.args)
        finally:
            with self._lock:
                self._running -= 1
                self.finished += 1

    def values(self) -> list[Any]:
        """Returns the argument ``value`` of all messages, in the order in which they came."""
        return [message.args.get("value") for message in list(self.messages)]


class TransportTests(_Base):
    """What every transport must do."""

    transport_class: ClassVar[type[Transport]]
    #: A plain class attribute, or set in setUp.
    url: str
    #: Options of ``[rpc]`` for all tests.
    options: ClassVar[dict[str, Any]] = {}

    # -- tools ----------------------------------------------------------------------------------------------------

    def transport(self, **options: Any) -> Transport:
        """Returns a new transport, closed at the end of the test."""
        conf = configuration({**self.options, **options})
        made: Transport = self.transport_class(conf=conf, url=self.url, clock=SystemClock())  # type: ignore[call-arg]
        self.addCleanup(made.close)
        return made

    def topic(self) -> str:
        """Returns a name that no other test uses."""
        return f"topic-{uuid.uuid4().hex[:12]}"

    def need(self, capability: str) -> None:
        """Skip the test for transports without it."""
        if capability not in self.transport_class.capabilities:
            self.skipTest(f"{self.transport_class.__name__} does not declare '{capability}'")

    @contextlib.contextmanager
    def peer(self, topic: str, server: str) -> Iterator[subprocess.Popen[str]]:
        """Another process that serves a topic."""
        wanted = {
            "plugin": f"{self.transport_class.__module__}:{self.transport_class.__name__}",
            "url": self.url,
            "options": self.options,
            "topic": topic,
            "server": server,
        }
        process = subprocess.Popen(  # noqa: S603  (our own program)
            [sys.executable, "-m", "moorage.testing.transport_peer", json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert process.stdout is not None  # noqa: S101  (for the type checker)
            self.assertEqual("ready\n", process.stdout.readline(), "the other process did not start")
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError, ValueError):
                process.communicate(timeout=PATIENCE)
            process.kill()
            process.wait()

    def wait_for(self, recorder: Recorder, count: int) -> None:
        """Until a recorder finished that many."""
        eventually(lambda: recorder.finished >= count, f"{count} messages handled")

    # -- calls ----------------------------------------------------------------------------------------------------

    def test_a_call_returns_what_the_handler_returns(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        transport.serve(topic, "one", recorder)
        self.assertEqual(
            {"value": 7}, transport.call(topic, Message("echo", {"value": 7}), server="one", timeout=PATIENCE)
        )
        self.assertEqual({"value": 8}, transport.call(topic, Message("echo", {"value": 8}), timeout=PATIENCE))
        self.assertEqual([7, 8], recorder.values())

    def test_values_arrive_as_they_were_sent(self) -> None:
        topic, transport = self.topic(), self.transport()
        transport.serve(topic, "one", lambda message: message.args["value"])
        for value in _VALUES:
            with self.subTest(value=value):
                answer = transport.call(topic, Message("echo", {"value": value}), server="one", timeout=PATIENCE)
                self.assertEqual((type(value), value), (type(answer), answer))

    def test_a_message_keeps_its_origin_context_and_version(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        transport.serve(topic, "one", recorder)
        origin = Origin(str(uuid.uuid4()), 3, 2**40)
        sent = Message("echo", {"a": 1}, origin, {"user_id": "käthe", "roles": ["reader"], "x": None}, "1.4")
        transport.call(topic, sent, server="one", timeout=PATIENCE)
        transport.cast(topic, sent, server="one")
        transport.fanout(topic, sent)
        self.wait_for(recorder, 3)
        for got in recorder.messages:
            self.assertEqual(sent, Message(got.method, got.args, got.origin, got.context, got.version))

    def test_a_message_without_origin_has_none(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        transport.serve(topic, "one", recorder)
        transport.call(topic, Message("echo"), server="one", timeout=PATIENCE)
        self.assertIsNone(recorder.messages[0].origin)

    def test_a_call_tells_the_handler_how_long_its_sender_waits(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        transport.serve(topic, "one", recorder)
        transport.call(topic, Message("echo"), server="one", timeout=9.5)
        transport.cast(topic, Message("echo"), server="one")
        self.wait_for(recorder, 2)
        called, cast = (message.timeout for message in recorder.messages)
        self.assertIsNone(cast)
        assert called is not None  # noqa: S101  (for the type checker)
        self.assertTrue(0 < called <= 9.5, called)

    def test_an_error_arrives_as_the_same_class_with_its_details(self) -> None:
        topic, transport = self.topic(), self.transport()

        def handler(message: Message) -> None:
            raise errors.CapacityExceeded("Too much asked of node ü.", provider="p", free=3)

        transport.serve(topic, "one", handler)
        with self.assertRaises(errors.CapacityExceeded) as caught:
            transport.call(topic, Message("claim"), server="one", timeout=PATIENCE)
        self.assertEqual("Too much asked of node ü.", caught.exception.message)
        self.assertEqual({"provider": "p", "free": 3}, caught.exception.details)

    def test_a_surprise_arrives_without_its_text(self) -> None:
        topic, transport = self.topic(), self.transport()

        def handler(message: Message) -> None:
            raise ValueError("password=secret")

        transport.serve(topic, "one", handler)
        with self.assertRaises(errors.MoorageError) as caught:
            transport.call(topic, Message("fail"), server="one", timeout=PATIENCE)
        self.assertEqual("moorage.internal", caught.exception.code)
        self.assertNotIn("secret", str(caught.exception))

    def test_a_handler_that_finds_nobody_does_not_look_like_no_handler(self) -> None:
        topic, transport = self.topic(), self.transport()

        def handler(message: Message) -> None:
            raise errors.NoListener("Nobody serves the next topic.")

        transport.serve(topic, "one", handler)
        with self.assertRaises(errors.TransportError) as caught:
            transport.call(topic, Message("relay"), server="one", timeout=PATIENCE)
        self.assertIs(errors.TransportError, type(caught.exception))

    def test_a_call_without_an_answer_ends_after_its_timeout(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        recorder.gate.clear()
        self.addCleanup(recorder.gate.set)
        transport.serve(topic, "one", recorder)
        with self.assertRaises(errors.CallTimeout):
            transport.call(topic, Message("echo"), server="one", timeout=0.5)
        recorder.gate.set()
        self.assertEqual(
            {"value": 2}, transport.call(topic, Message("echo", {"value": 2}), server="one", timeout=PATIENCE)
        )

    def test_calls_of_many_threads_get_their_own_answers(self) -> None:
        topic, transport = self.topic(), self.transport()
        transport.serve(topic, "one", lambda message: message.args["value"])
        transport.serve(topic, "two", lambda message: message.args["value"])

        def ask(number: int) -> bool:
            server = (None, "one", "two")[number % 3]
            return bool(
                transport.call(topic, Message("echo", {"value": number}), server=server, timeout=PATIENCE) == number
            )

        with ThreadPoolExecutor(16) as pool:
            self.assertTrue(all(pool.map(ask, range(320))))

    def test_calls_that_were_begun_get_their_own_answers_in_any_order(self) -> None:
        topic, transport = self.topic(), self.transport()
        transport.serve(topic, "one", lambda message: message.args["value"])
        ends = [
            transport.begin_call(topic, Message("echo", {"value": number}), server=server, timeout=PATIENCE)
            for number, server in enumerate((None, "one", None, "one"))
        ]
        self.assertEqual([3, 2, 1, 0], [end() for end in reversed(ends)])

    def test_a_call_that_was_begun_fails_as_other_calls_do(self) -> None:
        topic, transport = self.topic(), self.transport(max_message_bytes=4096)

        def handler(message: Message) -> None:
            raise errors.NoValidHost("No room.")

        transport.serve(topic, "one", handler)
        for value, failure in (("x", errors.NoValidHost), ("x" * 5000, errors.MessageTooLarge)):
            # Once over a new connection, and once over one that may have been kept.
            for _ in range(2):
                with self.assertRaises(failure):
                    transport.begin_call(topic, Message("claim", {"value": value}), server="one", timeout=PATIENCE)()

    def test_a_handler_may_call(self) -> None:
        front, back, transport = self.topic(), self.topic(), self.transport()
        transport.serve(back, "one", lambda message: "from behind")
        transport.serve(front, "one", lambda message: transport.call(back, message, timeout=PATIENCE))
        self.assertEqual("from behind", transport.call(front, Message("relay"), timeout=PATIENCE))

    # -- refusals -------------------------------------------------------------------------------------------------

    def test_too_large_messages_are_refused_by_the_sender(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport(max_message_bytes=4096)
        transport.serve(topic, "one", recorder)
        large = Message("echo", {"value": "x" * 5000})
        with self.assertRaises(errors.MessageTooLarge):
            transport.call(topic, large, server="one", timeout=PATIENCE)
        with self.assertRaises(errors.MessageTooLarge):
            transport.cast(topic, large, server="one")
        with self.assertRaises(errors.MessageTooLarge):
            transport.fanout(topic, large)
        self.assertEqual({"value": 1}, transport.call(topic, Message("echo", {"value": 1}), timeout=PATIENCE))

    def test_a_too_large_answer_is_refused(self) -> None:
        topic, transport = self.topic(), self.transport(max_message_bytes=4096)
        transport.serve(topic, "one", lambda message: "x" * 5000)
        with self.assertRaises(errors.MessageTooLarge):
            transport.call(topic, Message("get"), server="one", timeout=PATIENCE)

    def test_what_is_not_json_is_refused_before_it_is_sent(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        transport.serve(topic, "one", recorder)
        for value in (object(), float("nan"), {1, 2}, b"bytes"):
            with self.assertRaises(errors.InvalidInput):
                transport.call(topic, Message("echo", {"value": value}), server="one", timeout=PATIENCE)
            with self.assertRaises(errors.InvalidInput):
                transport.fanout(topic, Message("echo", {"value": value}))
        self.assertEqual([], recorder.messages)

    def test_an_answer_that_is_not_json_is_the_fault_of_the_handler(self) -> None:
        topic, transport = self.topic(), self.transport()
        transport.serve(topic, "one", lambda message: object())
        with self.assertRaises(errors.MoorageError) as caught:
            transport.call(topic, Message("get"), server="one", timeout=PATIENCE)
        self.assertEqual("moorage.internal", caught.exception.code)

    def test_nobody_there_is_known_at_once(self) -> None:
        self.need(KNOWS_LISTENERS)
        topic, transport = self.topic(), self.transport()
        for server in (None, "one"):
            with self.assertRaises(errors.NoListener):
                transport.call(topic, Message("echo"), server=server, timeout=PATIENCE)
            with self.assertRaises(errors.NoListener):
                transport.cast(topic, Message("echo"), server=server)
        self.assertEqual([], list(transport.listeners(topic) or ()))

    def test_listeners_are_known_while_they_serve(self) -> None:
        self.need(KNOWS_LISTENERS)
        topic, transport, other = self.topic(), self.transport(), self.transport()
        transport.serve(topic, "two", Recorder())
        first = transport.serve(topic, "Ünö/1", Recorder())
        self.assertEqual(["two", "Ünö/1"], list(other.listeners(topic) or ()))
        first.stop(5)
        self.assertEqual(["two"], list(other.listeners(topic) or ()))
        with self.assertRaises(errors.NoListener):
            other.call(topic, Message("echo"), server="Ünö/1", timeout=PATIENCE)

    def test_a_name_is_served_once(self) -> None:
        self.need(KNOWS_LISTENERS)
        topic, transport, other = self.topic(), self.transport(), self.transport()
        transport.serve(topic, "one", Recorder())
        with self.assertRaises(errors.AlreadyExists):
            other.serve(topic, "one", Recorder())

    def test_a_closed_transport_refuses(self) -> None:
        topic, transport = self.topic(), self.transport()
        transport.close()
        transport.close()
        with self.assertRaises(errors.TransportError):
            transport.call(topic, Message("echo"), timeout=PATIENCE)
        with self.assertRaises(errors.TransportError):
            transport.fanout(topic, Message("echo"))

    # -- casts and fanouts ----------------------------------------------------------------------------------------

    def test_a_cast_is_handled_once_by_one_server(self) -> None:
        topic, one, two, transport = self.topic(), Recorder(), Recorder(), self.transport()
        transport.serve(topic, "one", one)
        transport.serve(topic, "two", two)
        for number in range(20):
            transport.cast(topic, Message("note", {"value": number}), server="two" if number < 10 else None)
        eventually(lambda: one.finished + two.finished >= 20, "20 casts handled")
        self.assertEqual(list(range(20)), sorted(one.values() + two.values()))
        self.assertTrue(set(range(10)) <= set(two.values()))

    def test_a_fanout_reaches_every_server_and_the_sender_itself(self) -> None:
        topic, recorders = self.topic(), [Recorder(), Recorder(), Recorder()]
        transport, other = self.transport(), self.transport()
        for index, recorder in enumerate(recorders):
            (transport, other)[index % 2].serve(topic, f"server-{index}", recorder)
        transport.fanout(topic, Message("note", {"value": 1}))
        for recorder in recorders:
            self.wait_for(recorder, 1)
            self.assertEqual([1], recorder.values())

    def test_a_fanout_to_nobody_is_no_error(self) -> None:
        self.transport().fanout(self.topic(), Message("note"))

    def test_fanouts_are_handled_one_at_a_time_and_in_order(self) -> None:
        self.need(ORDERED)
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        transport.serve(topic, "one", recorder)
        for number in range(300):
            transport.fanout(topic, Message("note", {"value": number}))
        self.wait_for(recorder, 300)
        self.assertEqual(list(range(300)), recorder.values())
        self.assertEqual(1, recorder.most_at_once)

    def test_a_failing_fanout_handler_gets_the_next_one(self) -> None:
        topic, seen, transport = self.topic(), [], self.transport()

        def handler(message: Message) -> None:
            seen.append(message.args["value"])
            raise ValueError("no")

        transport.serve(topic, "one", handler)
        for number in range(3):
            transport.fanout(topic, Message("note", {"value": number}))
        eventually(lambda: len(seen) == 3, "3 fanouts handled")

    def test_a_slow_fanout_handler_loses_the_oldest_and_holds_up_nobody(self) -> None:
        topic, slow, quick = self.topic(), Recorder(), Recorder()
        transport = self.transport(queue_limit=20)
        slow.gate.clear()
        self.addCleanup(slow.gate.set)
        transport.serve(topic, "slow", slow)
        transport.serve(topic, "quick", quick)
        for number in range(200):
            transport.fanout(topic, Message("note", {"value": number}))
            # In step with the quick one, so that nothing of its own is dropped.
            self.wait_for(quick, number + 1)
        slow.gate.set()
        eventually(lambda: 199 in slow.values(), "the newest message")
        self.assertLess(len(slow.messages), 100)
        self.assertEqual(sorted(slow.values()), slow.values())

    def test_a_full_receiver_refuses(self) -> None:
        self.need(BOUNDED)
        topic, recorder, transport = self.topic(), Recorder(), self.transport(queue_limit=5)
        recorder.gate.clear()
        self.addCleanup(recorder.gate.set)
        transport.serve(topic, "one", recorder, threads=2)
        for taken in range(2):
            transport.cast(topic, Message("note", {"value": taken}), server="one")
        # A thread that takes its first message later would make room again.
        eventually(lambda: len(recorder.messages) == 2, "both threads have one in hand")
        with self.assertRaises(errors.Busy):
            for taken in range(2, 50):
                transport.cast(topic, Message("note", {"value": taken}), server="one")
        with self.assertRaises(errors.Busy):
            transport.call(topic, Message("note", {"value": -1}), server="one", timeout=PATIENCE)
        recorder.gate.set()
        self.wait_for(recorder, taken)
        self.assertEqual(list(range(taken)), sorted(recorder.values()))

    # -- stopping -------------------------------------------------------------------------------------------------

    def test_stopping_lets_a_running_handler_finish(self) -> None:
        topic, recorder = self.topic(), Recorder()
        transport, caller = self.transport(), self.transport()
        recorder.gate.clear()
        self.addCleanup(recorder.gate.set)
        subscription = transport.serve(topic, "one", recorder)
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(caller.call, topic, Message("echo", {"value": 5}), server="one", timeout=PATIENCE)
            eventually(lambda: recorder.messages, "the call is being handled")
            stopped = pool.submit(subscription.stop, PATIENCE)
            recorder.gate.set()
            self.assertEqual({"value": 5}, asked.result())
            self.assertTrue(stopped.result())
        self.assertTrue(subscription.stop(0.0))

    def test_stopping_gives_up_on_a_handler_that_hangs(self) -> None:
        topic, recorder, transport = self.topic(), Recorder(), self.transport()
        recorder.gate.clear()
        self.addCleanup(recorder.gate.set)
        subscription = transport.serve(topic, "one", recorder)
        transport.cast(topic, Message("echo"), server="one")
        eventually(lambda: recorder.messages, "the cast is being handled")
        self.assertFalse(subscription.stop(0.1))

    def test_a_listener_that_was_stopped_and_started_is_reached(self) -> None:
        topic, transport, caller = self.topic(), self.transport(), self.transport()
        for number in range(3):
            recorder = Recorder()
            subscription = transport.serve(topic, "one", recorder)
            self.assertEqual(
                {"n": number}, caller.call(topic, Message("echo", {"n": number}), server="one", timeout=PATIENCE)
            )
            caller.fanout(topic, Message("echo", {"n": number}))
            self.wait_for(recorder, 2)
            self.assertTrue(subscription.stop(10))

    # -- other processes ------------------------------------------------------------------------------------------

    def test_another_process_is_reached(self) -> None:
        self.need(CROSS_PROCESS)
        topic, transport = self.topic(), self.transport()
        with self.peer(topic, "other") as process:
            self.assertEqual(process.pid, transport.call(topic, Message("pid"), server="other", timeout=PATIENCE))
            transport.fanout(topic, Message("note", {"value": "f"}))
            transport.cast(topic, Message("note", {"value": "c"}))
            eventually(
                lambda: sorted(transport.call(topic, Message("seen"), timeout=PATIENCE)) == ["c", "f"],
                "both messages seen",
            )

    def test_a_killed_process_is_an_error_and_its_successor_is_reached(self) -> None:
        self.need(CROSS_PROCESS)
        topic, transport = self.topic(), self.transport()
        with self.peer(topic, "other") as process:
            transport.call(topic, Message("pid"), server="other", timeout=PATIENCE)
            process.send_signal(signal.SIGKILL)
            process.wait()
            expected = errors.CallTimeout if QUEUES_FOR_ABSENT in transport.capabilities else errors.NoListener
            with self.assertRaises(expected):
                transport.call(topic, Message("pid"), server="other", timeout=1.0)
            transport.fanout(topic, Message("note", {"value": "lost"}))
        with self.peer(topic, "other") as process:
            self.assertEqual(process.pid, transport.call(topic, Message("pid"), server="other", timeout=PATIENCE))

    def test_a_stopped_process_holds_up_neither_sender_nor_others(self) -> None:
        self.need(CROSS_PROCESS)
        topic, recorder, transport = self.topic(), Recorder(), self.transport(queue_limit=50)
        transport.serve(topic, "here", recorder)
        with self.peer(topic, "other") as process:
            transport.call(topic, Message("pid"), server="other", timeout=PATIENCE)
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            for number in range(200):
                transport.fanout(topic, Message("note", {"value": number, "padding": "x" * 10_000}))
                self.wait_for(recorder, number + 1)
            self.assertLess(time.monotonic() - started, PATIENCE)
            process.send_signal(signal.SIGCONT)
            transport.fanout(topic, Message("note", {"value": "last"}))
            eventually(
                lambda: "last" in transport.call(topic, Message("seen"), server="other", timeout=PATIENCE),
                "the newest arrives",
            )


_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -(2**63),
    10**30,
    0.1,
    1e-300,
    "",
    "zażółć 😀 \x00 \u2028 \"'\\",
    [],
    [1, [2, [3, None]]],
    {},
    {"a": {"b": {"": "ü"}}, "list": [1.5, "x"]},
)
