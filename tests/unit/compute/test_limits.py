# SPDX-License-Identifier: Apache-2.0
"""Limits of the process driver, on folders that look like the two versions of control groups.

The functional tests of the driver use those of the machine, which has one of the versions, or none.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

from moorage_plugins.drivers.guarded.limits import Limits, groups_for


class LimitsTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def made(self, **resources: int) -> Limits:
        limits = Limits(groups_for("a-1", resources, 512, self.root), resources.get("MEMORY_MB", 0))
        limits.make()
        return limits

    def read(self, path: str) -> str:
        return (self.root / path).read_text()

    def test_version_2_has_one_group_whose_parents_give_it_the_controllers(self) -> None:
        (self.root / "cgroup.controllers").write_text("cpu memory pids")
        limits = self.made(VCPU=2, MEMORY_MB=64)
        self.assertEqual("", limits.missing())
        for folder in ("", "moorage/"):
            self.assertEqual("+memory +cpu +pids", self.read(f"{folder}cgroup.subtree_control"))
        self.assertEqual(str(64 * 2**20), self.read("moorage/a-1/memory.max"))
        self.assertEqual("200000 100000", self.read("moorage/a-1/cpu.max"))
        self.assertEqual("512", self.read("moorage/a-1/pids.max"))

    def test_version_1_has_a_group_for_each_controller(self) -> None:
        for name in ("memory", "cpu", "pids"):
            (self.root / name).mkdir()
        limits = self.made(VCPU=2, MEMORY_MB=64)
        self.assertEqual("", limits.missing())
        self.assertEqual(str(64 * 2**20), self.read("memory/moorage/a-1/memory.limit_in_bytes"))
        self.assertEqual("200000", self.read("cpu/moorage/a-1/cpu.cfs_quota_us"))
        self.assertEqual("512", self.read("pids/moorage/a-1/pids.max"))

    def test_what_cannot_be_limited_is_said(self) -> None:
        self.assertEqual(
            "No control groups: memory is limited for each process alone, processor time is not limited, the number of processes "
            "is not limited.",
            self.made(MEMORY_MB=64).missing(),
        )
        (self.root / "memory").mkdir()
        (self.root / "cpu").touch()
        self.assertEqual(
            "No control groups: processor time is not limited, the number of processes is not limited.",
            self.made(MEMORY_MB=64).missing(),
        )

    def test_what_is_not_asked_for_is_not_limited(self) -> None:
        (self.root / "cgroup.controllers").write_text("cpu memory pids")
        self.made()
        self.assertEqual({"pids.max"}, {path.name for path in (self.root / "moorage/a-1").iterdir()})

    def test_a_kill_for_memory_is_seen(self) -> None:
        (self.root / "cgroup.controllers").write_text("cpu memory pids")
        limits = self.made(MEMORY_MB=64)
        self.assertFalse(limits.out_of_memory())
        (self.root / "moorage/a-1/memory.events").write_text("low 0\noom 1\noom_kill 1\n")
        self.assertTrue(limits.out_of_memory())
