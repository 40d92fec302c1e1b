# SPDX-License-Identifier: Apache-2.0
"""Events of the journal as notifications of oslo.messaging, for ceilometer and other consumers of OpenStack's notifications.

oslo.messaging's Notifier logs what it could not send, and goes on. Here that would lose events. So this observer makes the messages
as the driver ``messagingv2`` does, and gives them to the transport, which raises. Then the same events are sent again.
"""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from moorage_plugins.transports import oslo_backend  # before oslo_messaging

# isort: split
import oslo_messaging
from typing_extensions import override

from moorage import errors
from moorage.observers.interface import Notice, Observer, ObserverTools

if TYPE_CHECKING:
    from moorage.db import RecordedEvent

__all__ = ["NotificationsObserver"]

#: Versions of the payload: a minor one adds fields, a major one changes what consumers read.
_VERSION = "1.0"
_PRIORITY = "info"
#: Tries beside the first one; then the delivery has failed, and is done again after a pause.
_RETRIES = 1


class NotificationsObserver(Observer):
    """Sends each event of the journal as a notification. Repetitions have the same ``message_id``."""

    api_version: ClassVar[tuple[int, int]] = (1, 3)
    #: It is given the journal, and wants nothing beside it.
    kinds = frozenset()

    def __init__(self, tools: ObserverTools) -> None:
        super().__init__(tools)
        section = tools.conf.observer_notifications
        self._url = section.transport_url or tools.conf.rpc.transport_url
        self._topics = [f"{topic}.{_PRIORITY}" for topic in section.topics]
        if not self._topics:
            raise errors.ConfigError(
                "[observer_notifications] topics is empty; name one, for example versioned_notifications."
            )
        make = oslo_messaging.get_notification_transport
        self._transport = oslo_backend.open_url(make, tools.conf, self._url, "[observer_notifications]")

    @override
    def observe(self, notice: Notice) -> None:
        """Nothing: see :meth:`follow`."""

    @override
    def follow(self, events: Sequence[RecordedEvent], missed: int) -> None:
        for event in events:
            message, context = _message(event, missed), _context(event)
            for topic in self._topics:
                try:
                    self._transport._send_notification(
                        oslo_messaging.Target(topic=topic), context, message, version=2.0, retry=_RETRIES
                    )
                except Exception as error:
                    # The text of a library's error may contain the URL, and that a password.
                    raise errors.Unavailable(
                        f"Event {event.number} could not be sent to the topic {topic} ({type(error).__name__}). Does the broker of "
                        "[observer_notifications] transport_url run?"
                    ) from error

    @override
    def close(self) -> None:
        self._transport.cleanup()


def _message(event: RecordedEvent, missed: int) -> dict[str, Any]:
    at = datetime.datetime.fromtimestamp(event.at / 1_000_000, datetime.UTC)
    name = json.dumps([event.number, event.kind, event.subject, event.version, event.at])
    data = {name: getattr(event, name) for name in event.__slots__}
    return {
        "message_id": str(uuid.uuid5(uuid.NAMESPACE_OID, name)),
        "publisher_id": f"moorage-{event.service}" if event.service else "moorage",
        "event_type": event.kind,
        "priority": _PRIORITY.upper(),
        "timestamp": at.replace(tzinfo=None).isoformat(" ", "microseconds"),
        "payload": {
            "moorage_object.name": "EventPayload",
            "moorage_object.namespace": "moorage",
            "moorage_object.version": _VERSION,
            "moorage_object.data": {**data, "missed": missed},
        },
    }


def _context(event: RecordedEvent) -> dict[str, str]:
    return {
        "user_id": event.actor,
        "project_id": event.project_id,
        "request_id": event.request_id,
        "global_request_id": event.global_request_id,
    }
