# SPDX-License-Identifier: Apache-2.0
"""The public interface: one list, which everybody is held to, and which does not break what was written against it."""

from __future__ import annotations

import tomllib
import unittest
from collections.abc import Iterator
from pathlib import Path

import moorage
from moorage.cli.scaffold.distribution import _render, names_of
from moorage.cli.scaffold.families import EXCEPTIONS, FAMILIES
from moorage.control_plane import extension_points as table
from moorage.public import PUBLIC, Audience, audience_of
from tests.sources import imported, imported_by
from tests.unit.packaging.test_metadata import extension_points, modules

ROOT = Path(__file__).parents[3]


def plugin_sources() -> Iterator[tuple[str, str, bool]]:
    """(name, text, whether it is a test) of everything that is written as a plugin's author would."""
    for folder in ("plugins/moorage_plugins", "examples/acme"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            yield name, path.read_text(encoding="utf-8"), "/tests/" in name
    for family in FAMILIES.values():
        for name, text in _render(family, names_of(family, "example")):
            if name.endswith(".py"):
                yield f"{family.name}: {name}", text, name.startswith("tests/")


class PublicTests(unittest.TestCase):
    def test_plugins_examples_and_templates_import_nothing_else(self) -> None:
        looked_at = 0
        for name, text, is_test in plugin_sources():
            allowed = {Audience.PLUGINS, Audience.TESTS} if is_test else {Audience.PLUGINS}
            for module in imported_by(text):
                looked_at += 1
                with self.subTest(source=name, module=module):
                    self.assertIn(audience_of(module), allowed)
        self.assertGreater(looked_at, 100)

    def test_what_is_said_to_be_public_exists(self) -> None:
        there = {module.__name__ for module in modules(moorage)}
        for pattern in PUBLIC:
            with self.subTest(pattern=pattern):
                self.assertTrue(
                    any(audience_of(name) for name in there if name == pattern or pattern.endswith("*"))
                    or "*" in pattern
                )
                self.assertTrue(pattern in there or "*" in pattern, f"there is no module {pattern}")

    def test_the_import_linter_forbids_what_is_not_public(self) -> None:
        contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        (contract,) = (each for each in contracts if each["name"] == "plugins use only the public interface")
        forbidden, ignored = contract["forbidden_modules"], contract["ignore_imports"]
        excepted = [each.rpartition(" -> ")[2] for each in ignored]
        for module in (each.__name__ for each in modules(moorage)):
            if any(module == each or module.startswith(f"{each}.") for each in forbidden):
                public = audience_of(module) is Audience.PLUGINS
                name = "moorage.*.interface" if ".interface" in module else module
                with self.subTest(module=module):
                    self.assertEqual(public, name in excepted)

    def test_every_public_module_says_what_it_offers(self) -> None:
        for module in modules(moorage):
            if audience_of(module.__name__) in (Audience.PLUGINS, Audience.PROGRAMS):
                with self.subTest(module=module.__name__):
                    self.assertTrue(module.__doc__)
                    offered = getattr(module, "__all__", None)
                    self.assertTrue(offered or module.__name__ in ("moorage.http", "moorage.rpc"), "it has no __all__")
                    for name in offered or ():
                        self.assertTrue(hasattr(module, name), name)


class TableTests(unittest.TestCase):
    def test_every_extension_point_is_in_the_table(self) -> None:
        # Commands are offered by cliff, and parts are no plugins: they are not looked at with the rest.
        self.assertEqual(
            set(extension_points()) - {"moorage.cli", "moorage.parts"},
            {point.group for point in table.extension_points()},
        )


class FamiliesTests(unittest.TestCase):
    def test_every_extension_point_has_a_template_or_a_reason_why_not(self) -> None:
        written = {family.group for family in FAMILIES.values()}
        points = {point.group for point in table.extension_points()} | {"moorage.cli", "moorage.parts"}
        self.assertEqual(points, written | set(EXCEPTIONS))
        self.assertEqual(set(), written & set(EXCEPTIONS))
        for reason in EXCEPTIONS.values():
            self.assertRegex(reason, r"moorage_plugins|examples/|write")

    def test_the_longest_name_fits_into_every_database(self) -> None:
        names = names_of(FAMILIES["periodic-task"], "a" * 39)
        self.assertLessEqual(len(f"alembic_version_{names['package']}"), 63)
        self.assertLessEqual(len(f"pk_{names['plugin']}_items"), 63)


class ExamplesTests(unittest.TestCase):
    def test_the_example_has_a_plugin_of_each_family_that_it_promises(self) -> None:
        text = (ROOT / "examples/acme/setup.cfg").read_text()
        for group in (
            *("filters", "weighers", "cleanup_handlers", "shard_strategies", "coordination", "periodic_tasks"),
            *("api", "observers", "parts"),
        ):
            self.assertIn(f"moorage.{group} =\n", text)

    def test_programs_are_short(self) -> None:
        for path in (ROOT / "examples/alone").glob("*.py"):
            self.assertTrue(imported(path))
            self.assertLess(len(path.read_text().splitlines()), 90)
