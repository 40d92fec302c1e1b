# SPDX-License-Identifier: Apache-2.0
"""Libraries that bring eventlet along: nothing is printed of it, and the thread that imported them can be waited for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import unittest

_PROGRAM = """
import os, sys, threading, importlib
thread = threading.Thread(target=importlib.import_module, args=(sys.argv[1],))
thread.start()
thread.join(60)
print("eventlet" in sys.modules, thread.is_alive(), "dns" in sys.modules, os.environ.get("EVENTLET_NO_GREENDNS"))
"""


class QuietImportTests(unittest.TestCase):
    def test_a_plugin_whose_library_imports_eventlet_says_nothing_leaves_nothing_and_ends(self) -> None:
        if importlib.util.find_spec("eventlet") is None:
            self.skipTest("eventlet is not installed, so nothing imports it")
        for name in ("coordination.tooz", "coordination.zookeeper", "transports.oslo"):
            with self.subTest(name=name):
                done = subprocess.run(
                    [sys.executable, "-c", _PROGRAM, f"moorage_plugins.{name}"],
                    capture_output=True, text=True, timeout=120, check=False,
                )  # fmt: skip
                self.assertEqual(("True False False None\n", ""), (done.stdout, done.stderr))


if __name__ == "__main__":
    unittest.main()
