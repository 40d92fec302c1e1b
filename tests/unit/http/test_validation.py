# SPDX-License-Identifier: Apache-2.0
"""Bodies and queries: what is refused, in which words, with and without the fast validator."""

from __future__ import annotations

import json
import unittest
from typing import Any
from unittest import mock

import jsonschema
from hypothesis import given
from hypothesis import strategies as st

from moorage import errors
from moorage.http import validation
from moorage.http.validation import Validator, parse_json

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "price": {"type": "string", "pattern": "^[0-9]+\\$"},
        "limit": {"type": "integer", "minimum": 1},
        "sure": {"type": "boolean"},
        "each": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": False,
}


class ValidatorTests(unittest.TestCase):
    def validators(self) -> list[Validator]:
        """One that has the fast library, one that has to do without."""
        with mock.patch.object(validation, "jsonschema_rs", None):
            slow = Validator(SCHEMA, "body")
        return [Validator(SCHEMA, "body"), slow]

    def test_both_give_the_same_answers_and_say_where(self) -> None:
        good: list[Any] = [{}, {"name": "a"}, {"price": "5$"}, {"price": "5$ or more"}, {"limit": 3}]
        bad = [
            ({"name": "a\n"}, "body/name"),
            ({"name": "A"}, "body/name"),
            ({"price": "5"}, "body/price"),
            ({"limit": 0}, "body/limit"),
            ({"limit": True}, "body/limit"),
            ({"colour": 1}, "body"),
            ([], "body"),
        ]
        for validator in self.validators():
            for data in good:
                validator.check(data)
            for data, path in bad:
                with self.subTest(data=data), self.assertRaises(errors.InvalidInput) as raised:
                    validator.check(data)
                self.assertEqual(path, raised.exception.details["path"])
                self.assertNotIn("API document", raised.exception.message)

    def test_a_query_is_text_that_becomes_what_the_schema_says(self) -> None:
        for validator in self.validators():
            self.assertEqual(
                {"limit": 3, "sure": True, "each": ["a"]},
                validator.read_query({"limit": ["3"], "sure": ["TRUE"], "each": ["a"]}),
            )
            self.assertEqual({"each": ["a", "b"]}, validator.read_query({"each": ["a", "b"]}))
            for name, value in (
                ("limit", "many"),
                ("limit", "1.0"),
                ("limit", "1_0"),
                ("sure", "perhaps"),
                ("colour", "red"),
            ):
                self.assertRaises(errors.InvalidInput, validator.read_query, {name: [value]})

    def test_both_refuse_a_schema_with_a_mistake_at_once_and_say_where(self) -> None:
        mistakes: list[tuple[dict[str, Any], str]] = [
            ({"type": "strin"}, "'strin'"),
            ({"properties": {"name": {"minLength": "x"}}}, "minLength"),
            ({"properties": {"name": {"pattern": "("}}}, "pattern"),
            ({"required": "name"}, "'name'"),
        ]
        for library in (validation.jsonschema_rs, None):
            for schema, said in mistakes:
                with (
                    self.subTest(fast=library is not None, schema=schema),
                    mock.patch.object(validation, "jsonschema_rs", library),
                    self.assertRaisesRegex(jsonschema.SchemaError, said),
                ):
                    Validator(schema, "body")

    def test_what_is_given_twice_is_told_so(self) -> None:
        with self.assertRaisesRegex(errors.InvalidInput, "query/limit: it is given 2 times"):
            Validator(SCHEMA, "query").read_query({"limit": ["1", "2"]})


class ParseTests(unittest.TestCase):
    def test_text_that_no_database_keeps_is_refused_wherever_it_stands(self) -> None:
        for text in ("\ud800", "a\udfff", "\0", "x\0y"):
            for data in (text, [text], {"a": {"b": [text]}}, {text: 1}):
                with self.subTest(data=data), self.assertRaisesRegex(errors.InvalidInput, "no text"):
                    parse_json(json.dumps(data).encode())

    def test_a_pair_of_surrogates_is_one_character(self) -> None:
        self.assertEqual({"a": "\U0001f600"}, parse_json(b'{"a": "\\ud83d\\ude00"}'))

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_everything_else_comes_back_as_it_was(self, data: Any) -> None:
        raw = json.dumps(data).encode()
        if b"\\u0000" in raw and "\0" in _texts(data):
            self.assertRaises(errors.InvalidInput, parse_json, raw)
        else:
            self.assertEqual(data, parse_json(raw))

    def test_what_is_no_json_is_told_with_its_place(self) -> None:
        for raw, said in (
            (b"{", "line 1, column 2"),
            (b"\xff", "not UTF-8"),
            (b'{"a": NaN}', "NaN"),
            (b'{"a": 1, "a": 2}', "'a' stands twice"),
            (b"[" * 100_000, "nested too deeply"),
        ):
            with self.subTest(raw=raw[:20]), self.assertRaisesRegex(errors.InvalidInput, said):
                parse_json(raw)


def _texts(data: Any) -> str:
    if isinstance(data, str):
        return data
    if isinstance(data, dict):
        return "".join(_texts(each) for pair in data.items() for each in pair)
    return "".join(map(_texts, data)) if isinstance(data, list) else ""
