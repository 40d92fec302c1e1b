# SPDX-License-Identifier: Apache-2.0
"""Which dialect is where."""

from __future__ import annotations

import json
import unittest
from typing import Any

from moorage import errors
from moorage.extensions import Loaded
from moorage.http.mounts import IsolatedApp, MountDispatcher, resolve_mounts
from moorage.plugin_isolation import PluginExit


def application(environ: dict[str, Any], start_response: Any) -> Any:
    return [environ["SCRIPT_NAME"].encode(), b"|", environ["PATH_INFO"].encode()]


class ResolveMountsTests(unittest.TestCase):
    def test_a_dialect_is_at_its_own_place_unless_the_deployer_chose_another(self) -> None:
        own = {"placement": "/placement", "volume": "/volume/v3"}
        self.assertEqual({"placement": "", "volume": "/volume/v3"}, resolve_mounts(own, {"placement": "/"}, ()))

    def test_refusals_name_the_dialect(self) -> None:
        own = {"placement": "/placement", "volume": "/volume/v3"}
        for chosen in (
            {"baremetal": "/"},
            {"placement": "here"},
            {"placement": "/volume/v3/"},
            {"placement": "/metrics"},
            {"placement": "/", "volume": "/"},
        ):
            with self.subTest(chosen), self.assertRaisesRegex(errors.ConfigError, "baremetal|placement|volume"):
                resolve_mounts(own, chosen, ["/metrics"])


class TestDispatcher(unittest.TestCase):
    def call(self, dispatcher: MountDispatcher, path: str) -> str:
        found = dispatcher({"PATH_INFO": path, "SCRIPT_NAME": "/front"}, lambda status, headers: None)
        return b"".join(found).decode()

    def test_the_longest_prefix_wins_and_moves_to_script_name(self) -> None:
        dispatcher = MountDispatcher({"/a": application, "/a/b": application, "": application})
        self.assertEqual("/front/a/b|/c", self.call(dispatcher, "/a/b/c"))
        self.assertEqual("/front/a|/bc", self.call(dispatcher, "/a/bc"))
        self.assertEqual("/front|/ab", self.call(dispatcher, "/ab"))


class IsolatedAppTests(unittest.TestCase):
    def call(self, application: Any) -> tuple[list[str], Any]:
        started: list[str] = []
        made = IsolatedApp(application, Loaded("it", object, "acme", "1.0", "moorage.api"))
        return started, made({"PATH_INFO": "/x"}, lambda status, headers, failure=None: started.append(status))

    def test_what_raises_or_exits_is_a_500_that_names_the_plugin(self) -> None:
        for error in (SystemExit(5), KeyError("x")):

            def fails(environ: Any, start_response: Any, error: BaseException = error) -> Any:
                raise error

            with self.assertLogs("moorage.http.mounts", "ERROR") as logs:
                started, body = self.call(fails)
            self.assertEqual(["500 Internal Server Error"], started)
            self.assertIn("plugin 'it' (moorage.api, of acme 1.0)", json.loads(b"".join(body))["error"]["message"])
            self.assertIn(type(error).__name__, logs.output[0])

    def test_a_body_that_is_made_while_it_is_sent_may_not_end_the_server_either_and_is_closed(self) -> None:
        closed = []

        def parts() -> Any:
            try:
                yield b"one"
                yield b""
                raise SystemExit(5)
            finally:
                closed.append(True)

        _, body = self.call(lambda environ, start_response: parts())
        found = iter(body)
        self.assertEqual([b"one", b""], [next(found), next(found)])
        with self.assertRaises(PluginExit):
            next(found)
        self.assertEqual([True], closed)

    def test_what_is_well_passes_as_it_is(self) -> None:
        self.assertEqual([b"x"], self.call(lambda environ, start_response: [b"x"])[1])
