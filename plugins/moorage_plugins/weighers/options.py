# SPDX-License-Identifier: Apache-2.0
"""Options of the weighers, a group for each."""

from __future__ import annotations

from collections.abc import Sequence

from oslo_config import cfg

__all__ = ["list_opts"]

_HELP = "How much free {} counts: 0 not at all, negative stacks instead of spreading. A reload takes it over."


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    return [
        ("weigher_cpu", [cfg.FloatOpt("multiplier", default=1.0, help=_HELP.format("VCPU"))]),
        ("weigher_ram", [cfg.FloatOpt("multiplier", default=1.0, help=_HELP.format("memory"))]),
    ]
