# SPDX-License-Identifier: Apache-2.0
"""The statements of the sql store, built once.

A row's condition stands in the statement that writes the row, so that no isolation level is relied on. Those that decide whether a
provider has room: :mod:`moorage_plugins.stores.capacity_statements`.
"""

from __future__ import annotations

import functools

import sqlalchemy as sa

from moorage.db import now
from moorage_plugins.stores.tables import (
    allocations,
    consumers,
    inventories,
    provider_aggregates,
    provider_traits,
    quota_projects,
    resource_providers,
)

__all__ = [
    "ADD_ALLOCATIONS",
    "ADD_CONSUMER",
    "ADD_LEASED_CONSUMER",
    "CONSUMER",
    "CONSUMERS",
    "CONSUMER_PAGE",
    "COUNT_HELD",
    "DRIFT",
    "DROP_ALLOCATIONS",
    "DROP_ALLOCATIONS_OF",
    "DROP_CONSUMER",
    "DROP_CONSUMER_RETURNING",
    "DROP_CONSUMERS_RETURNING",
    "DROP_INVENTORIES",
    "DROP_OVERDUE",
    "DROP_OVERDUE_RETURNING",
    "DROP_PROVIDER",
    "DROP_PROVIDER_AGGREGATES",
    "DROP_PROVIDER_TRAITS",
    "GIVERS_TURN",
    "HAS_CHILDREN",
    "HELD_BY",
    "HELD_OF",
    "HOLD_CONSUMER",
    "HOLD_OVERDUE",
    "INVENTORIES_OF",
    "LEAVE",
    "LOCK_PROVIDERS",
    "MORE_GENERATIONS",
    "NEXT_GENERATION",
    "OVERDUE",
    "PAGE",
    "PROVIDER_ID",
    "PROVIDER_IDS",
    "PROVIDER_ROW",
    "RECOUNT",
    "RENEW",
    "RESIDENTS",
    "TOUCH",
    "BUMP_GENERATION",
    "BUMP_GENERATIONS",
    "BUMP_GENERATION_IF_SEEN",
    "VERSIONS",
    "change_consumer",
    "project_usages",
    "provider_columns",
]

_OF_PROVIDER = sa.bindparam("of_provider", type_=sa.BigInteger)
_OF_CONSUMER = sa.bindparam("of_consumer", type_=sa.String)
_LARGE = sa.BigInteger

ADD_CONSUMER = sa.insert(consumers).values(generation=1, created_at=now(), updated_at=now())
DROP_CONSUMER = sa.delete(consumers).where(consumers.c.uuid == _OF_CONSUMER)
#: Keeps a consumer from being changed, deleted or counted until the transaction ends.
HOLD_CONSUMER = (
    sa.update(consumers).where(consumers.c.uuid == _OF_CONSUMER).values(generation=consumers.c.generation + 1)
)
_LIFETIME = sa.bindparam("new_lifetime", type_=sa.BigInteger)
ADD_LEASED_CONSUMER = ADD_CONSUMER.values(expires_at=now() + _LIFETIME)
RENEW = sa.update(consumers).where(consumers.c.uuid == _OF_CONSUMER).values(expires_at=now() + _LIFETIME)
OVERDUE = (
    sa.select(consumers.c.uuid)
    .where(consumers.c.expires_at <= now())
    .order_by(consumers.c.expires_at)
    .limit(sa.bindparam("of_limit", type_=sa.Integer))
)
DROP_OVERDUE = DROP_CONSUMER.where(consumers.c.expires_at <= now())
HOLD_OVERDUE = HOLD_CONSUMER.where(consumers.c.expires_at <= now())
#: What is shown of a consumer; labelled, since it stands beside providers.
consumer_columns = (
    consumers.c.uuid.label("consumer_uuid"),
    consumers.c.generation.label("consumer_generation"),
    consumers.c.project_id,
    consumers.c.user_id,
    consumers.c.consumer_type,
    consumers.c.request_id,
    consumers.c.counted,
    consumers.c.counts_with,
    consumers.c.updated_at.label("consumer_updated_at"),
    consumers.c.expires_at,
)
#: For databases that know DELETE ... RETURNING; MySQL does not.
_COUNTED = (
    consumers.c.uuid.label("consumer_uuid"),
    consumers.c.project_id,
    consumers.c.counted,
    consumers.c.counts_with,
)
DROP_CONSUMER_RETURNING = DROP_CONSUMER.returning(*_COUNTED)
DROP_CONSUMERS_RETURNING = (
    sa.delete(consumers).where(consumers.c.uuid.in_(sa.bindparam("consumers", expanding=True))).returning(*_COUNTED)
)
DROP_OVERDUE_RETURNING = DROP_OVERDUE.returning(*_COUNTED)
CONSUMER = sa.select(*consumer_columns).where(consumers.c.uuid == _OF_CONSUMER)
CONSUMER_PAGE = (
    sa.select(*consumer_columns)
    .where(consumers.c.uuid > sa.bindparam("after", type_=sa.String))
    .order_by(consumers.c.uuid)
    .limit(sa.bindparam("of_limit", type_=sa.Integer))
)
CONSUMERS = sa.select(*consumer_columns).where(consumers.c.uuid.in_(sa.bindparam("consumers", expanding=True)))
ADD_ALLOCATIONS = sa.insert(allocations)
DROP_ALLOCATIONS_OF = sa.delete(allocations).where(
    allocations.c.consumer_id.in_(sa.bindparam("consumers", expanding=True))
)
DROP_ALLOCATIONS = sa.delete(allocations).where(allocations.c.consumer_id == _OF_CONSUMER)

PROVIDER_ID = sa.select(resource_providers.c.id).where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
PROVIDER_IDS = sa.select(resource_providers.c.uuid, resource_providers.c.id).where(
    resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True))
)
#: What is shown of a provider, in the order of the reader.
provider_columns = (
    resource_providers.c.id,
    resource_providers.c.uuid,
    resource_providers.c.name,
    resource_providers.c.can_host,
    resource_providers.c.generation,
    resource_providers.c.parent_uuid,
    resource_providers.c.root_uuid,
    resource_providers.c.updated_at,
)
PROVIDER_ROW = sa.select(*provider_columns).where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
HAS_CHILDREN = sa.select(sa.func.count()).where(resource_providers.c.parent_uuid == sa.bindparam("of_uuid"))
DROP_PROVIDER_TRAITS = sa.delete(provider_traits).where(provider_traits.c.resource_provider_id == _OF_PROVIDER)
DROP_PROVIDER_AGGREGATES = sa.delete(provider_aggregates).where(
    provider_aggregates.c.resource_provider_id == _OF_PROVIDER
)
DROP_PROVIDER = sa.delete(resource_providers).where(resource_providers.c.id == _OF_PROVIDER)
DROP_INVENTORIES = sa.delete(inventories).where(inventories.c.resource_provider_id == _OF_PROVIDER)
INVENTORIES_OF = (
    sa.select(
        inventories.c.resource_provider_id, inventories.c.resource_class_id, inventories.c.total,
        inventories.c.reserved, inventories.c.min_unit, inventories.c.max_unit, inventories.c.step_size,
        inventories.c.allocation_ratio, inventories.c.used,
    )
    .where(inventories.c.resource_provider_id.in_(sa.bindparam("numbers", expanding=True)))
    .order_by(inventories.c.resource_provider_id, inventories.c.resource_class_id)
)  # fmt: skip

#: What every write of a provider's counters does to its row. The version of its residents rises with each: one that rises
#: needlessly costs a claim another look, one that does not rise breaks the promise of a filter.
NEXT_RESIDENTS = {
    resource_providers.c.residents: resource_providers.c.residents + 1,
    resource_providers.c.updated_at: now(),
}
#: Every write that can change what fits.
NEXT_GENERATION = {resource_providers.c.generation: resource_providers.c.generation + 1, **NEXT_RESIDENTS}
#: A transaction that has raised the generation has the turn until it ends: all writers of a provider's counters begin with this.
#: The condition names the uuid too, because a remembered id may belong to another provider by now.
#: No row is written if ``of_project`` has limits. So a claim finds limits without a statement of its own.
BUMP_GENERATION = (
    sa.update(resource_providers)
    .where(
        resource_providers.c.id == _OF_PROVIDER,
        resource_providers.c.uuid == sa.bindparam("of_uuid"),
        ~sa.select(quota_projects.c.project_id)
        .where(quota_projects.c.project_id == sa.bindparam("of_project", "", sa.String))
        .exists(),
    )
    .values(NEXT_GENERATION)
)
#: The turn of a claim whose filters judged the provider's instances at this version. No row: the instances changed since.
BUMP_GENERATION_IF_SEEN = BUMP_GENERATION.where(
    resource_providers.c.residents == sa.bindparam("of_residents", type_=sa.BigInteger)
)
#: The turns of several providers, executed once for each in the order of their ids. ``of_residents`` may be None: any version.
BUMP_GENERATIONS = (
    sa.update(resource_providers)
    .where(
        resource_providers.c.id == _OF_PROVIDER,
        resource_providers.c.uuid == sa.bindparam("of_uuid"),
        resource_providers.c.residents
        == sa.func.coalesce(sa.bindparam("of_residents", type_=sa.BigInteger), resource_providers.c.residents),
    )
    .values(NEXT_GENERATION)
)
#: Locks providers in the order of their ids, for a set statement that writes them.
LOCK_PROVIDERS = (
    sa.select(resource_providers.c.id)
    .where(resource_providers.c.id.in_(sa.bindparam("numbers", expanding=True)))
    .order_by(resource_providers.c.id)
    .with_for_update(key_share=True)
)
#: Serializes a transaction that only releases: it waits, and makes others wait, as BUMP_GENERATION does. The generation stays,
#: as it does for Placement's clients when allocations are deleted. It changes the row, since Galera compares only what
#: transactions write.
GIVERS_TURN = (
    sa.update(resource_providers)
    .where(resource_providers.c.id == _OF_PROVIDER, resource_providers.c.uuid == sa.bindparam("of_uuid"))
    .values(NEXT_RESIDENTS)
)
#: An instance left a node of which it may have held nothing itself.
LEAVE = sa.update(resource_providers).where(resource_providers.c.uuid == sa.bindparam("of_uuid")).values(NEXT_RESIDENTS)
RESIDENTS = sa.select(resource_providers.c.residents).where(resource_providers.c.uuid == sa.bindparam("of_uuid"))
VERSIONS = sa.select(resource_providers.c.id, resource_providers.c.uuid, resource_providers.c.residents).where(
    resource_providers.c.uuid.in_(sa.bindparam("uuids", expanding=True))
)
#: More steps of a reshape; for who has the turn.
MORE_GENERATIONS = (
    sa.update(resource_providers)
    .where(resource_providers.c.id == _OF_PROVIDER)
    .values(generation=resource_providers.c.generation + sa.bindparam("of_steps", type_=_LARGE))
)
#: Changes of a tree write the rows of its root and of the parent first, so that they take turns; the generation stays.
TOUCH = (
    sa.update(resource_providers).where(resource_providers.c.uuid == sa.bindparam("of_uuid")).values(updated_at=now())
)
#: What consumers hold, with the providers, in the order in which providers are locked.
HELD_BY = (
    sa.select(allocations.c.consumer_id, allocations.c.resource_class_id, allocations.c.used, *provider_columns)
    .join_from(allocations, resource_providers, allocations.c.resource_provider_id == resource_providers.c.id)
    .where(allocations.c.consumer_id.in_(sa.bindparam("consumers", expanding=True)))
    .order_by(allocations.c.resource_provider_id, allocations.c.resource_class_id, allocations.c.consumer_id)
)
#: What is held of a provider, with the consumers.
HELD_OF = (
    sa.select(allocations.c.resource_class_id, allocations.c.used, *consumer_columns)
    .join_from(allocations, consumers, allocations.c.consumer_id == consumers.c.uuid)
    .where(allocations.c.resource_provider_id == _OF_PROVIDER)
    .order_by(allocations.c.consumer_id, allocations.c.resource_class_id)
)
COUNT_HELD = sa.select(sa.func.count()).where(allocations.c.resource_provider_id == _OF_PROVIDER)

#: Allocations in the order of the unique index on these three columns. By itself MariaDB begins with the providers and
#: sorts all allocations for every page; STRAIGHT_JOIN forbids that.
PAGE = (
    sa.select(
        allocations.c.consumer_id,
        resource_providers.c.uuid.label("provider"),
        allocations.c.resource_class_id,
        allocations.c.used,
    )
    .join_from(allocations, resource_providers, allocations.c.resource_provider_id == resource_providers.c.id)
    .order_by(allocations.c.consumer_id, allocations.c.resource_provider_id, allocations.c.resource_class_id)
    .prefix_with("STRAIGHT_JOIN", dialect="mysql")
    .prefix_with("STRAIGHT_JOIN", dialect="mariadb")
)


@functools.lru_cache(maxsize=4)
def change_consumer(expected: bool, counted: bool) -> sa.Update:
    """Write the row of a consumer, unless it is of the same request already.

    Parameters: of_consumer; of_generation when one is expected; new_project, new_user, new_type (None: as it is), new_request,
    new_lifetime (microseconds; None: it stays). Of a counted consumer also of_project, its project, and new_counted: 0 when its
    project changes.
    """
    request = sa.bindparam("new_request", type_=sa.String)
    statement = (
        sa.update(consumers)
        .where(
            consumers.c.uuid == _OF_CONSUMER,
            sa.or_(request.is_(None), consumers.c.request_id.is_(None), consumers.c.request_id != request),
        )
        .values(
            generation=consumers.c.generation + 1,
            project_id=sa.func.coalesce(sa.bindparam("new_project", type_=sa.String), consumers.c.project_id),
            user_id=sa.func.coalesce(sa.bindparam("new_user", type_=sa.String), consumers.c.user_id),
            consumer_type=sa.func.coalesce(sa.bindparam("new_type", type_=sa.String), consumers.c.consumer_type),
            request_id=request,
            updated_at=now(),
            expires_at=now() + _LIFETIME,
        )
    )
    if expected:
        statement = statement.where(consumers.c.generation == sa.bindparam("of_generation"))
    if not counted:
        return statement.where(consumers.c.counted == 0)
    project = sa.bindparam("of_project", type_=sa.String)
    return statement.where(consumers.c.counted == 1, consumers.c.project_id == project).values(
        counted=sa.bindparam("new_counted", type_=sa.SmallInteger)
    )


def project_usages(
    project: str, user: str | None, consumer_type: str | None
) -> tuple[sa.Select[tuple[str, int]], sa.Select[tuple[str, int, int]]]:
    """Returns the consumers of a project by type, and what they hold by type and class."""
    columns = consumers.c
    of_project = [columns.project_id == project]
    if user is not None:
        # Both values, which the index has between the project and the user.
        of_project += [columns.counted.in_((0, 1)), columns.user_id == user]
    if consumer_type is not None:
        of_project.append(columns.consumer_type == consumer_type)
    counts = sa.select(columns.consumer_type, sa.func.count().label("consumers")).where(*of_project)
    sums = (
        sa.select(columns.consumer_type, allocations.c.resource_class_id, sa.func.sum(allocations.c.used).label("used"))
        .join_from(consumers, allocations, allocations.c.consumer_id == columns.uuid)
        .where(*of_project)
    )
    return (
        counts.group_by(columns.consumer_type).order_by(columns.consumer_type),
        sums.group_by(columns.consumer_type, allocations.c.resource_class_id).order_by(allocations.c.resource_class_id),
    )


_SUMS = (
    sa.select(
        allocations.c.resource_provider_id,
        allocations.c.resource_class_id,
        sa.cast(sa.func.sum(allocations.c.used), _LARGE).label("held"),
    )
    .group_by(allocations.c.resource_provider_id, allocations.c.resource_class_id)
    .subquery("sums")
)
_SAME_CLASS = sa.and_(
    inventories.c.resource_provider_id == _SUMS.c.resource_provider_id,
    inventories.c.resource_class_id == _SUMS.c.resource_class_id,
)
#: Counters that differ from the sums or belong to no provider, and sums without a counter; one statement, since that is one
#: moment at READ COMMITTED.
DRIFT = sa.union_all(
    sa.select(
        sa.func.coalesce(resource_providers.c.uuid, "").label("provider"),
        inventories.c.resource_class_id,
        inventories.c.used.label("counted"),
        sa.func.coalesce(_SUMS.c.held, 0).label("held"),
    )
    .select_from(inventories)
    .outerjoin(resource_providers, inventories.c.resource_provider_id == resource_providers.c.id)
    .outerjoin(_SUMS, _SAME_CLASS)
    .where(sa.or_(inventories.c.used != sa.func.coalesce(_SUMS.c.held, 0), resource_providers.c.id.is_(None))),
    sa.select(
        sa.func.coalesce(resource_providers.c.uuid, "").label("provider"),
        _SUMS.c.resource_class_id,
        sa.cast(sa.null(), _LARGE).label("counted"),
        _SUMS.c.held.label("held"),
    )
    .select_from(_SUMS)
    .outerjoin(resource_providers, _SUMS.c.resource_provider_id == resource_providers.c.id)
    .outerjoin(inventories, _SAME_CLASS)
    .where(inventories.c.id.is_(None)),
)
#: Only for who has the turn.
RECOUNT = (
    sa.update(inventories)
    .where(inventories.c.resource_provider_id == _OF_PROVIDER)
    .values(
        used=sa.select(sa.cast(sa.func.coalesce(sa.func.sum(allocations.c.used), 0), _LARGE))
        .where(
            allocations.c.resource_provider_id == inventories.c.resource_provider_id,
            allocations.c.resource_class_id == inventories.c.resource_class_id,
        )
        .scalar_subquery()
    )
)
