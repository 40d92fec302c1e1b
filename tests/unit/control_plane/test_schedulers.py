# SPDX-License-Identifier: Apache-2.0
"""How the API finds a scheduler that answers."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from typing_extensions import override

from moorage import errors
from moorage.clock import SystemClock
from moorage.context import RequestContext, acting_for, anonymous
from moorage.control_plane import scheduler_client
from moorage.control_plane.scheduler_client import Schedulers, _Create
from moorage.rpc import wire
from moorage.rpc.client import RpcSender
from moorage.rpc.interface import Message
from moorage.scheduling.reporter import TOPIC
from moorage.testing.clock import ManualClock
from moorage.testing.transport_peer import configuration
from moorage_plugins.transports.memory import MemoryTransport, MessageHub
from tests.servers import wait_until


class _Hub(unittest.TestCase):
    """A hub for schedulers."""

    def setUp(self) -> None:
        self.hub = MessageHub()
        self.asked: list[str] = []
        self.released = threading.Event()
        self.addCleanup(self.released.set)

    def transport(self) -> MemoryTransport:
        transport = MemoryTransport(conf=configuration({}), url="memory://", clock=SystemClock(), hub=self.hub)
        self.addCleanup(transport.close)
        return transport

    def serve(self, name: str, work: Callable[[], Any]) -> None:
        def handle(message: Message) -> Any:
            self.asked.append(name)
            return work()

        subscription = self.transport().serve(TOPIC, name, handle)
        self.addCleanup(subscription.stop, 5.0)
        self.addCleanup(self.released.set)

    def schedulers(self, attempts: int, timeout: float = 0.3) -> Schedulers:
        return Schedulers(RpcSender(self.transport(), "api", 1), SystemClock(), attempts, timeout)

    def silent(self) -> None:
        self.released.wait(60)


class SchedulersTests(_Hub):
    """Two schedulers on one hub; what each of them does is up to the test."""

    def test_one_that_is_silent_costs_its_timeout_and_another_is_asked(self) -> None:
        self.serve("silent", self.silent)
        self.serve("well", lambda: "here")
        for _ in range(4):
            self.assertEqual("here", self.schedulers(2).ask("select_destinations", {}))
        self.assertIn("silent", self.asked)

    def test_when_all_are_silent_the_last_error_is_told_after_the_attempts(self) -> None:
        self.serve("first", self.silent)
        self.serve("second", self.silent)
        self.assertRaises(errors.CallTimeout, self.schedulers(3).ask, "select_destinations", {})
        self.assertEqual(3, len(self.asked))

    def test_a_refusal_is_an_answer_and_nobody_else_is_asked(self) -> None:
        def refuse() -> None:
            raise errors.NoValidHost("No node has room.")

        self.serve("first", refuse)
        self.serve("second", refuse)
        self.assertRaises(errors.NoValidHost, self.schedulers(3).create, {}, "one")
        self.assertEqual(1, len(self.asked))

    def test_without_any_scheduler_the_error_says_so(self) -> None:
        self.assertRaises(errors.TransportError, self.schedulers(2).ask, "select_destinations", {})


class CreatesTogetherTests(_Hub):
    """Creates that wait while another one is asked for are asked for by one message."""

    @override
    def setUp(self) -> None:
        super().setUp()
        self.messages: list[Message] = []
        self.gate = threading.Event()
        self.addCleanup(self.gate.set)

    def scheduler(self, name: str, each: Callable[[Sequence[str]], Any]) -> None:
        """Serve creates; the first one waits for the gate. ``each`` answers the uuids of a message that asks for several."""

        def handle(message: Message) -> Any:
            self.messages.append(message)
            if message.method == "create_instance":
                if message.args["request"]["uuid"] == "first":
                    self.gate.wait(60)
                return {"instance": {"uuid": message.args["request"]["uuid"]}}
            return each([item["request"]["uuid"] for item in message.args["requests"]])

        subscription = self.transport().serve(TOPIC, name, handle)
        self.addCleanup(subscription.stop, 5.0)
        self.addCleanup(self.gate.set)

    def create(self, *uuids: str, attempts: int = 3) -> dict[str, Any]:
        """Create instances while the create of a first one is under way; the answer or the error of each."""
        pool = ThreadPoolExecutor(1 + len(uuids))
        self.addCleanup(pool.shutdown)

        def create(uuid: str) -> Any:
            with acting_for(RequestContext(project_id=f"of-{uuid}", overwrite=False)):
                return client.create({"uuid": uuid}, f"key-{uuid}")

        with mock.patch.object(scheduler_client, "_PATIENCE", 60.0):
            client = self.client = self.schedulers(attempts, 60.0)
        sent = {"first": pool.submit(create, "first")}
        wait_until(lambda: self.messages, "the first one is asked for", 60)
        for number, uuid in enumerate(uuids, 1):
            sent[uuid] = pool.submit(create, uuid)
            wait_until(lambda number=number: len(client._gathering._waiting) == number, "it waits", 60)  # type: ignore[misc]
        self.gate.set()
        return {uuid: each.exception(60) or each.result() for uuid, each in sent.items()}

    def methods(self) -> list[str]:
        return [each.method for each in self.messages]

    def test_one_message_asks_for_all_that_wait_and_each_has_its_own_answer(self) -> None:
        refused = wire.error_reply(errors.NoValidHost("No room."), "create_instance")

        def each(uuids: Sequence[str]) -> Any:
            return [{"result": {"instance": {"uuid": "a"}}}, refused, {"result": {"instance": {}}}, None]

        self.scheduler("one", each)
        found = self.create("a", "b", "c", "d")
        self.assertEqual({"uuid": "a"}, found["a"])
        self.assertIsInstance(found["b"], errors.NoValidHost)
        self.assertIsNone(found["c"])
        # Nothing was done for it: it was asked for by itself.
        self.assertEqual({"uuid": "d"}, found["d"])
        self.assertEqual(["create_instance", "create_each", "create_instance"], self.methods())
        items = self.messages[1].args["requests"]
        self.assertEqual([f"key-{uuid}" for uuid in "abcd"], [each["request_id"] for each in items])
        self.assertEqual([f"of-{uuid}" for uuid in "abcd"], [each["context"]["project_id"] for each in items])

    def test_a_message_is_in_the_name_of_its_own_user_whichever_thread_sends_it(self) -> None:
        self.scheduler("one", lambda uuids: [{"result": {"instance": {"uuid": uuid}}} for uuid in uuids])
        self.create("a")
        self.assertEqual(["create_instance"] * 2, self.methods())
        self.assertEqual(["of-first", "of-a"], [each.context["project_id"] for each in self.messages])

    def test_a_scheduler_that_is_lost_with_one_create_is_replaced_as_often_as_that_is_allowed(self) -> None:
        lost = errors.TransportError("It broke the connection.")
        for attempts, failures in ((3, 2), (3, 3), (1, 1)):
            with self.subTest(attempts=attempts, failures=failures):
                self.hub = MessageHub()
                self.asked.clear()
                answers = iter([lost] * failures)

                def work(answers: Iterator[errors.TransportError] = answers) -> Any:
                    error = next(answers, None)
                    if error is not None:
                        raise error
                    return {"instance": {"uuid": "a"}}

                self.serve("one", work)
                client = self.schedulers(attempts, 60.0)
                if failures < attempts:
                    self.assertEqual({"uuid": "a"}, client.create({"uuid": "a"}, "key-a"))
                else:
                    self.assertRaises(errors.TransportError, client.create, {"uuid": "a"}, "key-a")
                self.assertEqual(min(attempts, failures + 1), len(self.asked))

    def test_a_scheduler_that_is_lost_with_several_creates_is_not_replaced_where_one_is_asked_at_most(self) -> None:
        def lost(uuids: Sequence[str]) -> Any:
            raise errors.TransportError("It broke the connection.")

        self.scheduler("one", lost)
        found = self.create("a", "b", attempts=1)
        self.assertEqual({"uuid": "first"}, found["first"])
        self.assertEqual([errors.TransportError] * 2, [type(found[uuid]) for uuid in "ab"])
        self.assertEqual(["create_instance", "create_each"], self.methods())

    def test_what_cannot_be_asked_together_is_asked_one_by_one(self) -> None:
        def lost(uuids: Sequence[str]) -> Any:
            raise errors.TransportError("It broke the connection.")

        def old(uuids: Sequence[str]) -> Any:
            raise errors.NotFound("This service has no method 'create_each'.", method="create_each")

        for answer in (lost, old, lambda uuids: [None] * len(uuids)):
            with self.subTest(answer=answer.__name__):
                self.messages.clear()
                self.gate.clear()
                self.hub = MessageHub()
                self.scheduler("one", answer)
                found = self.create("a", "b")
                self.assertEqual({"first": {"uuid": "first"}, "a": {"uuid": "a"}, "b": {"uuid": "b"}}, found)
                self.assertEqual(["create_instance", "create_each", *2 * ["create_instance"]], self.methods())

    def test_after_schedulers_have_placed_none_together_creates_are_asked_for_one_by_one_for_a_while(self) -> None:
        self.scheduler("one", lambda uuids: [None] * len(uuids))
        self.create("a", "b")
        client = self.client
        self.assertGreater(client._apart_until, client._clock.monotonic())
        with mock.patch.object(client._gathering, "join", side_effect=AssertionError("it must not wait")):
            self.assertEqual({"uuid": "c"}, client.create({"uuid": "c"}, "key-c"))

    def test_a_lost_scheduler_is_no_reason_to_ask_one_by_one_from_then_on(self) -> None:
        def lost(uuids: Sequence[str]) -> Any:
            raise errors.TransportError("It broke the connection.")

        self.scheduler("one", lost)
        self.create("a", "b")
        self.assertEqual(0.0, self.client._apart_until)


class StayingTests(_Hub):
    """Creates that are asked for together go to one scheduler for a while."""

    @override
    def setUp(self) -> None:
        super().setUp()
        for name in ("one", "other"):
            self.serve(name, lambda: [{"result": {"instance": {"uuid": each}}} for each in "ab"])
        self.clock = ManualClock()
        self.client = Schedulers(RpcSender(self.transport(), "api", 1), self.clock, 2, 5.0)

    def turn(self) -> list[_Create]:
        creates = [
            _Create({"request": {"uuid": each}, "request_id": each, "context": {}}, anonymous()) for each in "ab"
        ]
        self.client._begin_each(creates)()
        return creates

    def test_turns_of_one_second_go_to_one_scheduler_and_later_ones_to_each(self) -> None:
        seen = set()
        for _ in range(40):
            self.asked.clear()
            for _ in range(4):
                self.turn()
                self.clock.advance(scheduler_client._STAY / 5)
            self.assertEqual(1, len(set(self.asked)), self.asked)
            seen.update(self.asked)
            self.clock.advance(scheduler_client._STAY)
        self.assertEqual({"one", "other"}, seen)

    def test_schedulers_are_looked_up_once_a_second(self) -> None:
        names = ["one", "other"]
        with mock.patch.object(MemoryTransport, "listeners", return_value=names) as listeners:
            for _ in range(4):
                self.turn()
                self.clock.advance(scheduler_client._STAY / 5)
            self.assertEqual(1, listeners.call_count)
            self.clock.advance(scheduler_client._STAY)
            names[:] = ["other"]
            self.asked.clear()
            self.turn()
        self.assertEqual((2, ["other"]), (listeners.call_count, self.asked))

    def test_a_transport_that_does_not_know_the_schedulers_chooses_one(self) -> None:
        with mock.patch.object(MemoryTransport, "listeners", return_value=None):
            self.assertEqual(["a", "b"], [each.outcome["instance"]["uuid"] for each in self.turn() if each.outcome])

    def test_another_one_is_asked_if_that_one_does_not_take_the_message(self) -> None:
        with (
            mock.patch.object(self.client._random, "choice", return_value="gone"),
            mock.patch.object(MemoryTransport, "listeners", return_value=["gone", "one"]),
        ):
            creates = self.turn()
        self.assertEqual(["a", "b"], [each.outcome["instance"]["uuid"] for each in creates if each.outcome])
        self.assertEqual(1, len(self.asked))
        # The next turn chooses again.
        self.assertEqual(0.0, self.client._stays_until)
