# SPDX-License-Identifier: Apache-2.0
"""Begins the deletion of instances; their agents end it.

Threads that delete at the same time share the work as :mod:`moorage.gathering` says: one read, one transaction, and one message to
each agent serve all of them. An instance that is in an operation, or that another transaction writes meanwhile, is deleted by its
own thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oslo_context import context as oslo_context
from oslo_log import log as logging

from moorage import errors
from moorage.db import Database
from moorage.gathering import Gathered, Gathering
from moorage.instances.interface import Instance, InstanceStore, InstanceWrite
from moorage.work.operations import NewOperation, SqlOperationStore

__all__ = ["DELETE", "Deleter"]

LOG = logging.getLogger(__name__)

DELETE = "delete"
#: How often an instance that is being written is looked at again before its deletion is given up.
_LOOKS = 5
#: Instances that one transaction deletes at most.
_TOGETHER = 64
#: Seconds that a deletion waits for its turn, and for the end of a turn, before its own thread does it.
_PATIENCE, _UNTIL_END = 0.2, 60.0
#: Statuses in which nothing is in progress, so that most likely nothing hinders the other deletions of a turn.
_AT_REST = frozenset({"active", "error", "stopped"})

#: Tells the agents of hosts: by host, the uuids of instances and the tokens of their deletions.
Tell = Callable[[Mapping[str, Sequence[tuple[str, int]]]], None]


class _ChangedError(Exception):
    """An instance was written since it was read: it may be on another host now."""


@dataclass(slots=True, eq=False)
class _Deletion(Gathered[bool]):
    """Holds one thread's request to delete an instance."""

    uuid: str
    check: Callable[[Instance], None]
    context: oslo_context.RequestContext | None = field(default_factory=oslo_context.get_current)


class Deleter:
    """Begins the deletion of instances. Safe for use by several threads.

    :param tell: tells agents of deletions that are recorded.
    :param gone: called with the uuid of an instance that was on no host, after it was removed.
    """

    def __init__(
        self,
        database: Database,
        instances: InstanceStore,
        workers: SqlOperationStore,
        tell: Tell,
        gone: Callable[[str], None] = lambda uuid: None,
    ) -> None:
        self._database = database
        self._instances = instances
        self._workers = workers
        self._tell = tell
        self._gone = gone
        self._gathering = Gathering[_Deletion](
            self._delete_each, lambda deletion: (deletion.uuid,), lambda: _TOGETHER, _PATIENCE, _UNTIL_END
        )

    def delete(
        self, uuid: str, *, force: bool = False, check: Callable[[Instance], None] = lambda instance: None
    ) -> None:
        """Records the operation, then tells the agent. An instance that is on no host is gone at once. Safe to repeat.

        :param check: called with the instance as it is read, perhaps by another thread; raises what the caller shall get instead.
        :raises NotFound: there is no such instance.
        :raises InUse: an operation on it is in progress, and ``force`` is not given.
        """
        mine = _Deletion(uuid, check)
        if not force:
            # Where the end of the turn is not seen, it is begun once more.
            self._gathering.join(mine)
        if mine.error is not None:
            raise mine.error
        if not mine.outcome:
            self._delete_alone(mine, force)

    def _delete_alone(self, deletion: _Deletion, force: bool) -> None:
        uuid = deletion.uuid
        for _ in range(_LOOKS):
            instance = self._instances.get(uuid)
            deletion.check(instance)
            if instance.status == "deleting" and not force:
                return
            try:
                token = self._database.run(functools.partial(self._record, instance=instance, force=force))
            except _ChangedError:
                continue
            if instance.host:
                self._tell({instance.host: [(uuid, token)]})
            else:
                self._gone(uuid)
            return
        raise errors.Conflict(f"Instance {uuid} becomes something else all the time; try again.")

    def _record(self, transaction: Any, instance: Instance, force: bool) -> int:
        of_type, uuid = self._instances.resource_type, instance.uuid
        token = self._workers.create(
            transaction, of_type, uuid, DELETE, "deleting", target_host=instance.host, force=force,
            project_id=instance.project_id,
        )  # fmt: skip
        if not self._instances.change(transaction, uuid, token, {"status": "deleting"}, fence=instance.fence):
            raise _ChangedError
        if not instance.host:
            self._instances.remove(transaction, uuid, token)
            self._workers.withdraw(transaction, of_type, uuid, token)
        return token

    def _delete_each(self, turn: Sequence[_Deletion]) -> None:
        """Begins the deletions of one turn. What cannot share a transaction is left to its own thread."""
        if len(turn) == 1:
            self._delete_alone(turn[0], force=False)
            turn[0].outcome = True
            return
        found = {each.uuid: each for each in self._instances.find([deletion.uuid for deletion in turn])}
        together: list[tuple[_Deletion, Instance]] = []
        for deletion in turn:
            instance = found.get(deletion.uuid)
            if instance is None or not instance.host or instance.status not in _AT_REST:
                deletion.alone = True
                continue
            try:
                deletion.check(instance)
            except errors.MoorageError as error:
                deletion.error = error
                continue
            together.append((deletion, instance))
        if not together:
            return
        try:
            tokens = self._database.run(lambda tx: self._record_each(tx, together))
        except (_ChangedError, errors.MoorageError) as error:
            LOG.debug("%d instances are deleted one by one: %r", len(together), error)
            for deletion, _ in together:
                deletion.alone = True
            return
        told: dict[str, list[tuple[str, int]]] = {}
        for deletion, instance in together:
            deletion.outcome = True
            told.setdefault(instance.host, []).append((instance.uuid, tokens[instance.uuid]))
        self._tell(told)

    def _record_each(self, transaction: Any, together: Sequence[tuple[_Deletion, Instance]]) -> Mapping[str, int]:
        """Records the operations of several instances, each in the name of its request; the tokens by uuid."""
        operations = [
            NewOperation(instance.uuid, instance.host, instance.project_id, deletion.context)
            for deletion, instance in together
        ]
        tokens = self._workers.create_many(transaction, self._instances.resource_type, DELETE, "deleting", operations)
        if tokens is None:
            raise _ChangedError
        writes = [
            InstanceWrite(
                instance.uuid, tokens[instance.uuid], {"status": "deleting"}, deletion.context, fence=instance.fence
            )
            for deletion, instance in together
        ]
        if not self._instances.write_many(transaction, writes):
            raise _ChangedError
        return tokens
