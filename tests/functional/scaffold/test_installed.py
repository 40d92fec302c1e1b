# SPDX-License-Identifier: Apache-2.0
"""As an author of plugins has it: Moorage from a wheel in a fresh virtual environment, by the documentation alone.

One environment for all of it: what ``moorage plugin new`` writes for every family, the distribution of ``examples/acme``, and the
page "Write a plugin", carried out line by line. Then a control plane uses all of them by configuration alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import requests
import sqlalchemy as sa

import tests
from moorage import errors
from moorage.cli.scaffold.distribution import Written, names_of, write
from moorage.cli.scaffold.families import FAMILIES
from moorage.db import Database, now
from moorage.work.operations import SqlOperationStore
from tests import servers
from tests.functional.control_plane.test_slice import Plane, flavor
from tests.functional.scaffold.installed import ROOT, Installed

HOWTO = ROOT / "doc/source/howto"
GUIDE = (HOWTO / "plugin.rst").read_text(encoding="utf-8")
SOON = 120
#: Everything chosen by its line in the README; the store and the transport cannot be used by roles.
CONF = """
[scheduling]
enabled_filters = compute,capacity,made_filter,gpu_model,firmware,firmware_version
enabled_weighers = quiet,cool
[sharding]
strategy = dice
[api]
enabled_apis = report,licences
[coordination]
periodic_coordination_backend = lockfile://{folder}/members
[periodic]
enabled_tasks = reconcile,expire,expire_licences
spacing = expire:0.5
poll = 0.3
[acme_licences]
expiry_interval = 0.5
[cleanup]
enabled_handlers = instance,lock,licence
interval = 0.5
unclaimed_timeout = 0.5
[allocation]
orphan_detectors = ghosts
[quota]
source = budget
[observers]
enabled = diary,refusals
[compute]
driver = shed
[agent]
# The page imports nodes; the driver would enrol this machine beside them.
enrol = false
services = compute,badge
"""
#: Another engine, of another group: a process has one backend.
ENGINE = """
[coordination]
periodic_coordination_backend = leases
group = acme
[periodic]
enabled_tasks = expire_licences
"""


def blocks(kind: str, page: str = GUIDE) -> list[str]:
    """The code blocks of a page."""
    found = re.findall(rf"\.\. code-block:: {kind}\n\n((?: {{3}}.*\n|\n)+)", page)
    return [re.sub(r"(?m)^ {3}", "", block).strip() for block in found]


def page_of(family: str) -> str:
    """The page of a family; that of filters is the guide."""
    return GUIDE if family == "filter" else (HOWTO / f"plugins/{family}.rst").read_text(encoding="utf-8")


def commands(family: str) -> list[str]:
    """What the page of a family has its reader type."""
    return [line.removeprefix("$ ") for line in "\n".join(blocks("console", page_of(family))).splitlines()]


#: The plugins of the pages; the filter beside that of the guide, which is written by the guide's own commands.
NAMES = {family: "made_filter" if family == "filter" else commands(family)[0].split()[-1] for family in FAMILIES}


class PagesTests(unittest.TestCase):
    """Each page leads from an empty folder to a plugin that is chosen, by the commands that :class:`InstalledTests` carries out."""

    def test_the_commands_are_those_that_lead_there(self) -> None:
        for family in FAMILIES.keys() - {"filter"}:
            name = NAMES[family]
            last = f"moorage {name.replace('_', ' ')} 2" if family == "command" else f"moorage plugin show {name}"
            with self.subTest(family=family):
                self.assertEqual(
                    [
                        f"moorage plugin new {family} {name}",
                        f"cd moorage-{name.replace('_', '-')}",
                        *("python -m unittest discover -s tests -t .", "pip install .", last),
                    ],
                    commands(family),
                )

    def test_the_lines_for_the_configuration_are_those_that_are_written(self) -> None:
        for family in FAMILIES.keys() - {"command"}:
            with self.subTest(family=family):
                name = "gpu_model" if family == "filter" else NAMES[family]
                self.assertEqual(names_of(FAMILIES[family], name)["choose"], blocks("ini", page_of(family))[0])

    def test_every_page_is_reached_from_the_guide(self) -> None:
        for path in (HOWTO / "plugins").glob("*.rst"):
            self.assertIn(f"   plugins/{path.stem}\n", GUIDE)


@tests.for_ci("installs the project into an environment of its own")
class InstalledTests(unittest.TestCase):
    folder: ClassVar[Path]
    installed: ClassVar[Installed]
    written: ClassVar[dict[str, Written]]
    acme: ClassVar[Path]
    place: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="moorage-installed-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.written = {family: write(family, name, cls.folder) for family, name in NAMES.items()}
        cls.acme = cls.folder / "acme"
        shutil.copytree(ROOT / "examples/acme", cls.acme, ignore=shutil.ignore_patterns("__pycache__"))
        cls.installed = Installed(cls.folder / "installed")
        cls.installed.install([*(each.folder for each in cls.written.values()), cls.acme])

    def moorage(self, *arguments: object) -> str:
        return self.installed.run(self.installed.bin / "moorage", *arguments).stdout

    def passes(self, folder: Path, how: str = "python -m unittest discover -s tests -t .") -> None:
        done = self.installed.run("bash", "-c", how, cwd=folder, check=False)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertRegex(done.stderr, r"Ran [1-9]\d* tests?")

    # -- what is installed ----------------------------------------------------------------------------------------

    def test_moorage_is_the_wheels_and_not_the_tests_own(self) -> None:
        code = "import moorage, importlib.metadata as m; print(moorage.__file__, m.version('moorage'))"
        said = self.installed.run(self.installed.python, "-c", code).stdout.split()
        wanted = [str(self.installed.folder / "venv"), metadata.version("moorage")]
        self.assertEqual(wanted, [said[0].partition("/lib/")[0], said[1]])

    def test_what_is_written_and_the_example_ask_for_a_moorage_that_is_there(self) -> None:
        """pip resolved them to be installed; what it installed must suit it afterwards as well."""
        check = (sys.executable, "-m", "pip", "--python", self.installed.python, "check", "--disable-pip-version-check")
        said = self.installed.run(*check, check=False).stdout
        self.assertEqual([], [line for line in said.splitlines() if "moorage" in line])

    def test_what_was_written_passes_its_own_tests(self) -> None:
        for family, written in self.written.items():
            with self.subTest(family=family):
                self.passes(written.folder, commands(family)[2])

    def test_the_example_passes_its_own_tests(self) -> None:
        self.passes(self.acme)

    def test_every_plugin_is_found_and_can_be_used(self) -> None:
        listed = self.moorage("plugin", "list", "-f", "csv")
        for family, name in NAMES.items():
            if family != "command":  # commands are not loaded by a survey: cliff offers them
                self.assertIn(f'"{FAMILIES[family].group}","{name}","ready"', listed)
        self.assertEqual(10, listed.count('"ready","acme-moorage","1.0.0"'))
        self.assertIn(" 0 cannot", self.moorage("plugin", "check"))
        made = self.installed.run("bash", "-c", commands("command")[-1]).stdout.split()
        self.assertEqual(2, len(made))

    # -- what is written ------------------------------------------------------------------------------------------

    def test_the_code_is_in_good_shape(self) -> None:
        rules = ("--isolated", "--line-length=120", "--select=E,W,F,B,UP,SIM,RET,D,C4")
        ignored = "--ignore=D203,D213,D107,D102,D401"
        folders = [str(written.folder) for written in self.written.values()]
        done = self.installed.run(sys.executable, "-m", "ruff", "check", *rules, ignored, *folders, check=False)
        self.assertEqual(0, done.returncode, done.stdout)

    def test_no_placeholder_is_left(self) -> None:
        for written in self.written.values():
            for path in written.files:
                self.assertNotIn("$", (written.folder / path).read_text(), path)

    def test_the_lines_for_the_configuration_name_the_plugin(self) -> None:
        for family, written in self.written.items():
            readme = (written.folder / "README.rst").read_text()
            if family != "command":
                self.assertRegex(readme, rf"(?m)^    \w+ = .*{NAMES[family]}")

    # -- control planes -------------------------------------------------------------------------------------------

    def plane(self) -> Plane:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        plane = Plane(folder, CONF.format(folder=folder), python=self.installed.python)
        self.addCleanup(plane.end)
        ready = plane.wait_ready()
        self.assertIn("is ready", ready, plane.said())
        self.api = plane.connect()
        self.auth = (plane.data["username"], plane.data["password"])
        url = sa.URL.create("sqlite", database=str(plane.state / "moorage.sqlite"))
        self.database = Database(url.render_as_string(), lock_timeout=60)
        self.addCleanup(self.database.close)
        self.installed.environment["MOORAGE_STATE_DIR"] = str(plane.state)
        self.addCleanup(self.installed.environment.pop, "MOORAGE_STATE_DIR")
        return plane

    def get(self, plane: Plane, path: str) -> Any:
        answer = requests.get(f"{plane.data['url']}{path}", auth=self.auth, timeout=60)
        self.assertEqual(200, answer.status_code, answer.text)
        return answer.json()

    def left_behind(self, table: sa.Table, resource_type: str, status: str, **values: Any) -> str:
        """A row in the middle of an operation that nobody comes for."""
        made = str(uuid.uuid4())
        workers = SqlOperationStore(self.database, lease_seconds=60)

        def work(tx: sa.Connection) -> None:
            tx.execute(sa.insert(table).values(uuid=made, status=status, fence=0, **values))
            workers.create(tx, resource_type, made, status, status, target_host="agent-1")

        self.database.run(work)
        return made

    def becomes(self, table: sa.Table, of: str, status: str) -> None:
        def is_so() -> bool:
            with self.database.read() as tx:
                return tx.execute(sa.select(table.c.status).where(table.c.uuid == of)).scalar_one_or_none() == status

        servers.wait_until(is_so, f"{table.name} {of} to become {status}", SOON)

    def reflected(self, name: str) -> sa.Table:
        with self.database.read() as tx:
            return sa.Table(name, sa.MetaData(), autoload_with=tx)

    def type_in(self, line: str) -> str:
        """What a person types, in the folder where the lines before have led."""
        if line.startswith("cd "):
            self.place = self.place / line.removeprefix("cd ")
            return ""
        if line.startswith("pip install"):
            self.installed.pip(line.split()[2:], cwd=self.place)
            return ""
        return self.installed.run("bash", "-c", line, cwd=self.place).stdout

    def test_the_page_is_right_line_by_line_and_a_control_plane_uses_one_plugin_of_each_family(self) -> None:
        self.place = self.folder
        write_it, tests, install, ask = blocks("console")
        said = ""
        for block in (write_it, tests, install):
            for line in block.splitlines():
                said = self.type_in(line.removeprefix("$ "))
        self.assertRegex(said, r"state\s*\| ready")
        self.assertIn("gpu_model", blocks("ini")[0])
        plane = self.plane()
        *before, select = (line.removeprefix("$ ") for line in ask.splitlines())
        for line in before:
            self.type_in(line)
        servers.wait_until(lambda: sum(host["up"] for host in self.api.hosts()) == 2, "the nodes", SOON)
        answer = json.loads(self.type_in(f"{select} -f json"))
        self.assertIn("n2", str(answer["selections"]))
        self.assertNotIn("n1", str(answer["selections"]))
        self.assertRegex(str(answer["removed"]), r"'gpu_model': 1\b|\"gpu_model\": 1\b")
        self.schedules_by_the_example()
        self.assigns_shards()
        self.warns_of_old_names(plane)
        self.cleans_and_expires()
        self.makes_an_item(plane)
        self.assertEqual({"used": {"VCPU": 0}}, self.get(plane, "/report/"))
        self.assertEqual({"licences": {"cad": {"available": 2}}}, self.get(plane, "/licences/"))
        listed = json.loads(self.moorage("licence", "list", "-f", "json"))
        self.assertEqual(["available", "available"], [each["status"] for each in listed])
        metrics = requests.get(f"{plane.data['url']}/metrics", timeout=60).text
        self.assertIn('acme_licences{status="available"} 2.0', metrics)
        self.assertEqual([], self.api.audit_allocations()["orphans"])
        self.coordinates(plane)
        with self.assertRaises(errors.NoValidHost):
            self.api.create_instance({"uuid": str(uuid.uuid4()), **flavor(VCPU=1000)})
        for pattern in ("diary/*.jsonl", "refusals-*.json"):
            servers.wait_until(lambda: list(plane.state.glob(pattern)), pattern, SOON)  # noqa: B023

    def schedules_by_the_example(self) -> None:
        nodes = [
            {
                "name": f"f{number}",
                "inventories": {"VCPU": 8},
                "properties": {"firmware": version, "inlet_temperature": heat},
            }
            for number, (version, heat) in enumerate((("1.9", 18), ("1.10", 30), ("2.0", 25)))
        ]
        self.api.import_nodes(nodes)
        servers.wait_until(lambda: sum(host["up"] for host in self.api.hosts()) == 5, "five nodes", SOON)
        asked = flavor()
        asked["flavor"]["extra_specs"] = {"acme:firmware": "1.10"}

        def chosen() -> Any:
            found = self.api.select({**asked, "explain": True})
            return found["selections"][0]["node"], found["removed"]["firmware"]

        # n1 and n2 say nothing of their firmware; of the two that are new enough the cooler one is taken.
        servers.wait_until(lambda: chosen() == ("f2", 3), "both schedulers to know the nodes", SOON)

    def warns_of_old_names(self, plane: Plane) -> None:
        """Of a plugin and an option that work by their old names, before the start and (once in each process) after it."""
        said = self.moorage("config", "validate", "--strict", "--config-file", plane.conf, "--state-dir", plane.state)
        plugin = (
            "lugin 'firmware_version' of acme-moorage 1.0.0 in group moorage.filters: it is deprecated since acme-moorage 1.0: "
            "choose firmware."
        )
        self.assertEqual(
            [
                f"deprecated: {plane.conf}: [acme_licences] expiry_interval is deprecated; write [acme_licences] interval.",
                f"deprecated: The p{plugin}",
                "The configuration can be used.",
            ],
            said.splitlines(),
        )
        self.assertIn(f"deprecated: p{plugin}", self.moorage("plugin", "check"))
        log = (plane.state / "log" / "scheduler-1.log").read_text()
        self.assertEqual(1, log.count(f"P{plugin}"))

    def assigns_shards(self) -> None:
        self.assertEqual("dice", self.api.make_shard_plan({"shards": ["a", "b"]})["strategy"])
        wanted = {"strategy": "rendezvous", "shards": ["a", "b"], "params": {"weights": {"a": 2}}}
        self.assertEqual("rendezvous", self.api.make_shard_plan(wanted)["strategy"])

    def cleans_and_expires(self) -> None:
        items, tasks, licences = map(self.reflected, ("lock_items", "expire_items", "acme_licences"))
        common = {"product": "cad", "holder": "agent-1"}
        item = self.left_behind(items, "lock", "making", expires_at=0)
        taken = self.left_behind(licences, "licence", "taking", held_until=0, **common)
        due, held = str(uuid.uuid4()), str(uuid.uuid4())
        with self.database.write() as tx:
            tx.execute(sa.insert(tasks).values(uuid=due, status="in use", expires_at=1, fence=0))
            tx.execute(sa.insert(licences).values(uuid=held, status="held", held_until=now(), fence=0, **common))
        for table, row, status in (
            (items, item, "error"), (licences, taken, "available"), (tasks, due, "expired"), (licences, held, "available"),
        ):  # fmt: skip
            self.becomes(table, row, status)

    def makes_an_item(self, plane: Plane) -> None:
        """By the request and the agent service that were written."""
        made = requests.post(f"{plane.data['url']}/scheduling/v1/badge/items", auth=self.auth, timeout=60)
        self.assertEqual(202, made.status_code, made.text)
        self.becomes(self.reflected("badge_items"), made.json()["uuid"], "ready")
        listed = self.get(plane, "/scheduling/v1/badge/items")
        self.assertEqual({"items": [{"uuid": made.json()["uuid"], "status": "ready"}]}, listed)

    def coordinates(self, plane: Plane) -> None:
        """By the backend's folder, and (an engine of another group) by the example's table."""
        (ring,) = self.api.rings()
        self.assertEqual(1, len(ring["members"]))
        self.assertEqual(1, len(list((plane.conf.parent / "members").rglob("moorage.*"))))
        conf = plane.conf.with_name("engine.conf")
        conf.write_text(ENGINE)
        command = (
            self.installed.bin / "moorage",
            "engine",
            "--name",
            "engine-9",
            "--state-dir",
            plane.state,
            "--config-file",
            conf,
        )
        with conf.with_suffix(".log").open("w") as log:
            engine = subprocess.Popen(command, env=self.installed.environment, stdout=log, stderr=log)
        self.addCleanup(engine.wait, SOON)
        self.addCleanup(engine.terminate)
        members = self.reflected("acme_members")

        def joined() -> bool:
            with self.database.read() as tx:
                return tx.execute(sa.select(sa.func.count()).select_from(members)).scalar_one() == 1

        servers.wait_until(joined, "the engine to join", SOON)
