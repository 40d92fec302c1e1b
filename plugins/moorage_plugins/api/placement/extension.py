# SPDX-License-Identifier: Apache-2.0
"""The plugin ``placement`` of the group moorage.api."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from moorage.api.dialect_application import Operation
from moorage.control_plane.interface import ApiExtension, Wsgi
from moorage_plugins.api.placement.application import DIALECT, PlacementApplication, versions_document

__all__ = ["PlacementApi"]


class PlacementApi(ApiExtension):
    """OpenStack Placement's REST API, microversions 1.0 to 1.39."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/placement"

    @override
    def application(self) -> Wsgi:
        operations = [Operation("GET", path, versions_document, public=True) for path in ("", "/")]
        return PlacementApplication(DIALECT, operations, self.tools)
