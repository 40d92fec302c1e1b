# SPDX-License-Identifier: Apache-2.0
"""The API's way to the schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oslo_log import log as logging

from moorage import errors
from moorage.clock import Clock
from moorage.rpc.client import RpcSender
from moorage.scheduling.reporter import TOPIC as SCHEDULERS

__all__ = ["Schedulers"]

LOG = logging.getLogger(__name__)


class Schedulers:
    """The API's way to the schedulers.

    :param attempts: how many are asked for one request, in all.
    :param timeout: seconds each of them has.  Without a connection to lose, a message queue cannot tell a dead scheduler
        from a slow one.
    """

    def __init__(self, sender: RpcSender, clock: Clock, attempts: int, timeout: float) -> None:
        self._sender = sender
        self._clock = clock
        self._attempts = attempts
        self._timeout = timeout

    def ask(self, method: str, args: Mapping[str, Any]) -> Any:
        """Ask any scheduler; another one when one is lost, because questions may be asked twice."""
        for attempt in range(1, self._attempts + 1):
            try:
                return self._sender.call(SCHEDULERS, method, dict(args), timeout=self._timeout)
            except errors.TransportError as error:
                if attempt == self._attempts:
                    raise
                LOG.warning("A scheduler was lost (%s); another one is asked.", error.message)
                self._clock.sleep(0.1 * attempt)
        raise AssertionError("unreachable")

    def find(self, method: str, args: Mapping[str, Any]) -> Any:
        """Ask one scheduler after the other until one knows."""
        names = self._sender.transport.listeners(SCHEDULERS)
        if not names:
            return self.ask(method, args)
        failure: errors.MoorageError = errors.NotFound("No scheduler is there to be asked.")
        for name in names:
            try:
                return self._sender.call(SCHEDULERS, method, dict(args), server=name, timeout=self._timeout)
            except errors.NotFound as error:
                failure = error
            except errors.TransportError as error:
                LOG.info("Scheduler %s was not asked: %s", name, error.message)
        raise failure

    def create_many(
        self, request: Mapping[str, Any], uuids: Sequence[str], request_id: str
    ) -> Sequence[Mapping[str, Any]]:
        """Place several instances alike, all or none; safe to ask again likewise."""
        args = {"request": dict(request), "uuids": list(uuids), "request_id": request_id}
        answer = self.ask("create_instances", args)
        # A scheduler of an earlier version answers with the uuids.
        return answer if all(isinstance(each, Mapping) and each for each in answer) else ()

    def move(self, uuid: str, operation: str, wanted: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        """Move an instance and return it; safe to ask again, because the request_id is kept with what is in progress."""
        args = {"instance_uuid": uuid, "operation": operation, "wanted": dict(wanted), "request_id": request_id}
        found: Mapping[str, Any] = self.ask("move_instance", args)["instance"]
        return found

    def create(self, request: Mapping[str, Any], request_id: str) -> Mapping[str, Any] | None:
        """Place an instance and return it, None if it was placed before; safe to ask again: uuid and request_id name the claim."""
        answer = self.ask("create_instance", {"request": dict(request), "request_id": request_id})
        return answer["instance"] or None
