# SPDX-License-Identifier: Apache-2.0
"""Options of the quota source ``keystone``."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["list_opts"]

_KEYSTONE: Sequence[cfg.Opt] = (
    cfg.StrOpt("auth_url", default="", help="The address of Keystone, for example https://keystone.example.org/v3."),
    cfg.StrOpt("username", default="moorage", help="A user with the role reader on the system."),
    cfg.StrOpt("password", default="", secret=True, help="The password of the user."),
    cfg.StrOpt("user_domain_id", default="default", help="The domain of the user."),
    cfg.StrOpt(
        "cafile", default="", help="Certificates that Keystone's certificate is checked with. Empty: the system's."
    ),
    cfg.StrOpt(
        "service",
        default="moorage",
        help="The name of the service in Keystone's catalog for which limits are registered.",
    ),
    cfg.StrOpt(
        "region",
        default="",
        help="The region whose limits apply, besides limits without a region. Empty: only those without a region.",
    ),
    cfg.FloatOpt("timeout", default=30.0, min=1.0, help="Seconds that one answer of Keystone may take."),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group."""
    return [("quota_keystone", _KEYSTONE)]
