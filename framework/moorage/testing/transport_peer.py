# SPDX-License-Identifier: Apache-2.0
"""Another process for the conformance kit of transports: serves one topic until its standard input ends.

``python -m moorage.testing.transport_peer '{"plugin": "module:Class", "url": ..., "options": {...}, "topic": ..., "server": ...}'``
writes ``ready`` to its standard output once it serves.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from typing import Any

from oslo_config import cfg

from moorage.clock import SystemClock
from moorage.rpc import options
from moorage.rpc.interface import Message

__all__ = ["configuration", "main"]


def configuration(rpc: dict[str, Any]) -> cfg.ConfigOpts:
    """Returns a private configuration with some options of ``[rpc]`` set."""
    conf = cfg.ConfigOpts()
    conf([], project="moorage", default_config_files=[], default_config_dirs=[])
    options.register_opts(conf)
    for name, value in rpc.items():
        conf.set_override(name, value, group="rpc")
    return conf


class Peer:
    """Counts messages; its methods are those the kit calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: list[Any] = []

    def handle(self, message: Message) -> Any:
        """``note`` keeps a value, ``seen`` returns all kept, ``pid`` the process, anything else the arguments."""
        with self._lock:
            if message.method == "note":
                self._seen.append(message.args["value"])
                return None
            if message.method == "seen":
                return list(self._seen)
        return os.getpid() if message.method == "pid" else dict(message.args)


def main(arguments: list[str]) -> None:
    """Serve as ``arguments[0]`` says."""
    wanted = json.loads(arguments[0])
    module, _colon, name = wanted["plugin"].partition(":")
    plugin = getattr(importlib.import_module(module), name)
    transport = plugin(conf=configuration(wanted["options"]), url=wanted["url"], clock=SystemClock())
    subscription = transport.serve(wanted["topic"], wanted["server"], Peer().handle)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    subscription.stop(5.0)
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
