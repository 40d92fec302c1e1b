# SPDX-License-Identifier: Apache-2.0
"""What the process driver reads of a machine, on folders that look like /proc and /sys/fs/cgroup."""

from __future__ import annotations

import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import os_traits

from moorage_plugins.drivers.guarded import machine

_MIB = 2**20


class MachineTests(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.proc, self.groups = Path(folder.name, "proc"), Path(folder.name, "cgroup")
        self.write("proc/self/cgroup", "")
        self.write("cgroup/unused", "")
        # The tests may run as root, who may write everywhere.
        self.writable = False
        self.enterContext(mock.patch("os.access", lambda path, mode: self.writable))
        self.enterContext(mock.patch("os.sched_getaffinity", lambda pid: set(range(8))))

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def found(self) -> tuple[int, int]:
        return machine.processors(self.proc, self.groups), machine.memory_mib(self.proc, self.groups)

    def test_without_control_groups_it_is_the_machine(self) -> None:
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.assertEqual((8, pages // _MIB), self.found())

    def test_the_least_limit_of_version_2_counts(self) -> None:
        self.write("cgroup/cgroup.controllers", "cpu memory")
        self.write("proc/self/cgroup", "0::/a/b\n")
        self.write("cgroup/a/b/cpu.max", "max 100000")
        self.write("cgroup/a/cpu.max", "250000 100000")
        self.write("cgroup/a/b/memory.max", str(64 * _MIB))
        self.write("cgroup/a/memory.max", "max")
        self.assertEqual((2, 64), self.found())

    def test_the_least_limit_of_version_1_counts(self) -> None:
        self.write("proc/self/cgroup", "3:cpu,cpuacct:/a\n4:memory:/b/c\n0::/\n")
        self.write("cgroup/cpu/a/cpu.cfs_quota_us", "-1")
        self.write("cgroup/cpu/a/cpu.cfs_period_us", "100000")
        self.write("cgroup/cpu/cpu.cfs_quota_us", "50000")
        self.write("cgroup/cpu/cpu.cfs_period_us", "100000")
        self.write("cgroup/memory/b/memory.limit_in_bytes", str(32 * _MIB))
        self.write("cgroup/memory/b/c/memory.limit_in_bytes", str(2**63 - 4096))
        # Half a processor is one: a workload of one VCPU runs, slowly.
        self.assertEqual((1, 32), self.found())

    def test_limits_of_the_agent_alone_do_not_count_where_workloads_have_groups_of_their_own(self) -> None:
        self.writable = True
        self.write("cgroup/cgroup.controllers", "cpu memory")
        self.write("proc/self/cgroup", "0::/agent\n")
        self.write("cgroup/agent/memory.max", str(2 * _MIB))
        self.write("cgroup/memory.max", str(128 * _MIB))
        self.assertEqual((8, 128), self.found())

    def test_only_traits_that_all_processors_have_and_that_are_certain(self) -> None:
        self.write("proc/cpuinfo", "flags\t\t: fpu pni avx2 fma rtm svm\n\nflags\t\t: fpu pni avx2 fma odd_flag svm\n")
        wanted = {"HW_ARCH_X86_64", "HW_CPU_X86_SSE3", "HW_CPU_X86_AVX2", "HW_CPU_X86_FMA3"}
        self.assertEqual(wanted, machine.processor_traits(self.proc, "x86_64"))
        self.write("proc/cpuinfo", "Features\t: fp asimd nothing\n")
        wanted = {"HW_ARCH_AARCH64", "HW_CPU_AARCH64_FP", "HW_CPU_AARCH64_ASIMD"}
        self.assertEqual(wanted, machine.processor_traits(self.proc, "aarch64"))

    def test_what_is_not_known_has_no_trait(self) -> None:
        self.assertEqual(frozenset(), machine.processor_traits(self.proc / "nowhere", "toaster"))

    def test_every_name_that_differs_from_its_flag_is_a_trait(self) -> None:
        names = {f"HW_CPU_X86_{name}" for name in machine._X86.values()}
        self.assertLessEqual(names, set(os_traits.get_traits()))

    def test_gpus_are_named_and_not_offered(self) -> None:
        for name in ("nvidia0", "nvidia1", "nvidiactl", "kfd", "null"):
            self.write(f"dev/{name}", "")
        self.assertEqual(["kfd", "nvidia0", "nvidia1"], machine.unoffered_gpus(self.proc.parent / "dev"))
        self.assertEqual([], machine.unoffered_gpus(self.proc.parent / "none"))
