# SPDX-License-Identifier: Apache-2.0
"""Reads what this machine has for workloads: processors, memory, and the traits of its processors.

Limits of control groups count where workloads have them too. An agent that may make groups puts workloads below the root of the
hierarchy; in a container, that is the root of the container. Otherwise workloads stay in the group of the agent.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import os_traits

__all__ = ["memory_mib", "processor_traits", "processors", "unoffered_gpus"]

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")
_MIB = 2**20
_KNOWN = frozenset(os_traits.get_traits())
_DEVICES = Path("/dev")
_GPU_NAMES = re.compile(r"nvidia\d+|kfd")
#: Flags of /proc/cpuinfo whose trait has another name than HW_CPU_X86_FLAG.
_X86 = {
    "pni": "SSE3", "sse4_1": "SSE41", "sse4_2": "SSE42", "fma": "FMA3", "pclmulqdq": "CLMUL", "aes": "AESNI", "sha_ni": "SHA",
    "bmi1": "BMI", "rtm": "TSX", "avx512_vnni": "AVX512VNNI", "avx512_vbmi2": "AVX512VBMI2", "avx512_bitalg": "AVX512BITALG",
    "avx512_vpopcntdq": "AVX512VPOPCNTDQ", "amx_bf16": "AMXBF16", "amx_int8": "AMXINT8", "amx_tile": "AMXTILE",
}  # fmt: skip
#: Flags that are about the host's kernel or firmware: workloads cannot use them, or their trait means more than the flag.
_NOT_CERTAIN = frozenset({"stibp", "sgx", "vmx", "svm", "asf"})


def processors(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Counts the processors that workloads may use: those of the agent's affinity, and no more than control groups allow."""
    quotas = [_quota(folder) for folder in _folders("cpu", proc, groups)]
    return max(1, math.floor(min([float(len(os.sched_getaffinity(0))), *quotas])))


def memory_mib(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Returns the memory that workloads may use, in MiB: that of the machine, and no more than control groups allow."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _folders("memory", proc, groups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            # Absent, or "max": no limit.
            with contextlib.suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text()))
    return min(limits) // _MIB


def processor_traits(proc: Path = _PROC, machine: str = "") -> frozenset[str]:
    """Returns the traits of os-traits that all processors certainly have, with that of the architecture.

    :param machine: the architecture, as ``uname -m`` says it; empty: this machine's.
    """
    machine = machine or platform.machine()
    found = {f"HW_ARCH_{machine.upper()}"}
    flags = _flags(proc)
    if machine == "x86_64":
        found |= {f"HW_CPU_X86_{_X86.get(flag, flag.upper())}" for flag in flags - _NOT_CERTAIN}
    elif machine == "aarch64":
        found |= {f"HW_CPU_AARCH64_{flag.upper()}" for flag in flags}
    return frozenset(found & _KNOWN)


def unoffered_gpus(devices: Path = _DEVICES) -> list[str]:
    """Returns the device files of GPUs, by name. Workloads have no devices, so GPUs are no resource of this driver."""
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(devices) if _GPU_NAMES.fullmatch(name))
    return []


def _flags(proc: Path) -> set[str]:
    """Returns the flags that all processors have."""
    try:
        text = (proc / "cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    each = [set(line.split()) for line in re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)]
    return set.intersection(*each) if each else set()


def _folders(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """Returns the control groups whose limits workloads have, from the inner to the outer."""
    root = groups if (groups / "cgroup.controllers").exists() else groups / controller
    if not os.access(root, os.W_OK):
        path = _own_group(controller, proc).strip("/")
        while path:
            yield root / path
            path = path.rpartition("/")[0]
    yield root


def _own_group(controller: str, proc: Path) -> str:
    """Returns the path of this process's group; version 1 names the controller, version 2 has one group and no name."""
    found = ""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            number, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path
            if number == "0" and not names:
                found = path
    return found


def _quota(folder: Path) -> float:
    """Returns how many processors a group allows; infinity without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            return int(quota) / int(period)
    return math.inf
