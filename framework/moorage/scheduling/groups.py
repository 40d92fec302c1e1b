# SPDX-License-Identifier: Apache-2.0
"""Server groups in the store.

Membership is written in the instance's row, so that it ends with the instance. A claim of a member writes the group's row first:
claims of one group run one after the other, and each sees the members that joined before, however many schedulers there are.

A group that a request brings along has no row in the table of groups. Its claims write one of a fixed number of rows instead,
chosen by a hash of project and name: two groups that share a row only wait for each other.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.db import Database, Duplicate, now
from moorage.scheduling.interface import ServerGroup
from moorage.scheduling.tables import group_turns, server_groups

__all__ = ["GroupStore", "StoredGroup", "check_policy", "is_promised"]

_COLUMNS = (
    server_groups.c.uuid, server_groups.c.name, server_groups.c.project_id, server_groups.c.policy,
    server_groups.c.max_server_per_host, server_groups.c.created_at,
)  # fmt: skip
_TOUCH = (
    sa.update(server_groups)
    .where(server_groups.c.uuid == sa.bindparam("of_uuid"))
    .values(generation=server_groups.c.generation + 1)
)
#: Rows on which groups that requests bring along take turns.
_SLOTS = 256
_TOUCH_SLOT = (
    sa.update(group_turns)
    .where(group_turns.c.slot == sa.bindparam("of_slot"))
    .values(generation=group_turns.c.generation + 1)
)
#: Policies that are promises; the soft ones only rank nodes.
_HARD = frozenset({"affinity", "anti-affinity"})


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A server group. ``created_at`` is microseconds since the Unix epoch."""

    uuid: str
    name: str
    project_id: str
    policy: str
    max_server_per_host: int
    created_at: int


class GroupStore:
    """The server groups of the store. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, project_id: str, policy: str, max_server_per_host: int = 1) -> StoredGroup:
        """A new one.

        :raises AlreadyExists: the project has one of that name.
        :raises InvalidInput: ``max_server_per_host`` is given with another policy than anti-affinity.
        """
        if max_server_per_host != 1 and policy != "anti-affinity":
            raise errors.InvalidInput(
                f"max_server_per_host has a meaning with the policy anti-affinity only, not with {policy}.",
                path="body/max_server_per_host",
            )
        uuid = randomness.new_uuid()
        values: dict[str, Any] = {"uuid": uuid, "name": name, "project_id": project_id, "policy": policy}
        values |= {"max_server_per_host": max_server_per_host, "generation": 0, "created_at": now()}
        try:
            self._database.run(lambda tx: tx.execute(sa.insert(server_groups).values(values)))
        except Duplicate:
            raise errors.AlreadyExists(f"The project has a server group {name} already.") from None
        return self.get(uuid, project_id)

    def get(self, name_or_uuid: str, project_id: str | None) -> StoredGroup:
        """One group of a project, or of any when that is None.

        :raises NotFound: there is none of that uuid or name.
        """
        query = sa.select(*_COLUMNS).where(
            sa.or_(server_groups.c.uuid == name_or_uuid, server_groups.c.name == name_or_uuid)
        )
        if project_id is not None:
            query = query.where(server_groups.c.project_id == project_id)
        with self._database.read() as tx:
            found = [StoredGroup(*row) for row in tx.execute(query)]
        exact = [each for each in found if each.uuid == name_or_uuid] or found
        if not exact:
            raise errors.NotFound(f"There is no server group {name_or_uuid}; moorage server group list shows all.")
        if len(exact) > 1:
            raise errors.InvalidInput(f"Several projects have a server group {name_or_uuid}; give its uuid.")
        return exact[0]

    def list(self, project_id: str | None, *, after: str = "", limit: int = 1000) -> Sequence[StoredGroup]:
        """Groups of a project (all when None) ordered by uuid, a page of ``limit`` after the given uuid."""
        query = sa.select(*_COLUMNS).where(server_groups.c.uuid > after).order_by(server_groups.c.uuid).limit(limit)
        if project_id is not None:
            query = query.where(server_groups.c.project_id == project_id)
        with self._database.read() as tx:
            return [StoredGroup(*row) for row in tx.execute(query)]

    def remove(self, uuid: str) -> None:
        """Remove it; its members stay where they are and belong to no group any more.

        :raises NotFound: there is none.
        """

        def work(tx: sa.Connection) -> None:
            if not tx.execute(sa.delete(server_groups).where(server_groups.c.uuid == uuid)).rowcount:
                raise errors.NotFound(f"There is no server group {uuid}.")

        self._database.run(work)

    def hold(self, tx: sa.Connection, groups: Iterable[tuple[str, str]]) -> Mapping[tuple[str, str], bool]:
        """Keep other transactions from holding these groups until this one ends; False: no group of that uuid is stored.

        All transactions lock stored groups in the order of their uuids, then slots in the order of their numbers.

        :param groups: (the uuid of a stored group, or the name of one that a request brought along; the project).
        """
        wanted = sorted(set(groups))
        uuids = {
            name: tx.execute(_TOUCH, {"of_uuid": name}).rowcount == 1 for name in sorted({each[0] for each in wanted})
        }
        found = {each: uuids[each[0]] for each in wanted}
        slots = {
            zlib.crc32(f"{project}\0{name}".encode()) % _SLOTS
            for (name, project), stored in found.items()
            if not stored
        }
        for slot in sorted(slots):
            if tx.execute(_TOUCH_SLOT, {"of_slot": slot}).rowcount != 1:
                with contextlib.suppress(Duplicate), tx.begin_nested():
                    tx.execute(sa.insert(group_turns).values(slot=slot, generation=0))
                tx.execute(_TOUCH_SLOT, {"of_slot": slot})
        return found


def is_promised(group: ServerGroup | None) -> bool:
    """Returns whether a claim must keep the policy of the group."""
    return group is not None and group.policy in _HARD


def check_policy(group: ServerGroup, node_uuid: str, nodes_of_members: Collection[str]) -> None:
    """Whether an instance may join on a node, when the members are on these nodes (one entry for each member).

    Members on the node that the instance is evacuated from do not count.

    :raises ConstraintViolated: it may not; another node may do.
    """
    nodes_of_members = [node for node in nodes_of_members if node != group.left]
    there = sum(node == node_uuid for node in nodes_of_members)
    if group.policy == "anti-affinity" and there >= group.max_server_per_host:
        problem = f"has {there} members of server group {group.name} already, and the policy is anti-affinity"
    elif group.policy == "affinity" and nodes_of_members and not there:
        problem = f"has no member of server group {group.name}, and the policy is affinity"
    else:
        return
    raise errors.ConstraintViolated(f"Node {node_uuid} {problem}.", provider=node_uuid)
