# SPDX-License-Identifier: Apache-2.0
"""ZooKeeper, the reference: tooz's driver, with the rules of :mod:`moorage_plugins.coordination.tooz` and some of its own."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from typing_extensions import override

from moorage.coordination.interface import BackendCapability, BackendTools
from moorage_plugins.coordination.tooz import ToozBackend

__all__ = ["ZooKeeperBackend"]

#: Where kazoo's message about a new session has the negotiated timeout, in milliseconds, among its arguments.
_NEGOTIATED = 2
_SESSION_CREATED = "Session created"


class _SessionLog(logging.LoggerAdapter[logging.Logger]):
    """Takes what kazoo logs: keeps the negotiated timeout of the session, and passes everything below ERROR on as DEBUG.

    Kazoo tells the negotiated timeout nowhere else; a server may give less than was asked for. While no server answers it logs 20
    warnings a second. The membership logs the beginning and the end of such an outage.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self.negotiated: float | None = None

    @override
    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        if str(msg).startswith(_SESSION_CREATED) and len(args) > _NEGOTIATED:
            self.negotiated = float(args[_NEGOTIATED]) / 1000
        super().log(level if level >= logging.ERROR else min(level, logging.DEBUG), msg, *args, **kwargs)


class ZooKeeperBackend(ToozBackend):
    """ZooKeeper (zookeeper://host:2181,host2:2181)."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: BackendTools) -> None:
        super().__init__(tools)
        self.capabilities = self.capabilities | {BackendCapability.PUSH}
        self._log: _SessionLog | None = None

    @property
    @override
    def session_timeout(self) -> float:
        asked = super().session_timeout
        negotiated = None if self._log is None else self._log.negotiated
        return asked if negotiated is None else min(asked, negotiated)

    @override
    def options(self) -> dict[str, Any]:
        # Kazoo's own pauses between tries grow until sessions end in them. Without max_jitter = 0 they would shrink: kazoo makes
        # each pause from the one before it, by chance, and after some seconds without a server the tries take a whole processor.
        retry = {"max_tries": -1, "delay": 0.1, "backoff": 1, "max_delay": 0.5, "max_jitter": 0.0}
        once = {**retry, "max_tries": 1}
        return {**super().options(), "connection_retry": retry, "command_retry": once}

    @override
    def connected(self, client: Any) -> None:
        kazoo = client._coord
        self._log = _SessionLog(kazoo.logger)
        kazoo.logger = kazoo._connection.logger = self._log
        kazoo.add_listener(self._state_changed)

    def _state_changed(self, state: Any) -> None:
        """In a thread of kazoo's: must return at once."""
        self.tools.changed()

    @override
    def _beat(self) -> frozenset[bytes]:
        """Reading is the heartbeat: kazoo keeps the session by itself, and the answer proves that it stands."""
        return self._read()

    @override
    def _read(self) -> frozenset[bytes]:
        # A server of an ensemble may be behind, or cut off from the others without having noticed: ask through the leader.
        self._client._coord.sync_async("/").get(timeout=self.tools.call_timeout)
        return super()._read()
