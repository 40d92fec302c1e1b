# SPDX-License-Identifier: Apache-2.0
"""Messages that tell agents of the operations on their instances. An operation whose message is lost is found by a sweep."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from oslo_log import log as logging

from moorage import errors
from moorage.clock import Clock
from moorage.read_only import FrozenDict
from moorage.rpc.client import RpcSender
from moorage.services.interface import (
    TAKES_TOLD_BUILDS,
    TAKES_TOLD_DELETION_SETS,
    TAKES_TOLD_DELETIONS,
    TAKES_TOLD_SETS,
)

__all__ = ["AGENT_TOPIC", "AgentCast", "AgentMessages", "cast_to_agent"]

LOG = logging.getLogger(__name__)

AGENT_TOPIC = "agent"
#: Seconds for which a service believes what it has read of the powers of agents.
_POWERS_AGE = 30.0


class AgentCast(Protocol):
    """Tells the agent of a host of an operation."""

    def __call__(self, host: str, method: str, uuid: str, more: Mapping[str, Any] = FrozenDict()) -> None:
        """Sends a message; ``more`` are its arguments beside the uuid of the instance."""


class AgentMessages:
    """Tells agents of builds and deletions. Where an agent has the power, the message brings the token of the operation.

    Such an agent takes the operation by one statement. The message of a build brings the instance too, so that the agent reads
    nothing. An agent of an earlier version would refuse these messages.

    :param lacking: reads which hosts have agents that lack one of some powers; asked every 30 seconds at most for each power.
    """

    def __init__(self, cast: AgentCast, lacking: Callable[[Collection[str]], Collection[str]], clock: Clock) -> None:
        self._cast = cast
        self._lacking = lacking
        self._clock = clock
        self._read_at: dict[str, float] = {}
        #: By power; a power is absent until it was read.
        self._without: dict[str, Collection[str]] = {}

    def build(self, host: str, uuid: str, token: int, instance: Mapping[str, Any]) -> None:
        """Sends the message of a build. What is not delivered is found by the agent's sweep.

        :param token: of the operation, if it is the first one of the instance; ``instance``: what was written with it. 0: the agent
            reads both.
        """
        told = {"token": token, "instance": dict(instance)} if token and self._can(host, TAKES_TOLD_BUILDS) else {}
        try:
            self._cast(host, "build_instance", uuid, told)
        except errors.MessageTooLarge:
            # The claim is committed: the agent reads what the message cannot bring.
            self._cast(host, "build_instance", uuid)

    def build_many(self, builds: Mapping[str, Sequence[tuple[str, int, Mapping[str, Any]]]]) -> None:
        """Sends the messages of several builds, one to each agent that takes them together.

        :param builds: by host; of each the arguments of :meth:`build`.
        """
        for host, several in builds.items():
            if len(several) > 1 and self._can(host, TAKES_TOLD_SETS) and all(token for _, token, _ in several):
                told = [
                    {"instance_uuid": uuid, "token": token, "instance": dict(instance)}
                    for uuid, token, instance in several
                ]
                try:
                    self._cast(host, "build_instance", several[0][0], {**told[0], "others": told[1:]})
                    continue
                except errors.MessageTooLarge:
                    LOG.debug("One message cannot bring %d builds to agent %s.", len(several), host)
            for uuid, token, instance in several:
                self.build(host, uuid, token, instance)

    def delete(self, deletions: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        """Sends the messages of deletions: one to each agent that takes several in a message, otherwise one for each deletion.

        :param deletions: by host: uuids of instances, and the tokens of the operations.
        """
        for host, several in deletions.items():
            if len(several) > 1 and self._can(host, TAKES_TOLD_DELETION_SETS):
                (uuid, token), *others = several
                told = [{"instance_uuid": other, "token": its} for other, its in others]
                self._cast(host, "delete_instance", uuid, {"token": token, "others": told})
                continue
            can = self._can(host, TAKES_TOLD_DELETIONS)
            for uuid, token in several:
                self._cast(host, "delete_instance", uuid, {"token": token} if can else {})

    def _can(self, host: str, power: str) -> bool:
        now = self._clock.monotonic()
        if now - self._read_at.get(power, float("-inf")) >= _POWERS_AGE:
            # Other threads use what was read before.
            self._read_at[power] = now
            try:
                self._without[power] = self._lacking((power,))
            except errors.Unavailable as error:
                LOG.debug("The powers of agents cannot be read now: %s", error.message)
        return power in self._without and host not in self._without[power]


def cast_to_agent(sender: RpcSender) -> AgentCast:
    """Returns a function that sends a message about an operation to an agent. Sweeps of the agent find lost messages.

    The log says once that an agent cannot be reached, and once that it can be reached again; not for each operation.
    """
    away: set[str] = set()

    def cast(host: str, method: str, uuid: str, more: Mapping[str, Any] = FrozenDict()) -> None:
        try:
            sender.cast(AGENT_TOPIC, method, {"instance_uuid": uuid, **more}, server=host)
        except errors.TransportError as error:
            level = LOG.debug if host in away else LOG.warning
            away.add(host)
            level(
                "Agent %s got no message %s about %s (%s); it finds the operation by itself.", host, method, uuid, error
            )
        else:
            if host in away:
                away.discard(host)
                LOG.info("Messages reach agent %s again.", host)

    return cast
