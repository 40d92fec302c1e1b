# SPDX-License-Identifier: Apache-2.0
"""A role that hangs or fails where it is told to, in a process of its own; what it comes to is a line of ``progress``."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from oslo_config import cfg

from moorage import errors
from moorage.control_plane import config, process
from moorage.control_plane.accepted_config import ConfigSource


class Script:
    """Does what the words of the command line say.

    They are ``hang-start``, ``fail-start``, ``exit-start``, ``refuse-start``, and so on for ``reload`` and ``stop``; ``serve``, and
    ``own-nothing``. A ``[agent] cluster`` that is called ``refused`` is refused too.
    """

    binary = "agent"

    def __init__(self, folder: Path, words: set[str]) -> None:
        self._progress = folder / "progress"
        self._words = words
        self.owns_work = "own-nothing" not in words

    def _come_to(self, place: str) -> None:
        with self._progress.open("a") as progress:
            progress.write(f"{place}\n")
        if f"hang-{place}" in self._words:
            threading.Event().wait()
        if f"fail-{place}" in self._words:
            self._words.discard(f"fail-{place}")
            raise RuntimeError("a mistake of the author")
        if f"refuse-{place}" in self._words:
            # As a library would leave it.
            threading.Thread(target=threading.Event().wait, daemon=False).start()
            raise errors.ConfigError("an option is nonsense")
        if f"exit-{place}" in self._words:
            self._words.discard(f"exit-{place}")
            sys.exit(4)

    def start(self, platform: process.Platform, conf: cfg.ConfigOpts) -> None:
        self._use(conf)
        self._come_to("start")
        if "serve" in self._words:
            platform.transport.serve("agent", "one", lambda message: None)
        self._come_to("ready")

    def _use(self, conf: cfg.ConfigOpts) -> None:
        if conf.agent.cluster == "refused":
            raise errors.ConfigError("[agent] cluster = refused cannot be used")
        self._come_to(f"cluster {conf.agent.cluster}")

    def reload(self, conf: cfg.ConfigOpts) -> None:
        self._use(conf)
        self._come_to("reload")
        self._come_to("reloaded")

    def stop(self, drain_seconds: float) -> None:
        self._come_to("stop")


def main(argv: list[str]) -> int:
    folder, words = Path(argv[0]), set(argv[1:])
    source = ConfigSource(
        lambda files, alone: config.load(files=files, alone=alone, state_dir=str(folder)),
        [str(folder / "moorage.conf")],
        str(folder),
        "agent-one",
        os.environ,
    )
    return process.run(Script(folder, words), "one", source)


if __name__ == "__main__":  # it starts itself again where it takes the accepted copy
    sys.exit(main(sys.argv[1:]))
