# SPDX-License-Identifier: Apache-2.0
"""The YAML files beside this module, each against an empty dialect."""

from __future__ import annotations

import pathlib

from tests.api.baremetal.ironic import IronicCase
from tests.gabbits import run_file

FOLDER = pathlib.Path(__file__).parent / "gabbits"


class TestGabbits(IronicCase):
    def test_every_file_holds(self) -> None:
        files = sorted(FOLDER.glob("*.yaml"))
        self.assertTrue(files)
        for file in files:
            with self.subTest(file.name):
                self.setUp()
                run_file(self, self.live.url, file, prefix="/baremetal")
