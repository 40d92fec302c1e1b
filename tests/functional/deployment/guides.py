# SPDX-License-Identifier: Apache-2.0
"""What a guide of the documentation has a person type, and the services that systemd would start."""

from __future__ import annotations

import configparser
import io
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["BIN", "ROOT", "UNITS", "Unit", "blocks", "commands", "exec_start", "here", "type_in"]

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "etc/systemd"
BIN = Path(sys.executable).parent


def blocks(guide: str, kind: str) -> list[str]:
    """The code blocks of a guide, those of its lists too, without their indentation."""
    found = re.findall(rf"(?m)^( *)\.\. code-block:: {kind}\n\n((?:\1 {{3}}.*\n|\n)+)", guide)
    return [re.sub(rf"(?m)^{indentation} {{3}}", "", block).strip() for indentation, block in found]


def commands(guide: str) -> list[str]:
    """What a guide has a person type, in order."""
    return [line.removeprefix("$ ") for block in blocks(guide, "console") for line in block.splitlines()]


def exec_start(unit: str) -> list[str]:
    """The command line of a unit: an instance of the one template that there is (``moorage@agent``)."""
    template, _, role = unit.partition("@")
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(UNITS / f"{template}@.service")
    return [word.replace("%i", role) for word in shlex.split(parsed["Service"]["ExecStart"])]


def here(command: str, conf: Path) -> list[str]:
    """A command of a guide on this machine, with the configuration of the test; who runs the test is the user ``moorage``."""
    words = shlex.split(command.removeprefix("sudo -u moorage ").replace("/etc/moorage/moorage.conf", str(conf)))
    words[0] = str(BIN / Path(words[0]).name)
    return words


def type_in(words: Sequence[str], answers: Sequence[str], folder: Path) -> str:
    """Run a command at a terminal of its own, and type an answer for each question that it asks; what was shown."""
    shown, program = b"", words[0]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(program, [*words])
    waiting = list(answers)
    with os.fdopen(terminal, "r+b", buffering=0) as stream:
        while piece := _read(stream):
            shown += piece
            # By what came last: the line's end that follows an answer is no question, and what is typed too early is lost.
            if waiting and piece.rstrip().endswith(b":"):
                stream.write(waiting.pop(0).encode() + b"\n")
            if not select.select([stream], [], [], 120)[0]:
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status:
        raise AssertionError(f"{shlex.join(words)} ended with {status}: {shown.decode()}")
    return shown.decode()


def _read(stream: io.FileIO) -> bytes:
    try:
        return stream.read(4096) or b""
    except OSError:
        # So Linux says that the other side of a terminal was closed.
        return b""


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
