# SPDX-License-Identifier: Apache-2.0
"""Images for virtual machines that run without a system, and the machines that run, read from the processes of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from moorage_plugins.drivers.libvirt.definition import prefix_of

__all__ = ["copies_of", "make_image", "processes_of"]

_MIB = 2**20
#: Where a BIOS puts a boot sector.
_AT = 0x7C00
#: xor ax, ax; mov ds, ax; mov si, TEXT
_BEGIN = bytes.fromhex("31c0 8ed8 be")
#: lodsb; test al, al; jz END; mov dx, COM1; out dx, al; jmp to lodsb
_SAY = bytes.fromhex("ac 84c0 7406 baf803 ee ebf5")
#: mov dx, PM1a_CNT; mov ax, SLP_EN; out dx, ax
_POWER_OFF = bytes.fromhex("ba0406 b80020 ef")
#: cli; hlt; jmp to itself
_HALT = bytes.fromhex("fa f4 ebfd")


def make_image(path: Path, text: str = "", *, power_off: bool = False) -> None:
    """Makes a disk whose boot sector writes a text to the serial line, and then turns the machine off or waits for ever."""
    end = (_POWER_OFF if power_off else b"") + _HALT
    says = _AT + len(_BEGIN) + 2 + len(_SAY) + len(end)
    sector = _BEGIN + says.to_bytes(2, "little") + _SAY + end + text.encode() + b"\0"
    content = sector.ljust(510, b"\0") + b"\x55\xaa"
    # A BIOS reads no disk that is smaller than a cylinder.
    path.write_bytes(content.ljust(_MIB, b"\0"))
    path.chmod(0o644)


def processes_of(host: str, uuid: str) -> Sequence[psutil.Process]:
    """The processes of qemu that run an instance of a host."""
    wanted = f"guest={prefix_of(host)}{uuid}-"
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(each.startswith(wanted) for each in process.info["cmdline"] or ())
        and process.status() != psutil.STATUS_ZOMBIE
    ]


def copies_of(host: str, uuid: str) -> Sequence[object]:
    """Each run of an instance on a host."""
    return [(each.pid, each.create_time()) for each in processes_of(host, uuid)]
