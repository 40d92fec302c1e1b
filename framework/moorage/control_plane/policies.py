# SPDX-License-Identifier: Apache-2.0
"""The policies of all parts and dialects, for the API and for oslo.policy's sample generator."""

from __future__ import annotations

from typing import Any

from moorage.control_plane.interface import API_EXTENSIONS
from moorage.http.policy import rules
from moorage.http.routes import PolicyRule
from moorage.part import parts

__all__ = ["core_policies", "list_rules"]


def core_policies() -> tuple[PolicyRule, ...]:
    """Returns the rules that the routes of the parts ask."""
    return tuple(
        rule
        for part in parts()
        for module in (*part.declared.api, *part.declared.routes)
        for rule in part.load(f"{module}:POLICIES")
    )


def list_rules() -> list[Any]:
    """Entry point of the group oslo.policy.policies: all rules, with those of all dialects that are installed."""
    dialects = API_EXTENSIONS.load_all(sorted(API_EXTENSIONS.installed()))
    return rules((*core_policies(), *(rule for each in dialects for rule in each.plugin.policies)))
