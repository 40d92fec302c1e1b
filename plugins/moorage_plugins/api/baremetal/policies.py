# SPDX-License-Identifier: Apache-2.0
"""The bare metal dialect's policies, under Ironic's names.

Two things differ from Ironic. An administrator of a project may read the counts of shards. Enrolling a node with a shard needs the
right to change a node's shard.
"""

from __future__ import annotations

from collections.abc import Sequence

from moorage.http.routes import PolicyRule

__all__ = ["POLICIES"]

_SYSTEM_READER = "(role:reader and system_scope:all) or (role:service and system_scope:all)"
_SYSTEM_MEMBER = "(role:member and system_scope:all) or (role:service and system_scope:all)"
_SYSTEM_ADMIN = "rule:system_admin"
_OWNER = "project_id:%(node.owner)s"
_LESSEE = "project_id:%(node.lessee)s"


def _node(name: str, check: str, description: str) -> PolicyRule:
    return PolicyRule(f"baremetal:node:{name}", check, description)


def _attached(kind: str) -> Sequence[PolicyRule]:
    return (
        PolicyRule(f"baremetal:{kind}:list_all", _SYSTEM_READER, f"List the {kind}s of all nodes."),
        PolicyRule(f"baremetal:{kind}:list", "role:reader or role:service", f"List the {kind}s of one's own nodes."),
        PolicyRule(
            f"baremetal:{kind}:write",
            f"({_SYSTEM_ADMIN}) or (role:service and system_scope:all) or (role:admin and {_OWNER})",
            f"Create, change and delete {kind}s of a node.",
        ),
    )


POLICIES: tuple[PolicyRule, ...] = (
    _node("list_all", _SYSTEM_READER, "List all nodes and show each."),
    _node("list", "role:reader or role:service", "List the nodes that one's project owns or leases, and show each."),
    _node("create", f"({_SYSTEM_ADMIN}) or (role:service and system_scope:all)", "Enrol a node for whomever."),
    _node(
        "create:self_owned_node",
        f"({_SYSTEM_ADMIN}) or role:service or (role:admin and project_id:%(project_id)s)",
        "Enrol a node that one's own project owns.",
    ),
    _node("update", f"{_SYSTEM_MEMBER} or ((role:member or role:service) and {_OWNER})", "Change a node."),
    _node("update:shard", _SYSTEM_ADMIN, "Set the shard of a node, when it is enrolled or later."),
    _node("update:owner", _SYSTEM_MEMBER, "Give a node to another project."),
    _node("update:lessee", f"{_SYSTEM_MEMBER} or (role:member and {_OWNER})", "Lend a node to another project."),
    _node("delete", f"({_SYSTEM_ADMIN}) or (role:admin and {_OWNER})", "Remove a node."),
    PolicyRule(
        "baremetal:shards:get", f"{_SYSTEM_READER} or role:admin", "See the shards and how many nodes each has."
    ),
    *_attached("port"),
    *_attached("portgroup"),
)
