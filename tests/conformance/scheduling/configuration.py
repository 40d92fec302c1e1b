# SPDX-License-Identifier: Apache-2.0
"""A configuration with the options of the reference filters and weighers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from oslo_config import cfg

from moorage.scheduling import options
from moorage_plugins.filters import options as filter_options
from moorage_plugins.weighers import options as weigher_options


def plugin_conf(**overrides: Any) -> Any:
    """The defaults, with ``group__option=value`` set."""
    return _made((*filter_options.list_opts(), *weigher_options.list_opts()), overrides)


def scheduling_conf(**overrides: Any) -> Any:
    """The same with the options of scheduling itself."""
    families = (options.list_opts(), filter_options.list_opts(), weigher_options.list_opts())
    return _made([pair for family in families for pair in family], overrides)


def _made(sets: Iterable[tuple[str, Sequence[cfg.Opt]]], overrides: dict[str, Any]) -> Any:
    conf = cfg.ConfigOpts()
    for group, opts in sets:
        conf.register_opts(opts, group=group)
    conf([], default_config_files=[])
    for name, value in overrides.items():
        group, _, option = name.partition("__")
        conf.set_override(option, value, group=group)
    return conf
