# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that keeps the names of resource classes and traits.

A transaction that gives a provider a custom class or trait, or a project a limit of the class, writes that name's row, and one that
deletes the name writes it first too. So they take turns: no use of a name begins while it is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import sqlalchemy as sa
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import NameCatalogue, ResourceClass, Trait
from moorage.db import Duplicate, now
from moorage_plugins.stores.checks import check_class
from moorage_plugins.stores.classes import STANDARD_CLASSES, no_such_class
from moorage_plugins.stores.insert_unless_taken import insert_unless_taken
from moorage_plugins.stores.sql_part import SqlPart
from moorage_plugins.stores.tables import inventories, provider_traits, quotas, resource_classes, traits
from moorage_plugins.stores.trait_names import STANDARD_TRAITS, check_trait, no_such_traits

__all__ = ["SqlNames", "check_traits", "ensure_traits", "hold_traits"]

_CLASSES = (
    sa.select(resource_classes.c.name, resource_classes.c.updated_at)
    .where(resource_classes.c.name.is_not(None))
    .order_by(resource_classes.c.id)
)
_CLASS = sa.select(resource_classes.c.id).where(resource_classes.c.name == sa.bindparam("of_name"))
_RENAME_CLASS = (
    sa.update(resource_classes)
    .where(resource_classes.c.name == sa.bindparam("of_name"))
    .values(name=sa.bindparam("new_name"), generation=resource_classes.c.generation + 1, updated_at=now())
)
_INVENTORIES_OF_CLASS = sa.select(sa.func.count()).where(inventories.c.resource_class_id == sa.bindparam("of_class"))
_LIMITS_OF_CLASS = sa.select(sa.func.count()).where(quotas.c.resource_class_id == sa.bindparam("of_class"))
_TRAITS = sa.select(traits.c.name, traits.c.updated_at)
_ADD_TRAIT = sa.insert(traits).values(generation=0, updated_at=now())
_HOLD_TRAITS = (
    sa.update(traits).where(traits.c.name == sa.bindparam("of_name")).values(generation=traits.c.generation + 1)
)
_WITH_TRAIT = sa.select(sa.func.count()).where(provider_traits.c.trait == sa.bindparam("of_name"))
_DROP_TRAIT = sa.delete(traits).where(traits.c.name == sa.bindparam("of_name"))


def check_traits(tx: sa.Connection, names: Iterable[str]) -> None:
    """See that the traits exist now; a statement when one is custom.

    :raises NotFound: ``details['traits']`` are those that do not.
    """
    custom = frozenset(names) - STANDARD_TRAITS
    if custom:
        missing = custom - set(tx.execute(sa.select(traits.c.name).where(traits.c.name.in_(custom))).scalars())
        if missing:
            raise no_such_traits(missing)


def ensure_traits(tx: sa.Connection, names: Iterable[str]) -> None:
    """Create the custom traits that do not exist.

    :raises NotFound: ``details['traits']`` are neither custom nor standard traits.
    """
    custom = {name for name in names if name.startswith("CUSTOM_")}
    if custom:
        missing = custom - set(tx.execute(sa.select(traits.c.name).where(traits.c.name.in_(custom))).scalars())
        for name in sorted(missing):
            check_trait(name)
            insert_unless_taken(tx, _ADD_TRAIT, [{"name": name}])
    check_traits(tx, names)


def hold_traits(tx: sa.Connection, names: Iterable[str]) -> None:
    """Keep the traits from being deleted until ``tx`` ends; for who gives them to a provider.

    :raises NotFound: one does not exist.
    """
    for name in sorted(frozenset(names) - STANDARD_TRAITS):
        if tx.execute(_HOLD_TRAITS, {"of_name": name}).rowcount != 1:
            raise no_such_traits({name})


class SqlNames(SqlPart, NameCatalogue):
    """Names of resource classes and traits."""

    @override
    def resource_classes(self) -> list[ResourceClass]:
        with self._database.read() as tx:
            custom = tx.execute(_CLASSES).all()
        return [ResourceClass(name, True) for name in STANDARD_CLASSES] + [
            ResourceClass(str(row.name), False, row.updated_at) for row in custom
        ]

    @override
    def create_resource_class(self, name: str) -> bool:
        if name in STANDARD_CLASSES:
            return False
        check_class(name, known=False)

        def work(tx: sa.Connection) -> bool:
            if tx.execute(_CLASS, {"of_name": name}).first() is not None:
                return False
            self._classes.ensure(tx, [name])
            return True

        return self._database.run(work)

    @override
    def rename_resource_class(self, name: str, new_name: str) -> None:
        self._check_custom(name)
        if new_name in STANDARD_CLASSES:
            raise _class_taken(new_name)
        check_class(new_name, known=False)
        try:
            renamed = self._database.run(
                lambda tx: tx.execute(_RENAME_CLASS, {"of_name": name, "new_name": new_name}).rowcount
            )
        except Duplicate:
            raise _class_taken(new_name) from None
        if not renamed:
            raise no_such_class(name)

    @override
    def delete_resource_class(self, name: str) -> None:
        self._check_custom(name)

        def work(tx: sa.Connection) -> None:
            number = tx.execute(_CLASS, {"of_name": name}).scalar_one_or_none()
            if number is None or not tx.execute(_RENAME_CLASS, {"of_name": name, "new_name": None}).rowcount:
                raise no_such_class(name)
            count = tx.execute(_INVENTORIES_OF_CLASS, {"of_class": number}).scalar_one()
            if count:
                raise errors.InUse(
                    f"{count} providers have an inventory of resource class {name}; remove those first.",
                    resource_class=name,
                    holder=f"{count} inventories",
                )
            limits = tx.execute(_LIMITS_OF_CLASS, {"of_class": number}).scalar_one()
            if limits:
                raise errors.InUse(
                    f"{limits} projects have a limit of resource class {name}; remove those first (moorage quota unset).",
                    resource_class=name,
                    holder=f"{limits} limits",
                    limits=limits,
                )

        self._database.run(work)

    def _check_custom(self, name: str) -> None:
        if name in STANDARD_CLASSES:
            raise errors.InvalidInput(
                f"{name} is a standard resource class and stays as it is; only classes named CUSTOM_... can be changed.",
                path="resource_class",
            )

    # -- traits ---------------------------------------------------------------------------------------------------

    @override
    def traits(self, *, names: Set[str] | None = None, prefix: str = "", associated: bool | None = None) -> list[Trait]:
        with self._database.read() as tx:
            custom = {row.name: row.updated_at for row in tx.execute(_TRAITS).all()}
            used = None
            if associated is not None:
                used = set(tx.execute(sa.select(provider_traits.c.trait).distinct()).scalars())
        return [
            Trait(name, name in STANDARD_TRAITS, custom.get(name, 0))
            for name in sorted(STANDARD_TRAITS | custom.keys())
            if name.startswith(prefix)
            and (names is None or name in names)
            and (used is None or (name in used) == associated)
        ]

    @override
    def create_trait(self, name: str) -> bool:
        if name in STANDARD_TRAITS:
            return False
        check_trait(name)
        return self._database.run(lambda tx: insert_unless_taken(tx, _ADD_TRAIT, [{"name": name}]))

    @override
    def delete_trait(self, name: str) -> None:
        if name in STANDARD_TRAITS:
            raise errors.InvalidInput(
                f"{name} is a standard trait and stays; only traits named CUSTOM_... can be deleted.", path="trait"
            )

        def work(tx: sa.Connection) -> None:
            hold_traits(tx, [name])
            count = tx.execute(_WITH_TRAIT, {"of_name": name}).scalar_one()
            if count:
                raise errors.InUse(
                    f"{count} providers have the trait {name}; take it from them first.",
                    trait=name,
                    holder=f"{count} providers",
                )
            tx.execute(_DROP_TRAIT, {"of_name": name})

        self._database.run(work)


def _class_taken(name: str) -> errors.AlreadyExists:
    return errors.AlreadyExists(f"There is a resource class {name} already.", resource_class=name)
