# SPDX-License-Identifier: Apache-2.0
"""The options of Acme's plugins; Moorage finds them by the entry point in setup.cfg."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["list_opts"]

_COOL = (
    cfg.FloatOpt(
        "multiplier", mutable=True, default=1.0, help="How much a cool inlet counts; negative prefers hot ones."
    ),
)
_LICENCES = (
    cfg.FloatOpt(
        "interval",
        default=60.0,
        min=0.05,
        deprecated_name="expiry_interval",
        help="Seconds between looks for licences whose time is over.",
    ),
)
_REFUSALS = (
    cfg.StrOpt(
        "file", mutable=True, default="", help="Where refusals are counted. Empty: refusals.json in the state folder."
    ),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group."""
    return [("weigher_cool", _COOL), ("acme_licences", _LICENCES), ("acme_refusals", _REFUSALS)]
