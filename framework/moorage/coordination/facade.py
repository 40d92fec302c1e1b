# SPDX-License-Identifier: Apache-2.0
"""Coordination as a library for another service: the two classes of the specification, from a URL.

Nothing is fenced here but by time: a member that is not certainly one gets nothing. If you need more, use periodic tasks, or
:class:`moorage.coordination.ring_manager.RingManager` with a ledger in its own database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from oslo_log import log as logging

from moorage import errors, randomness, threads
from moorage.clock import Clock, SystemClock
from moorage.coordination.loading import client_factory
from moorage.coordination.membership import MemberId, Membership, Timing
from moorage.ring import Ring

__all__ = ["Coordinator", "HashRing"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class Coordinator:
    """Membership in groups of a coordination server. Safe for use by several threads.

    Without a URL there is no coordination: it is the only member there is.

    :param backend_url: ``zookeeper://host:2181``, ``etcd3+http://host:2379``, ``redis://host:6379``, ``file:///a/folder``, ...
    :param heartbeat_timeout: seconds between heartbeats (the specification's name for the interval); each group has a thread.
    :param session_timeout: seconds after which the server drops a silent member; at least three times as long.
    :raises ConfigError: the URL cannot be used. The server is reached by ``join_group``.
    """

    def __init__(
        self,
        backend_url: str,
        *,
        heartbeat_timeout: float = 1.0,
        session_timeout: float = 10.0,
        lease_margin: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        if session_timeout < 3 * heartbeat_timeout:
            raise errors.ConfigError("session_timeout must be at least three times heartbeat_timeout.")
        self._clock: Clock = clock or SystemClock()
        self._timing = Timing(heartbeat_timeout, lease_margin, session_timeout)
        self._factory = (
            client_factory(backend_url, clock=self._clock, session_timeout=session_timeout) if backend_url else None
        )
        self._id = randomness.new_hex()
        self._groups: dict[str, Membership] = {}
        self._lock = threads.lock()

    def is_started(self) -> bool:
        """Returns whether coordination is configured."""
        return self._factory is not None

    def heartbeat(self) -> None:
        """Beat now in all groups; done by a thread of its own besides. Never raises."""
        for membership in list(self._groups.values()):
            membership.step()

    def join_group(self, group_id: str) -> None:
        """Becomes a member, and stays one through restarts of the server; joining twice changes nothing.

        :raises Unavailable: the server cannot be reached. :raises ConfigError: it can never work.
        """
        if self._factory is None:
            return
        with self._lock:
            if group_id in self._groups:
                return
            number = len(self._groups)
            membership = Membership(self._factory, group_id, MemberId(self._id, 1, number), self._clock, self._timing)
            membership.begin()
            membership.start()
            self._groups[group_id] = membership

    def get_members(self, group_id: str) -> list[bytes]:
        """The members of a group that was joined, sorted; none while the server does not answer, or this is not one of them."""
        membership = self._groups.get(group_id)
        if membership is None:
            return []
        try:
            found = membership.view().members
        except errors.Unavailable as error:
            LOG.debug("The members of %s are not known: %s", group_id, error.message)
            return []
        me = membership.member_id
        return sorted(found) if me in found and membership.holds(me) else []

    def member_id(self, group_id: str) -> bytes | None:
        """Returns the id of this member in a group, as ``get_members`` lists it; it changes with every stay."""
        membership = self._groups.get(group_id)
        return None if membership is None else membership.member_id

    def holds(self, group_id: str) -> bool:
        """Returns whether this certainly is a member now: to be asked before each object. True without coordination."""
        if self._factory is None:
            return True
        membership = self._groups.get(group_id)
        return membership is not None and membership.holds(membership.member_id)

    def stop(self) -> None:
        """Leave all groups."""
        with self._lock:
            for membership in self._groups.values():
                membership.stop()
            self._groups.clear()


class HashRing(Coordinator):
    """The part of some objects that is this member's.

    :param group_id: the group that it joins at once.
    :param replicas: points of a member on the ring.
    :param hash_function: ``md5`` gives Sahara's owners.
    """

    def __init__(
        self, backend_url: str, group_id: str, replicas: int = 40, *, hash_function: str = "md5", **settings: Any
    ) -> None:
        super().__init__(backend_url, **settings)
        self.group_id = group_id
        self._replicas = replicas
        self._hash_function = hash_function
        Ring[bytes]([], replicas, hash_function)
        self.join_group(group_id)

    def get_subset(self, objects: Sequence[T], key: Callable[[T], str] | None = None) -> list[T]:
        """Returns the objects that are this member's, by a ring built from the live group now; none when it is not one for certain.

        :param key: gives an object's key; without it, its ``id``, or the object itself when it is text.
        """
        if not self.is_started():
            return list(objects)
        members = self.get_members(self.group_id)
        me = self.member_id(self.group_id)
        if me is None or me not in members:
            return []
        return Ring(members, self._replicas, self._hash_function).subset(objects, me, key or _key)


def _key(each: Any) -> str:
    return each if isinstance(each, str) else str(each.id)
