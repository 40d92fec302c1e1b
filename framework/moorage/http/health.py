# SPDX-License-Identifier: Apache-2.0
"""Serves ``/healthcheck``."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from oslo_log import log as logging

from moorage import errors, plugin_isolation, threads
from moorage.bounded_pool import BoundedPool
from moorage.clock import Clock, SystemClock

__all__ = ["Health"]

LOG = logging.getLogger(__name__)


class _Check:
    """One asking of one health check."""

    def __init__(self) -> None:
        self.ended = threads.event()
        self.problem = ""


class Health:
    """``/healthcheck``: 200 when no check finds a problem, 503 with the problems otherwise. Needs no authentication.

    A check is a function that returns an empty text, or a problem in words that every client may read. A check that raises is a
    problem, and the log says why. A check that has not answered within ``patience`` seconds is a problem too; it is not called
    again before it has answered.
    """

    def __init__(
        self, checks: Mapping[str, Callable[[], str]], patience: float = 3.0, clock: Clock | None = None
    ) -> None:
        self._checks = checks
        self._patience = patience
        self._clock = clock or SystemClock()
        self._pool = BoundedPool("health", self._clock, max(1, len(checks)))
        self._lock = threads.lock()
        self._asked: dict[str, _Check] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        until = self._clock.monotonic() + self._patience
        asked = {name: self._ask(name) for name in self._checks}
        found = {name: self._answer(each, until) for name, each in asked.items()}
        wrong = {name: text for name, text in found.items() if text}
        data = json.dumps({"status": "unhealthy" if wrong else "healthy", "problems": wrong}).encode()
        status = "503 Service Unavailable" if wrong else "200 OK"
        start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(data)))])
        return [data]

    def _ask(self, name: str) -> _Check:
        """Begin the check, unless it is being made for an earlier request."""
        with self._lock:
            asked = self._asked.get(name)
            if asked is None or asked.ended.is_set():
                asked = self._asked[name] = _Check()
                try:
                    self._pool.start(functools.partial(self._make, name, asked))
                except errors.Unavailable as error:
                    asked.problem = error.message
                    asked.ended.set()
            return asked

    def _make(self, name: str, check: _Check) -> None:
        check.problem = "it failed; the log says why"
        try:
            with plugin_isolation.isolate_plugin_call(name):
                check.problem = self._checks[name]()
        except Exception as error:  # noqa: BLE001  (whatever is wrong is the answer)
            LOG.warning("The health check of %s failed: %s", name, error)
        finally:
            check.ended.set()

    def _answer(self, check: _Check, until: float) -> str:
        if self._clock.wait(check.ended, max(0.0, until - self._clock.monotonic())):
            return check.problem
        return f"no answer within {self._patience:g} seconds"
