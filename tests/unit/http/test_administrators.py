# SPDX-License-Identifier: Apache-2.0
"""Identities and administrators: noauth's tokens, and one meaning of administrator on every mount."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Mapping
from typing import Any
from unittest import mock

from keystoneauth1 import noauth
from oslo_config import cfg

from moorage import errors
from moorage.context import RequestContext
from moorage.control_plane import options as control_plane_options
from moorage.control_plane.interface import API_EXTENSIONS
from moorage.control_plane.policies import core_policies
from moorage.http import authentication, options
from moorage.http.policy import AccessPolicy

MOUNTS = ("placement", "baremetal", "volume", "data_processing")
#: One rule of each mount that changes what belongs to the system or to another project.
ADMINISTRATION = (
    "scheduling:nodes:create",
    "scheduling:shards:update",
    "placement:allocations:delete",
    "placement:resource_providers:inventories:update",
    "baremetal:node:update:shard",
    "baremetal:node:delete",
    "volume:admin",
    "volume:workers:cleanup",
    "data_processing:change",
)


def configuration(folder: str, **settings: Any) -> cfg.ConfigOpts:
    conf = cfg.ConfigOpts()
    for group, found in (*options.list_opts(), *control_plane_options.list_opts()):
        conf.register_opts(found, group=group)
    conf([])
    conf.set_override("state_dir", folder, group="control_plane")
    for name, value in settings.items():
        conf.set_override(name, value, group="api")
    return conf


class IdentityCase(unittest.TestCase):
    strategy = ""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def identify(self, headers: Mapping[str, str], **settings: Any) -> RequestContext:
        environ = {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()}
        conf = configuration(self.folder, auth_strategy=self.strategy, **settings)
        return authentication.authenticator(conf)(environ)


class NoauthTests(IdentityCase):
    strategy = "noauth"

    def test_admin_and_no_token_have_every_role_and_system_scope(self) -> None:
        for headers, project in (
            ({}, None),
            ({"X-Auth-Token": ""}, None),
            ({"X-Auth-Token": str(noauth.NoAuth().get_token(mock.Mock()))}, None),
            ({"X-Auth-Token": "admin"}, None),
            ({"X-Auth-Token": "admin:lab"}, "lab"),
        ):
            with self.subTest(headers=headers):
                found = self.identify(headers)
                self.assertEqual({"admin", "manager", "member", "reader", "service"}, set(found.roles))
                self.assertEqual(("admin", project, "all"), (found.user_id, found.project_id, found.system_scope))

    def test_another_user_is_a_member_of_the_project(self) -> None:
        for token, user, project in (("ann:lab", "ann", "lab"), ("ann", "ann", "ann")):
            with self.subTest(token=token):
                found = self.identify({"X-Auth-Token": token})
                self.assertEqual({"member", "reader"}, set(found.roles))
                self.assertEqual((user, project, None), (found.user_id, found.project_id, found.system_scope))

    def test_the_header_gives_other_roles(self) -> None:
        found = self.identify({"X-Auth-Token": "ann:lab", "X-Roles": "reader"})
        self.assertEqual(["reader"], list(found.roles))
        found = self.identify({"X-Auth-Token": "nova:service", "X-Roles": "service, admin"})
        self.assertEqual({"admin", "manager", "member", "reader", "service"}, set(found.roles))
        self.assertIsNone(found.system_scope)
        self.assertEqual([], list(self.identify({"X-Auth-Token": "ann", "X-Roles": ""}).roles))


class OneAdministratorTests(IdentityCase):
    """The same person may do the same on every mount."""

    strategy = "keystone"

    def setUp(self) -> None:
        super().setUp()
        extensions = API_EXTENSIONS.load_all(MOUNTS)
        self.policy = AccessPolicy(
            (*core_policies(), *(rule for each in extensions for rule in each.plugin.policies)), None
        )

    def token(self, roles: str, **scope: str) -> dict[str, str]:
        return {"X-Identity-Status": "Confirmed", "X-User-Id": "u", "X-Roles": roles, **scope}

    def allowed(self, context: RequestContext) -> set[str]:
        found = set()
        for rule in ADMINISTRATION:
            try:
                self.policy.check(rule, context, {"project_id": "other", "node.owner": "other"})
            except errors.Forbidden:
                continue
            found.add(rule)
        return found

    def test_an_administrator_of_a_project_is_none_of_the_system(self) -> None:
        for roles in ("admin,manager,member,reader", "member,reader"):
            context = self.identify(self.token(roles, **{"X-Project-Id": "mine"}))
            self.assertEqual(set(), self.allowed(context))

    def test_an_administrator_of_the_system_may_everything_on_all_mounts(self) -> None:
        for enforce in (True, False):
            headers = self.token("admin,manager,member,reader", **{"Openstack-System-Scope": "all"})
            context = self.identify(headers, enforce_scope=enforce)
            self.assertEqual(set(ADMINISTRATION), self.allowed(context))

    def test_without_scopes_role_admin_is_enough_on_all_mounts_and_other_roles_are_not(self) -> None:
        context = self.identify(
            self.token("admin,manager,member,reader", **{"X-Project-Id": "mine"}), enforce_scope=False
        )
        self.assertEqual(set(ADMINISTRATION), self.allowed(context))
        self.assertEqual("mine", context.project_id)
        context = self.identify(self.token("member,reader", **{"X-Project-Id": "mine"}), enforce_scope=False)
        self.assertEqual(set(), self.allowed(context))

    def test_the_refusal_tells_an_administrator_of_a_project_what_to_do(self) -> None:
        context = self.identify(self.token("admin,member", **{"X-Project-Id": "mine"}))
        with self.assertRaises(errors.Forbidden) as refused:
            self.policy.check("placement:allocations:delete", context)
        self.assertIn("--os-system-scope all", refused.exception.message)
        self.assertIn("enforce_scope", refused.exception.message)
