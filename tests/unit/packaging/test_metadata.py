# SPDX-License-Identifier: Apache-2.0
"""setup.cfg, the lists of requirements and the code say the same."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import moorage
import moorage_plugins
from moorage.extensions import ExtensionPoint, PluginState
from moorage.part import Part

ROOT = Path(__file__).parents[3]
#: The libraries of the extras, as modules.
OPTIONAL = (
    *("psycopg2", "pymysql", "oslo_messaging", "keystonemiddleware"),
    *("kazoo", "etcd3gw", "redis", "pymemcache", "tooz", "jsonschema_rs", "sushy"),
)

#: Files of etc that somebody wrote, and no program.
_OURS = frozenset({".service", ".target"})


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "setup.cfg")
    return parser


def declared() -> list[importlib.metadata.EntryPoint]:
    """Every entry point of setup.cfg, which an old installation may not know yet."""
    return [
        importlib.metadata.EntryPoint(name.strip(), value.strip(), group)
        for group, lines in _setup()["options.entry_points"].items()
        for line in lines.strip().splitlines()
        if line.strip() and not line.startswith("#")
        for name, value in [line.split("=", 1)]
    ]


def modules(*packages: ModuleType) -> Iterator[ModuleType]:
    """All modules of the packages, without those that run a program when imported."""
    for package in packages:
        yield package
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith((".__main__", ".alembic.env")):
                yield importlib.import_module(found.name)


def extension_points() -> dict[str, ExtensionPoint]:
    """Every extension point that a module of the core declares, by group."""
    return {
        value.group: value
        for module in modules(moorage)
        for value in vars(module).values()
        if isinstance(value, ExtensionPoint)
    }


class TestEntryPoints(unittest.TestCase):
    def test_every_entry_point_resolves(self):
        for point in declared():
            with self.subTest(group=point.group, name=point.name):
                self.assertTrue(
                    isinstance(point.load(), Part) if point.group == "moorage.parts" else callable(point.load())
                )

    def test_the_installed_project_has_the_entry_points_of_setup_cfg(self):
        installed = importlib.metadata.distribution("moorage").entry_points
        self.assertEqual(
            {(p.group, p.name, p.value) for p in declared()},
            {(p.group, p.name, p.value) for p in installed},
            "run 'make venv': setup.cfg changed since the project was installed",
        )

    def test_every_reference_plugin_passes_the_survey_of_its_extension_point(self):
        for group, point in extension_points().items():
            for finding in point.survey():
                with self.subTest(group=group, name=finding.name):
                    self.assertIs(PluginState.READY, finding.state, finding.sentence())

    def test_every_class_that_implements_an_interface_has_an_entry_point(self):
        values = {
            (group, owner.module, owner.attr)
            for group, point in extension_points().items()
            for owners in point.installed().values()
            for owner in owners
        }
        for group, point in extension_points().items():
            for module in modules(moorage_plugins):
                for name, value in vars(module).items():
                    if (
                        point.interface is not None
                        and inspect.isclass(value)
                        and issubclass(value, point.interface)
                        and value.__module__ == module.__name__
                        and not inspect.isabstract(value)
                        and not name.startswith("_")
                    ):
                        self.assertIn((group, module.__name__, name), values)


class TestParts(unittest.TestCase):
    def declared(self) -> dict[str, Part]:
        """The parts of setup.cfg, by the package that they lie in."""
        return {
            point.module.removesuffix(".part"): point.load() for point in declared() if point.group == "moorage.parts"
        }

    def references(self, part: Part) -> list[str]:
        return [
            *([f"{part.options}:list_opts"] if part.options else []),
            *([part.migrations] if part.migrations else []),
            *([part.interface] if part.interface else []),
            *part.checks.values(),
            *(f"{module}:POLICIES" for module in (*part.api, *part.routes)),
            *(f"{module}:routes" for module in part.routes),
            *part.collectors,
            *part.upgrade_checks.values(),
            *part.commands.values(),
            *part.periodic_tasks.values(),
        ]

    def test_every_part_module_is_an_entry_point(self):
        written = {module.__name__ for module in modules(moorage, moorage_plugins) if module.__name__.endswith(".part")}
        self.assertEqual({f"{package}.part" for package in self.declared()} | {"moorage.part"}, written)

    def test_what_a_part_names_is_there_and_lies_in_its_package(self):
        """So that import-linter sees whatever lies between the layers."""
        for package, part in self.declared().items():
            for reference in self.references(part):
                with self.subTest(reference=reference):
                    self.assertTrue(reference.startswith(f"{package}."))
                    importlib.metadata.EntryPoint("it", reference, "moorage.parts").load()

    def test_every_module_of_options_and_every_one_of_policies_belongs_to_a_part(self):
        named = [
            reference.partition(":")[0] for part in self.declared().values() for reference in self.references(part)
        ]
        for module in modules(moorage, moorage_plugins):
            name = module.__name__
            has_policies = name.startswith("moorage.") and hasattr(module, "POLICIES")
            if has_policies or (name.endswith(".options") and name != "moorage.options"):
                self.assertIn(name, named)

    def test_to_declare_a_part_imports_nothing_of_it(self):
        code = "import sys; from moorage.part import parts; print(len(parts())); print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        count, imported = done.stdout.splitlines()
        packages = self.declared()
        self.assertEqual(len(packages), int(count))
        found = {name for name in imported.split() if any(name.startswith(f"{each}.") for each in packages)}
        self.assertEqual({f"{each}.part" for each in packages}, found - set(packages))

    def test_options_and_the_core_need_no_extra(self):
        core = [module.__name__ for module in modules(moorage) if not module.__name__.startswith("moorage.testing")]
        wanted = core + [part.options for part in self.declared().values() if part.options]
        code = (
            "import importlib, sys\n"
            "class Block:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name.split('.')[0] in {OPTIONAL!r}: raise ModuleNotFoundError('blocked: ' + name, name=name)\n"
            "sys.meta_path.insert(0, Block())\n"
            f"for name in {wanted!r}: getattr(importlib.import_module(name), 'list_opts', list)()\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        self.assertEqual((0, ""), (done.returncode, done.stderr))


class TestRequirements(unittest.TestCase):
    @staticmethod
    def _names(lines: str) -> set[str]:
        found = (re.match(r"[A-Za-z0-9._-]+", line.strip()) for line in lines.splitlines() if not line.startswith("#"))
        return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}

    def test_constraints_pin_everything_that_is_asked_for(self):
        pinned = self._names((ROOT / "constraints.txt").read_text())
        asked = self._names((ROOT / "requirements.txt").read_text() + (ROOT / "test-requirements.txt").read_text())
        for extra, lines in _setup()["options.extras_require"].items():
            if extra != "test":
                asked |= self._names(lines)
        self.assertEqual(set(), asked - pinned)

    def test_constraints_are_exact_versions_and_name_no_place(self):
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            self.assertRegex(line, r"^(#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+)$")

    def test_every_requirement_has_a_lower_bound_that_the_tested_version_reaches(self):
        """``make lower`` installs the bounds, so each must be one version."""

        def number(text: str) -> tuple[int, ...]:
            return tuple(int(part) for part in re.findall(r"\d+", text))

        pinned = {
            re.sub(r"[-_.]+", "-", name).lower(): version
            for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text())
        }
        for line in (ROOT / "requirements.txt").read_text().splitlines():
            with self.subTest(line=line):
                found = re.fullmatch(r"([\w.-]+)>=([\d.]+) # .+", line)
                assert found is not None
                name = re.sub(r"[-_.]+", "-", found.group(1)).lower()
                self.assertLessEqual(number(found.group(2)), number(pinned[name]))

    def test_the_core_imports_only_what_it_requires(self):
        """A library that is there only because another one brings it may be gone tomorrow."""
        provided = importlib.metadata.packages_distributions()
        required = self._names((ROOT / "requirements.txt").read_text())
        imported = {
            name.split(".")[0]
            for path in (ROOT / "framework/moorage").rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            for name in _imports(node)
        }
        for name in sorted(imported - set(sys.stdlib_module_names) - {"moorage", *OPTIONAL}):
            with self.subTest(module=name):
                owners = {re.sub(r"[-_.]+", "-", owner).lower() for owner in provided.get(name, [])}
                self.assertTrue(owners & required, f"{name} comes from {owners or 'nowhere'}")


def _imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


class TestSource(unittest.TestCase):
    def test_files_that_are_no_modules_name_their_licence_too(self):
        for name in (
            *(".gitignore", "tox.ini", "setup.cfg", "pyproject.toml"),
            *("examples/acme/pyproject.toml", "examples/acme/setup.cfg"),
            *(str(path.relative_to(ROOT)) for path in (ROOT / "etc").rglob("moorage*") if path.suffix in _OURS),
        ):
            # An archive has no .gitignore.
            if (ROOT / name).exists():
                first = (ROOT / name).read_text(encoding="utf-8").partition("\n")[0]
                self.assertEqual("# SPDX-License-Identifier: Apache-2.0", first, name)

    def test_the_manifest_names_nothing_twice(self):
        lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
        self.assertEqual(sorted(set(lines)), sorted(lines))

    def test_every_module_names_its_licence_and_says_what_it_is_for(self):
        for folder in ("framework", "plugins", "tests", "benchmarks", "examples", "doc/source"):
            for path in sorted((ROOT / folder).rglob("*.py")):
                text = path.read_text()
                with self.subTest(path=str(path.relative_to(ROOT))):
                    self.assertTrue(text.startswith("# SPDX-License-Identifier: Apache-2.0\n"))
                    if path.name != "__init__.py":
                        self.assertTrue(ast.get_docstring(ast.parse(text)))
