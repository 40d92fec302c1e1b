# SPDX-License-Identifier: Apache-2.0
"""The messages that a role sends to others after a change, or to ask for a comparison."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from oslo_log import log as logging

from moorage import errors, threads
from moorage.control_plane.periodic_loop import PeriodicLoop
from moorage.control_plane.process import Platform
from moorage.instances.agent_messages import AgentMessages
from moorage.scheduling.instance_tracker import record_to_json
from moorage.scheduling.placement import Selection
from moorage.scheduling.reporter import AGENTS
from moorage.scheduling.reporter import TOPIC as SCHEDULERS

__all__ = ["PlacementNotices", "ask_agent", "ask_agents", "ask_to_sync", "tell_schedulers"]

LOG = logging.getLogger(__name__)
#: Seconds that a placement waits at least, so that others are sent in the same messages.
_TOGETHER = 0.005
#: Seconds of pause for each placement that was sent, and the longest pause. A scheduler that places fewer than a hundred instances
#: per second sends each after the shortest wait. A busy scheduler sends ten times per second, because each message costs an agent
#: two transactions, however many builds it has. A create takes a tenth less processor time at full load, and clients are answered
#: faster below it.
_PAUSE, _LONGEST_PAUSE = 0.01, 0.1
#: Parts into which the agents are divided. A part gets its messages when the part before it has had its share of the pause. Agents
#: that all begin their builds at the same moment would take the processors and the database from the requests of that moment.
_PARTS = 4
#: Claims in one message at most.
_AT_ONCE = 500
#: Placements in the queue at most. While an agent hangs, messages to the others wait. The sweeps of agents find the operations of
#: placements that were dropped.
_MOST = 10_000


class PlacementNotices:
    """Sends the builds of placed instances to agents, and the claims of this scheduler to the other schedulers.

    A thread sends the messages, so no client waits for them. One message has what was placed within five milliseconds, or since
    the message before it if that one had many. A message may be lost: the agent sweeps for its operations, and the condition of a
    claim decides.

    :param to_schedulers: whether claims are sent to other schedulers.
    """

    def __init__(self, platform: Platform, agents: AgentMessages, *, to_schedulers: bool) -> None:
        self._platform = platform
        self._agents = agents
        self._to_schedulers = to_schedulers
        self._waiting: collections.deque[Selection] = collections.deque(maxlen=_MOST)
        self._wake = threads.event()
        self._loop = PeriodicLoop(
            platform, "notices of placements", self._send_and_rest, None, wake=self._wake, gather=_TOGETHER
        )

    def add(self, placed: Iterable[Selection]) -> None:
        """Queues what was just placed, and returns at once."""
        self._waiting.extend(placed)
        self._wake.set()

    def stop(self) -> None:
        """Sends what is queued and ends the thread."""
        self._loop.stop()
        self._send()

    def _send_and_rest(self) -> None:
        self._send(min(_LONGEST_PAUSE, len(self._waiting) * _PAUSE))

    def _send(self, pause: float = 0.0) -> None:
        """Sends what is queued now, to one part of the agents after the other. Later placements wait for the next call.

        :param pause: seconds of rest in all; each part of the agents is followed by an equal share.
        """
        number = len(self._waiting)
        rounds = range(0, number, _AT_ONCE)
        for first in rounds:
            placed = [self._waiting.popleft() for _ in range(min(number - first, _AT_ONCE))]
            claimed = [record_to_json(each.record) for each in placed if not each.repeated]
            if claimed and self._to_schedulers:
                self._send_claims(claimed)
            builds = collections.defaultdict(list)
            for each in placed:
                builds[each.record.host].append((each.record.uuid, each.token, each.shown))
            hosts = sorted(builds)
            parts = min(_PARTS, len(hosts))
            for part in range(parts):
                self._agents.build_many({host: builds[host] for host in hosts[part::parts]})
                self._platform.clock.sleep(pause / len(rounds) / parts)

    def _send_claims(self, claimed: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._platform.sender.fanout(SCHEDULERS, "claimed_instances", {"instances": claimed}, to_others=True)
        except (errors.TransportError, errors.MessageTooLarge) as error:
            LOG.debug("%d claims were not sent to other schedulers: %s", len(claimed), error)


def ask_agent(platform: Platform) -> Callable[[str, str], None]:
    """Returns a function that sends a request to the agent of a host; it raises TransportError if no agent got it."""

    def ask(host: str, method: str) -> None:
        platform.sender.cast(AGENTS, method, {}, server=host)

    return ask


def ask_to_sync(platform: Platform) -> Callable[[str], None]:
    """Returns a function that asks the agent of a host to compare its instances with schedulers soon, after an instance changed."""

    def ask(host: str) -> None:
        try:
            platform.sender.cast(AGENTS, "sync_instances", {"soon": True}, server=host)
        except errors.TransportError as error:
            LOG.info("Agent %s was not asked to compare its instances (%s); it does so periodically.", host, error)

    return ask


def ask_agents(platform: Platform) -> None:
    """Asks all agents to report their instances soon, so that a scheduler that has just started can trust what it has loaded."""
    try:
        platform.sender.fanout(AGENTS, "sync_instances", {"soon": True})
    except errors.TransportError as error:
        LOG.info("Agents were not asked to speak (%s); they do so by themselves.", error)


def tell_schedulers(platform: Platform, method: str = "fleet_changed") -> Callable[[], None]:
    """Returns a function that has all schedulers refresh the fleet; with ``states_changed`` only the states of agents and nodes."""

    def tell() -> None:
        try:
            platform.sender.fanout(SCHEDULERS, method)
        except errors.TransportError as error:
            LOG.info("Schedulers did not receive %s (%s); they find the change by themselves.", method, error)

    return tell
