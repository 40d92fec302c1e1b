# SPDX-License-Identifier: Apache-2.0
"""The messages that a role sends to others after a change, or to ask for a comparison."""

from __future__ import annotations

from collections.abc import Callable

from oslo_log import log as logging

from moorage import errors
from moorage.control_plane.process import Platform
from moorage.scheduling.instance_tracker import record_to_json
from moorage.scheduling.reporter import AGENTS
from moorage.scheduling.reporter import TOPIC as SCHEDULERS
from moorage.scheduling.scheduler import Selection

__all__ = ["ask_agent", "ask_agents", "ask_to_sync", "tell_of_claim", "tell_schedulers"]

LOG = logging.getLogger(__name__)


def tell_of_claim(platform: Platform, selection: Selection) -> None:
    """Let the other schedulers know at once, so that they do not try the same room in vain."""
    try:
        args = {"host_name": selection.record.host, "instance": record_to_json(selection.record)}
        platform.sender.fanout(SCHEDULERS, "claimed_instance", args, to_others=True)
    except errors.TransportError as error:
        LOG.debug("Other schedulers were not told of a claim: %s", error)


def ask_agent(platform: Platform) -> Callable[[str, str], None]:
    """Returns a function that sends a request to the agent of a host; it raises TransportError if no agent got it."""

    def ask(host: str, method: str) -> None:
        platform.sender.cast(AGENTS, method, {}, server=host)

    return ask


def ask_to_sync(platform: Platform) -> Callable[[str], None]:
    """A function that asks the agent of a host to compare its instances with schedulers soon, because an instance was changed."""

    def ask(host: str) -> None:
        try:
            platform.sender.cast(AGENTS, "sync_instances", {"soon": True}, server=host)
        except errors.TransportError as error:
            LOG.info("Agent %s was not asked to compare its instances (%s); it does so periodically.", host, error)

    return ask


def ask_agents(platform: Platform) -> None:
    """Have all agents speak soon, so that this scheduler, which has just started, can trust what it has loaded."""
    try:
        platform.sender.fanout(AGENTS, "sync_instances", {"soon": True})
    except errors.TransportError as error:
        LOG.info("Agents were not asked to speak (%s); they do so by themselves.", error)


def tell_schedulers(platform: Platform, method: str = "fleet_changed") -> Callable[[], None]:
    """A function that has all schedulers read the fleet again; with ``states_changed`` only the states of agents and nodes."""

    def tell() -> None:
        try:
            platform.sender.fanout(SCHEDULERS, method)
        except errors.TransportError as error:
            LOG.info("Schedulers did not receive %s (%s); they find the change by themselves.", method, error)

    return tell
