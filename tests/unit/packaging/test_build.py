# SPDX-License-Identifier: Apache-2.0
"""What is built holds what it should, with and without git, and needs no network."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from pathlib import Path

import tests

ROOT = Path(__file__).parents[3]
#: What a working copy has beside the source.
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".stestr", ".hypothesis", "__pycache__", "*.egg-info", "build"
)
#: Folders of tests/unit that are run from the archive; the other ones pass or fail there as they do here.
OFFLINE_TESTS = ("client", "db", "observers", "rpc", "services")
#: Any attempt to fetch something ends at once.
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_CONFIG_FILE": os.devnull,
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


@functools.cache
def _without_network() -> tuple[str, ...]:
    """What runs a program where there is no network but its own loopback, if this machine lets us."""
    program = shutil.which("unshare")
    for command in ((program, "--net"), (program, "--map-root-user", "--net")):
        if program and subprocess.run((*command, "true"), capture_output=True, check=False).returncode == 0:
            return tuple(str(word) for word in command)
    return ()


def _run(*command: str, cwd: Path, **variables: str) -> None:
    command = (*_without_network(), *command)
    environment = {name: value for name, value in os.environ.items() if name != "PBR_VERSION"} | OFFLINE | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def _wheel(source: Path, into: Path, **variables: str) -> Path:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(into),
        ".",
    )
    _run(*pip, cwd=source, **variables)
    (wheel,) = into.glob("*.whl")
    return wheel


def _archive(source: Path, into: Path, **variables: str) -> Path:
    code = "import pbr.build, sys; pbr.build.build_sdist(sys.argv[1])"
    into.mkdir()
    _run(sys.executable, "-c", code, str(into), cwd=source, **variables)
    (archive,) = into.glob("*.tar.gz")
    return archive


def _unpack(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as opened:
        opened.extractall(into, filter="data")
    (unpacked,) = into.iterdir()
    return unpacked


def _names(archive: Path) -> set[str]:
    with tarfile.open(archive) as opened:
        return {member.name.partition("/")[2] for member in opened if member.isfile()}


@tests.for_ci("builds the project three times")
class TestBuild(unittest.TestCase):
    """A release: an archive from a tagged repository; from that, without git, a wheel and an archive again."""

    source: Path
    archive: Path
    again: Path
    wheel: Path
    unpacked: Path
    members: set[str]

    @classmethod
    def setUpClass(cls):
        folder = Path(tempfile.mkdtemp(prefix="moorage-build-"))
        cls.addClassCleanup(shutil.rmtree, folder)
        cls.source = source = folder / "source"
        shutil.copytree(ROOT, source, ignore=NOT_SOURCE)
        name = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "init.defaultBranch=main")
        for command in (
            ["init"],
            ["add", "--all"],
            ["commit", "--message=All"],
            ["tag", "--annotate", "--message=-", "1.2.3"],
        ):
            _run(
                "git",
                *name,
                *command[:1],
                *(["--quiet"] if command[0] in {"init", "commit"} else []),
                *command[1:],
                cwd=source,
            )
        cls.archive = _archive(source, folder / "archive")
        cls.unpacked = _unpack(cls.archive, folder / "unpacked")
        cls.wheel = _wheel(cls.unpacked, folder / "wheel")
        with zipfile.ZipFile(cls.wheel) as opened:
            cls.members = set(opened.namelist())
        # reno reads its notes from the history, so that an archive of an archive has to do without.
        cls.again = _archive(_unpack(cls.archive, folder / "second"), folder / "again", SKIP_GENERATE_RENO="1")

    def test_tests_pass_in_the_unpacked_archive_without_git_and_network(self):
        roots = [str(self.unpacked / name) for name in ("framework", "plugins")]
        code = f"import moorage, moorage_plugins; assert moorage.__file__.startswith({roots[0]!r}), moorage.__file__"
        path = {"PYTHONPATH": os.pathsep.join(roots), "GIT_DIR": os.devnull}
        _run(sys.executable, "-c", code, cwd=self.unpacked, **path)
        # Modules of all of them are imported; those that run take ten seconds of a processor in all.
        chosen = (word for package in OFFLINE_TESTS for word in ("-k", f"tests.unit.{package}.*"))
        _run(sys.executable, "-W", "ignore", "-m", "unittest", "discover", "-s", "tests/unit", "-t", ".", *chosen,
             cwd=self.unpacked, **path)  # fmt: skip

    def test_the_version_travels_without_git(self):
        self.assertEqual("moorage-1.2.3.tar.gz", self.archive.name)
        self.assertEqual("moorage-1.2.3.tar.gz", self.again.name)
        self.assertEqual("moorage-1.2.3-py3-none-any.whl", self.wheel.name)

    def test_an_archive_made_without_git_loses_nothing(self):
        lost = {name for name in _names(self.archive) - _names(self.again) if "egg-info" not in name}
        self.assertEqual(set(), lost - {"RELEASENOTES.rst", ".gitignore"})

    def test_the_archive_holds_all_that_is_needed_to_build_test_and_document(self):
        needed = """
            setup.py setup.cfg pyproject.toml requirements.txt test-requirements.txt constraints.txt bindep.txt Makefile
            .stestr.conf LICENSE README.rst .ci/run doc/source/conf.py releasenotes/config.yaml
            etc/oslo-config-generator/moorage.conf tests/unit/packaging/test_build.py
        """
        self.assertEqual(set(), set(needed.split()) - _names(self.archive))

    def test_the_wheel_holds_every_file_of_both_packages_and_nothing_else(self):
        expected = {
            f"{package}/{path.relative_to(folder)}"
            for package, folder in (
                ("moorage", self.source / "framework/moorage"),
                ("moorage_plugins", self.source / "plugins/moorage_plugins"),
            )
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        found = {name for name in self.members if ".dist-info/" not in name and ".data/" not in name}
        self.assertEqual(expected, found)
        self.assertLessEqual(
            {"moorage/py.typed", "moorage_plugins/py.typed", "moorage/db/alembic/script.py.mako"}, found
        )

    def test_the_wheel_brings_samples_units_user_folders_and_licence(self):
        endings = (
            *("data/etc/moorage/moorage.conf.sample", "dist-info/licenses/LICENSE", "dist-info/entry_points.txt"),
            *("data/lib/systemd/system/moorage@.service", "data/lib/systemd/system/moorage.target"),
            *("data/lib/sysusers.d/moorage.conf", "data/lib/tmpfiles.d/moorage.conf"),
        )
        for ending in endings:
            self.assertTrue([name for name in self.members if name.endswith(ending)], ending)


@tests.for_ci("builds the project")
class TestVersionFromGit(unittest.TestCase):
    def test_a_shallow_clone_without_tags_builds(self):
        if not (ROOT / ".git").exists():
            self.skipTest("this source has no git repository to clone")
        folder = Path(tempfile.mkdtemp(prefix="moorage-clone-"))
        self.addCleanup(shutil.rmtree, folder)
        _run("git", "clone", "--quiet", "--depth=1", "--no-tags", f"file://{ROOT}", "clone", cwd=folder)
        wheel = _wheel(folder / "clone", folder / "wheel")
        self.assertRegex(wheel.name, r"^moorage-0\.0\.[01](\.dev\d+)?-py3-none-any\.whl$")
