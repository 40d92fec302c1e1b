# SPDX-License-Identifier: Apache-2.0
"""What a guide of the documentation has a person type, and the services that systemd would start."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["BIN", "ROOT", "UNITS", "Unit", "blocks", "commands", "exec_start", "here"]

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "etc/systemd"
BIN = Path(sys.executable).parent


def blocks(guide: str, kind: str) -> list[str]:
    """The code blocks of a guide, without their indentation."""
    found = re.findall(rf"\.\. code-block:: {kind}\n\n((?: {{3}}.*\n|\n)+)", guide)
    return [re.sub(r"(?m)^ {3}", "", block).strip() for block in found]


def commands(guide: str) -> list[str]:
    """What a guide has a person type, in order."""
    return [line.removeprefix("$ ") for block in blocks(guide, "console") for line in block.splitlines()]


def exec_start(unit: str) -> list[str]:
    """The command line of a unit."""
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(UNITS / f"{unit}.service")
    return shlex.split(parsed["Service"]["ExecStart"])


def here(command: str, conf: Path) -> list[str]:
    """A command of a guide on this machine, with the configuration of the test."""
    words = shlex.split(command.replace("/etc/moorage/moorage.conf", str(conf)))
    words[0] = str(BIN / Path(words[0]).name)
    return words


class Unit:
    """A service as systemd starts it: with a socket that it tells its state."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self.told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = folder / f"{name}.notify"
        path.unlink(missing_ok=True)
        self.told.bind(str(path))
        self.told.settimeout(120)
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, "NOTIFY_SOCKET": str(path)}, stdout=log, stderr=log, cwd=folder
            )

    def wait_for(self, state: str) -> None:
        try:
            said = self.told.recv(1024).decode()
        except TimeoutError:
            raise AssertionError(f"{self.name} told nothing: {self.log.read_text()[-3000:]}") from None
        if said != state:
            raise AssertionError(f"{self.name} told {said}, not {state}")

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.told.close()
