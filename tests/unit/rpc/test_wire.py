# SPDX-License-Identifier: Apache-2.0
"""Messages and replies as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import unittest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage import errors
from moorage.rpc import wire
from moorage.rpc.interface import Message, Origin
from moorage.rpc.server import RpcDispatcher

TEXT = st.text(max_size=10)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=4)
MESSAGES = st.builds(
    Message,
    TEXT,
    OBJECTS,
    st.none() | st.builds(Origin, TEXT, st.integers(), st.integers()),
    OBJECTS,
    TEXT,
)


class WireTests(unittest.TestCase):
    @given(MESSAGES)
    def test_a_message_survives_the_wire(self, message: Message) -> None:
        encoded = wire.dump(wire.message_to_data(message), 1 << 20, "message")
        self.assertEqual(message, wire.message_from_data(wire.load(encoded, "message")))

    @given(st.binary(max_size=50) | JSON.map(lambda value: json.dumps(value).encode()))
    def test_any_bytes_are_a_message_or_invalid_input(self, encoded: bytes) -> None:
        with contextlib.suppress(errors.InvalidInput):
            self.assertIsInstance(wire.message_from_data(wire.load(encoded, "frame")), Message)

    def test_fields_of_wrong_types_are_refused(self) -> None:
        good: dict[str, Any] = {"method": "m", "args": {}, "version": "1.0", "origin": None, "context": {}}
        wrong = {"method": 1, "args": [1], "version": 1.0, "origin": ["a", "1", 2], "context": "x"}
        for name, value in wrong.items():
            with self.subTest(name), self.assertRaises(errors.InvalidInput):
                wire.message_from_data({**good, name: value})

    def test_deep_nesting_is_invalid_not_a_crash(self) -> None:
        with self.assertRaises(errors.InvalidInput):
            wire.load(b"[" * 100_000, "frame")

    def test_error_details_that_are_no_json_become_text(self) -> None:
        def handler(message: Message) -> None:
            raise errors.InUse("Held.", holder=object(), since=float("nan"))

        with self.assertRaises(errors.InUse) as caught:
            wire.result_of(json.loads(wire.answer(handler, Message("m"), 4096)))
        self.assertIn("object", caught.exception.details["holder"])

    def test_an_error_larger_than_a_message_may_be_is_cut(self) -> None:
        def handler(message: Message) -> None:
            raise errors.InUse("Held. " * 5000, holder="x" * 50_000)

        reply = wire.answer(handler, Message("m"), 4096)
        self.assertLessEqual(len(reply), 4096)
        with self.assertRaises(errors.InUse):
            wire.result_of(json.loads(reply))

    def test_a_handler_that_exits_is_answered_like_one_that_raises(self) -> None:
        def handler(message: Message) -> None:
            raise SystemExit(5)

        with self.assertLogs("moorage.rpc.wire", "ERROR") as logs:
            reply = wire.answer(handler, Message("m"), 4096)
            wire.absorb(handler, Message("m"), "topic")
            with self.assertRaises(errors.MoorageError):
                RpcDispatcher({"m": lambda: sys.exit(5)})(Message("m"))
        self.assertEqual(3, sum("SystemExit(5)" in said for said in logs.output))
        with self.assertRaisesRegex(errors.MoorageError, "failed unexpectedly"):
            wire.result_of(json.loads(reply))

    def test_a_reply_of_a_stranger_is_an_error(self) -> None:
        for reply in ({}, {"error": "text"}, {"other": 1}):
            with self.assertRaises(errors.TransportError):
                wire.result_of(reply)

    def test_a_failed_cast_is_logged(self) -> None:
        def handler(message: Message) -> None:
            raise errors.InUse("Held by somebody.")

        with self.assertLogs("moorage.rpc.wire", "WARNING") as logs:
            wire.absorb(handler, Message("m"), "topic")
        self.assertIn("Held by somebody.", logs.output[0])
