# SPDX-License-Identifier: Apache-2.0
"""The Placement dialect's policies: Placement's rules under Placement's names, so that a deployer's policy file keeps its meaning.

An administrator is the same caller here as in /scheduling/v1 (``rule:system_admin``). Placement itself lets role ``admin`` of any
project in; ``[api] enforce_scope = false`` does that for all mounts.
"""

from __future__ import annotations

from moorage.http.routes import PolicyRule

__all__ = [
    "AGGREGATES_LIST",
    "AGGREGATES_UPDATE",
    "ALLOCATIONS_DELETE",
    "ALLOCATIONS_LIST",
    "ALLOCATIONS_MANAGE",
    "ALLOCATIONS_UPDATE",
    "CANDIDATES_LIST",
    "CLASSES_CREATE",
    "CLASSES_DELETE",
    "CLASSES_LIST",
    "CLASSES_SHOW",
    "CLASSES_UPDATE",
    "INVENTORIES_CREATE",
    "INVENTORIES_DELETE",
    "INVENTORIES_LIST",
    "INVENTORIES_SHOW",
    "INVENTORIES_UPDATE",
    "POLICIES",
    "PROVIDERS_CREATE",
    "PROVIDERS_DELETE",
    "PROVIDERS_LIST",
    "PROVIDERS_SHOW",
    "PROVIDERS_UPDATE",
    "PROVIDER_ALLOCATIONS_LIST",
    "PROVIDER_TRAITS_DELETE",
    "PROVIDER_TRAITS_LIST",
    "PROVIDER_TRAITS_UPDATE",
    "PROVIDER_USAGES",
    "RESHAPE",
    "TRAITS_DELETE",
    "TRAITS_LIST",
    "TRAITS_SHOW",
    "TRAITS_UPDATE",
    "USAGES",
]

AGGREGATES_LIST = "placement:resource_providers:aggregates:list"
AGGREGATES_UPDATE = "placement:resource_providers:aggregates:update"
ALLOCATIONS_DELETE = "placement:allocations:delete"
ALLOCATIONS_LIST = "placement:allocations:list"
ALLOCATIONS_MANAGE = "placement:allocations:manage"
ALLOCATIONS_UPDATE = "placement:allocations:update"
CANDIDATES_LIST = "placement:allocation_candidates:list"
CLASSES_CREATE = "placement:resource_classes:create"
CLASSES_DELETE = "placement:resource_classes:delete"
CLASSES_LIST = "placement:resource_classes:list"
CLASSES_SHOW = "placement:resource_classes:show"
CLASSES_UPDATE = "placement:resource_classes:update"
INVENTORIES_CREATE = "placement:resource_providers:inventories:create"
INVENTORIES_DELETE = "placement:resource_providers:inventories:delete"
INVENTORIES_LIST = "placement:resource_providers:inventories:list"
INVENTORIES_SHOW = "placement:resource_providers:inventories:show"
INVENTORIES_UPDATE = "placement:resource_providers:inventories:update"
PROVIDERS_CREATE = "placement:resource_providers:create"
PROVIDERS_DELETE = "placement:resource_providers:delete"
PROVIDERS_LIST = "placement:resource_providers:list"
PROVIDERS_SHOW = "placement:resource_providers:show"
PROVIDERS_UPDATE = "placement:resource_providers:update"
PROVIDER_ALLOCATIONS_LIST = "placement:resource_providers:allocations:list"
PROVIDER_TRAITS_DELETE = "placement:resource_providers:traits:delete"
PROVIDER_TRAITS_LIST = "placement:resource_providers:traits:list"
PROVIDER_TRAITS_UPDATE = "placement:resource_providers:traits:update"
PROVIDER_USAGES = "placement:resource_providers:usages"
RESHAPE = "placement:reshaper:reshape"
TRAITS_DELETE = "placement:traits:delete"
TRAITS_LIST = "placement:traits:list"
TRAITS_SHOW = "placement:traits:show"
TRAITS_UPDATE = "placement:traits:update"
USAGES = "placement:usages"

_ADMIN_OR_SERVICE = "rule:admin_or_service_api"

POLICIES = (
    PolicyRule("admin_api", "rule:system_admin", "Administrators, in rules of the Placement dialect."),
    PolicyRule("service_api", "role:service", "Other services, in rules of the Placement dialect."),
    PolicyRule("admin_or_service_api", "rule:admin_api or rule:service_api", "Nearly all of the Placement dialect."),
    PolicyRule("project_reader_api", "role:reader and project_id:%(project_id)s", "Readers of the project."),
    PolicyRule(
        "admin_or_project_reader_or_service_api",
        "rule:admin_or_service_api or rule:project_reader_api",
        "What readers of a project may see as well.",
    ),
    PolicyRule(PROVIDERS_LIST, _ADMIN_OR_SERVICE, "List resource providers."),
    PolicyRule(PROVIDERS_CREATE, _ADMIN_OR_SERVICE, "Create a resource provider."),
    PolicyRule(PROVIDERS_SHOW, _ADMIN_OR_SERVICE, "Show a resource provider."),
    PolicyRule(PROVIDERS_UPDATE, _ADMIN_OR_SERVICE, "Update a resource provider."),
    PolicyRule(PROVIDERS_DELETE, _ADMIN_OR_SERVICE, "Delete a resource provider."),
    PolicyRule(INVENTORIES_LIST, _ADMIN_OR_SERVICE, "List inventories of a resource provider."),
    PolicyRule(INVENTORIES_CREATE, _ADMIN_OR_SERVICE, "Create an inventory."),
    PolicyRule(INVENTORIES_SHOW, _ADMIN_OR_SERVICE, "Show an inventory."),
    PolicyRule(INVENTORIES_UPDATE, _ADMIN_OR_SERVICE, "Update inventories."),
    PolicyRule(INVENTORIES_DELETE, _ADMIN_OR_SERVICE, "Delete inventories."),
    PolicyRule(AGGREGATES_LIST, _ADMIN_OR_SERVICE, "List aggregates of a resource provider."),
    PolicyRule(AGGREGATES_UPDATE, _ADMIN_OR_SERVICE, "Set aggregates of a resource provider."),
    PolicyRule(PROVIDER_TRAITS_LIST, _ADMIN_OR_SERVICE, "List traits of a resource provider."),
    PolicyRule(PROVIDER_TRAITS_UPDATE, _ADMIN_OR_SERVICE, "Set traits of a resource provider."),
    PolicyRule(PROVIDER_TRAITS_DELETE, _ADMIN_OR_SERVICE, "Take all traits from a resource provider."),
    PolicyRule(PROVIDER_USAGES, _ADMIN_OR_SERVICE, "Show what is used of a resource provider."),
    PolicyRule(PROVIDER_ALLOCATIONS_LIST, _ADMIN_OR_SERVICE, "List allocations of a resource provider."),
    PolicyRule(CLASSES_LIST, _ADMIN_OR_SERVICE, "List resource classes."),
    PolicyRule(CLASSES_CREATE, _ADMIN_OR_SERVICE, "Create a resource class."),
    PolicyRule(CLASSES_SHOW, _ADMIN_OR_SERVICE, "Show a resource class."),
    PolicyRule(CLASSES_UPDATE, _ADMIN_OR_SERVICE, "Rename or create a resource class."),
    PolicyRule(CLASSES_DELETE, _ADMIN_OR_SERVICE, "Delete a resource class."),
    PolicyRule(TRAITS_LIST, _ADMIN_OR_SERVICE, "List traits."),
    PolicyRule(TRAITS_SHOW, _ADMIN_OR_SERVICE, "Ask whether a trait exists."),
    PolicyRule(TRAITS_UPDATE, _ADMIN_OR_SERVICE, "Create a trait."),
    PolicyRule(TRAITS_DELETE, _ADMIN_OR_SERVICE, "Delete a trait."),
    PolicyRule(ALLOCATIONS_MANAGE, _ADMIN_OR_SERVICE, "Set allocations of several consumers."),
    PolicyRule(ALLOCATIONS_LIST, _ADMIN_OR_SERVICE, "List allocations of a consumer."),
    PolicyRule(ALLOCATIONS_UPDATE, _ADMIN_OR_SERVICE, "Set allocations of a consumer."),
    PolicyRule(ALLOCATIONS_DELETE, _ADMIN_OR_SERVICE, "Release a consumer's allocations."),
    PolicyRule(CANDIDATES_LIST, _ADMIN_OR_SERVICE, "List allocation candidates."),
    PolicyRule(USAGES, "rule:admin_or_project_reader_or_service_api", "Show what a project uses."),
    PolicyRule(RESHAPE, "rule:service_api", "Move inventories and allocations between providers in one step."),
)
