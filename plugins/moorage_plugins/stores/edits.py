# SPDX-License-Identifier: Apache-2.0
"""Edits of a provider's inventories, each as what it makes of the present ones; the same for every store."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import InventoryItem, ProviderCatalogue, ResourceProvider
from moorage_plugins.stores.checks import check_inventories

__all__ = ["Edit", "InventoryEdits"]

#: From the present inventories, by class, to those that shall be.
Edit = Callable[[Mapping[str, InventoryItem]], Sequence[InventoryItem]]


class InventoryEdits(ProviderCatalogue):
    """The four edits over one way to make them."""

    @abc.abstractmethod
    def _edit(self, uuid: str, expected: int | None, edit: Edit) -> ResourceProvider:
        """Make an edit of what is there when nobody else can write it.

        :param expected: the generation that the provider must have; None: any.
        """

    @override
    def set_inventories(
        self, uuid: str, items: Sequence[InventoryItem], expected_generation: int | None = None
    ) -> ResourceProvider:
        check_inventories(uuid, items)
        return self._edit(uuid, expected_generation, lambda present: items)

    @override
    def add_inventory(self, uuid: str, item: InventoryItem, expected_generation: int | None = None) -> ResourceProvider:
        check_inventories(uuid, [item])

        def edit(present: Mapping[str, InventoryItem]) -> Sequence[InventoryItem]:
            if item.resource_class in present:
                raise errors.AlreadyExists(
                    f"Provider {uuid} has an inventory of {item.resource_class} already.",
                    inventory=item.resource_class,
                )
            return [*present.values(), item]

        return self._edit(uuid, expected_generation, edit)

    @override
    def change_inventory(
        self, uuid: str, item: InventoryItem, expected_generation: int | None = None
    ) -> ResourceProvider:
        check_inventories(uuid, [item])

        def edit(present: Mapping[str, InventoryItem]) -> Sequence[InventoryItem]:
            _must_have(uuid, item.resource_class, present)
            return list((dict(present) | {item.resource_class: item}).values())

        return self._edit(uuid, expected_generation, edit)

    @override
    def remove_inventory(
        self, uuid: str, resource_class: str, expected_generation: int | None = None
    ) -> ResourceProvider:
        def edit(present: Mapping[str, InventoryItem]) -> Sequence[InventoryItem]:
            _must_have(uuid, resource_class, present)
            return [item for name, item in present.items() if name != resource_class]

        return self._edit(uuid, expected_generation, edit)


def _must_have(uuid: str, name: str, present: Mapping[str, InventoryItem]) -> None:
    if name not in present:
        raise errors.NotFound(f"Provider {uuid} has no inventory of {name}.", inventory=name)
