# SPDX-License-Identifier: Apache-2.0
"""The agent's side of instance tracking: tell every scheduler what changed, after it has succeeded.

The methods and their first arguments are those of the seed. Messages may be lost; the periodic :meth:`Reporter.sync` repairs that.

What is told must be told in the order of the commits: who reads the store for :meth:`Reporter.sync` or
:meth:`Reporter.host_started` and has committed something before must have told it before. One thread that commits, tells and
compares holds to that by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from oslo_log import log as logging

from moorage import errors
from moorage.scheduling.digest import instance_digest
from moorage.scheduling.instance_fields import NO_FIELDS, FieldSet

__all__ = ["AGENTS", "TOPIC", "Reporter", "Tracked"]

LOG = logging.getLogger(__name__)
#: Where schedulers listen, and where agents do.
TOPIC = "scheduler"
AGENTS = "agent"
#: How many instances one message tells of at most; what is more is told in several.
_PER_MESSAGE = 1000


class Tracked(Protocol):
    """What is told of an instance; InstanceRecord and the stores' own classes fit."""

    @property
    def uuid(self) -> str:
        """The instance."""

    @property
    def host(self) -> str:
        """Where it is."""

    @property
    def node(self) -> str:
        """On which node."""

    @property
    def flavorid(self) -> str:
        """Its size."""

    @property
    def resources(self) -> Any:
        """Resource class -> units."""

    @property
    def project_id(self) -> str:
        """Whose it is."""


class FanoutSender(Protocol):
    """The part of :class:`moorage.rpc.client.RpcSender` that is needed."""

    def fanout(self, topic: str, method: str, args: dict[str, Any]) -> None:
        """Send to every server of the topic."""


class Reporter:
    """Tells schedulers of one host's instances. A message that cannot be sent is told in the log and is not tried again.

    :param enabled: ``[scheduling] track_instance_changes``; nothing is sent without it.
    :param fields: what is told beyond what is always told, see :func:`moorage.scheduling.instance_fields.declared_fields`.
    """

    def __init__(self, sender: FanoutSender, host: str, *, enabled: bool = True, fields: FieldSet = NO_FIELDS) -> None:
        self._fields = fields
        self._sender = sender
        self._host = host
        self._enabled = enabled

    @property
    def enabled(self) -> bool:
        """Whether anything is sent at all; who would read the store only to tell of it need not."""
        return self._enabled

    def created(self, instances: Sequence[Tracked]) -> None:
        """Instances were built here."""
        self._update(instances)

    def resized(self, instance: Tracked) -> None:
        """An instance has another flavor."""
        self._update([instance])

    def unshelved(self, instance: Tracked) -> None:
        """An instance was brought back here."""
        self._update([instance])

    def rebuilt(self, instance: Tracked) -> None:
        """An instance was rebuilt."""
        self._update([instance])

    def live_migrated(self, instance: Tracked, *, source: bool) -> None:
        """Told by both ends: the source has lost the instance, the destination has it."""
        if source:
            self.deleted([instance.uuid])
        else:
            self._update([instance])

    def deleted(self, uuids: Sequence[str]) -> None:
        """Instances are gone; one message for all of them. A single one is told in the seed's form."""
        for start in range(0, len(uuids), _PER_MESSAGE):
            part = list(uuids[start : start + _PER_MESSAGE])
            self._send(
                "delete_instance_info",
                {"host_name": self._host, "instance_uuid": part[0] if len(part) == 1 else part},
            )

    def shelved_offloaded(self, uuid: str) -> None:
        """An instance occupies this host no more."""
        self.deleted([uuid])

    def host_started(self, instances: Sequence[Tracked]) -> None:
        """All instances of the host; replaces what schedulers believed, also when there are none.

        More than fit into one message are told in several, with a comparison after them.
        """
        if len(instances) <= _PER_MESSAGE:
            self._update(instances, replace=True)
            return
        self._update(instances)
        self.sync(instances)

    def sync(self, instances: Sequence[Tracked]) -> None:
        """What the host has now, as uuids and a digest, for comparison."""
        self._send(
            "sync_instance_info",
            {
                "host_name": self._host,
                "instance_uuids": [each.uuid for each in instances],
                "digest": instance_digest((each.uuid, each.flavorid) for each in instances),
            },
        )

    def _update(self, instances: Sequence[Tracked], *, replace: bool = False) -> None:
        if not self._enabled:
            return
        for start in range(0, len(instances) or 1, _PER_MESSAGE):
            data = [self._told(each) for each in instances[start : start + _PER_MESSAGE]]
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
            LOG.warning("Schedulers were not told by %s (%s); the next comparison repairs it.", method, error)

    def _told(self, instance: Tracked) -> dict[str, Any]:
        told: dict[str, Any] = {
            "uuid": instance.uuid,
            "host": instance.host,
            "node": instance.node,
            "flavorid": instance.flavorid,
            "resources": dict(instance.resources),
            "project_id": instance.project_id,
        }
        # What filters declared beyond these, and what only some instances have; plain rows of a store may have none.
        if fields := self._fields.of(instance):
            told["fields"] = fields
        if getattr(instance, "busy", False):
            told["busy"] = True
        if group := getattr(instance, "server_group", ""):
            told["server_group"] = group
        return told
