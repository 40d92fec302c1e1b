# SPDX-License-Identifier: Apache-2.0
"""The options of everything that is installed, and a configuration without files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, foreign
from moorage.extensions import entry_points, groups

__all__ = ["GROUP", "defaults", "option_sets"]

LOG = logging.getLogger(__name__)
#: Where distributions name their options.
GROUP = "oslo.config.opts"


def option_sets() -> Iterator[tuple[str | None, Sequence[cfg.Opt]]]:
    """(group, options) of the core and of all plugin distributions; a broken one is told in the log and left out."""
    # Compared as objects: a distribution's name costs reading all of its metadata.
    owners = {
        id(point.dist)
        for group in groups()
        if group.startswith("moorage.")
        for point in entry_points(group)
        if point.dist is not None
    }
    seen: set[str] = set()
    for point in entry_points(GROUP):
        if point.dist is None or id(point.dist) not in owners or point.value in seen:
            continue
        seen.add(point.value)
        try:
            with foreign.printing_aside(), foreign.contained(point.dist.name):
                found = list(point.load()())
        except Exception as error:  # noqa: BLE001  (a stray package must not stop a service; its plugin will be named)
            LOG.warning("The options of %s (%s) cannot be read: %s", point.dist.name, point.value, error)
            continue
        yield from found


def defaults(**sections: Mapping[str, Any]) -> cfg.ConfigOpts:
    """A configuration with the defaults of all options, for programs and tests that read no files.

    :param sections: what shall be otherwise: ``scheduling={"enabled_filters": ["capacity"]}``.
    :raises ConfigError: there is no such option, or it cannot have that value.
    """
    conf = cfg.ConfigOpts()
    for group, options in option_sets():
        conf.register_opts(options, group=group)
    conf([], default_config_files=[], default_config_dirs=[])
    for section, values in sections.items():
        for name, value in values.items():
            try:
                conf.set_override(name, value, group=section)
            except (cfg.Error, ValueError) as error:
                raise errors.ConfigError(f"[{section}] {name} = {value!r}: {error}") from error
    return conf
