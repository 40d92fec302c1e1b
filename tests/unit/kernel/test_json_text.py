# SPDX-License-Identifier: Apache-2.0
"""JSON is written as the standard library writes it, but for the look of some numbers and DEL."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import re
import unittest
from typing import Any

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


class Name(str):
    __slots__ = ()


@dataclasses.dataclass
class Record:
    name: str = ""


def usual_look(text: str) -> str:
    """The text, with DEL and numbers that are no integers as Python writes them."""
    return re.sub(
        r"-?[0-9]+(\.[0-9]+|(?=e))(e[-+]?[0-9]+)?", lambda found: repr(float(found[0])), text.replace("\x7f", "\\u007f")
    )


class JsonTextTests(unittest.TestCase):
    def check(self, value: Any, options: dict[str, Any]) -> None:
        usual = json.JSONEncoder(separators=(",", ":"), **options).encode
        try:
            expected: object = usual(value)
        except (TypeError, ValueError) as error:
            with self.assertRaises(type(error)):
                writer(**options)(value)
        else:
            self.assertEqual(usual_look(str(expected)), usual_look(writer(**options)(value)))

    @given(VALUES, OPTIONS)
    def test_texts_and_refusals_are_those_of_the_standard_library(self, value: Any, options: dict[str, bool]) -> None:
        self.check(value, options)
        self.check(frozen(value), options)

    def test_what_is_no_json_is_refused(self) -> None:
        today = datetime.datetime(2026, 11, 29, tzinfo=datetime.UTC)
        of_others = (object(), {"a": {1}}, b"bytes", {(1, 2): 3}, Record(), today, today.date())
        for value in (*of_others, [float("nan")], {"a": [-float("inf")]}):
            for allow_nan in (False, True):
                with self.subTest(value, allow_nan=allow_nan):
                    self.check(value, {"allow_nan": allow_nan})

    def test_what_is_nearly_plain_data_is_written_as_plain_data(self) -> None:
        for value in (
            Color.RED,
            {Color.RED: "\ud800"},
            {Name("a"): Name("b")},
            {1: None, False: 2**64},
            "null",
            {"é": ["ü"]},
        ):
            with self.subTest(value):
                self.check(value, {})

    def test_an_object_that_contains_itself_is_refused(self) -> None:
        value: list[Any] = []
        value.append(value)
        self.check(value, {})

    def test_depth_is_no_limit_of_its_own(self) -> None:
        value: list[Any] = []
        for _ in range(600):
            value = [value]
        self.check(value, {})
