# SPDX-License-Identifier: Apache-2.0
"""A configuration with the options of the reference filters and weighers."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

from moorage_plugins.filters import options as filter_options
from moorage_plugins.weighers import options as weigher_options


def plugin_conf(**overrides: Any) -> Any:
    """The defaults, with ``group__option=value`` set."""
    conf = cfg.ConfigOpts()
    for group, options in (*filter_options.list_opts(), *weigher_options.list_opts()):
        conf.register_opts(options, group=group)
    conf([], default_config_files=[])
    for name, value in overrides.items():
        group, _, option = name.partition("__")
        conf.set_override(option, value, group=group)
    return conf
