# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation that list what the code has: they say the same."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import prometheus_client

from moorage.cleanup.cleanup_metrics import CleanupCollector
from moorage.cli import tree
from moorage.cli.main import MoorageApp
from moorage.control_plane.policies import core_policies
from moorage.http.metrics import Metrics
from moorage.testing.database import temporary
from tests import SOAK, servers
from tests.queue import flat
from tests.unit.packaging.test_metadata import declared

ROOT = Path(__file__).parents[3]
METRICS = (ROOT / "doc/source/reference/metrics.rst").read_text(encoding="utf-8")
LOGS = (ROOT / "doc/source/reference/logs.rst").read_text(encoding="utf-8")


def _metric_names() -> Iterator[str]:
    """Every name of a metric in a module that has to do with Prometheus."""
    for package in ("framework/moorage", "plugins/moorage_plugins"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "prometheus_client" in text:
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.Constant) and re.fullmatch("moorage_[a-z_]+", str(node.value)):
                        yield str(node.value)


class MetricsPageTests(unittest.TestCase):
    rows = re.findall(r"(?m)^``(moorage_[a-z_]+)`` +(\w+) +", METRICS)

    def test_the_page_lists_every_metric_of_the_code_and_no_other(self) -> None:
        names = [name for name, _ in self.rows]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(set(_metric_names()), set(names))

    def test_what_is_served_is_of_the_kind_that_the_page_says(self) -> None:
        metrics = Metrics()
        metrics.count("GET", "/", 200, 0.1)
        with temporary(tables=True) as database:
            metrics.registry.register(CleanupCollector(database))
            found = {family.name: family.type for family in metrics.registry.collect()}
        self.assertLessEqual(found.items(), dict(self.rows).items())
        self.assertGreaterEqual(len(found), 6)
        self.assertTrue(prometheus_client.generate_latest(metrics.registry))


class ExplanationTests(unittest.TestCase):
    def test_what_is_said_to_be_tried_is_tried_there(self) -> None:
        named = {
            (page.name, path)
            for page in (ROOT / "doc/source/explanation").glob("*.rst")
            for path in re.findall(r"``((?:tests|benchmarks)/[\w/.]+)``", page.read_text(encoding="utf-8"))
        }
        self.assertGreater(len(named), 20)
        self.assertEqual([], sorted(each for each in named if not (ROOT / each[1]).exists()))


class FaultsPageTests(unittest.TestCase):
    page = (ROOT / "doc/source/explanation/faults.rst").read_text(encoding="utf-8")

    def test_every_test_that_the_page_names_exists(self) -> None:
        named = set(re.findall(r"``((?:api|functional|simulation|unit)\.[\w.]+)``", self.page))
        self.assertGreater(len(named), 100)
        for name in sorted(named):
            with self.subTest(name):
                loader = unittest.TestLoader()
                self.assertGreater(loader.loadTestsFromName(f"tests.{name}").countTestCases(), 0)
                self.assertEqual([], loader.errors)

    @unittest.skipIf(SOAK, "nothing is skipped")
    def test_tests_of_make_soak_alone_are_marked(self) -> None:
        for name, mark in re.findall(r"\| ``([\w.]+)``( \(soak\))?\n", self.page):
            loaded = unittest.TestLoader().loadTestsFromName(f"tests.{name}")
            reasons = [
                getattr(getattr(each, each._testMethodName), "__unittest_skip_why__", "")
                or getattr(type(each), "__unittest_skip_why__", "")
                for each in flat(loaded)
            ]
            with self.subTest(name):
                # Tests that skip themselves when they begin are not seen here.
                self.assertTrue(mark or not any("make soak" in each for each in reasons), reasons)

    def test_every_row_names_a_test(self) -> None:
        rows = re.findall(r"(?ms)^   \* - (\w+)\n(.*?)(?=^   \* - |\n\n)", self.page)
        found = [row for row, text in rows if row != "Row" and "| ``" in text]
        wanted = [
            f"{family}{number}"
            for family, count in (("A", 11), ("B", 1), ("H", 9), ("C", 11), ("S", 6), ("K", 8), ("F", 4), ("J", 1))
            for number in range(1, count + 1)
        ]
        self.assertEqual(wanted, found)


class RestPageTests(unittest.TestCase):
    def test_the_page_has_every_dialect_and_the_sample_every_rule(self) -> None:
        dialects = {entry.name: entry.load() for entry in declared() if entry.group == "moorage.api"}
        page = (ROOT / "doc/source/reference/rest.rst").read_text(encoding="utf-8")
        self.assertEqual(set(dialects), set(re.findall(r"(?m)^\.\. rest-dialect:: (\w+)$", page)))
        sample = (ROOT / "etc/moorage/policy.yaml.sample").read_text(encoding="utf-8")
        rules = [*core_policies(), *(rule for dialect in dialects.values() for rule in dialect.policies)]
        self.assertEqual(set(), {rule.name for rule in rules} - set(re.findall(r'(?m)^#"([^"]+)":', sample)))


class ManualTests(unittest.TestCase):
    """The manual pages, built from nothing but their own files."""

    built: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        source, cls.built = Path(folder.name, "source"), Path(folder.name, "built")
        shutil.copytree(ROOT / "doc/source/man", source / "man")
        (source / "index.rst").write_text("x\n=\n\n.. toctree::\n   :glob:\n\n   man/*\n")
        pages = re.search(r"(?s)man_pages = \[.*?\n\]\n", (ROOT / "doc/source/conf.py").read_text())
        assert pages is not None
        lines = ("import sys", f"sys.path.insert(0, {str(ROOT / 'doc/source/ext')!r})", 'extensions = ["manual"]')
        (source / "conf.py").write_text("\n".join((*lines, pages.group())))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", "-W", "-b", "man", str(source), str(cls.built)],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr

    def test_every_command_and_option_is_in_the_page_of_its_program(self) -> None:
        texts = {page.stem: page.read_text().replace("\\-", "-") for page in self.built.glob("*.[18]")}
        self.assertEqual(set(tree.PROGRAMS), set(texts))
        for name, text in texts.items():
            self.assertEqual({name}, set(re.findall(r"usage: (\S+)", text)))
        for entry in tree.entries(MoorageApp()):
            text = texts[entry.path[0]]
            for word in (" ".join(entry.path), *(word for word in entry.words if entry.parser is not None)):
                self.assertIn(word, text)

    def test_mandoc_finds_no_mistake(self) -> None:
        pages = sorted(map(str, self.built.glob("*.[18]")))
        words = [servers.program("mandoc"), "-T", "lint", "-W", "error", *pages]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((0, ""), (done.returncode, done.stdout + done.stderr))


PROGRAM = """
import sys
from oslo_log import log
from moorage.context import RequestContext
from moorage.control_plane import config
log.setup(config.load(files=[sys.argv[1]], state_dir=sys.argv[2]), "moorage-test")
LOG = log.getLogger("moorage.somewhere")
LOG.info("nobody asked")
RequestContext(user_id="u1", project_id="p1", request_id="req-1")
LOG.warning("somebody asked")
try:
    raise ValueError("a mistake")
except ValueError:
    LOG.exception("with a stack")
"""


class LogsPageTests(unittest.TestCase):
    def lines(self, conf: str) -> list[str]:
        with temporary() as database:
            folder = Path(str(database.url_safe).removeprefix("sqlite:///")).parent
            file = folder / "moorage.conf"
            file.write_text(conf)
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", PROGRAM, str(file), str(folder)],
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
        self.assertEqual(0, done.returncode, done.stderr)
        return done.stdout.splitlines()

    def test_the_expression_of_the_page_takes_every_line_apart_but_stacks(self) -> None:
        example, expression = (
            block.strip() for block in re.findall(r"\.\. code-block:: text\n\n((?: {3}.*\n)+)", LOGS)
        )
        self.assertRegex(example, expression)
        found = [match.groupdict() for line in self.lines("") if (match := re.match(expression, line))]
        said = [each for each in found if each["logger"] == "moorage.somewhere"]
        self.assertEqual(
            [("INFO", "nobody asked"), ("WARNING", "somebody asked"), ("ERROR", "with a stack: ValueError: a mistake")],
            [(each["level"], each["message"]) for each in said][:3],
        )
        self.assertEqual("-", said[0]["who"])
        self.assertRegex(said[1]["who"], r"req-1 .*u1.*p1")

    def test_as_json_a_line_is_an_object_with_the_fields_of_the_page(self) -> None:
        found = [json.loads(line) for line in self.lines("[DEFAULT]\nuse_json = true\n")]
        told = re.search(r"\(((?:``\w+``,\s+)+)\.\.\.\)", LOGS)
        assert told is not None
        for each in found:
            self.assertLessEqual(set(re.findall(r"``(\w+)``", told.group(1))), set(each))
        self.assertIn("somebody asked", [each["message"] for each in found])
