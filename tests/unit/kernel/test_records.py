# SPDX-License-Identifier: Apache-2.0
"""Copies of records, and identifiers: they are as the standard library makes them."""

from __future__ import annotations

import dataclasses
import unittest
import uuid
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moorage import randomness
from moorage.instances.interface import Instance
from moorage.read_only import fields_of, replaced
from moorage.scheduling.interface import Flavor, InstanceRecord, RequestSpec

_RECORDS = (
    RequestSpec(
        "u", Flavor("f", {"VCPU": 1}), hints={"same_host": ["a"]}, force_hosts=("h",), properties={"name": "n"}
    ),
    InstanceRecord("u", "h", "n", "f", {"VCPU": 1}, fields={"a": [1]}, holds={"p": {"VCPU": 1}}),
    Instance("u", "n", "active", "h", "n", "nu", "f", {"VCPU": 1}, request={"hints": {}}, created_at=5),
)


class RecordTests(unittest.TestCase):
    @given(st.sampled_from(_RECORDS), st.data())
    def test_a_copy_is_that_of_dataclasses(self, record: Any, data: st.DataObject) -> None:
        names = [each.name for each in dataclasses.fields(record)]
        others = data.draw(st.lists(st.sampled_from(names), unique=True))
        changes = {name: {"of": [name]} for name in others}
        before = dataclasses.asdict(record)
        expected, found = dataclasses.replace(record, **changes), replaced(record, **changes)
        self.assertEqual(expected, found)
        for name in names:
            # What is made read-only is so in both.
            self.assertIs(type(getattr(expected, name)), type(getattr(found, name)), name)
        self.assertEqual(before, dataclasses.asdict(record))

    def test_an_unknown_field_is_refused(self) -> None:
        for record in _RECORDS:
            with self.assertRaises(TypeError):
                replaced(record, colour="red")

    def test_fields_are_in_order_and_shared(self) -> None:
        for record in _RECORDS:
            found = fields_of(record)
            self.assertEqual([each.name for each in dataclasses.fields(record)], list(found))
            for name, value in found.items():
                self.assertIs(getattr(record, name), value)


class UuidTests(unittest.TestCase):
    def test_uuids_are_random_ones(self) -> None:
        made = [randomness.RandomSource().new_uuid() for _ in range(500)]
        self.assertEqual(len(made), len(set(made)))
        for text in made:
            parsed = uuid.UUID(text)
            self.assertEqual((text, 4, uuid.RFC_4122), (str(parsed), parsed.version, parsed.variant))
        for place in (19, 0, 35):
            # Each value of a digit is taken.
            self.assertEqual(4 if place == 19 else 16, len({text[place] for text in made}))
