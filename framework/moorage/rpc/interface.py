# SPDX-License-Identifier: Apache-2.0
"""The interface of transports, and the plain data that they carry.

Messages are at most once, unordered and possibly stale (a receiver throws out duplicates and old ones with
:class:`moorage.rpc.sequence.OriginFilter`, and compares notes periodically to repair what was lost). A transport never sends a
message a second time unless it is certain that the first try was not handled.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moorage.errors import MoorageError
from moorage.extensions import ExtensionPoint

__all__ = [
    "API_VERSION",
    "BOUNDED",
    "CROSS_HOST",
    "CROSS_PROCESS",
    "KNOWS_LISTENERS",
    "ORDERED",
    "QUEUES_FOR_ABSENT",
    "TRANSPORTS",
    "Handler",
    "Message",
    "Origin",
    "Subscription",
    "Transport",
]

API_VERSION = (1, 0)

# Capabilities, as a transport class declares them.
#: Several processes of one machine reach each other.
CROSS_PROCESS = "cross-process"
#: Several machines reach each other.
CROSS_HOST = "cross-host"
#: ``listeners`` answers, and a message without a listener raises NoListener at once.
KNOWS_LISTENERS = "knows-listeners"
#: Fanouts of one transport object arrive at each listener in the order in which one thread sent them (some may be missing).
ORDERED = "ordered"
#: A receiver whose queue is full makes the sender of a call or a cast see Busy at once.
BOUNDED = "bounded"
#: A directed message to a server that is away may wait, and be handled, stale, when that server comes back.
QUEUES_FOR_ABSENT = "queues-for-absent"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sent a message.

    :param service: uuid of the sending service.
    :param epoch: incarnation of that service.
    :param sequence: number of the message within (service, epoch): starts at 1, strictly rising over all topics.
    """

    service: str
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Everything in it is JSON data, and arrives as JSON would carry it (tuples become lists).

    :param method: name of what is asked for.
    :param args: named arguments.
    :param origin: None for a bare message of a foreign sender.
    :param context: the request context as ``RequestContext.to_dict()`` gives it.
    :param version: ``major.minor`` of the called interface.
    :param timeout: seconds for which the caller still waits, counted from the moment the handler gets the message; None for
        casts and fanouts. Set by the transport on delivery; what the sender put there is ignored.
    :param to_others: of a fanout: its sender needs no copy. A transport may leave out the servers of the sender.
    :param answer_early: of a call: answers it with an error, from any thread. What the handler returns later is dropped. None where
        the transport cannot do that. Set by the transport on delivery, and not sent.
    """

    method: str
    args: Mapping[str, Any] = field(default_factory=dict)
    origin: Origin | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    version: str = "1.0"
    timeout: float | None = None
    to_others: bool = False
    answer_early: Callable[[MoorageError], None] | None = field(default=None, compare=False, repr=False)


#: Handles one message; what it returns (JSON data) is the reply of a call, what it raises is the error of a call.
Handler = Callable[[Message], Any]


class Subscription(abc.ABC):
    """A served topic; ends with :meth:`stop`."""

    @abc.abstractmethod
    def stop(self, drain_seconds: float) -> bool:
        """Take no more messages and let the accepted ones finish, for at most ``drain_seconds``.

        Idempotent, callable from any thread but not from a handler. A message that arrives meanwhile is refused with
        NoListener where the transport can say so.

        :returns: True when everything accepted was finished; False when something was left running or was thrown away.
        """


class Transport(abc.ABC):
    """Carries messages. Built by the loader as ``plugin(conf=ConfigOpts, url=str, clock=Clock)``; thread safe.

    Errors of every sending method: MessageTooLarge (``[rpc] max_message_bytes``), InvalidInput (not JSON data), TransportError
    (the transport itself cannot be reached). A transport may be created before a fork and used on both sides of it, but a
    topic must be served by the process that called :meth:`serve`.
    """

    api_version: ClassVar[tuple[int, int]]
    capabilities: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def serve(self, topic: str, server: str, handler: Handler, *, threads: int = 8) -> Subscription:
        """Start to handle messages to ``topic``, under the name ``server``; returns once messages would arrive.

        Calls and casts to (topic, server), and this server's part of those to the topic alone, are handled by a pool of
        ``threads``; fanouts to the topic by ONE thread, in the order of arrival. So a fanout handler must be quick.

        :raises AlreadyExists: the name is served by another server (where the transport can know).
        :raises TransportError: what carries the messages cannot be reached; says where it was looked for.
        """

    @abc.abstractmethod
    def call(self, topic: str, message: Message, *, server: str | None = None, timeout: float) -> Any:
        """Send and wait for the reply; without ``server``, one of the topic's servers gets it.

        :param timeout: seconds; the reply is awaited no longer (a short constant for closing things may be added).
        :raises NoListener: no server listens on the topic: certainly not handled.
        :raises Busy: the receiver's queue is full: certainly not handled.
        :raises PeerLost: the connection ended after sending: not known whether it was handled.
        :raises CallTimeout: no reply in time: not known whether it was or will be handled.
        :raises MoorageError: what the handler raised, as the same class. A TransportError of the handler's own (it sent messages
            too, and those failed) arrives as plain TransportError, so that NoListener and Busy keep the meaning above.
        """

    def begin_call(
        self, topic: str, message: Message, *, server: str | None = None, timeout: float
    ) -> Callable[[], Any]:
        """Sends a call and does not wait for the reply.

        A transport that would have to wait, or that does not override this method, sends when the returned function is called.

        :returns: a function that waits for the reply and returns or raises what :meth:`call` does. Any thread may call it, once.
        """
        return functools.partial(self.call, topic, message, server=server, timeout=timeout)

    @abc.abstractmethod
    def cast(self, topic: str, message: Message, *, server: str | None = None) -> None:
        """Send and do not wait for the work; at most once. Returns within a few seconds, whatever the network does.

        :raises NoListener, Busy: as for :meth:`call`, when that is known at once. No error says nothing about the outcome.
        """

    @abc.abstractmethod
    def fanout(self, topic: str, message: Message) -> None:
        """Sends to every server of the topic, at most once for each. It is no error if no server listens.

        The sender's own servers get it too, unless the message says ``to_others`` and the transport knows them.

        Never waits for a listener: one that is slow, stopped or dead loses the oldest messages (counted, with a warning).
        """

    @abc.abstractmethod
    def listeners(self, topic: str) -> Sequence[str] | None:
        """Names of the topic's live servers, sorted; None when the transport cannot know."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop what is still served (without draining), flush what is queued for a short while, give everything back.

        Idempotent. Sending afterwards raises TransportError.
        """


TRANSPORTS: ExtensionPoint[Transport] = ExtensionPoint(
    "moorage.transports", Transport, API_VERSION, "[rpc] transport_url"
)
