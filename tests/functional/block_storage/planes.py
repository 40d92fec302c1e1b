# SPDX-License-Identifier: Apache-2.0
"""``moorage up`` with block storage, and agents beside it that may be killed for good."""

from __future__ import annotations

import json
import pathlib
import signal
import tempfile
import unittest
from typing import Any

from moorage import client
from moorage.cli import main, roles
from tests.commands import in_process
from tests.forking import Command
from tests.servers import wait_until

__all__ = ["GIGABYTE", "SOON", "Plane"]

SOON = 90.0
GIGABYTE = 50_000
CONF = f"""
[agent]
cluster = one
sweep_interval = 0.3
[services]
report_interval = 0.3
service_down_time = 4
[cleanup]
interval = 0.3
lease_seconds = 4
[block_storage]
gigabyte_bytes = {GIGABYTE}
chunk_bytes = 5000
collect_interval = 0.5
"""


class Plane:
    """A control plane without authentication; ends with the test class."""

    def __init__(self, test: type[unittest.TestCase], extra: str = "", schedulers: int = 2, agents: int = 2) -> None:
        folder = tempfile.TemporaryDirectory()
        test.addClassCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.state = self.folder / "state"
        self.conf = self.folder / "moorage.conf"
        self.conf.write_text(CONF + extra)
        self._test = test
        said = self.folder / "stderr"
        self.process = Command(
            [
                *("up", "--state-dir", str(self.state), "--bind", "127.0.0.1:0", "--config-file", str(self.conf)),
                *("--auth-strategy", "noauth", "--agents", str(agents), "--schedulers", str(schedulers)),
            ],
            said,
        )
        test.addClassCleanup(self.end)
        line = self.process.stdout.readline()
        if "ready" not in line:
            raise AssertionError(f"{line}{said.read_text()}")
        data: dict[str, Any] = json.loads((self.state / "client.json").read_text())
        self.url = str(data["url"])
        self.api = client.connect(**data)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)

    def agent(self, name: str, *settings: str, wait: bool = True) -> Command:
        """An agent that nobody starts again, once it is up unless ``wait`` is False."""
        given = [word for setting in settings for word in ("--set", setting)]
        words = ["agent", "--name", name, "--state-dir", str(self.state), "--config-file", str(self.conf), *given]
        process = Command(words, self.folder / f"{name}.log", program=roles.main)

        def end() -> None:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait(SOON)

        self._test.addClassCleanup(end)
        if wait:
            wait_until(lambda: self.service(name).get("state") == "up", f"{name} is up", SOON)
        return process

    def service(self, host: str) -> dict[str, Any]:
        found = self.api.services(binary="agent", host=host)
        return found[0] if found else {}

    def volume(self, method: str, path: str, body: Any = None) -> Any:
        """A request to the volume dialect."""
        return self.api.request(method, path, body=body, prefix="/volume/v3")

    def statuses(self, kind: str) -> dict[str, str]:
        return {each["id"]: each["status"] for each in self.volume("GET", f"/{kind}s")[f"{kind}s"]}

    def workers(self, **query: Any) -> list[dict[str, Any]]:
        return list(self.api.pages("/workers", "workers", query))

    def moorage(self, *words: str) -> Any:
        """A command, its JSON output."""
        command = [*words, "--state-dir", str(self.state)]
        if words[1] not in ("delete", "retry", "discard", "reset-state"):
            command += ["-f", "json"]
        status, said, error = in_process(main.main, command)
        if status:
            raise AssertionError(f"moorage {' '.join(words)}: {status}\n{said}{error}")
        return json.loads(said) if said.strip() else None

    def files(self) -> list[str]:
        """Files of the backend, as kind/uuid/token."""
        backend = self.state / "block_storage"
        return sorted(str(path.relative_to(backend)) for path in backend.glob("*/*/*"))
