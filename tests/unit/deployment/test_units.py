# SPDX-License-Identifier: Apache-2.0
"""What systemd makes of the files in etc: units, the user, the folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from moorage.cli.roles import ROLES
from moorage.http import authentication

ETC = Path(__file__).parents[3] / "etc"
#: Tenths; 85 is what the unit was without limits, 100 the worst.
_EXPOSURE = 20


class UnitTests(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.units = self.folder / "etc/systemd/system"
        self.units.mkdir(parents=True)
        for path in (ETC / "systemd").iterdir():
            shutil.copy(path, self.units)

    def run_tool(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        if shutil.which(str(words[0])) is None:
            self.skipTest(f"{words[0]} is not installed")
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done

    def test_every_role_is_a_unit_without_mistakes(self) -> None:
        unit = self.units / "moorage@.service"
        program = Path(sys.executable).with_name("moorage")
        unit.write_text(
            unit.read_text().replace("/usr/bin/moorage", str(program)).replace("=moorage\nGroup=moorage", "=root")
        )
        for role in ROLES:
            done = self.run_tool("systemd-analyze", "verify", "--man=no", self.units / f"moorage@{role}.service")
            self.assertNotIn("moorage", done.stderr)

    def test_the_drop_in_of_the_process_driver_keeps_workloads_and_has_no_mistakes(self) -> None:
        folder = self.units / "moorage@agent.service.d"
        folder.mkdir()
        shutil.copy(ETC / "systemd-drop-ins/process-driver.conf", folder)
        unit = self.units / "moorage@.service"
        unit.write_text(
            unit.read_text().replace("/usr/bin/moorage", sys.executable).replace("=moorage\nGroup=moorage", "=root")
        )
        done = self.run_tool("systemd-analyze", "verify", "--man=no", self.units / "moorage@agent.service")
        self.assertNotIn("moorage", done.stderr)
        # A setting that systemd knows, in the section in which it looks for it.
        settings = (folder / "process-driver.conf").read_text().partition("[Service]")[2]
        self.assertIn("\nKillMode=process\n", settings)
        self.assertIn("\nOOMPolicy=continue\n", settings)

    def test_what_is_enabled_comes_back_after_a_reboot(self) -> None:
        self.run_tool("systemctl", f"--root={self.folder}", "enable", "moorage@api")
        self.assertTrue(os.path.lexists(self.units / "multi-user.target.wants/moorage@api.service"))
        self.assertTrue(os.path.lexists(self.units / "moorage.target.wants/moorage@api.service"))

    def test_a_unit_is_hardly_exposed(self) -> None:
        self.run_tool(
            "systemd-analyze",
            "security",
            "--offline=yes",
            f"--threshold={_EXPOSURE}",
            self.units / "moorage@agent.service",
        )

    def test_the_user_of_the_units_and_the_folders_can_be_made(self) -> None:
        unit = (self.units / "moorage@.service").read_text()
        self.assertRegex(unit, r"(?m)^User=moorage\nGroup=moorage$")
        self.run_tool("systemd-sysusers", f"--root={self.folder}", ETC / "sysusers.d/moorage.conf")
        self.assertIn("moorage:", (self.folder / "etc/passwd").read_text())
        if os.geteuid():
            self.skipTest("only root gives folders to others")
        (self.folder / "etc/moorage").mkdir()
        for name in ("moorage.conf", "users"):
            (self.folder / "etc/moorage" / name).write_text("")
        self.run_tool("systemd-tmpfiles", "--create", f"--root={self.folder}", ETC / "tmpfiles.d/moorage.conf")
        found = re.search(r"moorage:[^:]*:(\d+):(\d+):", (self.folder / "etc/passwd").read_text())
        assert found is not None
        for name, mode in (("", 0o750), ("moorage.conf", 0o640), ("users", 0o640)):
            state = (self.folder / "etc/moorage" / name).stat()
            self.assertEqual((0, int(found[2]), mode), (state.st_uid, state.st_gid, state.st_mode & 0o7777), name)


class OwnerTests(unittest.TestCase):
    """A file of users that root writes can be read by the services."""

    def setUp(self) -> None:
        if os.geteuid():
            self.skipTest("only root writes files for others")
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.users = self.folder / "users"

    def written(self) -> tuple[int, int, int]:
        authentication.set_user(self.users, "admin", "a password", ["admin"])
        state = self.users.stat()
        return state.st_uid, state.st_gid, state.st_mode & 0o7777

    def test_a_new_one_belongs_to_whom_the_folder_does(self) -> None:
        os.chown(self.folder, 4711, 4712)
        self.assertEqual((4711, 4712, 0o600), self.written())

    def test_a_new_one_in_a_folder_of_roots_is_readable_by_the_group_of_the_folder(self) -> None:
        os.chown(self.folder, 0, 4712)
        self.assertEqual((0, 4712, 0o640), self.written())
        os.chown(self.folder, 0, 0)
        self.users.unlink()
        self.assertEqual((0, 0, 0o600), self.written())

    def test_one_that_is_there_keeps_whom_it_belongs_to_and_loses_what_everybody_may(self) -> None:
        self.users.write_text("")
        os.chown(self.users, 4711, 4712)
        self.users.chmod(0o644)
        self.assertEqual((4711, 4712, 0o640), self.written())


if __name__ == "__main__":
    unittest.main()
