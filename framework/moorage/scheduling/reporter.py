# SPDX-License-Identifier: Apache-2.0
"""Reports the instances of a host to all schedulers, from its agent.

Messages may be lost. The periodic :meth:`Reporter.sync` repairs that.

Reports must be sent in the order of the commits. So an agent reports what it has committed before it reads the store for
:meth:`Reporter.sync` or :meth:`Reporter.host_started`. An agent that does all of it in one thread keeps that order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from oslo_log import log as logging

from moorage import errors
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.instance_fields import NO_FIELDS, FieldSet

__all__ = ["AGENTS", "TOPIC", "FlavorOf", "Reporter", "Tracked"]

LOG = logging.getLogger(__name__)
#: The topics of schedulers and agents.
TOPIC = "scheduler"
AGENTS = "agent"
#: Instances in one message at most. More of them are sent in several messages.
_PER_MESSAGE = 1000
#: Bytes of a comparison's message for each instance. A uuid has 39 with what separates it from the next one.
_BYTES_COMPARED = 64


class FlavorOf(Protocol):
    """The attributes of an instance that agents and schedulers compare."""

    @property
    def uuid(self) -> str:
        """Returns the instance's uuid."""

    @property
    def flavorid(self) -> str:
        """Returns the id of the flavor."""


class Tracked(FlavorOf, Protocol):
    """The attributes of an instance that agents report to schedulers. InstanceRecord and the classes of stores have them."""

    @property
    def host(self) -> str:
        """Returns the host of the instance."""

    @property
    def node(self) -> str:
        """Returns the node of the instance."""

    @property
    def resources(self) -> Any:
        """Returns units by resource class."""

    @property
    def project_id(self) -> str:
        """Returns the project of the instance."""


class FanoutSender(Protocol):
    """The part of :class:`moorage.rpc.client.RpcSender` that a reporter uses."""

    def fanout(self, topic: str, method: str, args: dict[str, Any]) -> None:
        """Sends a message to every server of the topic."""


class Reporter:
    """Reports the instances of one host to schedulers. A message that cannot be sent is logged and not sent again.

    :param enabled: ``[scheduling] track_instance_changes``; nothing is sent without it.
    :param fields: what is reported besides :class:`Tracked`; see :func:`moorage.scheduling.instance_fields.declared_fields`.
    :param largest: bytes of a message at most: ``[rpc] max_message_bytes``.
    """

    def __init__(
        self,
        sender: FanoutSender,
        host: str,
        *,
        enabled: bool = True,
        fields: FieldSet = NO_FIELDS,
        largest: int = sys.maxsize,
    ) -> None:
        self._fields = fields
        self._most_compared = max(1, largest // _BYTES_COMPARED)
        self._sender = sender
        self._host = host
        self._enabled = enabled

    @property
    def enabled(self) -> bool:
        """Returns whether reports are sent at all. If not, there is no need to read the store for them."""
        return self._enabled

    def created(self, instances: Sequence[Tracked]) -> None:
        """Reports instances that were built on the host."""
        self._update(instances)

    def resized(self, instance: Tracked) -> None:
        """Reports an instance that has another flavor now."""
        self._update([instance])

    def unshelved(self, instance: Tracked) -> None:
        """Reports an instance that was unshelved on the host."""
        self._update([instance])

    def rebuilt(self, instance: Tracked) -> None:
        """Reports an instance that was rebuilt."""
        self._update([instance])

    def live_migrated(self, instance: Tracked, *, source: bool) -> None:
        """Reports a live migration. Both agents call it.

        :param source: whether the instance has left the host; otherwise it has arrived.
        """
        if source:
            self.deleted([instance.uuid])
        else:
            self._update([instance])

    def deleted(self, uuids: Sequence[str]) -> None:
        """Reports instances that have left the host, in one message. A single instance is sent as a text, not as a list."""
        for start in range(0, len(uuids), _PER_MESSAGE):
            part = list(uuids[start : start + _PER_MESSAGE])
            self._send(
                "delete_instance_info",
                {"host_name": self._host, "instance_uuid": part[0] if len(part) == 1 else part},
            )

    def shelved_offloaded(self, uuid: str) -> None:
        """Reports an instance that was shelved and holds nothing on the host any more."""
        self.deleted([uuid])

    def host_started(self, instances: Sequence[Tracked]) -> None:
        """Reports all instances of the host. They replace what schedulers know of the host, even if there are none.

        If they do not fit into one message, several messages and a comparison are sent.
        """
        if len(instances) <= _PER_MESSAGE:
            self._update(instances, replace=True)
            return
        self._update(instances)
        self.sync(instances)

    def sync(self, instances: Sequence[FlavorOf]) -> None:
        """Sends the uuids of all instances of the host and a digest, which schedulers compare with their view.

        If they do not fit into one message, each of several messages has those from one uuid up to the first of the next message.
        """
        most = self._most_compared
        if len(instances) <= most:
            self._compare(instances, {})
            return
        ordered = sorted(instances, key=lambda each: each.uuid)
        for start in range(0, len(ordered), most):
            end = start + most
            between = [ordered[start].uuid if start else "", ordered[end].uuid if end < len(ordered) else None]
            self._compare(ordered[start:end], {"between": between})

    def _compare(self, instances: Sequence[FlavorOf], more: Mapping[str, Any]) -> None:
        self._send(
            "sync_instance_info",
            {
                "host_name": self._host,
                "instance_uuids": [each.uuid for each in instances],
                "digest": instance_digest((each.uuid, each.flavorid) for each in instances),
                **more,
            },
        )

    def _update(self, instances: Sequence[Tracked], *, replace: bool = False) -> None:
        if not self._enabled:
            return
        for start in range(0, len(instances) or 1, _PER_MESSAGE):
            data = [self._plain(each) for each in instances[start : start + _PER_MESSAGE]]
            args: dict[str, Any] = {"host_name": self._host, "instance_or_list": data}
            if replace:
                args["replace"] = True
            self._send("update_instance_info", args)

    def _send(self, method: str, args: dict[str, Any]) -> None:
        if not self._enabled:
            return
        try:
            self._sender.fanout(TOPIC, method, args)
        except (errors.TransportError, errors.MessageTooLarge) as error:
            LOG.warning(
                "The message %s was not sent to schedulers (%s); the next comparison repairs it.", method, error
            )

    def _plain(self, instance: Tracked) -> dict[str, Any]:
        found: dict[str, Any] = {
            "uuid": instance.uuid,
            "host": instance.host,
            "node": instance.node,
            "flavorid": instance.flavorid,
            "resources": dict(instance.resources),
            "project_id": instance.project_id,
        }
        # Fields that filters declare, and fields that only some instances have. Plain rows of a store may lack them.
        if fields := self._fields.of(instance):
            found["fields"] = fields
        if getattr(instance, "busy", False):
            found["busy"] = True
        if group := getattr(instance, "server_group", ""):
            found["server_group"] = group
        return found
