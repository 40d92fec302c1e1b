# SPDX-License-Identifier: Apache-2.0
"""Server groups in the store.

Who is a member is written where the instance is, so that a member goes with its instance. What must not change while a member
joins is held by one statement on the group's row, inside the transaction that writes the claim: two who join one after the other
see each other, however many schedulers there are.
"""

from __future__ import annotations

import uuid as uuid_module
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage import errors
from moorage.db import Database, Duplicate, now
from moorage.scheduling.interface import ServerGroup
from moorage.scheduling.tables import server_groups

__all__ = ["GroupStore", "StoredGroup", "check_policy"]

_COLUMNS = (
    server_groups.c.uuid, server_groups.c.name, server_groups.c.project_id, server_groups.c.policy,
    server_groups.c.max_server_per_host, server_groups.c.created_at,
)  # fmt: skip
_TOUCH = (
    sa.update(server_groups)
    .where(server_groups.c.uuid == sa.bindparam("of_uuid"))
    .values(generation=server_groups.c.generation + 1)
)


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
        uuid = str(uuid_module.uuid4())
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

    def hold(self, tx: sa.Connection, uuid: str) -> bool:
        """From here to the end of the transaction nobody else holds the group; False when there is none."""
        return bool(tx.execute(_TOUCH, {"of_uuid": uuid}).rowcount == 1)


def check_policy(group: ServerGroup, node_uuid: str, nodes_of_members: Collection[str]) -> None:
    """Whether an instance may join on a node, when the members are on these nodes (one entry for each member).

    :raises ConstraintViolated: it may not; another node may do.
    """
    there = sum(node == node_uuid for node in nodes_of_members)
    if group.policy == "anti-affinity" and there >= group.max_server_per_host:
        problem = f"has {there} members of server group {group.name} already, and the policy is anti-affinity"
    elif group.policy == "affinity" and nodes_of_members and not there:
        problem = f"has no member of server group {group.name}, and the policy is affinity"
    else:
        return
    raise errors.ConstraintViolated(f"Node {node_uuid} {problem}.", provider=node_uuid)
