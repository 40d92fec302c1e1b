# SPDX-License-Identifier: Apache-2.0
"""The catalogue of a store: providers in trees, their inventories, traits and aggregates, and the names of classes and traits.

Every write of a provider takes an ``expected_generation``: with a number the write happens only while the provider has that
generation (compare-and-update), and None asks for nothing. The condition stands in the statement that writes.
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


#: An argument that leaves what is stored as it is, where None means something.
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
    """Which providers; what is empty or None asks for nothing, and all that is given must hold.

    :param in_tree: uuid of any provider of the tree.
    :param resources: class -> amount that must fit now (capacity, min_unit, max_unit, step rule) on the provider itself.
    :param required: of each set at least one trait.
    :param forbidden: none of these traits.
    :param member_of: of each set at least one aggregate (uuids).
    :param not_member_of: none of these aggregates.
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
    """A power of stores: providers one by one, as an API edits them.

    :class:`moorage.errors.NotFound` of an unknown provider has ``details['provider']``, of an unknown resource class
    ``details['resource_class']``, of an unknown trait ``details['trait']``. Numbers and names that can never be right are
    :class:`moorage.errors.InvalidInput` with ``details['path']``. Everything is one transaction; nothing is half written.
    """

    @abc.abstractmethod
    def create_provider(self, provider: ResourceProvider) -> ResourceProvider:
        """Create a provider, with generation 0, below ``provider.parent`` where that is given.

        :returns: it as it is stored.
        :raises AlreadyExists: the uuid or the name is taken; ``details['field']`` says which (``uuid`` or ``name``).
        :raises InvalidInput: the parent does not exist, or is the provider itself; path ``parent``.
        :raises TreeTooDeep: it would be below :data:`~moorage.allocation.interface.MOST_LEVELS` levels.
        """

    @abc.abstractmethod
    def provider(self, uuid: str) -> ResourceProvider:
        """A provider without its inventories.

        :raises NotFound: there is none.
        """

    @abc.abstractmethod
    def find_providers(
        self, query: ProviderFilter | None = None, *, after: str = "", limit: int | None = None
    ) -> list[ResourceProvider]:
        """Providers without their inventories, ordered by uuid, those after the given one; one statement.

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
        """Give a provider another name, or another place in a tree; its generation stays. Its children come with it.

        :param reparent: False: only a root may get a parent, and who has one keeps it.
        :raises AlreadyExists: the name is taken.
        :raises InvalidInput: no such parent, a parent below the provider itself, or a change that ``reparent`` forbids; path
            ``parent``.
        :raises TreeTooDeep: a provider would be below :data:`~moorage.allocation.interface.MOST_LEVELS` levels, and deeper than it
            was.
        """

    @abc.abstractmethod
    def inventories(self, uuid: str) -> ProviderUsage:
        """A provider with its inventories and what is used of them.

        :raises NotFound: there is none.
        """

    @abc.abstractmethod
    def set_inventories(
        self, uuid: str, items: Sequence[InventoryItem], expected_generation: int | None = None
    ) -> ResourceProvider:
        """Bring all inventories of a provider to the given state. Raises the generation.

        Classes must exist. ``reserved`` may be ``total``; capacity may fall below what is used.

        :returns: the provider with its inventories as they are now.
        :raises GenerationConflict: nothing was written.
        :raises InUse: an inventory that has allocations would vanish; ``details['resource_class']``.
        """

    @abc.abstractmethod
    def add_inventory(self, uuid: str, item: InventoryItem, expected_generation: int | None = None) -> ResourceProvider:
        """Add one inventory; as :meth:`set_inventories`.

        :raises AlreadyExists: there is one of the class.
        """

    @abc.abstractmethod
    def change_inventory(
        self, uuid: str, item: InventoryItem, expected_generation: int | None = None
    ) -> ResourceProvider:
        """Change one inventory; as :meth:`set_inventories`.

        :raises NotFound: the provider has none of the class; ``details['inventory']`` is the class.
        """

    @abc.abstractmethod
    def remove_inventory(
        self, uuid: str, resource_class: str, expected_generation: int | None = None
    ) -> ResourceProvider:
        """Remove one inventory; as :meth:`set_inventories`.

        :raises NotFound: the provider has none of the class; ``details['inventory']`` is the class.
        :raises InUse: it has allocations.
        """

    @abc.abstractmethod
    def provider_traits(self, uuid: str) -> tuple[ResourceProvider, tuple[str, ...]]:
        """A provider without inventories, and its traits, sorted.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def traits_of(self, providers: Sequence[str]) -> Mapping[str, frozenset[str]]:
        """Reads the traits of those of the providers that have any, by uuid; one statement."""

    @abc.abstractmethod
    def set_traits(
        self, uuid: str, traits: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        """Set all traits of a provider. Raises the generation.

        :raises NotFound: there is no such provider, or ``details['traits']`` (sorted) do not exist.
        :raises GenerationConflict: nothing was written.
        """

    def change_traits(
        self, uuid: str, added: Set[str], removed: Set[str] = frozenset(), transaction: Any | None = None
    ) -> bool:
        """Give a provider traits and take others away; the rest stay. Custom traits begin to exist with the first provider.

        Raises the generation where something changes. Inside ``transaction`` when given (stores with SHARED_TRANSACTION).

        A store overrides this method. The default makes no custom traits, and refuses a transaction.

        :returns: whether something changed.
        :raises NotFound: there is no such provider, or ``details['traits']`` (sorted) are no standard traits.
        :raises InvalidInput: a name that no trait can have.
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
        """A provider without inventories, and the uuids of its aggregates, sorted.

        :raises NotFound: there is no such provider.
        """

    @abc.abstractmethod
    def set_aggregates(
        self, uuid: str, aggregates: Set[str], expected_generation: int | None = None
    ) -> tuple[ResourceProvider, tuple[str, ...]]:
        """Set all aggregates of a provider. Raises the generation when one is expected, and only then, as Placement does.

        An aggregate is nothing but a uuid that providers have in common.

        :raises NotFound: there is no such provider.
        :raises GenerationConflict: nothing was written.
        """


class NameCatalogue(abc.ABC):
    """A power of stores: the names of resource classes and traits. Those of one's own begin with ``CUSTOM_``."""

    @abc.abstractmethod
    def resource_classes(self) -> list[ResourceClass]:
        """All resource classes: the standard ones in the order of their numbers, then custom ones in that of their creation."""

    @abc.abstractmethod
    def create_resource_class(self, name: str) -> bool:
        """Create a custom class where there is none; False when it exists (standard classes do).

        :raises InvalidInput: a name that no class can have.
        """

    @abc.abstractmethod
    def rename_resource_class(self, name: str, new_name: str) -> None:
        """Give a custom class another name; its inventories and allocations follow.

        :raises NotFound: there is none of the name.
        :raises AlreadyExists: the new name is taken.
        :raises InvalidInput: it is a standard class, or the new name can be none.
        """

    @abc.abstractmethod
    def delete_resource_class(self, name: str) -> None:
        """Remove a custom class.

        :raises NotFound: there is none.
        :raises InvalidInput: it is a standard class.
        :raises InUse: a provider has an inventory of it.
        """

    @abc.abstractmethod
    def traits(self, *, names: Set[str] | None = None, prefix: str = "", associated: bool | None = None) -> list[Trait]:
        """Traits, ordered by name: of these names, that begin so, that some provider has (True) or none has (False)."""

    @abc.abstractmethod
    def create_trait(self, name: str) -> bool:
        """Create a custom trait where there is none; False when it exists (standard traits do).

        :raises InvalidInput: a name that no trait can have.
        """

    @abc.abstractmethod
    def delete_trait(self, name: str) -> None:
        """Remove a custom trait.

        :raises NotFound: there is none.
        :raises InvalidInput: it is a standard trait.
        :raises InUse: a provider has it.
        """
