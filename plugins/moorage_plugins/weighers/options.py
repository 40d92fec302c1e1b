# SPDX-License-Identifier: Apache-2.0
"""Options of the weighers, a group for each. A reload takes all of them over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oslo_config import cfg, types
from typing_extensions import override

__all__ = ["expected_request", "list_opts", "ratio"]

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
    (
        "gpu_fragmentation",
        10.0,
        "How much it counts that the GPUs of a node stay usable for the expected requests.",
    ),
    ("io_ops", -1.0, "How much the number of busy instances counts: negative avoids nodes with many."),
    ("num_instances", 0.0, "How much the number of instances counts: negative avoids nodes with many."),
    ("build_failure", 1_000_000.0, "How much failed builds are avoided (the node's property failed_builds)."),
    ("hypervisor_version", 1.0, "How much the hypervisor's version counts: negative prefers older ones."),
    ("soft_affinity", 1.0, "How much members of the same server group attract, with the policy soft-affinity."),
    ("soft_anti_affinity", 1.0, "How much members of the same server group repel, with the policy soft-anti-affinity."),
    ("metrics", 1.0, "How much the sum of the metrics counts."),
)

#: (popularity, GPUs) of the requests that are expected by default, with 8 processors and 32 GiB for each GPU.
_DEFAULT_GPUS = ((8, 1), (4, 2), (2, 4), (1, 8))


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


class _Expected(types.String):
    """One of the expected requests; wrong ones are refused where the file is read."""

    @override
    def __call__(self, value: Any) -> str:
        text = super().__call__(value)
        expected_request(text)
        return str(text)


def expected_request(setting: str) -> tuple[float, dict[str, tuple[int, int]]]:
    """Popularity of ``popularity:CLASS=units:CLASS=NxUNITS``, and its resources: class -> number of devices, units of each.

    Units without a number are those of one device.

    :raises ValueError: it is not of that form, the popularity is not above 0, or units are not whole numbers above 0.
    """
    popularity, *parts = setting.split(":")
    try:
        weight = float(popularity)
        resources = {name.strip(): _amounts(text) for name, _, text in (part.partition("=") for part in parts)}
    except ValueError:
        weight, resources = math.nan, {}
    least = min((min(amounts) for amounts in resources.values()), default=0)
    if not (math.isfinite(weight) and weight > 0 and all(resources) and least > 0):
        raise ValueError(
            f"{setting!r} is no expected request; write POPULARITY:CLASS=UNITS:CLASS=UNITS, for example "
            "70:PGPU=1:VCPU=8:MEMORY_MB=32768, and NxUNITS for so many units of each of N devices"
        )
    return weight, resources


def _amounts(text: str) -> tuple[int, int]:
    number, times, units = text.partition("x")
    return (int(number), int(units)) if times else (1, int(text))


_GPU_FRAGMENTATION: Sequence[cfg.Opt] = (
    cfg.StrOpt(
        "resource_class",
        mutable=True,
        default="PGPU",
        help="The resource class of the devices.",
    ),
    cfg.BoolOpt(
        "shares",
        mutable=True,
        default=False,
        help="Requests take shares of devices: each provider of the class is one device, for example a GPU with 1000 of "
        "CUSTOM_GPU_MILLI. Otherwise each unit of the class is a whole device.",
    ),
    cfg.ListOpt(
        "expected",
        item_type=_Expected(),
        mutable=True,
        default=[
            f"{popularity}:PGPU={gpus}:VCPU={8 * gpus}:MEMORY_MB={32768 * gpus}" for popularity, gpus in _DEFAULT_GPUS
        ],
        help="Requests that are expected and how popular they are, POPULARITY:CLASS=UNITS:CLASS=UNITS each: the flavors with "
        "GPUs, and how often each is asked for. Popularities are relative to each other. With shares, write "
        "CUSTOM_GPU_MILLI=300 for a part of one device, and CUSTOM_GPU_MILLI=8x1000 for eight whole ones.",
    ),
)
#: Options of weighers beside the multiplier.
_MORE: Mapping[str, Sequence[cfg.Opt]] = {"metrics": _METRICS, "gpu_fragmentation": _GPU_FRAGMENTATION}


def list_opts() -> Sequence[tuple[str, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration."""
    options: list[tuple[str, Sequence[cfg.Opt]]] = []
    for name, default, meaning in _MULTIPLIERS:
        multiplier = cfg.FloatOpt(
            "multiplier", mutable=True, default=default, help=meaning + " Aggregates may set their own."
        )
        options.append((f"weigher_{name}", [multiplier, *_MORE.get(name, ())]))
    return options
