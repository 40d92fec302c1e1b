# SPDX-License-Identifier: Apache-2.0
"""All policies of the core, for the API and for oslo.policy's sample generator."""

from __future__ import annotations

from typing import Any

from moorage.allocation import api as allocation_api
from moorage.allocation import pools_api
from moorage.cleanup import api as cleanup_api
from moorage.control_plane import api as control_plane_api
from moorage.coordination import api as coordination_api
from moorage.fleet import api as fleet_api
from moorage.fleet import facts_api
from moorage.http.policy import rules
from moorage.http.routes import PolicyRule
from moorage.instances import server_groups_api
from moorage.scheduling import api as scheduling_api
from moorage.services import api as services_api
from moorage.sharding import api as sharding_api

__all__ = ["POLICIES", "list_rules"]

POLICIES: tuple[PolicyRule, ...] = (
    *services_api.POLICIES,
    *fleet_api.POLICIES,
    *facts_api.POLICIES,
    *allocation_api.POLICIES,
    *pools_api.POLICIES,
    *scheduling_api.POLICIES,
    *cleanup_api.POLICIES,
    *control_plane_api.POLICIES,
    *server_groups_api.POLICIES,
    *sharding_api.POLICIES,
    *coordination_api.POLICIES,
)


def list_rules() -> list[Any]:
    """Entry point of the group oslo.policy.policies."""
    return rules(POLICIES)
