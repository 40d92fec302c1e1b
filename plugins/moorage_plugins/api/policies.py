# SPDX-License-Identifier: Apache-2.0
"""All policies of the reference dialects, for oslo.policy's sample generator and the documentation."""

from __future__ import annotations

from oslo_policy import policy

from moorage.control_plane.interface import ApiExtension
from moorage_plugins.api.baremetal.extension import BaremetalApi
from moorage_plugins.api.placement.extension import PlacementApi
from moorage_plugins.api.volume.extension import VolumeApi
from moorage_plugins.data_processing.api import DataProcessingApi

__all__ = ["list_rules"]

_EXTENSIONS: tuple[type[ApiExtension], ...] = (PlacementApi, BaremetalApi, VolumeApi, DataProcessingApi)


def list_rules() -> list[policy.RuleDefault]:
    """Entry point of the group oslo.policy.policies."""
    return [
        policy.RuleDefault(rule.name, rule.check, rule.description)
        for extension in _EXTENSIONS
        for rule in extension.policies
    ]
