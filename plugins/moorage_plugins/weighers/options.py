# SPDX-License-Identifier: Apache-2.0
"""Options of the weighers, a group for each. A reload takes all of them over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from oslo_config import cfg, types
from typing_extensions import override

__all__ = ["list_opts", "ratio"]

#: Weigher -> its multiplier, and what counts.
_MULTIPLIERS: Sequence[tuple[str, float, str]] = (
    ("cpu", 1.0, "How much free VCPU counts: 0 not at all, negative stacks instead of spreading."),
    ("ram", 1.0, "How much free memory counts: 0 not at all, negative stacks instead of spreading."),
    ("disk", 1.0, "How much free disk counts: 0 not at all, negative stacks instead of spreading."),
    (
        "least_waste",
        10.0,
        "How much it counts that a node's scarce resources stay free for requests that ask for them.",
    ),
    ("io_ops", -1.0, "How much the number of busy instances counts: negative avoids nodes with many."),
    ("num_instances", 0.0, "How much the number of instances counts: negative avoids nodes with many."),
    ("build_failure", 1_000_000.0, "How much failed builds are avoided (the node's property failed_builds)."),
    ("hypervisor_version", 1.0, "How much the hypervisor's version counts: negative prefers older ones."),
    ("soft_affinity", 1.0, "How much members of the same server group attract, with the policy soft-affinity."),
    ("soft_anti_affinity", 1.0, "How much members of the same server group repel, with the policy soft-anti-affinity."),
    ("metrics", 1.0, "How much the sum of the metrics counts."),
)


class _Ratio(types.String):
    """One of the settings; wrong ones are refused where the file is read, whether the weigher is enabled or not."""

    @override
    def __call__(self, value: Any) -> str:
        text = super().__call__(value)
        ratio(text)
        return str(text)


def ratio(setting: str) -> tuple[str, float]:
    """Metric and ratio of ``name=ratio``.

    :raises ValueError: it is not of that form, or the ratio is no finite number.
    """
    name, _, text = setting.partition("=")
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not name.strip() or not math.isfinite(found):
        raise ValueError(f"{setting!r} is no setting; write NAME=RATIO, for example cpu.percent=-1.0")
    return name.strip(), found


_METRICS: Sequence[cfg.Opt] = (
    cfg.ListOpt(
        "settings",
        item_type=_Ratio(),
        mutable=True,
        default=[],
        help="Metrics and their ratios, NAME=RATIO each, for example cpu.percent=-1.0,power=0.5; metrics are the node's "
        "property metrics.",
    ),
    cfg.BoolOpt(
        "required",
        mutable=True,
        default=True,
        help="A node without one of the metrics refuses the request (the filter metrics takes such nodes out before).",
    ),
    cfg.FloatOpt(
        "weight_of_unavailable",
        mutable=True,
        default=-10000.0,
        help="The weight of a node without one of the metrics, unless required.",
    ),
)


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    options: list[tuple[str, Sequence[cfg.Opt]]] = []
    for name, default, meaning in _MULTIPLIERS:
        multiplier = cfg.FloatOpt(
            "multiplier", mutable=True, default=default, help=meaning + " Aggregates may set their own."
        )
        options.append((f"weigher_{name}", [multiplier, *(_METRICS if name == "metrics" else ())]))
    return options
