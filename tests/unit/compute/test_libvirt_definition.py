# SPDX-License-Identifier: Apache-2.0
"""Definitions of machines for libvirt, what its capabilities mean, and what is read from virsh."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import unittest
import xml.etree.ElementTree as ET
from pathlib import Path

from moorage.drivers.interface import DriverError, HostResources, Workload
from moorage_plugins.drivers.libvirt import definition
from moorage_plugins.drivers.libvirt.virsh import Domain, Virsh, VirshError

UUID = "3e1b7a52-0000-4000-8000-00000000000a"
WORKLOAD = Workload(uuid=UUID, resources={"VCPU": 2, "MEMORY_MB": 64}, image={"id": "debian-13"})
CAPABILITIES = """
<capabilities>
  <host><cpu><arch>x86_64</arch></cpu><topology><cells num='2'>
    <cell id='0'><memory unit='KiB'>1048576</memory><cpus num='4'/></cell>
    <cell id='1'><memory unit='KiB'>2097152</memory><cpus num='4'/></cell>
  </cells></topology></host>
  <guest><arch name='i686'><domain type='qemu'/><domain type='kvm'/></arch></guest>
  <guest><arch name='x86_64'><domain type='qemu'/></arch></guest>
</capabilities>
"""


class NameTests(unittest.TestCase):
    def test_a_name_says_host_instance_and_token(self) -> None:
        prefix = definition.prefix_of("host-1")
        name = definition.name_of(prefix, UUID, 17)
        self.assertEqual((UUID, 17), definition.split_name(prefix, name))
        self.assertRegex(name, r"\Amoorage-[0-9a-z-]+\Z")
        # Another host's, another program's.
        self.assertIsNone(definition.split_name(definition.prefix_of("host-2"), name))
        self.assertIsNone(definition.split_name(prefix, f"{prefix}web"))
        self.assertIsNone(definition.split_name(prefix, "web-1"))

    def test_any_name_of_a_host_makes_a_name_of_a_domain(self) -> None:
        for host in ("Grüße ☃", "x" * 255, "a\nb", "a' b"):
            self.assertRegex(definition.prefix_of(host), r"\Amoorage-[0-9a-f]{12}-\Z")


class ImageTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-images-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def find(self, wanted: object) -> definition.Image:
        return definition.find_image(self.folder, dataclasses.replace(WORKLOAD, image={"id": wanted}))

    def test_the_format_is_that_of_the_name_of_the_file(self) -> None:
        for suffix in ("raw", "qcow2"):
            path = self.folder / f"image-{suffix}.{suffix}"
            # It says that it is a qcow2 file.
            path.write_bytes(b"QFI\xfb")
            self.assertEqual(definition.Image(path, suffix), self.find(f"image-{suffix}"))

    def test_nothing_else_on_the_host_is_an_image(self) -> None:
        (self.folder / "secret").write_text("")
        (self.folder / "folder.raw").mkdir()
        for wanted in ("secret", "folder", "../etc/passwd", "/etc/passwd", "a/b", ".", "x" * 129, "web\n", 3):
            with self.subTest(wanted=wanted), self.assertRaisesRegex(DriverError, "there is no image"):
                self.find(wanted)
        for nothing in ("", None):
            with self.assertRaisesRegex(DriverError, "has no image"):
                self.find(nothing)


class DefinitionTests(unittest.TestCase):
    def machine(self, workload: Workload = WORKLOAD, kind: str = "qemu", path: str = "/images/a.qcow2") -> ET.Element:
        text = definition.machine_xml(
            workload,
            name="moorage-1",
            token=3,
            host="host-1",
            kind=kind,
            image=definition.Image(Path(path), "qcow2"),
            log=Path("/consoles/1.log"),
        )
        return ET.fromstring(text)

    def test_a_machine_has_what_it_claims_a_disk_and_a_serial_line_alone(self) -> None:
        found = self.machine()
        self.assertEqual(("64", "MiB"), (found.findtext("memory"), found.find("memory").get("unit")))  # type: ignore[union-attr]
        self.assertEqual("2", found.findtext("vcpu"))
        devices = found.find("devices")
        assert devices is not None
        self.assertEqual(["controller", "memballoon", "disk", "serial"], [each.tag for each in devices])
        disk = devices.find("disk")
        assert disk is not None
        self.assertIsNotNone(disk.find("readonly"))
        # Absent, libvirt would open the file that a qcow2 file names.
        self.assertIsNotNone(disk.find("backingStore"))
        self.assertEqual("qcow2", disk.find("driver").get("type"))  # type: ignore[union-attr]

    def test_processors_of_the_host_are_shown_where_they_execute_it(self) -> None:
        self.assertEqual("host-model", self.machine(kind="kvm").find("cpu").get("mode"))  # type: ignore[union-attr]
        self.assertIsNone(self.machine().find("cpu"))

    def test_no_text_breaks_the_definition(self) -> None:
        workload = dataclasses.replace(WORKLOAD, name="a\nb\x00<disk/>", uuid="a'</description><x/>")
        found = self.machine(workload, path="/a'<b>&\".qcow2")
        self.assertIsNone(found.find("x"))
        self.assertEqual("/a'<b>&\".qcow2", found.find("devices/disk/source").get("file"))  # type: ignore[union-attr]

    def test_a_machine_without_memory_is_refused(self) -> None:
        with self.assertRaisesRegex(DriverError, "claims no MEMORY_MB"):
            self.machine(dataclasses.replace(WORKLOAD, resources={"CUSTOM_METAL": 1}))


class ResourcesTests(unittest.TestCase):
    def test_all_cells_count(self) -> None:
        self.assertEqual(
            HostResources({"VCPU": 8, "MEMORY_MB": 3072}, frozenset({"HW_ARCH_X86_64"})),
            definition.host_resources(CAPABILITIES, "qemu"),
        )

    def test_a_host_that_cannot_execute_machines_is_refused(self) -> None:
        with self.assertRaisesRegex(DriverError, "runs no x86_64 machines of the kind kvm.*virt_type.*/dev/kvm"):
            definition.host_resources(CAPABILITIES, "kvm")


class VirshTests(unittest.TestCase):
    def virsh(self, script: str, timeout: float = 60.0) -> Virsh:
        folder = Path(tempfile.mkdtemp(prefix="moorage-virsh-"))
        self.addCleanup(shutil.rmtree, folder)
        program = folder / "virsh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return Virsh(str(program), "qemu:///system", timeout)

    def test_domains_of_others_are_left_out(self) -> None:
        said = "Domain: 'web'\n  state.state=1\n  state.reason=1\n\nDomain: 'm-1'\n  state.state=5\n  state.reason=3\n"
        virsh = self.virsh(f"cat <<'END'\n{said}END")
        self.assertEqual({"m-1": Domain(5, 3)}, dict(virsh.domains("m-")))

    def test_what_it_says_of_an_error_is_for_the_log_alone(self) -> None:
        virsh = self.virsh("echo 'error: cannot open /secret' >&2; exit 1")
        with self.assertRaises(VirshError) as raised:
            virsh.run("start", "m-1")
        self.assertEqual("error: cannot open /secret", raised.exception.detail)
        self.assertNotIn("secret", str(raised.exception))

    def test_it_is_said_why_a_machine_runs_no_more(self) -> None:
        for state, reason, text in (
            (5, 2, "outside of Moorage"),
            (5, 3, "killed"),
            (6, 0, "crashed"),
            (5, 0, "started again"),
        ):
            self.assertIn(text, Domain(state, reason).ended_because)
            self.assertFalse(Domain(state, reason).active)
        self.assertEqual((True, False), (Domain(5, 1).shut_down, Domain(1, 1).shut_down))
        self.assertEqual([True] * 4, [Domain(state, 0).active for state in (0, 1, 3, 4)])
