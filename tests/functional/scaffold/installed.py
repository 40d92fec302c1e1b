# SPDX-License-Identifier: Apache-2.0
"""A fresh virtual environment with Moorage from a wheel, and what authors of plugins install beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["Installed"]

ROOT = Path(__file__).parents[3]
#: What a wheel is made from.
SOURCE = (
    "framework",
    "plugins",
    "etc",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
    "requirements.txt",
    "README.rst",
    "LICENSE",
)
#: Without a network: what a distribution asks for must be installed, or be one of the wheels.
OPTIONS = ("--quiet", "--no-index", "--disable-pip-version-check")
#: Builds a wheel of each folder, through the interface that pip uses (PEP 517), in one process.
BUILD = """
import importlib, os, sys, tomllib
into = sys.argv[1]
for folder in sys.argv[2:]:
    os.chdir(folder)
    with open('pyproject.toml', 'rb') as file:
        backend = tomllib.load(file)['build-system']['build-backend']
    importlib.import_module(backend).build_wheel(into)
"""


class Installed:
    """A virtual environment that shares the libraries of the tests', and none of its Moorage.

    :ivar python: its interpreter; ``bin`` holds the commands.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheels = folder / "wheels"
        self.wheels.mkdir(parents=True)
        self.bin = folder / "venv" / "bin"
        self.python = self.bin / "python"
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")},
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            # The one that what is written in the tests' process asks for, a development version most of the time.
            "PBR_VERSION": metadata.version("moorage"),
        }
        self.run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
        # Behind its own packages: a path in such a file is only looked at, so that the tests' Moorage, which is installed there as
        # a folder of sources, is not found.
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        source = folder / "source"
        source.mkdir()
        for name in SOURCE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(ROOT / name, source)
        # pip would take the tests' Moorage, which has the same version, for this one.
        self.install([source], "--force-reinstall", "--no-deps")

    def run(self, *command: object, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command as somebody types it who uses this environment."""
        done = subprocess.run(
            [str(each) for each in command],
            cwd=cwd or self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{command}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done

    def install(self, folders: Iterable[Path], *options: str) -> None:
        """Build a wheel of each, and install those."""
        before = set(self.wheels.iterdir())
        self.run(sys.executable, "-c", BUILD, self.wheels, *folders)
        self.pip([*options, *sorted(str(each) for each in set(self.wheels.iterdir()) - before)])

    def pip(self, what: Sequence[str], *, cwd: Path | None = None) -> None:
        """``pip install``, by the tests' pip."""
        # pip builds without isolation what is no wheel: the backend is the tests' too.
        options = (*OPTIONS, "--find-links", self.wheels, "--no-build-isolation")
        self.run(sys.executable, "-m", "pip", "--python", self.python, "install", *options, *what, cwd=cwd)
