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
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import sqlalchemy as sa

import moorage
import moorage_plugins
from moorage import errors, part
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


def crossing(homes: Mapping[sa.Table, str]) -> list[str]:
    """The tables with a foreign key to one of another package; each comes with its package."""
    return [
        table.name for table, home in homes.items() for key in table.foreign_keys if homes[key.column.table] != home
    ]


class DiscoveryTest(unittest.TestCase):
    """The chains that parts name."""

    def setUp(self) -> None:
        module = types.ModuleType(_MODULE)
        module.LATER = migrations.Migrations("zoo", "zoo.alembic", new_metadata())  # type: ignore[attr-defined]
        module.EARLIER = migrations.Migrations("an-ark.tools", "ark.alembic", new_metadata())  # type: ignore[attr-defined]
        module.SAME = migrations.Migrations("an_ark_tools", "arc.alembic", new_metadata())  # type: ignore[attr-defined]
        module.STRANGE = object()  # type: ignore[attr-defined]
        patch = mock.patch.dict(sys.modules, {_MODULE: module})
        patch.start()
        self.addCleanup(patch.stop)
        (self.own,) = (each for each in part.parts() if each.name == "db")

    def _discover(self, **chains: str) -> list[str]:
        """The chains that are found where Moorage's own parts and those of a distribution are installed."""
        brought = [
            part.InstalledPart(
                part.Part(migrations=value if ":" in value else f"{_MODULE}:{value}"),
                importlib.metadata.EntryPoint(name, "acme.part:PART", "moorage.parts"),
            )
            for name, value in chains.items()
        ]
        with mock.patch.object(migrations, "parts", return_value=[*part.parts(), *brought]):
            return [each.name for each in migrations.discover()]

    def test_the_bases_come_first_and_the_others_by_name(self) -> None:
        self.assertEqual(["moorage", "moorage_plugins", "an-ark.tools", "zoo"], self._discover(z="LATER", a="EARLIER"))

    def test_what_cannot_be_used_is_reported_and_left_out(self) -> None:
        self.enterContext(tempfile_module("raise SystemExit(3)\n", "tour_that_exits"))
        for broken in ("nowhere.to.be.found:X", "STRANGE", "MISSING", "tour_that_exits:X"):
            with self.subTest(broken), self.assertLogs("moorage.db.migrations", "ERROR") as logs:
                self.assertEqual(["moorage", "moorage_plugins", "zoo"], self._discover(broken=broken, zoo="LATER"))
            self.assertIn("the part 'broken'", logs.output[0])

    def test_a_broken_core_is_an_error(self) -> None:
        broken = part.InstalledPart(part.Part(migrations="nowhere.to.be.found:X"), self.own.point)
        with (
            mock.patch.object(migrations, "parts", return_value=[broken]),
            self.assertRaisesRegex(errors.PluginLoadError, "'db' of moorage"),
        ):
            migrations.discover()

    def test_two_parts_cannot_share_a_version_table(self) -> None:
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


class ForeignKeyTests(unittest.TestCase):
    def test_no_foreign_key_goes_from_one_part_to_another(self) -> None:
        """Else a part could not be uninstalled, nor its chain be upgraded by itself."""
        homes = dict[sa.Table, str]()
        for chain in migrations.discover():
            for name in chain.tables:
                package = name.removesuffix(".tables")
                homes |= {
                    each: package for each in vars(importlib.import_module(name)).values() if isinstance(each, sa.Table)
                }
        self.assertGreater(len(homes), 30)
        self.assertEqual([], crossing(homes))
        other = sa.Table("things", new_metadata(), sa.Column("id", sa.Integer, primary_key=True))
        crosses = sa.Table("crosses", other.metadata, sa.Column("thing", sa.ForeignKey("things.id")))
        self.assertEqual(["crosses"], crossing({other: "one", crosses: "another"}))
