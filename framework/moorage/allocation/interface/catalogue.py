# SPDX-License-Identifier: Apache-2.0
"""Defines the catalogue of a store: providers in trees, inventories, traits, aggregates, and names of classes and traits.

Every write of a provider takes an ``expected_generation``. With a number, the write succeeds only while the provider has that
generation (compare-and-update). None: any generation. The condition is in the statement that writes.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from moorage import errors
from moorage.allocation.interface.claims import InventoryItem, ProviderUsage, ResourceProvider

__all__ = [
    "KEEP",
    "GenerationConflict",
    "Keep",
    "NameCatalogue",
    "ProviderCatalogue",
    "ProviderFilter",
    "ResourceClass",
    "Trait",
]


class GenerationConflict(errors.Conflict):
    """A generation is not the expected one; details: ``provider`` or ``consumer``, ``expected``, ``present``."""


class Keep(enum.Enum):
    """The type of :data:`KEEP`."""

    KEEP = "keep"


#: An argument that keeps the stored value, where None is a value.
KEEP: Final = Keep.KEEP


@dataclass(frozen=True, slots=True)
class ResourceClass:
    """A resource class. ``updated_at``: microseconds since the epoch; 0 for a standard class."""

    name: str
    standard: bool
    updated_at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Trait:
    """A trait. ``updated_at``: microseconds since the epoch; 0 for a standard trait (of os-traits)."""

    name: str
    standard: bool
    updated_at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ProviderFilter:
    """Selects providers. Empty or None: no condition. All given conditions must hold.

    :param in_tree: the uuid of any provider of the tree.
    :param resources: amounts by class that must fit now (capacity, min_unit, max_unit, step rule) on the provider itself.
    :param required: the provider has at least one trait of each set.
    :param forbidden: the provider has none of these traits.
    :param member_of: the provider is in at least one aggregate (uuid) of each set.
    :param not_member_of: the provider is in none of these aggregates.
    """

    name: str | None = None
    uuid: str | None = None
    in_tree: str | None = None
    resources: Mapping[str, int] = field(default_factory=dict)
    required: tuple[frozenset[str], ...] = ()
    forbidden: frozenset[str] = frozenset()
    member_of: tuple[frozenset[str], ...] = ()
    not_member_of: frozenset[str] = frozenset()


class ProviderCatalogue(abc.ABC):
    """A power of stores: reads and writes single providers, as an API edits them.

    :class:`moorage.errors.NotFound` has ``details['provider']`` for an unknown provider, ``details['resource_class']`` for an
    unknown resource class, and ``details['trait']`` for an unknown trait. Invalid numbers and names raise
    :class:`moorage.errors.InvalidInput` with ``details['path']``. Each call is one transaction; nothing is half written.
    """

    @abc.abstractmethod
    def create_provider(self, provider: ResourceProvider) -> ResourceProvider:
        """Creates a provider with generation 0, below ``provider.parent`` if it is given.

        :returns: the provider as it is stored.
        :raises AlreadyExists: the uuid or the name is in use; ``details['field']`` says which (``uuid`` or ``name``).
        :raises InvalidInput: the parent does not exist, or is the provider itself; path ``parent``.
        :raises TreeTooDeep: it would be below :data:`~moorage.allocation.interface.MOST_LEVELS` levels.
        """

    @abc.abstractmethod
    def provider(self, uuid: str) -> ResourceProvider:
        """Returns a provider, without its inventories.

        :raises NotFound: there is none.
        """

    @abc.abstractmethod
    def find_providers(
        self, query: ProviderFilter | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ResourceProvider]:
        """Returns providers without their inventories, ordered by uuid, after the uuid ``after``; one statement.

        An unknown provider of ``in_tree`` and unknown aggregates find nothing.

        :raises NotFound: a trait or resource class of the query does not exist.
        """

    @abc.abstractmethod
    def update_provider(
        self,
        uuid: str,
        *,
        name: str | Keep = KEEP,
        can_host: bool | Keep = KEEP,
        parent: str | None | Keep = KEEP,
        reparent: bool = True,
    ) -> ResourceProvider:
        """Changes the name of a provider, or moves it in its tree, with its children. Its generation stays.

        :param reparent: False: a provider with a parent keeps it; only a root may get a parent.
        :raises AlreadyExists: the name is in use.
        :raises InvalidInput: no such parent, a parent below the provider itself, or a change that ``reparent`` forbids; path
            ``parent``.
        :raises TreeTooDeep: a provider would be below :data:`~moorage.allocation.interface.MOST_LEVELS` levels, and deeper than it
            was.
        """

    @abc.abstractmethod
    def inventories(self, uuid: str) -> ProviderUsage:
        """Returns a provider with its inventories and their use.

        :raises NotFound: there is none.
        """

    @abc.abstractmethod
    def set_inventories(
        self, uuid: str, items: Sequence[InventoryItem], expected_generation: int | None = None
    ) -> ResourceProvider:
        """Replaces all inventories of a provider. Raises the generation.

        Classes must exist. ``reserved`` may be ``total``, and the capacity may be less than what is used.

        :returns: the provider with its inventories as they are now.
        :raises GenerationConflict: nothing was written.
        :raises InUse: an inventory with allocations would be removed; ``details['resource_class']``.
        """

    @abc.abstractmethod
    def add_inventory(self, uuid: str, item: InventoryItem, expected_generation: int | None = None) -> ResourceProvider:
        """Adds one inventory, as :meth:`set_inventories` does.

        :raises AlreadyExists: the provider has an inventory of the class.
        """

    @abc.abstractmethod
    def change_inventory(
        self, uuid: str, item: InventoryItem, expected_generation: int | None = None
    ) -> ResourceProvider:
        """Changes one inventory, as :meth:`set_inventories` does.

        :raises NotFound: the provider has none of the class; ``details['inventory']`` is the class.
        """

    @abc.abstractmethod
    def remove_inventory(
        self, uuid: str, resource_class: str, expected_generation: int | None = None
    ) -> ResourceProvider:
        """Removes one inventory, as :meth:`set_inventories` does.

        :raises NotFound: the provider has none of the class; ``details['inventory']`` is the class.
        :raises InUse: it has allocations.
        """

    @abc.abstractmethod
    def provider_traits(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        """Returns a provider without inventories, and its traits, sorted.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def traits_of(self, providers: Sequence[str]) -> Mapping[str, frozenset[str]]:
        """Reads the traits of providers, by uuid; one statement. Providers without traits are absent."""

    @abc.abstractmethod
    def set_traits(
        self, uuid: str, traits: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        """Replaces all traits of a provider. Raises the generation.

        :raises NotFound: there is no such provider, or ``details['traits']`` (sorted) do not exist.
        :raises GenerationConflict: nothing was written.
        """

    def change_traits(
        self, uuid: str, added: Set[str], removed: Set[str] = frozenset(), transaction: Any | None = None
    ) -> bool:
        """Adds traits to a provider and removes others. Custom traits are created with their first provider.

        Raises the generation if anything changes. Uses ``transaction`` if it is given (stores with SHARED_TRANSACTION).

        A store overrides this method. The default creates no custom traits, and refuses a transaction.

        :returns: whether anything changed.
        :raises NotFound: there is no such provider, or ``details['traits']`` (sorted) are no standard traits.
        :raises InvalidInput: a name is invalid.
        """
        if transaction is not None:
            raise errors.InvalidInput(
                "This allocation store cannot change traits in a transaction.", path="transaction"
            )
        row, present = self.provider_traits(uuid)
        wanted = frozenset(present) - removed | added
        if wanted == frozenset(present):
            return False
        self.set_traits(uuid, wanted, row.generation)
        return True

    @abc.abstractmethod
    def provider_aggregates(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        """Returns a provider without inventories, and the uuids of its aggregates, sorted.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def set_aggregates(
        self, uuid: str, aggregates: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        """Replaces all aggregates of a provider. Raises the generation only if one is expected, as Placement does.

        An aggregate is only a uuid that several providers have.

        :raises NotFound: there is no such provider.
        :raises GenerationConflict: nothing was written.
        """


class NameCatalogue(abc.ABC):
    """A power of stores: keeps the names of resource classes and traits. Custom names begin with ``CUSTOM_``."""

    @abc.abstractmethod
    def resource_classes(self) -> list[ResourceClass]:
        """Returns all resource classes: standard classes by their numbers, then custom classes by their creation."""

    @abc.abstractmethod
    def create_resource_class(self, name: str) -> bool:
        """Creates a custom class. Returns False if it exists (standard classes do).

        :raises InvalidInput: the name is invalid.
        """

    @abc.abstractmethod
    def rename_resource_class(self, name: str, new_name: str) -> None:
        """Renames a custom class, in inventories and allocations too.

        :raises NotFound: there is no class with the name.
        :raises AlreadyExists: the new name is in use.
        :raises InvalidInput: it is a standard class, or the new name is invalid.
        """

    @abc.abstractmethod
    def delete_resource_class(self, name: str) -> None:
        """Deletes a custom class.

        :raises NotFound: there is none.
        :raises InvalidInput: it is a standard class.
        :raises InUse: a provider has an inventory of it.
        """

    @abc.abstractmethod
    def traits(self, *, names: Set[str] | None = None, prefix: str = "", associated: bool | None = None) -> list[Trait]:
        """Returns traits, ordered by name.

        :param names: only these. :param prefix: only those that begin with it.
        :param associated: True: only those that a provider has; False: only those that no provider has.
        """

    @abc.abstractmethod
    def create_trait(self, name: str) -> bool:
        """Creates a custom trait. Returns False if it exists (standard traits do).

        :raises InvalidInput: the name is invalid.
        """

    @abc.abstractmethod
    def delete_trait(self, name: str) -> None:
        """Deletes a custom trait.

        :raises NotFound: there is none.
        :raises InvalidInput: it is a standard trait.
        :raises InUse: a provider has it.
        """
