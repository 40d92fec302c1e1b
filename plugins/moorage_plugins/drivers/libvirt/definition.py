# SPDX-License-Identifier: Apache-2.0
"""How a workload is defined in libvirt: the name of its domain, and the XML of the machine.

The name says whose domain it is: ``moorage-HOST-INSTANCE-TOKEN``, with a digest of the name of the agent. So a request for one
token never reaches another one, and agents that share a libvirt do not see each other's domains.
"""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import os_traits

from moorage.drivers.interface import DriverError, HostResources, Workload

__all__ = ["Image", "find_image", "host_resources", "machine_xml", "name_of", "prefix_of", "split_name"]

#: The id of an image is the name of a file, without its suffix.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FORMATS: Mapping[str, str] = {".raw": "raw", ".qcow2": "qcow2"}
_NAME = re.compile(r"(?P<uuid>.+)-(?P<token>[0-9]+)")
_TRAITS = frozenset(os_traits.get_traits())


@dataclass(frozen=True, slots=True)
class Image:
    """A disk on the host. ``format`` is that of its file, by the name of the file: it is never guessed from the content."""

    path: Path
    format: str


def prefix_of(host: str) -> str:
    """Returns the beginning of the names of a host's domains."""
    return f"moorage-{hashlib.sha256(host.encode()).hexdigest()[:12]}-"


def name_of(prefix: str, uuid: str, token: int) -> str:
    """Returns the name of a domain."""
    return f"{prefix}{uuid}-{token}"


def split_name(prefix: str, name: str) -> tuple[str, int] | None:
    """Returns the instance and the token of a domain; None where the name is none that :func:`name_of` makes."""
    found = _NAME.fullmatch(name.removeprefix(prefix))
    return (found["uuid"], int(found["token"])) if found and name.startswith(prefix) else None


def find_image(folder: Path, workload: Workload) -> Image:
    """Returns the image of a workload's request.

    :raises DriverError: it asks for none, or the image is not on this host.
    """
    wanted = str(workload.image.get("id") or "")
    if not wanted:
        raise DriverError(
            "the instance has no image, and the driver libvirt runs nothing else; say one with moorage instance create --image"
        )
    if _ID.fullmatch(wanted):
        for suffix, kind in _FORMATS.items():
            path = folder.absolute() / f"{wanted}{suffix}"
            if path.is_file():
                return Image(path, kind)
    raise DriverError(f"there is no image {wanted!r} on this host; an operator puts images there")


def machine_xml(workload: Workload, *, name: str, token: int, host: str, kind: str, image: Image, log: Path) -> str:
    """Returns the definition of a machine: processors, memory, a disk that it can only read, a serial line, and nothing else.

    :param kind: how it is executed: kvm or qemu.
    :raises DriverError: the workload claims no memory.
    """
    memory = workload.resources.get("MEMORY_MB", 0)
    if memory <= 0:
        raise DriverError("the instance claims no MEMORY_MB, and a machine needs memory; use a flavor that has it")
    domain = ET.Element("domain", type=kind)
    _add(domain, "name", name)
    # For people who read it with virsh: the driver reads the name.
    _add(domain, "description", ascii(f"Instance {workload.uuid} of Moorage host {host}, token {token}"))
    _add(domain, "memory", str(memory), unit="MiB")
    _add(domain, "vcpu", str(max(1, workload.resources.get("VCPU", 1))))
    system = _add(domain, "os")
    _add(system, "type", "hvm")
    _add(system, "boot", dev="hd")
    features = _add(domain, "features")
    _add(features, "acpi")
    if kind == "kvm":
        _add(domain, "cpu", mode="host-model")
    for event, action in (("on_poweroff", "destroy"), ("on_reboot", "restart"), ("on_crash", "destroy")):
        _add(domain, event, action)
    devices = _add(domain, "devices")
    _add(devices, "controller", type="usb", model="none")
    _add(devices, "memballoon", model="none")
    disk = _add(devices, "disk", type="file", device="disk")
    _add(disk, "driver", name="qemu", type=image.format)
    _add(disk, "source", file=str(image.path))
    # A qcow2 file may name another file of the host that it is based on; that one is not opened.
    _add(disk, "backingStore")
    _add(disk, "target", dev="vda", bus="virtio")
    _add(disk, "readonly")
    serial = _add(devices, "serial", type="file")
    _add(serial, "source", path=str(log), append="on")
    return ET.tostring(domain, encoding="unicode")


def host_resources(capabilities: str, kind: str) -> HostResources:
    """What the capabilities of a host, as libvirt says them, give to workloads.

    :raises DriverError: the host cannot run machines of this kind.
    """
    root = ET.fromstring(capabilities)  # noqa: S314  (libvirt's own)
    architecture = root.findtext("host/cpu/arch", "")
    guests = root.findall("guest/arch")
    if not any(
        guest.get("name") == architecture and guest.find(f"domain[@type='{kind}']") is not None for guest in guests
    ):
        raise DriverError(
            f"the hypervisor of this host runs no {architecture or 'unknown'} machines of the kind {kind}; see [driver_libvirt] "
            "virt_type, and whether qemu is installed" + (" and /dev/kvm is there" if kind == "kvm" else "")
        )
    cells = root.findall("host/topology/cells/cell")
    memory = sum(_kib(cell) for cell in cells) // 1024
    processors = sum(int(cpus.get("num", "0")) for cell in cells for cpus in cell.findall("cpus"))
    inventory = {"VCPU": processors, "MEMORY_MB": memory}
    return HostResources(
        {name: units for name, units in inventory.items() if units > 0},
        _TRAITS & {f"HW_ARCH_{architecture.upper()}"},
    )


def _kib(cell: Any) -> int:
    found = cell.find("memory")
    return int(found.text or 0) if found is not None and found.get("unit") == "KiB" else 0


def _add(parent: ET.Element, tag: str, text: str = "", **attributes: str) -> ET.Element:
    made = ET.SubElement(parent, tag, attributes)
    made.text = text or None
    return made
