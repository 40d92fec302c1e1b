# SPDX-License-Identifier: Apache-2.0
"""The API's way to the schedulers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import errors, randomness
from moorage.clock import Clock
from moorage.context import anonymous
from moorage.gathering import Gathered, Gathering
from moorage.rpc import wire
from moorage.rpc.client import RpcSender
from moorage.scheduling.reporter import TOPIC as SCHEDULERS

__all__ = ["Schedulers"]

LOG = logging.getLogger(__name__)

#: Creates that one message asks for at most. A process has one such message under way at a time: two would be half as large.
_TOGETHER = 64
#: Seconds that a create waits for such a message before it is asked for by itself.
_PATIENCE = 0.2
#: Seconds for which creates are asked for one by one, after schedulers have placed none that were asked for together.
_APART = 10.0
#: Seconds for which such messages go to one scheduler. If schedulers alternated, each would ask its plugins again about all nodes
#: that the others have used meanwhile. Each API process chooses at moments of its own. No message asks which schedulers there are:
#: each system call on the way to a message lets the threads that wait for the interpreter's lock run first.
_STAY = 1.0


@dataclass(slots=True, eq=False)
class _Create(Gathered[Mapping[str, Any]]):
    """Holds the request of a thread for one instance."""

    #: ``request``, ``request_id`` and ``context``, as a message has them. The thread of the request makes this, and the thread that
    #: sends the message does not.
    data: Mapping[str, Any]
    context: oslo_context.RequestContext
    #: How many schedulers were asked for it and are lost.
    asked: int = 0

    @property
    def args(self) -> dict[str, Any]:
        """Returns the arguments of ``create_instance``, which asks for one instance."""
        return {name: self.data[name] for name in ("request", "request_id")}


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
        self._random = randomness.generator()
        #: The scheduler that is asked for creates that wait together; None: any. Until when, on the monotonic clock.
        self._server: str | None = None
        self._stays_until = 0.0
        #: Until when creates are asked for one by one, on the monotonic clock.
        self._apart_until = 0.0
        self._gathering = Gathering[_Create](
            self._begin_each,
            lambda create: (create.data["request"].get("uuid"),),
            lambda: _TOGETHER,
            _PATIENCE,
            timeout,
        )

    def ask(self, method: str, args: Mapping[str, Any], asked: int = 0) -> Any:
        """Ask any scheduler; another one when one is lost, because questions may be asked twice.

        :param asked: how many schedulers were asked before, and are lost.
        """
        for attempt in range(asked + 1, self._attempts + 1):
            if attempt > 1:
                self._clock.sleep(0.1 * (attempt - 1))
            try:
                return self._sender.call(SCHEDULERS, method, dict(args), timeout=self._timeout)
            except errors.TransportError as error:
                if attempt == self._attempts:
                    raise
                LOG.warning("A scheduler was lost (%s); another one is asked.", error.message)
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
        context = oslo_context.get_current() or anonymous()
        mine = _Create({"request": dict(request), "request_id": request_id, "context": context.to_dict()}, context)
        if self._clock.monotonic() >= self._apart_until:
            # Where the end of the turn is not seen, it is asked for once more.
            self._gathering.join(mine)
        if mine.error is not None:
            raise mine.error
        if mine.outcome is None:
            mine.outcome = self._create_alone(mine)
        return mine.outcome["instance"] or None

    def _create_alone(self, create: _Create) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.ask("create_instance", create.args, create.asked)
        return found

    def _begin_each(self, turn: Sequence[_Create]) -> Callable[[], None]:
        """Sends the creates of one turn to a scheduler. Returns the function that waits for the reply.

        Creates that this message does not place are left to their own threads.
        """
        begin = functools.partial(self._sender.begin_call, SCHEDULERS, timeout=self._timeout, context=turn[0].context)
        if len(turn) == 1:
            return functools.partial(self._end_one, turn[0], begin("create_instance", turn[0].args))
        ask = functools.partial(begin, "create_each", {"requests": [each.data for each in turn]})
        server = self._chosen()
        return functools.partial(self._end_each, turn, ask, server, ask(server=server))

    def _end_one(self, create: _Create, receive: Callable[[], Mapping[str, Any]]) -> None:
        """Waits for the scheduler's reply to ``create_instance``, and keeps it as the outcome of the create."""
        try:
            create.outcome = receive()
        except errors.TransportError as error:
            self._lost([create], error)

    def _lost(self, turn: Sequence[_Create], error: errors.TransportError) -> None:
        """Leaves the creates of a turn whose scheduler is lost to their own threads, which ask other schedulers.

        :raises TransportError: no more than one scheduler may be asked for a create.
        """
        if self._attempts == 1:
            raise error
        LOG.warning("A scheduler was lost (%s); another one is asked for %d creates.", error.message, len(turn))
        for each in turn:
            each.asked, each.alone = 1, True

    def _end_each(
        self,
        turn: Sequence[_Create],
        ask: Callable[[], Callable[[], Any]],
        server: str | None,
        receive: Callable[[], Any],
    ) -> None:
        """Waits for the scheduler's reply to ``create_each``, and keeps the part of each create as its outcome or error.

        :param ask: sends the message to any scheduler.
        :param server: the scheduler that was asked; None: any.
        :param receive: waits for its reply.
        """
        replies: Sequence[Mapping[str, Any] | None] = ()
        try:
            replies = self._replies(ask, server, receive)
        except errors.TransportError as error:
            self._lost(turn, error)
            return
        except errors.MoorageError as error:
            LOG.debug("%d creates are asked for one by one: %s", len(turn), error.message)
        if not any(replies):
            # The schedulers are of an earlier version, or their store makes no claims together.
            self._apart_until = self._clock.monotonic() + _APART
        for each, reply in zip(turn, replies or [None] * len(turn), strict=True):
            if reply is None:
                each.alone = True
                continue
            try:
                each.outcome = wire.result_of(reply)
            except errors.MoorageError as error:
                each.error = error

    def _replies(
        self, ask: Callable[[], Callable[[], Any]], server: str | None, receive: Callable[[], Any]
    ) -> Sequence[Mapping[str, Any] | None]:
        """Waits for the reply of the chosen scheduler; asks any other scheduler if the chosen one refuses the message."""
        try:
            found: Sequence[Mapping[str, Any] | None] = receive()
        except (errors.NoListener, errors.Busy) as error:
            if server is None:
                raise
            LOG.debug("Scheduler %s takes no creates (%s); any one is asked.", server, error.message)
            self._stays_until = 0.0
            found = ask()()
        return found

    def _chosen(self) -> str | None:
        """Returns the name of the scheduler that gets the next message with several creates; None if any scheduler may get it.

        Called by one thread at a time.
        """
        now = self._clock.monotonic()
        if now >= self._stays_until:
            names = self._sender.transport.listeners(SCHEDULERS)
            self._server = self._random.choice(names) if names else None
            self._stays_until = now + _STAY
        return self._server
