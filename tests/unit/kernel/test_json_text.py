# SPDX-License-Identifier: Apache-2.0
"""JSON is written as the standard library writes it."""

from __future__ import annotations

import enum
import json
import unittest
from json import encoder
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from moorage.json_text import writer
from moorage.read_only import frozen

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner).filter(lambda each: len({type(key) for key in each}) < 2)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)
OPTIONS = st.fixed_dictionaries({name: st.booleans() for name in ("sort_keys", "ensure_ascii", "allow_nan")})


class Color(enum.IntEnum):
    RED = 7


class JsonTextTests(unittest.TestCase):
    def check(self, value: Any, options: dict[str, Any]) -> None:
        usual = json.JSONEncoder(separators=(",", ":"), **options).encode
        try:
            expected: object = usual(value)
        except (TypeError, ValueError) as error:
            with self.assertRaises(type(error)):
                writer(**options)(value)
        else:
            self.assertEqual(expected, writer(**options)(value))

    @given(VALUES, OPTIONS)
    def test_texts_and_refusals_are_those_of_the_standard_library(self, value: Any, options: dict[str, bool]) -> None:
        self.check(value, options)
        self.check(frozen(value), options)

    def test_what_is_no_json_is_refused(self) -> None:
        for value in (object(), {"a": {1}}, b"bytes", {(1, 2): 3}, [float("nan")], Color.RED, {Color.RED: "\ud800"}):
            for allow_nan in (False, True):
                with self.subTest(value, allow_nan=allow_nan):
                    self.check(value, {"allow_nan": allow_nan})

    def test_an_object_that_contains_itself_is_refused(self) -> None:
        value: list[Any] = []
        value.append(value)
        with self.assertRaises(RecursionError):
            writer()(value)

    def test_without_the_encoder_in_c_the_text_is_the_same(self) -> None:
        value = {"b": [1, "é"], "a": None}
        expected = writer(sort_keys=True)(value)
        for other in (None, mock.Mock(side_effect=TypeError)):
            with mock.patch.object(encoder, "c_make_encoder", other):
                write = writer(sort_keys=True)
            self.assertEqual(expected, write(value))
