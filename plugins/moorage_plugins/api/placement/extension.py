# SPDX-License-Identifier: Apache-2.0
"""The plugin ``placement`` of the group moorage.api."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import FullStore
from moorage.control_plane.interface import ApiExtension
from moorage.http.routes import Route, Wsgi
from moorage_plugins.api.placement import (
    allocations,
    candidates,
    inventories,
    policies,
    providers,
    resource_classes,
    traits_and_aggregates,
    usages,
)
from moorage_plugins.api.placement.application import PlacementApplication, versions_document

__all__ = ["PlacementApi"]


class PlacementApi(ApiExtension):
    """OpenStack Placement's REST API, microversions 1.0 to 1.39."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/placement"
    policies = policies.POLICIES

    @override
    def application(self) -> Wsgi:
        store = self.tools.store()
        if not isinstance(store, FullStore):
            raise errors.ConfigError(
                f"The allocation store {type(store).__name__} has not all the powers that the Placement dialect needs "
                "(moorage.allocation.interface.FullStore). Choose sql for [allocation] store, or take placement out of "
                "[api] enabled_apis."
            )
        routes = (
            *(Route("GET", path, versions_document, public=True) for path in ("", "/")),
            *providers.routes(store),
            *inventories.routes(store),
            *traits_and_aggregates.routes(store),
            *resource_classes.routes(store),
            *usages.routes(store),
            *allocations.routes(store),
            *candidates.routes(store),
        )
        return PlacementApplication(routes, store, self.tools)
