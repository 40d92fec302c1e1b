# SPDX-License-Identifier: Apache-2.0
"""Authorisation by oslo.policy: each request is checked once, before its handler runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oslo_config import cfg
from oslo_policy import opts as policy_opts
from oslo_policy import policy as oslo_policy

from moorage import errors
from moorage.context import RequestContext
from moorage.http.routes import PolicyRule

__all__ = ["BASE_RULES", "AccessPolicy", "rules"]

#: Rules that other rules refer to. Roles with system scope read and write everything; roles of a project its own resources.
#: ``system_admin`` is the one meaning of administrator; every mount refers to it.
BASE_RULES: tuple[PolicyRule, ...] = (
    PolicyRule("system_admin", "role:admin and system_scope:all", "Administrator of the system."),
    PolicyRule("system_manager", "role:manager and system_scope:all", "Manager of the system."),
    PolicyRule("system_member", "role:member and system_scope:all", "Operator of the system."),
    PolicyRule(
        "system_reader", "role:reader and system_scope:all or role:service", "Reader of the system, or a service."
    ),
    PolicyRule("project_manager", "role:manager and project_id:%(project_id)s", "Manager of the project."),
    PolicyRule("project_member", "role:member and project_id:%(project_id)s", "Member of the project."),
    PolicyRule("project_reader", "role:reader and project_id:%(project_id)s", "Reader of the project."),
    PolicyRule("service", "role:service", "Another service."),
)


def rules(policies: Sequence[PolicyRule]) -> list[oslo_policy.RuleDefault]:
    """oslo.policy's form of the base rules and the given ones."""
    return [oslo_policy.RuleDefault(rule.name, rule.check, rule.description) for rule in (*BASE_RULES, *policies)]


class AccessPolicy:
    """Decides. Decisions without a target depend on roles, scope and project alone and are remembered."""

    def __init__(self, policies: Sequence[PolicyRule], policy_file: str | None) -> None:
        if policy_file and not Path(policy_file).is_file():
            # oslo.policy would go on with the defaults.
            raise errors.ConfigError(f"[api] policy_file = {policy_file}: there is no such file.")
        conf = cfg.ConfigOpts()
        conf([], default_config_files=[], default_config_dirs=[])
        policy_opts.set_defaults(conf, policy_file=policy_file or "no-policy-file")
        self._enforcer = oslo_policy.Enforcer(conf)
        self._enforcer.suppress_deprecation_warnings = True
        self._enforcer.register_defaults(rules(policies))
        try:
            self._enforcer.load_rules()
            self._enforcer.check_rules(raise_on_violation=True)
        except Exception as error:
            raise errors.ConfigError(f"The policy {policy_file} cannot be used: {error}") from error
        self._refuse_mistakes(str(policy_file))
        self._known: dict[tuple[Any, ...], bool] = {}

    def _refuse_mistakes(self, policy_file: str) -> None:
        """oslo.policy takes a check that it cannot read for a refusal of everybody, and a misspelt name for a rule of its own."""
        for name, rule in self._enforcer.file_rules.items():
            if name not in self._enforcer.registered_rules:
                near = difflib.get_close_matches(name, self._enforcer.registered_rules, n=1)
                meant = f"; {near[0]} was meant?" if near else ""
                raise errors.ConfigError(
                    f"The policy {policy_file} cannot be used: nothing asks for the rule {name}{meant}."
                )
            if str(rule.check) == "!" and rule.check_str.strip() != "!":
                raise errors.ConfigError(
                    f"The policy {policy_file} cannot be used: the check of {name}, {rule.check_str!r}, cannot be read."
                )

    def check(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> None:
        """Refuse what the caller may not do.

        :param target: what is acted upon; None: something of the caller's own project.
        :raises Forbidden: names the rule.
        """
        if target is not None:
            allowed = self._decide(rule, context, target)
        else:
            key = (rule, tuple(context.roles or ()), context.system_scope, context.project_id)
            known = self._known.get(key)
            if known is None:
                if len(self._known) > 10_000:
                    self._known.clear()
                known = self._known[key] = self._decide(rule, context, {"project_id": context.project_id})
            allowed = known
        if not allowed:
            message = f"The policy {rule} does not let you do this."
            if "admin" in (context.roles or ()) and not context.system_scope:
                message += (
                    " Your role admin is of a project. Use a token of the system scope (openstack --os-system-scope all), or have "
                    "the operator set [api] enforce_scope = false."
                )
            raise errors.Forbidden(message, rule=rule)

    def _decide(self, rule: str, context: RequestContext, target: Mapping[str, Any]) -> bool:
        credentials = {
            "roles": list(context.roles or ()),
            "system_scope": context.system_scope,
            "project_id": context.project_id,
            "user_id": context.user_id,
        }
        known = {name: value for name, value in target.items() if value is not None}
        return bool(self._enforcer.enforce(rule, known, credentials))
