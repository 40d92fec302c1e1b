# SPDX-License-Identifier: Apache-2.0
"""From a message to a method."""

from __future__ import annotations

import unittest
from typing import Any

from oslo_context import context as oslo_context

from moorage import errors
from moorage.context import RequestContext
from moorage.rpc.interface import Message
from moorage.rpc.server import RpcDispatcher, endpoints_of, incoming, remaining_seconds, rpc_method
from moorage.testing.clock import ManualClock


class Endpoint:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @rpc_method
    def add(self, left: int, right: int = 1) -> int:
        return left + right

    @rpc_method
    def look(self) -> str:
        current = oslo_context.get_current()
        self.seen.append((incoming(), remaining_seconds(), current))
        return str(current and current.user_id)

    @rpc_method
    def surprise(self) -> None:
        raise KeyError("secret")

    @rpc_method
    def refuse(self) -> None:
        raise errors.InUse("Held.", holder="x")

    def hidden(self) -> None:
        raise AssertionError("must not be callable")


class DispatcherTests(unittest.TestCase):
    def setUp(self) -> None:
        self.endpoint = Endpoint()
        self.clock = ManualClock(100.0)
        self.dispatcher = RpcDispatcher(endpoints_of(self.endpoint), version="1.3", clock=self.clock)

    def test_the_named_method_gets_the_named_arguments(self) -> None:
        self.assertEqual(5, self.dispatcher(Message("add", {"left": 2, "right": 3})))
        self.assertEqual(3, self.dispatcher(Message("add", {"left": 2})))

    def test_an_unknown_method_is_not_found(self) -> None:
        for name in ("hidden", "__init__", "nothing"):
            with self.assertRaisesRegex(errors.NotFound, name):
                self.dispatcher(Message(name))

    def test_arguments_that_do_not_fit_are_invalid(self) -> None:
        for args in ({}, {"left": 1, "rihgt": 2}, {"left": 1, "self": 2}):
            with self.assertRaises(errors.InvalidInput):
                self.dispatcher(Message("add", args))

    def test_a_type_error_of_the_method_itself_is_a_surprise(self) -> None:
        with self.assertLogs("moorage.rpc.wire", "ERROR"), self.assertRaises(errors.MoorageError) as caught:
            self.dispatcher(Message("add", {"left": "x"}))
        self.assertEqual("moorage.internal", caught.exception.code)

    def test_the_same_major_and_an_older_minor_are_served(self) -> None:
        for version in ("1.0", "1.3", "1"):
            self.assertEqual(2, self.dispatcher(Message("add", {"left": 1}, version=version)))
        for version in ("1.4", "2.0", "0.9", "x", "1.x", ""):
            with self.assertRaises(errors.UnsupportedVersion):
                self.dispatcher(Message("add", {"left": 1}, version=version))

    def test_a_surprise_shows_an_id_and_logs_the_rest(self) -> None:
        with self.assertLogs("moorage.rpc.wire", "ERROR") as logs, self.assertRaises(errors.MoorageError) as caught:
            self.dispatcher(Message("surprise"))
        identity = caught.exception.details["id"]
        self.assertIn(identity, str(caught.exception))
        self.assertNotIn("secret", str(caught.exception))
        self.assertIn(identity, logs.output[0])
        self.assertIn("secret", logs.output[0])

    def test_an_error_of_the_method_goes_through(self) -> None:
        with self.assertRaises(errors.InUse):
            self.dispatcher(Message("refuse"))

    def test_the_method_sees_message_context_and_time_left(self) -> None:
        outside = RequestContext(user_id="outside")
        self.addCleanup(RequestContext(overwrite=False).update_store)
        message = Message("look", context=RequestContext(user_id="inside", overwrite=False).to_dict(), timeout=30.0)
        self.assertEqual("inside", self.dispatcher(message))
        got, left, _context = self.endpoint.seen[0]
        self.assertEqual((message, 30.0), (got, left))
        self.assertIs(outside, oslo_context.get_current())
        self.assertEqual((None, None), (incoming(), remaining_seconds()))

    def test_a_cast_has_no_time_limit(self) -> None:
        self.dispatcher(Message("look"))
        self.assertIsNone(self.endpoint.seen[0][1])

    def test_the_user_of_one_message_is_not_left_for_the_next(self) -> None:
        before = oslo_context.get_current()
        self.dispatcher(Message("look", context={"user_id": "inside"}))
        after = oslo_context.get_current()
        self.assertTrue(after is before or after is None or after.user_id is None)

    def test_two_objects_with_one_method_are_refused(self) -> None:
        with self.assertRaisesRegex(errors.ConfigError, "add"):
            endpoints_of(Endpoint(), Endpoint())
