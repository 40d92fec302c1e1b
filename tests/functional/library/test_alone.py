# SPDX-License-Identifier: Apache-2.0
"""Each family alone: the programs of ``examples/alone``, in a fresh interpreter in which the other families cannot be imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from moorage.public import Audience, audience_of
from tests.sources import imported

FOLDER = Path(__file__).parents[3] / "examples" / "alone"
#: Family -> the packages that are its own: the core's, and those of the reference plugins.
FAMILIES = {
    "scheduling": ("moorage.scheduling", "moorage_plugins.filters", "moorage_plugins.weighers"),
    "allocation": ("moorage.allocation", "moorage_plugins.stores"),
    "coordination": ("moorage.coordination", "moorage_plugins.coordination"),
    "sharding": ("moorage.sharding", "moorage_plugins.strategies"),
    "cleanup": ("moorage.cleanup",),
}
#: What joins the families, and the services that are made of them.
JOINED = (
    *("moorage.control_plane", "moorage.http", "moorage.cli", "moorage.client", "moorage.testing", "moorage.observers"),
    *(
        "moorage_plugins.api",
        "moorage_plugins.compute",
        "moorage_plugins.block_storage",
        "moorage_plugins.data_processing",
    ),
    *("moorage_plugins.transports", "moorage_plugins.observers"),
    *("moorage.drivers", "moorage_plugins.drivers"),
)
#: Modules that are read of all that is installed: declared parts, tables of migrations, options of the configuration.
SHARED = ("tables", "options", "part")
#: Nothing else of a family that is not there can be imported.
BLOCKED = """
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name.startswith(each + '.') for each in {blocked!r}) and name.rpartition('.')[2] not in {shared!r}:
            if name not in {packages!r}:
                raise ModuleNotFoundError('absent: ' + name, name=name)
sys.meta_path.insert(0, Absent())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
loaded = [name for name in sys.modules if any(name.startswith(each + '.') for each in {blocked!r})]
wrong = [name for name in loaded if name not in {packages!r} and name.rpartition('.')[2] not in {shared!r}]
assert not wrong, wrong
"""
SAID = {
    "scheduling": ["instance-0 goes to node-3 on host-3", "instance-1 goes to node-3 on host-3"],
    "allocation": [
        *("3 VCPU are claimed", "3 VCPU are claimed"),
        *("refused (moorage.capacity_exceeded)", "node-1 has 6 VCPU in use"),
    ],
    "coordination": [
        *("together 1000 of 1000, twice 0", "each has some: True", "the one that is left has 1000"),
        *("job-0 is done", "job-1 is done", "who has left has 0"),
    ],
    "sharding": [
        *("east: 60 -> 34", "north: 0 -> 33", "west: 40 -> 33"),
        *("33 nodes move, no plan could do with less than 33", "nodes in use that move: 0", "planned again: 0 moves"),
    ],
    "cleanup": [
        *("host-1 runs job-1", "declared dead: True", "host-2 cleans: {'done': 1}"),
        *("host-1 is refused", "job-1 has failed"),
    ],
}


class AloneTests(unittest.TestCase):
    def run_it(self, family: str) -> list[str]:
        others = (each for name, own in FAMILIES.items() if name != family for each in own)
        blocked = (*others, *JOINED)
        # Packages themselves are named by the migrations and options of what is installed.
        packages = {"moorage_plugins.api.baremetal"}
        folder = tempfile.mkdtemp(prefix="moorage-alone-")
        self.addCleanup(shutil.rmtree, folder)
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                BLOCKED.format(blocked=blocked, packages=packages, shared=SHARED),
                FOLDER / f"{family}.py",
            ],
            cwd=folder,
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        return done.stdout.splitlines()

    def test_scheduling(self) -> None:
        said = self.run_it("scheduling")
        self.assertEqual((SAID["scheduling"], 6), (said[:2], len(said)))
        # Twelve, eight and four VCPU take four, two and one instances of three.
        counts = [sum(f"node-{number} " in line for line in said) for number in (3, 2, 1)]
        self.assertEqual((6, True, True, True), (sum(counts), counts[0] <= 4, counts[1] <= 2, counts[2] <= 1))

    def test_allocation(self) -> None:
        self.assertEqual(SAID["allocation"], self.run_it("allocation"))

    def test_coordination(self) -> None:
        self.assertEqual(SAID["coordination"], self.run_it("coordination"))

    def test_sharding(self) -> None:
        self.assertEqual(SAID["sharding"], self.run_it("sharding"))

    def test_cleanup(self) -> None:
        self.assertEqual(SAID["cleanup"], self.run_it("cleanup"))


class ImportsTests(unittest.TestCase):
    def test_the_programs_import_what_programs_may_import(self) -> None:
        for path in FOLDER.glob("*.py"):
            for module in imported(path):
                with self.subTest(program=path.name, module=module):
                    self.assertIn(audience_of(module), (Audience.PLUGINS, Audience.PROGRAMS))
