# SPDX-License-Identifier: Apache-2.0
"""What the part brings: the roles and what joins the families."""

from moorage.part import Part

__all__ = ["PART"]

PART = Part(
    interface="moorage.control_plane.interface",
    options="moorage.control_plane.options",
    checks={
        "log": "moorage.control_plane.logs:check",
        "agent": "moorage.control_plane.interface:AGENT_SERVICES.chosen",
        "allocation store": "moorage.control_plane.factories:check_allocation_store",
        "quota source": "moorage.control_plane.factories:check_quota_source",
        "cleanup": "moorage.control_plane.cleanup_endpoints:check",
        "periodic tasks": "moorage.control_plane.periodic:check_tasks",
        "coordination": "moorage.control_plane.periodic:check_backend",
        "API": "moorage.control_plane.api_assembly:check",
    },
    periodic_tasks={
        "evacuate_hosts": "moorage.control_plane.evacuation_task:EvacuateHosts",
        "expire_claims": "moorage.control_plane.core_tasks:ExpireClaims",
        "purge_events": "moorage.control_plane.core_tasks:PurgeEvents",
        "purge_idempotency_keys": "moorage.control_plane.core_tasks:PurgeIdempotencyKeys",
        "read_quotas": "moorage.control_plane.core_tasks:ReadQuotas",
        "reconcile": "moorage.control_plane.core_tasks:Reconcile",
    },
    upgrade_checks={
        "services": "moorage.control_plane.upgrade_checks:services",
        "coordination": "moorage.control_plane.upgrade_checks:coordination",
        "followers": "moorage.control_plane.upgrade_checks:followers",
    },
)
