# SPDX-License-Identifier: Apache-2.0
"""Asks the agents of hosts about instances that run, for requests that wait for the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oslo_log import log as logging

from moorage import errors, threads
from moorage.instances.agent_messages import AGENT_TOPIC
from moorage.instances.availability import Availability
from moorage.rpc.client import RpcSender

__all__ = ["AgentQuestions"]

LOG = logging.getLogger(__name__)
#: Seconds that an agent has to answer.
_ANSWERS = 15.0
#: One in so many threads of the API may wait for an agent.
_PART = 4


class AgentQuestions:
    """Asks an agent about an instance. Safe for use by several threads.

    Members of projects may ask, and an agent that cannot be reached keeps a thread of the API waiting. So at most a quarter of the
    threads wait for agents, and an agent that is down is not asked. No error names a host: members do not see hosts.

    :param api_threads: ``[api] threads``.
    """

    def __init__(self, sender: RpcSender, availability: Availability, api_threads: int) -> None:
        self._sender = sender
        self._availability = availability
        self._most = max(1, api_threads // _PART)
        self._places = threads.semaphore(self._most)

    def ask(self, host: str, method: str, instance: str, args: Mapping[str, Any]) -> Any:
        """Returns the answer of the agent of a host.

        :raises Unavailable: the agent is down, does not answer or is too old, or too many requests wait for agents.
        """
        if not self._places.acquire(blocking=False):
            raise errors.Unavailable(
                f"{self._most} requests of this process wait for agents, and no more may wait. Try again in a second."
            )
        try:
            return self._ask(host, method, instance, args)
        finally:
            self._places.release()

    def _ask(self, host: str, method: str, instance: str, args: Mapping[str, Any]) -> Any:
        if not self._availability.is_up(host):
            raise errors.Unavailable(f"The agent of instance {instance} is down. Try again when it is up.")
        try:
            return self._sender.call(
                AGENT_TOPIC, method, {"instance_uuid": instance, **args}, server=host, timeout=_ANSWERS
            )
        except errors.TransportError as error:
            LOG.warning("The agent of host %s was not asked about instance %s: %s", host, instance, error)
            raise errors.Unavailable(f"The agent of instance {instance} does not answer. Try again.") from error
        except errors.NotFound as error:
            if "method" not in error.details:
                raise
            LOG.warning("The agent of host %s is too old for %s. Upgrade it: %s", host, method, error)
            raise errors.Unavailable(
                f"The agent of instance {instance} is of an earlier version and does not answer this question. Try again when the "
                "agent has been upgraded."
            ) from error
