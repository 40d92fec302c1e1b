# SPDX-License-Identifier: Apache-2.0
"""Errors as data."""

from __future__ import annotations

import unittest

from moorage import errors


class TestWire(unittest.TestCase):
    def test_every_error_arrives_as_its_own_class_with_its_details(self) -> None:
        for name in errors.__all__:
            cls = getattr(errors, name)
            if not isinstance(cls, type):
                continue
            with self.subTest(name):
                back = errors.from_wire(errors.to_wire(cls("what was wrong", path="/x")))
                self.assertIs(cls, type(back))
                self.assertEqual("what was wrong", back.message)
                self.assertEqual("/x", back.details["path"])

    def test_codes_are_unique(self) -> None:
        classes = [getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)]
        self.assertEqual(len(classes), len({cls.code for cls in classes}))

    def test_an_unknown_code_keeps_its_text(self) -> None:
        back = errors.from_wire({"code": "acme.special", "message": "strange"})
        self.assertIsInstance(back, errors.RemoteError)
        self.assertEqual("acme.special", back.details["remote_code"])

    def test_what_is_not_ours_gives_no_text_away(self) -> None:
        self.assertNotIn("secret", errors.to_wire(ValueError("secret"))["message"])
