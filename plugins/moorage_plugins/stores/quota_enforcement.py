# SPDX-License-Identifier: Apache-2.0
"""Counts what the consumers of projects hold against the limits of the projects.

A consumer is counted (``consumers.counted`` is 1) or not. For each limit this holds at every commit: ``used`` is what the counted
consumers of the project hold. Consumers that count together count once, with the larger amount.

* A change of a consumer knows from the consumer's own row whether it is counted: the statement that changes the row has
  ``counted = 0`` in its condition, and the statement that deletes it returns it. So a change costs nothing where no limit is.
* A claim finds limits in the statement that takes the first provider's turn: it takes no turn if its project has limits. A claim
  that this statement lets pass began before the limit was set. It leaves a consumer that is not counted.
* All else is written last, by :class:`QuotaTally`. It writes the row of the project first. Of two transactions that change the
  counters of one project, the second waits there, and reads what the first one wrote (READ COMMITTED: each statement reads what is
  committed when it begins). Then it marks the consumers of the project that are not counted: its own new ones, and those of claims
  that began before the limit. Then it reads what the consumers hold, and changes ``used`` by the difference.
* Whoever removes the last limit of a project clears the marks before it writes the row of the project, so that all lock consumers
  before the project. It clears once more afterwards, since others may have marked consumers in between. If others changed the
  limits in between, it begins again.
* Whoever sets the first limit of a project marks consumers in the same way. The mark waits for a transaction that is changing or
  deleting the consumer; if the consumer is gone then, it is neither marked nor read. If the mark is first, the other transaction
  finds ``counted = 0`` no more, and counts.

SQLite has one writer at a time. PostgreSQL and MariaDB evaluate the condition on a row that they waited for on its new version. On
Galera the rows of projects, limits and consumers are in the write sets: of two transactions that wrote one of them on different
nodes, only the first one commits, and the other is done again. A claim that begins on a node to which a new limit was not yet
replicated counts as one that began before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from moorage import errors, threads
from moorage.allocation.interface import AllocationChange, Quota, QuotaDrift
from moorage.db import JournalEvent, record, write_last
from moorage_plugins.stores.classes import ResourceClasses
from moorage_plugins.stores.insert_unless_taken import insert_unless_taken
from moorage_plugins.stores.tables import allocations, consumers, quota_projects, quotas

__all__ = ["CountedBefore", "LimitsChangedError", "LONGEST_SUBJECT", "QuotaCounter", "QuotaTally", "subject_of"]

#: How many uncounted consumers are marked at once: their uuids are parameters of a statement.
_PAGE = 500
_NAME = "quotas"
#: Characters of the subject of an event.
LONGEST_SUBJECT = 255

_OF_PROJECT = sa.bindparam("of_project", type_=sa.String)
_OF_CLASS = sa.bindparam("of_class", type_=sa.Integer)
_LARGE = sa.BigInteger
_UNIT = sa.func.coalesce(consumers.c.counts_with, consumers.c.uuid)

LIMITED = sa.select(quota_projects.c.project_id).where(
    quota_projects.c.project_id.in_(sa.bindparam("projects", expanding=True))
)
#: Every transaction that changes the counters or the limits of a project begins them with this, and so they take turns.
HOLD_PROJECT = (
    sa.update(quota_projects)
    .where(quota_projects.c.project_id == _OF_PROJECT)
    .values(version=quota_projects.c.version + 1)
)
VERSION = sa.select(quota_projects.c.version).where(quota_projects.c.project_id == _OF_PROJECT)
ADD_PROJECT = sa.insert(quota_projects).values(version=1)
DROP_PROJECT = sa.delete(quota_projects).where(quota_projects.c.project_id == _OF_PROJECT)
UNCOUNTED = (
    sa.select(consumers.c.uuid, _UNIT.label("unit"))
    .where(consumers.c.project_id == _OF_PROJECT, consumers.c.counted == 0)
    .order_by(consumers.c.uuid)
    .limit(_PAGE)
)
#: The projects with limits that have consumers that are not counted.
UNCOUNTED_PROJECTS = (
    sa.select(quota_projects.c.project_id)
    .where(
        sa.select(consumers.c.id)
        .where(consumers.c.project_id == quota_projects.c.project_id, consumers.c.counted == 0)
        .exists()
    )
    .order_by(quota_projects.c.project_id)
)
UNCOUNTED_PROJECT = UNCOUNTED_PROJECTS.where(quota_projects.c.project_id == _OF_PROJECT)
#: The project stands in the condition because the consumer may have changed it since it was read.
MARK = (
    sa.update(consumers)
    .where(
        consumers.c.uuid.in_(sa.bindparam("uuids", expanding=True)),
        consumers.c.project_id == _OF_PROJECT,
        consumers.c.counted == 0,
    )
    .values(counted=1)
)
UNMARK = sa.update(consumers).where(consumers.c.project_id == _OF_PROJECT, consumers.c.counted == 1).values(counted=0)


def _holdings(where: sa.ColumnElement[bool]) -> sa.Select[tuple[str, str, int, int]]:
    return (
        sa.select(consumers.c.uuid, _UNIT.label("unit"), allocations.c.resource_class_id, allocations.c.used)
        .join_from(consumers, allocations, allocations.c.consumer_id == consumers.c.uuid)
        # As expressions: SQLite has no statistics, and would read all counted consumers of the project by the index of these two.
        .where(where, consumers.c.project_id.concat("") == _OF_PROJECT, consumers.c.counted + 0 == 1)
    )


_UNITS: sa.BindParameter[str] = sa.bindparam("units", expanding=True)
#: What the counted consumers hold that count together with these, and these themselves. Two halves, because no database uses two
#: indexes well for one OR.
HOLDINGS = sa.union_all(
    _holdings(consumers.c.uuid.in_(_UNITS)),
    _holdings(consumers.c.counts_with.in_(_UNITS)),
)
LIMITS = (
    sa.select(quotas.c.resource_class_id, quotas.c.maximum, quotas.c.used)
    .where(quotas.c.project_id == _OF_PROJECT)
    .order_by(quotas.c.resource_class_id)
)
_LIMIT = (quotas.c.project_id == _OF_PROJECT, quotas.c.resource_class_id == _OF_CLASS)
_AMOUNT = sa.bindparam("of_amount", type_=_LARGE)
COUNT = sa.update(quotas).where(*_LIMIT).values(used=quotas.c.used + _AMOUNT)
#: The law: no row is written where the limit would be exceeded.
COUNT_WITHIN = COUNT.where(quotas.c.used + _AMOUNT <= quotas.c.maximum)
ADD_LIMIT = sa.insert(quotas)
SET_LIMIT = sa.update(quotas).where(*_LIMIT).values(maximum=sa.bindparam("new_maximum", type_=_LARGE))
SET_USED = sa.update(quotas).where(*_LIMIT).values(used=sa.bindparam("new_used", type_=_LARGE))
DROP_LIMIT = sa.delete(quotas).where(*_LIMIT)

_BY_CONSUMER = (
    sa.select(
        consumers.c.project_id,
        _UNIT.label("unit"),
        allocations.c.resource_class_id,
        sa.func.sum(allocations.c.used).label("amount"),
    )
    .join_from(consumers, allocations, allocations.c.consumer_id == consumers.c.uuid)
    .where(consumers.c.counted == 1)
    .group_by(consumers.c.project_id, _UNIT, consumers.c.uuid, allocations.c.resource_class_id)
)


def _truth(by_consumer: sa.Select[tuple[str, str, int, int]]) -> sa.Subquery:
    """What counted consumers hold in all, by project and class."""
    one = by_consumer.subquery("by_consumer")
    unit = (
        sa.select(one.c.project_id, one.c.resource_class_id, sa.func.max(one.c.amount).label("amount"))
        .group_by(one.c.project_id, one.c.unit, one.c.resource_class_id)
        .subquery("by_unit")
    )
    return (
        sa.select(
            unit.c.project_id, unit.c.resource_class_id, sa.cast(sa.func.sum(unit.c.amount), _LARGE).label("held")
        )
        .group_by(unit.c.project_id, unit.c.resource_class_id)
        .subquery("truth")
    )


_OF_ONE = _truth(_BY_CONSUMER.where(consumers.c.project_id == _OF_PROJECT))
TRUTH = sa.select(_OF_ONE.c.resource_class_id, _OF_ONE.c.held)
_OF_ALL = _truth(_BY_CONSUMER)
_HELD = sa.func.coalesce(_OF_ALL.c.held, 0)
#: One statement, since that is one moment at READ COMMITTED.
DRIFT = (
    sa.select(quotas.c.project_id, quotas.c.resource_class_id, quotas.c.used, _HELD.label("held"))
    .select_from(quotas)
    .outerjoin(
        _OF_ALL,
        sa.and_(_OF_ALL.c.project_id == quotas.c.project_id, _OF_ALL.c.resource_class_id == quotas.c.resource_class_id),
    )
    .where(quotas.c.used != _HELD)
)
ALL = sa.select(quotas).order_by(quotas.c.project_id, quotas.c.resource_class_id)
ALL_OF = ALL.where(quotas.c.project_id == _OF_PROJECT)

Amounts = Mapping[int, int]


class LimitsChangedError(Exception):
    """Inside of a change of limits: others changed the limits of the project meanwhile; begin a new transaction."""


@dataclass(frozen=True, slots=True)
class CountedBefore:
    """What a counted consumer held before a transaction changed it.

    :param unit: the consumer that it counts together with, or itself.
    :param held: units by the number of the class.
    """

    project: str
    unit: str
    held: Amounts


@dataclass(slots=True)
class QuotaTally:
    """The last write of a transaction: counts what it changed.

    It is called in the transaction in which every row of :attr:`before` was written, so that no other transaction counts them.
    """

    counter: QuotaCounter
    #: By consumer. A transaction may change a consumer several times; the first one says what was counted.
    before: dict[str, CountedBefore] = field(default_factory=dict)
    #: Projects in which consumers may have become something to count.
    projects: set[str] = field(default_factory=set)
    #: Consumers whose project may not exceed its limits, by what they count together with.
    enforced: set[str] = field(default_factory=set)

    def __call__(self, tx: sa.Connection) -> None:
        """Count what the transaction changed in each project, in the order of the projects."""
        for project in sorted(self.projects | {each.project for each in self.before.values()}):
            self.counter.settle(tx, project, self)


class QuotaCounter:
    """The limits of one database. Safe for use by several threads."""

    def __init__(self, classes: ResourceClasses) -> None:
        self._classes = classes
        #: Projects that had limits when they were last looked at. It saves a statement, and may be outdated.
        self._limited: frozenset[str] = frozenset()
        self._lock = threads.lock()

    # -- what claims ask ------------------------------------------------------------------------------------------

    def is_limited(self, project: str | None) -> bool:
        """Returns whether the project had limits when this process last looked."""
        return project in self._limited

    def look(self, tx: sa.Connection, projects: Iterable[str]) -> set[str]:
        """Returns the projects that have limits, and remembers them."""
        found = set(tx.execute(LIMITED, {"projects": list(projects)}).scalars())
        with self._lock:
            self._limited |= found
        return found

    def note(
        self,
        tx: sa.Connection,
        changes: Sequence[AllocationChange],
        before: Mapping[str, CountedBefore],
        limited: Collection[str],
    ) -> None:
        """Have the end of the transaction count what it changes, if there is anything to count.

        :param before: of the consumers that are counted and were changed.
        :param limited: projects that take something and have limits, as the transaction found them before it took anything.
        """
        if not limited and not before:
            return
        tally = write_last(tx, _NAME, lambda: QuotaTally(self))
        for consumer, was in before.items():
            tally.before.setdefault(consumer, was)
        tally.projects.update(limited)
        tally.enforced |= {each.counts_with or each.consumer for each in changes if each.enforce_quota}

    # -- counting -------------------------------------------------------------------------------------------------

    def settle(self, tx: sa.Connection, project: str, tally: QuotaTally) -> bool:
        """Count what the transaction changed, and consumers that were not counted yet; False if the project has no limits.

        :raises QuotaExceeded: a limit would be exceeded by a consumer that may not.
        """
        if not self._hold(tx, project):
            with self._lock:
                self._limited -= {project}
            return False
        if not self.is_limited(project):
            with self._lock:
                self._limited |= {project}
        before = {uuid: was for uuid, was in tally.before.items() if was.project == project}
        more: dict[int, int] = defaultdict(int)
        enforced: dict[int, int] = defaultdict(int)
        while True:
            fresh = {row.uuid: row.unit for row in tx.execute(UNCOUNTED, {"of_project": project})}
            if fresh:
                tx.execute(MARK, {"of_project": project, "uuids": list(fresh)})
            units = {was.unit for was in before.values()} | set(fresh.values())
            for unit, of_class, difference in self._differences(tx, project, units, before, fresh):
                more[of_class] += difference
                if unit in tally.enforced:
                    enforced[of_class] += difference
            if len(fresh) < _PAGE:
                break
            before = {}
        self._write(tx, project, more, enforced)
        return True

    def _differences(
        self,
        tx: sa.Connection,
        project: str,
        units: Iterable[str],
        before: Mapping[str, CountedBefore],
        fresh: Iterable[str],
    ) -> list[tuple[str, int, int]]:
        """By how much more each unit counts now, by class."""
        wanted = sorted(units)
        if not wanted:
            return []
        # (unit, class) -> consumer -> units
        now: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        then: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for row in tx.execute(HOLDINGS, {"of_project": project, "units": wanted}):
            now[row.unit, row.resource_class_id][row.uuid] += row.used
            if row.uuid not in before and row.uuid not in fresh:
                then[row.unit, row.resource_class_id][row.uuid] += row.used
        for uuid, was in before.items():
            for of_class, amount in was.held.items():
                then[was.unit, of_class][uuid] += amount
        return [
            (unit, of_class, difference)
            for unit, of_class in sorted(now.keys() | then.keys())
            if (difference := _most(now, unit, of_class) - _most(then, unit, of_class))
        ]

    def _write(self, tx: sa.Connection, project: str, more: Amounts, enforced: Amounts) -> None:
        if not any(more.values()):
            return
        for row in tx.execute(LIMITS, {"of_project": project}).all():
            amount = more.get(row.resource_class_id, 0)
            if not amount:
                continue
            values = {"of_project": project, "of_class": row.resource_class_id, "of_amount": amount}
            # A transaction that lowers what is used is never refused, whatever a part of it takes.
            if amount < 0 or enforced.get(row.resource_class_id, 0) <= 0:
                tx.execute(COUNT, values)
            elif tx.execute(COUNT_WITHIN, values).rowcount != 1:
                raise self._exceeded(tx, project, row, amount)

    def _exceeded(self, tx: sa.Connection, project: str, row: Any, amount: int) -> Exception:
        number, limit, used = row.resource_class_id, row.maximum, row.used
        name = self._names(tx, [number])[number]
        over = used + amount - limit
        return errors.QuotaExceeded(
            f"Project {project} may hold {limit} {name} and holds {used}. {amount} more would exceed the limit by {over}. Delete "
            "instances, or ask an administrator for a higher limit (moorage quota set).",
            project=project,
            resource_class=name,
            limit=limit,
            used=used,
            asked=amount,
            over=over,
        )

    # -- limits ---------------------------------------------------------------------------------------------------

    def set(self, tx: sa.Connection, project: str, name: str, limit: int) -> Quota:
        """Set a limit; the project's first one counts its consumers.

        :raises NotFound: there is no such class.
        :raises LimitsChangedError: others set and removed the first limit meanwhile.
        """
        number = self._classes.numbers(tx, [name])[name]
        # The class before the project: a transaction that adds inventories counts last.
        self._classes.hold(tx, [number])
        key = {"of_project": project, "of_class": number}
        held = self._hold(tx, project) or insert_unless_taken(tx, ADD_PROJECT, [{"project_id": project}])
        # Otherwise another transaction has set the first limit meanwhile.
        if not held and not self._hold(tx, project):
            raise LimitsChangedError
        if not tx.execute(SET_LIMIT, {**key, "new_maximum": limit}).rowcount:
            tx.execute(ADD_LIMIT, {"project_id": project, "resource_class_id": number, "maximum": limit, "used": 0})
            self.recount(tx, project)
        used = next(row.used for row in tx.execute(LIMITS, {"of_project": project}) if row.resource_class_id == number)
        self._record(tx, project, name, {"limit": limit, "used": used})
        return Quota(project, name, limit, used)

    def unset(self, tx: sa.Connection, project: str, name: str) -> bool:
        """Remove a limit; False when there is none. The project's last one removes all that counts.

        :raises LimitsChangedError: others set or removed limits of the project meanwhile.
        """
        limited = self._limits(tx, project)
        # By the shown names: the class may have been deleted by a version that did not look for limits.
        number = next((each for each, shown in self._names(tx, limited).items() if shown == name), None)
        if number is None:
            return False
        last = len(limited) == 1
        if last:
            # The consumers before the project, as in every change of a consumer.
            tx.execute(UNMARK, {"of_project": project})
        if not self._hold(tx, project) or self._limits(tx, project) != limited:
            raise LimitsChangedError
        tx.execute(DROP_LIMIT, {"of_project": project, "of_class": number})
        self._record(tx, project, name, {"limit": None})
        if last:
            tx.execute(DROP_PROJECT, {"of_project": project})
            # Those that were marked while this transaction waited for the project.
            tx.execute(UNMARK, {"of_project": project})
        return True

    def recount(self, tx: sa.Connection, project: str) -> bool:
        """Set the counters of a project to what its consumers hold; False without limits."""
        if not self.settle(tx, project, QuotaTally(self)):
            return False
        held = {row.resource_class_id: int(row.held) for row in tx.execute(TRUTH, {"of_project": project})}
        for row in tx.execute(LIMITS, {"of_project": project}).all():
            number = row.resource_class_id
            if row.used != held.get(number, 0):
                tx.execute(SET_USED, {"of_project": project, "of_class": number, "new_used": held.get(number, 0)})
        return True

    def read(self, tx: sa.Connection, project: str | None) -> list[Quota]:
        """Limits, ordered by project and class."""
        rows = (tx.execute(ALL) if project is None else tx.execute(ALL_OF, {"of_project": project})).all()
        names = self._names(tx, {row.resource_class_id for row in rows})
        found = [Quota(row.project_id, names[row.resource_class_id], row.maximum, row.used) for row in rows]
        return sorted(found, key=lambda each: (each.project, each.resource_class))

    def uncounted(self, tx: sa.Connection, project: str | None) -> Sequence[str]:
        """Projects with limits that have consumers of claims that began before the limit; None: all of them."""
        if project is None:
            return tx.execute(UNCOUNTED_PROJECTS).scalars().all()
        return tx.execute(UNCOUNTED_PROJECT, {"of_project": project}).scalars().all()

    def drift(self, tx: sa.Connection) -> list[QuotaDrift]:
        """Counters that disagree with what the counted consumers hold."""
        rows = tx.execute(DRIFT).all()
        names = self._names(tx, {row.resource_class_id for row in rows})
        found = [QuotaDrift(row.project_id, names[row.resource_class_id], row.used, int(row.held)) for row in rows]
        return sorted(found, key=lambda each: (each.project, each.resource_class))

    def _hold(self, tx: sa.Connection, project: str) -> bool:
        """Take the turn of a project; False if it has no limits."""
        return tx.execute(HOLD_PROJECT, {"of_project": project}).rowcount == 1

    def _limits(self, tx: sa.Connection, project: str) -> frozenset[int]:
        return frozenset(row.resource_class_id for row in tx.execute(LIMITS, {"of_project": project}))

    def _names(self, tx: sa.Connection, numbers: Collection[int]) -> Mapping[int, str]:
        """Names of classes by number. A deleted class is shown by its number, under a name that no class can have."""
        names = self._classes.names(tx, numbers)
        return {each: names.get(each, f"DELETED_CLASS_{each}") for each in numbers}

    def _record(self, tx: sa.Connection, project: str, name: str, state: Mapping[str, int | None]) -> None:
        version = tx.execute(VERSION, {"of_project": project}).scalar_one()
        changed = {"resource_class": name, **state}
        record(tx, JournalEvent("quota.change", subject_of(project, name), version, changed, project))


def subject_of(project: str, name: str) -> str:
    """Returns the subject of events about a limit."""
    return f"quota/{project}/{name}"


def _most(amounts: Mapping[tuple[str, int], Mapping[str, int]], unit: str, of_class: int) -> int:
    return max(amounts.get((unit, of_class), {}).values(), default=0)
