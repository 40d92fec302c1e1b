# SPDX-License-Identifier: Apache-2.0
"""The catalogue of flavors: each flavorid has versions 1, 2, 3, ..., and a version's resources and extra specs never change.

A new version is one INSERT of the number after the highest one. The unique constraint on flavorid and version is the fence: of two
administrators who add a version at once, the second one begins again, and finds a newer version than the expected one. The highest
number is read before the newest version. So a version that is added in between makes the INSERT fail.

Implicit versions record the sizes of instances that brought their resources along. They cannot be requested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import sqlalchemy as sa

from moorage import errors, randomness
from moorage.db import Database, Duplicate, JournalEvent, now, record
from moorage.scheduling.resource_request import GivenResources, HeldResources, given_resources, normal_given
from moorage.scheduling.tables import flavors

__all__ = ["FlavorStore", "FlavorVersion"]

T = TypeVar("T")
_Contents = tuple[HeldResources, Mapping[str, str]]
_COLUMNS = tuple(flavors.c[name] for name in (
    "uuid", "flavorid", "version", "resources", "extra_specs", "implicit", "deprecated", "successor", "generation",
    "created_at", "updated_at",
))  # fmt: skip
#: New transactions after lost races. Of several writers of a flavor, one succeeds in each round.
_ATTEMPTS = 100
_OF_FLAVOR = flavors.c.flavorid == sa.bindparam("of_flavor", type_=sa.String)
_REQUESTABLE = flavors.c.implicit == sa.false()
_LAST = sa.select(sa.func.coalesce(sa.func.max(flavors.c.version), 0)).where(_OF_FLAVOR)
#: The one statement of a request by flavorid; the unique index has its order.
_NEWEST = sa.select(*_COLUMNS).where(_OF_FLAVOR, _REQUESTABLE).order_by(flavors.c.version.desc()).limit(1)
_ONE = sa.select(*_COLUMNS).where(_OF_FLAVOR, flavors.c.version == sa.bindparam("of_version", type_=sa.Integer))
_VERSIONS = sa.select(*_COLUMNS).where(_OF_FLAVOR).order_by(flavors.c.version)
_ALL = sa.select(*_COLUMNS).where(_REQUESTABLE).order_by(flavors.c.flavorid, flavors.c.version.desc())
_STATE = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(flavors.c.generation), 0)).where(_REQUESTABLE)
_INSERT = sa.insert(flavors).values(deprecated=False, successor="", generation=1, created_at=now(), updated_at=now())
_DEPRECATE = (
    sa.update(flavors)
    .where(
        flavors.c.uuid == sa.bindparam("of_uuid", type_=sa.String),
        flavors.c.generation == sa.bindparam("seen_generation", type_=sa.BigInteger),
    )
    .values(
        deprecated=sa.bindparam("to_deprecated", type_=flavors.c.deprecated.type),
        successor=sa.bindparam("to_successor", type_=sa.String),
        generation=flavors.c.generation + 1,
        updated_at=now(),
    )
)


def _page(implicit: bool) -> sa.Select[Any]:
    """Returns the newest version of each flavor, a page in the order of flavorids."""
    other = flavors.alias("other")
    newest = sa.select(sa.func.max(other.c.version)).where(other.c.flavorid == flavors.c.flavorid)
    query = sa.select(*_COLUMNS).where(flavors.c.flavorid > sa.bindparam("after", type_=sa.String))
    if not implicit:
        newest, query = newest.where(other.c.implicit == sa.false()), query.where(_REQUESTABLE)
    return (
        query.where(flavors.c.version == newest.scalar_subquery())
        .order_by(flavors.c.flavorid)
        .limit(sa.bindparam("page", type_=sa.Integer))
    )


_PAGES = {implicit: _page(implicit) for implicit in (False, True)}


class _LostRaceError(Exception):
    """Another transaction wrote the flavor first; begin a new one."""


@dataclass(frozen=True, slots=True)
class FlavorVersion:
    """A version of a flavor. Times are microseconds since the Unix epoch.

    :param resources: as they were given. What an instance holds follows from them and the extra specs.
    :param implicit: it records what instances have, and cannot be requested.
    :param successor: the flavorid that the administrator who deprecated it named; empty for none.
    :param generation: rises when it is deprecated, or is so no longer.
    """

    uuid: str
    flavorid: str
    version: int
    resources: GivenResources
    extra_specs: Mapping[str, str]
    implicit: bool
    deprecated: bool
    successor: str
    generation: int
    created_at: int
    updated_at: int

    def means(self, resources: Mapping[str, int], extra_specs: Mapping[str, str]) -> bool:
        """Returns whether a flavor has equal contents.

        :param resources: as they are given.
        """
        return dict(self.resources) == dict(resources) and dict(self.extra_specs) == dict(extra_specs)


class FlavorStore:
    """The flavors of the store. Safe for use by several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self, flavorid: str, resources: Mapping[str, int], extra_specs: Mapping[str, str], expected: int = 0
    ) -> tuple[FlavorVersion, bool]:
        """Adds a flavor, or its next version. Returns it, and whether it is new: the newest one may have these contents already.

        :param resources: as they are given.
        :param expected: the newest version that the caller knows; 0: the catalogue does not have the flavor.
        :raises Conflict: the newest version is another one, and has other contents.
        """

        def work(tx: sa.Connection) -> tuple[FlavorVersion, bool]:
            # In this order; see the module.
            last = tx.execute(_LAST, {"of_flavor": flavorid}).scalar_one()
            newest = _newest(tx, flavorid)
            if newest is not None and newest.means(resources, extra_specs):
                return newest, False
            _check_expected(flavorid, expected, newest.version if newest is not None else 0)
            return _insert(tx, flavorid, last + 1, resources, extra_specs, implicit=False), True

        return self._until_done(flavorid, work)

    def deprecate(
        self, flavorid: str, version: int | None = None, *, deprecated: bool = True, successor: str = ""
    ) -> Sequence[FlavorVersion]:
        """Refuses new requests for a version, or accepts them again; None: for all versions. Returns these versions.

        :param successor: the flavorid that refusals name.
        :raises NotFound: the catalogue has no such flavor or version.
        :raises InvalidInput: the successor is not in the catalogue, is the flavor itself, or nothing is deprecated.
        """
        if successor and (successor == flavorid or not deprecated):
            raise errors.InvalidInput(
                "A successor is another flavor, and goes with a flavor that is deprecated.", path="body/successor"
            )

        def work(tx: sa.Connection) -> Sequence[FlavorVersion]:
            if successor and _newest(tx, successor) is None:
                raise errors.InvalidInput(
                    f"There is no flavor {successor} in the catalogue; moorage flavor list shows what there is.",
                    path="body/successor",
                )
            found = [each for each in _versions(tx, flavorid) if not each.implicit and version in (None, each.version)]
            if not found:
                raise _not_found(flavorid, version)
            for each in found:
                if (each.deprecated, each.successor) != (deprecated, successor):
                    _set_deprecated(tx, each, deprecated, successor)
            return [each for each in _versions(tx, flavorid) if each.version in {old.version for old in found}]

        return self._until_done(flavorid, work)

    def adopt(self, flavorid: str, contents: Sequence[_Contents]) -> tuple[Sequence[int], int]:
        """Returns a version for each of several resources and extra specs, and how many implicit versions were added for them.

        :param contents: what instances hold, and their extra specs, each once. Of several versions that have them, a requestable
            one is taken before an implicit one, and a newer one before an older one.
        """

        def work(tx: sa.Connection) -> tuple[Sequence[int], int]:
            # In this order; see the module.
            last = first = tx.execute(_LAST, {"of_flavor": flavorid}).scalar_one()
            versions = sorted(_versions(tx, flavorid), key=lambda each: (not each.implicit, each.version))
            known = {_contents_of(each): each.version for each in versions}
            found = []
            for held, extra_specs in contents:
                resources = given_resources(held, extra_specs)
                version = known.get(_text(resources, extra_specs))
                if version is None:
                    last = version = last + 1
                    _insert(tx, flavorid, version, resources, extra_specs, implicit=True)
                found.append(version)
            return found, last - first

        return self._until_done(flavorid, work)

    def newest(self, flavorid: str) -> FlavorVersion | None:
        """Returns the newest version that is not implicit, deprecated or not; None when the catalogue has no such flavor."""
        with self._database.read() as tx:
            return _newest(tx, flavorid)

    def versions(self, flavorid: str) -> Sequence[FlavorVersion]:
        """Returns all versions of a flavor, the oldest first.

        :raises NotFound: there is none.
        """
        with self._database.read() as tx:
            found = _versions(tx, flavorid)
        if not found:
            raise _not_found(flavorid, None)
        return found

    def list(self, *, after: str = "", limit: int = 1000, implicit: bool = False) -> Sequence[FlavorVersion]:
        """Returns the newest version of each flavor in the order of flavorids, a page of ``limit`` after the given flavorid.

        :param implicit: count implicit versions, too.
        """
        with self._database.read() as tx:
            return [FlavorVersion(*row) for row in tx.execute(_PAGES[implicit], {"after": after, "page": limit})]

    def state(self) -> tuple[int, ...]:
        """Numbers that differ when the catalogue has changed; one statement."""
        with self._database.read() as tx:
            return tuple(map(int, tx.execute(_STATE).one()))

    def all(self) -> Mapping[str, Sequence[FlavorVersion]]:
        """Returns all versions that are not implicit, by flavorid, the newest first."""
        found: dict[str, list[FlavorVersion]] = {}
        with self._database.read() as tx:
            for row in tx.execute(_ALL):
                found.setdefault(row.flavorid, []).append(FlavorVersion(*row))
        return found

    def _until_done(self, flavorid: str, work: Callable[[sa.Connection], T]) -> T:
        for _ in range(_ATTEMPTS):
            try:
                return self._database.run(work)
            except (Duplicate, _LostRaceError):
                continue
        raise errors.Conflict(f"Flavor {flavorid} is being changed all the time; try again.", flavorid=flavorid)


def _text(resources: Mapping[str, int], extra_specs: Mapping[str, str]) -> str:
    return json.dumps([dict(resources), dict(extra_specs)], sort_keys=True)


def _contents_of(each: FlavorVersion) -> str:
    """What :meth:`FlavorStore.adopt` compares instances with: what is found of an instance of the version."""
    resources = each.resources if each.implicit else normal_given(each.resources, each.extra_specs)
    return _text(resources, each.extra_specs)


def _newest(tx: sa.Connection, flavorid: str) -> FlavorVersion | None:
    row = tx.execute(_NEWEST, {"of_flavor": flavorid}).first()
    return None if row is None else FlavorVersion(*row)


def _versions(tx: sa.Connection, flavorid: str) -> Sequence[FlavorVersion]:
    return [FlavorVersion(*row) for row in tx.execute(_VERSIONS, {"of_flavor": flavorid})]


def _insert(
    tx: sa.Connection,
    flavorid: str,
    version: int,
    resources: Mapping[str, int],
    extra_specs: Mapping[str, str],
    *,
    implicit: bool,
) -> FlavorVersion:
    values = {"uuid": randomness.new_uuid(), "flavorid": flavorid, "version": version, "implicit": implicit}
    tx.execute(_INSERT, {**values, "resources": dict(resources), "extra_specs": dict(extra_specs)})
    made = FlavorVersion(*tx.execute(_ONE, {"of_flavor": flavorid, "of_version": version}).one())
    _record(tx, "create", made)
    return made


def _set_deprecated(tx: sa.Connection, each: FlavorVersion, deprecated: bool, successor: str) -> None:
    given = {"of_uuid": each.uuid, "seen_generation": each.generation}
    if tx.execute(_DEPRECATE, {**given, "to_deprecated": deprecated, "to_successor": successor}).rowcount != 1:
        raise _LostRaceError
    changed = {"deprecated": deprecated, "successor": successor, "generation": each.generation + 1}
    _record(tx, "change", replace(each, **changed))  # type: ignore[arg-type]


def _record(tx: sa.Connection, what: str, each: FlavorVersion) -> None:
    state = {name: getattr(each, name) for name in ("flavorid", "version", "implicit", "deprecated", "successor")}
    event = JournalEvent(
        f"flavor.{what}", f"flavor/{each.uuid}", each.generation, {**state, "resources": dict(each.resources)}
    )
    record(tx, event)


def _check_expected(flavorid: str, expected: int, newest: int) -> None:
    if expected == newest:
        return
    if not newest:
        raise errors.Conflict(
            f"There is no flavor {flavorid} in the catalogue, and the request expects its version {expected}. To create it, "
            "expect version 0, or leave the version out.",
            flavorid=flavorid,
            version=newest,
        )
    raise errors.Conflict(
        f"The newest version of flavor {flavorid} is {newest} and has other contents; the request expects version {expected}. "
        f"Look at it with moorage flavor show {flavorid}. To add version {newest + 1}, expect version {newest} "
        f"(--expected-version {newest}).",
        flavorid=flavorid,
        version=newest,
    )


def _not_found(flavorid: str, version: int | None) -> errors.NotFound:
    what = f"version {version} of flavor {flavorid}" if version is not None else f"flavor {flavorid}"
    return errors.NotFound(f"There is no {what} in the catalogue; moorage flavor list shows what there is.")
