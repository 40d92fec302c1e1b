# SPDX-License-Identifier: Apache-2.0
"""The observer on Moorage's conformance kit."""

from __future__ import annotations

import json
import unittest
from pathlib import Path
from typing import Any

from acme_moorage.observers import RefusalsObserver
from acme_moorage.options import list_opts

from moorage.observers.interface import Observer, ObserverTools, RequestRefused
from moorage.testing.observers import ObserverTests


class RefusalsObserverTests(ObserverTests, unittest.TestCase):
    def make_observer(self, tools: ObserverTools) -> Observer:
        return RefusalsObserver(tools)

    def list_opts(self) -> Any:
        return list_opts()

    def test_refusals_are_counted_by_project_and_reason(self) -> None:
        tools = self.tools()
        observer = self.make_observer(tools)
        for project, summary in (("red", "full"), ("red", "full"), ("red", "down"), ("blue", "full")):
            observer.observe(self.notice(RequestRefused("r", "i", project, summary, 3, {})))
        observer.flush()
        (file,) = Path(tools.conf.control_plane.state_dir).glob("refusals-*.json")
        self.assertEqual({"red": {"full": 2, "down": 1}, "blue": {"full": 1}}, json.loads(file.read_text()))
