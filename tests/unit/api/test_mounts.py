# SPDX-License-Identifier: Apache-2.0
"""Which dialect is where."""

from __future__ import annotations

import unittest
from typing import Any

from moorage import errors
from moorage.api.mounts import Dispatcher, at_its_path, places


def application(environ: dict[str, Any], start_response: Any) -> Any:
    return [environ["SCRIPT_NAME"].encode(), b"|", environ["PATH_INFO"].encode()]


class TestPlaces(unittest.TestCase):
    def test_a_dialect_is_at_its_own_place_unless_the_deployer_chose_another(self) -> None:
        own = {"placement": "/placement", "volume": "/volume/v3"}
        self.assertEqual({"placement": "", "volume": "/volume/v3"}, places(own, {"placement": "/"}, {}))

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
                places(own, chosen, {"/metrics": application})


class TestDispatcher(unittest.TestCase):
    def call(self, dispatcher: Dispatcher, path: str) -> str:
        found = dispatcher({"PATH_INFO": path, "SCRIPT_NAME": "/front"}, lambda status, headers: None)
        return b"".join(found).decode()

    def test_the_longest_prefix_wins_and_moves_to_script_name(self) -> None:
        dispatcher = Dispatcher({"/a": application, "/a/b": application, "": application})
        self.assertEqual("/front/a/b|/c", self.call(dispatcher, "/a/b/c"))
        self.assertEqual("/front/a|/bc", self.call(dispatcher, "/a/bc"))
        self.assertEqual("/front|/ab", self.call(dispatcher, "/ab"))

    def test_an_application_that_knows_its_path_sees_it_whole(self) -> None:
        dispatcher = Dispatcher({"/scheduling": at_its_path(application, "/scheduling")})
        self.assertEqual("/front|/scheduling/v1", self.call(dispatcher, "/scheduling/v1"))
