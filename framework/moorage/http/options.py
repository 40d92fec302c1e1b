# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[api]``, and of ``[cors]`` and ``[oslo_middleware]``, which oslo.middleware owns."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg
from oslo_middleware import cors, http_proxy_to_wsgi

__all__ = ["GROUP", "OPTS", "list_opts"]

GROUP = cfg.OptGroup("api", title="The HTTP API")

OPTS: Sequence[cfg.Opt] = (
    cfg.StrOpt("bind", default="127.0.0.1:8780", help="Address and port of the embedded server."),
    cfg.IntOpt(
        "threads",
        default=64,
        min=1,
        max=1024,
        help="Requests that one process answers at the same time. Streams (events, long polls) are not counted.",
    ),
    cfg.StrOpt(
        "auth_strategy",
        default="http_basic",
        choices=[
            (
                "noauth",
                "no password is checked: the token admin[:project] has all roles, the token user:project is a member of the "
                "project, the header X-Roles gives other roles, and a request without a token is the administrator's; refused "
                "unless bound to a loopback address",
            ),
            ("http_basic", "users of a file with bcrypt hashes"),
            ("keystone", "tokens of Keystone, see [keystone_authtoken]; needs the extra keystone"),
        ],
        mutable=True,
        help="How callers are authenticated.",
    ),
    cfg.BoolOpt(
        "enforce_scope",
        default=True,
        mutable=True,
        help="Tell the administrator of the system from administrators of projects. true: an administrator has role admin and "
        "a token of the system scope (openstack --os-system-scope all). false: role admin in any project makes an administrator "
        "of everything, as in Nova, Cinder and Placement by default. Holds for /scheduling/v1 and all dialects; http_basic's "
        "users always have the system scope.",
    ),
    cfg.StrOpt(
        "http_basic_auth_user_file",
        mutable=True,
        help="Lines of user:bcrypt-hash[:role,role...]; without roles a user is an administrator. Unset: 'users' in the "
        "state directory, made with a generated password where it is missing. A change is noticed.",
    ),
    cfg.IntOpt(
        "max_body_bytes",
        default=4 * 1024 * 1024,
        min=1024,
        mutable=True,
        help="The largest body of a request, in bytes.",
    ),
    cfg.ListOpt(
        "enabled_apis",
        default=["placement", "baremetal", "volume"],
        mutable=True,
        help="The dialects (entry-point group moorage.api) that are served beside /scheduling/v1.",
    ),
    cfg.DictOpt(
        "mounts",
        default={},
        mutable=True,
        help="Where dialects are mounted instead of at their own place, as name:path pairs: placement:/ serves the Placement "
        "dialect at the root, and all the others where they were.",
    ),
    cfg.StrOpt("policy_file", mutable=True, help="Policy overrides (YAML)."),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [(GROUP.name, OPTS), ("cors", cors.CORS_OPTS), ("oslo_middleware", http_proxy_to_wsgi.OPTS)]
