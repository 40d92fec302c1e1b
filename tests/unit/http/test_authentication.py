# SPDX-License-Identifier: Apache-2.0
"""HTTP basic authentication against a file of users that changes while it is used."""

from __future__ import annotations

import base64
import os
import tempfile
import threading
import unittest
from pathlib import Path
from unittest import mock

import bcrypt
from oslo_config import cfg

from moorage import errors
from moorage.http import authentication, options


def hashed(password: str) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


class BasicTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "users"
        self.changes = 0
        self.write(f"ann:{hashed('right')}:reader\n")
        conf = cfg.ConfigOpts()
        for group, found in options.list_opts():
            conf.register_opts(found, group=group)
        conf([])
        conf.set_override("http_basic_auth_user_file", str(self.path), group="api")
        conf.set_override("auth_strategy", "http_basic", group="api")
        self.authenticate = authentication.authenticator(conf)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self.changes += 1
        os.utime(self.path, ns=(self.changes * 10**9, self.changes * 10**9))

    def call(self, user: str, password: str) -> list[str]:
        encoded = base64.b64encode(f"{user}:{password}".encode()).decode()
        return list(self.authenticate({"HTTP_AUTHORIZATION": f"Basic {encoded}"}).roles)

    def test_a_right_password_has_its_roles_and_is_hashed_only_once(self) -> None:
        with mock.patch("moorage.http.authentication.bcrypt.checkpw", wraps=bcrypt.checkpw) as checkpw:
            for _ in range(3):
                self.assertEqual(["reader"], self.call("ann", "right"))
        self.assertEqual(1, checkpw.call_count)

    def test_wrong_and_unknown_are_refused_alike_and_cost_the_same(self) -> None:
        said = set()
        with mock.patch("moorage.http.authentication.bcrypt.checkpw", wraps=bcrypt.checkpw) as checkpw:
            for user, password in (("ann", "wrong"), ("bob", "right")):
                with self.assertRaises(errors.Unauthenticated) as raised:
                    self.call(user, password)
                said.add(raised.exception.message)
        self.assertEqual((1, 2), (len(said), checkpw.call_count))

    def test_malformed_headers_are_refused_in_words(self) -> None:
        for header in ("", "Basic", "Basic \xff\xfe", "Basic !!!", "Basic /w==", "Bearer abc"):
            with self.subTest(header=header), self.assertRaises(errors.Unauthenticated):
                self.authenticate({"HTTP_AUTHORIZATION": header})

    def test_a_changed_file_counts_at_once(self) -> None:
        self.call("ann", "right")
        self.write(f"ann:{hashed('new')}:admin\n")
        self.assertRaises(errors.Unauthenticated, self.call, "ann", "right")
        self.assertIn("admin", self.call("ann", "new"))

    def test_a_password_that_was_being_checked_while_the_file_changed_is_not_remembered(self) -> None:
        began, go_on = threading.Event(), threading.Event()

        def slow(password: bytes, against: bytes) -> bool:
            began.set()
            go_on.wait(60)
            return bcrypt.checkpw(password, against)

        with mock.patch.object(authentication, "bcrypt", mock.Mock(checkpw=slow)):
            thread = threading.Thread(target=self.call, args=("ann", "right"))
            thread.start()
            began.wait(60)
            self.write(f"ann:{hashed('new')}:admin\n")
            go_on.set()
            self.assertIn("admin", self.call("ann", "new"))
            thread.join()
        self.assertRaises(errors.Unauthenticated, self.call, "ann", "right")


class UsersFileTests(unittest.TestCase):
    def test_a_generated_password_never_begins_like_an_option(self) -> None:
        drawn = [b"\xfb" + bytes(17), b"\x6d" * 18]
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch("moorage.randomness.secret", side_effect=drawn.copy()),
        ):
            _, password = authentication.ensure_users(Path(folder) / "users", Path(folder) / "credentials")
        self.assertEqual("bW1t" * 6, password)

    def test_a_lost_password_is_replaced_and_all_other_users_stay(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            users, credentials = Path(folder) / "users", Path(folder) / "credentials"
            first = authentication.ensure_users(users, credentials)
            self.assertEqual(first, authentication.ensure_users(users, credentials))
            other = f"ann:{hashed('right')}:reader"
            users.write_text(users.read_text() + other + "\n")
            credentials.unlink()
            second = authentication.ensure_users(users, credentials)
            self.assertNotEqual(first, second)
            lines = users.read_text().splitlines()
            self.assertEqual([other], [line for line in lines if not line.startswith("admin:")])
            (admin,) = (line for line in lines if line.startswith("admin:"))
            self.assertTrue(bcrypt.checkpw(second[1].encode(), admin.split(":")[1].encode()))
            for path in (users, credentials):
                self.assertEqual(0o600, path.stat().st_mode & 0o777)

    def test_users_are_set_and_removed_and_what_cannot_be_kept_is_refused_and_changes_nothing(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "users"
            path.write_text("# people\n")
            authentication.set_user(path, "ann", "one", ["reader"])
            authentication.set_user(path, "bob", "two", ["member", "service"])
            authentication.set_user(path, "ann", "three", ["admin"])
            lines = path.read_text().splitlines()
            self.assertEqual(["# people", "bob", "ann"], [line.partition(":")[0] for line in lines])
            self.assertTrue(lines[1].endswith(":member,service"))
            before = path.read_bytes()
            for user, password, roles in (
                ("", "x", ["admin"]),
                ("a:b", "x", ["admin"]),
                ("a\nb", "x", ["admin"]),
                ("a", "", ["admin"]),
                ("a", "x" * 73, ["admin"]),
                ("a", "x", ["king"]),
                ("a", "x", []),
            ):
                with self.subTest(user=user, roles=roles), self.assertRaises(errors.InvalidInput):
                    authentication.set_user(path, user, password, roles)
            self.assertRaises(errors.NotFound, authentication.remove_user, path, "cid")
            self.assertEqual(before, path.read_bytes())
            authentication.remove_user(path, "bob")
            self.assertNotIn("bob", path.read_text())
