# SPDX-License-Identifier: Apache-2.0
"""Finding the migrations of installed distributions."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import moorage
import moorage_plugins
from moorage import errors
from moorage.db import migrations, new_metadata
from moorage.db.core_migrations import MIGRATIONS
from moorage_plugins import migrations as plugins

_MODULE = "tour_of_discovery"


@contextlib.contextmanager
def tempfile_module(code: str, name: str) -> Iterator[None]:
    """A module of that name can be imported meanwhile."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        Path(folder, f"{name}.py").write_text(code)
        importlib.invalidate_caches()
        yield
    sys.modules.pop(name, None)


class DiscoveryTest(unittest.TestCase):
    """The entry-point group ``moorage.migrations``."""

    def setUp(self) -> None:
        module = types.ModuleType(_MODULE)
        module.LATER = migrations.Migrations("zoo", "zoo.alembic", new_metadata())  # type: ignore[attr-defined]
        module.EARLIER = migrations.Migrations("an-ark.tools", "ark.alembic", new_metadata())  # type: ignore[attr-defined]
        module.SAME = migrations.Migrations("an_ark_tools", "arc.alembic", new_metadata())  # type: ignore[attr-defined]
        module.STRANGE = object()  # type: ignore[attr-defined]
        patch = mock.patch.dict(sys.modules, {_MODULE: module})
        patch.start()
        self.addCleanup(patch.stop)

    def _discover(self, **points: str) -> list[str]:
        found = [
            importlib.metadata.EntryPoint(name, value if ":" in value else f"{_MODULE}:{value}", migrations.GROUP)
            for name, value in points.items()
        ]
        with mock.patch.object(migrations, "entry_points", return_value=found):
            return [each.distribution for each in migrations.discover()]

    def test_the_core_comes_first_and_the_others_by_name(self) -> None:
        found = self._discover(zoo="LATER", ark="EARLIER", moorage="moorage.db.core_migrations:MIGRATIONS")
        self.assertEqual(["moorage", "an-ark.tools", "zoo"], found)

    def test_what_cannot_be_used_is_reported_and_left_out(self) -> None:
        self.enterContext(tempfile_module("raise SystemExit(3)\n", "tour_that_exits"))
        for broken in ("nowhere.to.be.found:X", "STRANGE", "MISSING", "tour_that_exits:X"):
            with self.subTest(broken), self.assertLogs("moorage.db.migrations", "ERROR") as logs:
                self.assertEqual(["zoo"], self._discover(broken=broken, zoo="LATER"))
            self.assertIn("'broken'", logs.output[0])
            self.assertIn("Repair or uninstall", logs.output[0])

    def test_a_broken_core_is_an_error(self) -> None:
        with self.assertRaisesRegex(errors.PluginLoadError, "'moorage'"):
            self._discover(moorage="nowhere.to.be.found:X")

    def test_two_distributions_cannot_share_a_version_table(self) -> None:
        with self.assertRaisesRegex(errors.PluginLoadError, "alembic_version_an_ark_tools"):
            self._discover(one="EARLIER", two="SAME")

    def test_every_table_module_is_named_and_none_imported(self) -> None:
        for package, found in ((moorage, MIGRATIONS), (moorage_plugins, plugins.MIGRATIONS)):
            root = Path(package.__path__[0])
            modules = {
                f"{package.__name__}." + ".".join(path.relative_to(root).with_suffix("").parts)
                for path in root.rglob("tables.py")
            }
            self.assertGreater(len(modules), 5)
            self.assertEqual(modules, set(found.tables))
        code = (
            "import sys; from moorage.db import migrations; found = migrations.discover();"
            "print(len(found), [name for name in sys.modules if name.startswith('moorage') and name.endswith('.tables')])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertEqual("2 []", done.stdout.strip())
