# SPDX-License-Identifier: Apache-2.0
"""The options of everything that is installed, and a configuration without files."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, foreign
from moorage.extensions import entry_points, groups

__all__ = ["GROUP", "defaults", "option_sets", "problems"]

LOG = logging.getLogger(__name__)
#: Where distributions name their options.
GROUP = "oslo.config.opts"
_Sets: TypeAlias = list[tuple[str | None, list[cfg.Opt]]]
#: What the log was told in this process.
_told: set[str] = set()


def option_sets() -> Iterator[tuple[str | None, Sequence[cfg.Opt]]]:
    """(group, options) of the core and of all plugin distributions.

    What cannot be read is left out, and told in the log once in each process, however often the configuration is read.
    """
    for point in _points():
        found, problem = _read(point)
        if problem and problem not in _told:
            _told.add(problem)
            LOG.warning("%s", problem)
        yield from found


def problems() -> list[str]:
    """A sentence for each distribution whose options cannot be read; empty when all can."""
    return [problem for point in _points() for _, problem in [_read(point)] if problem]


def _points() -> Iterator[importlib.metadata.EntryPoint]:
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
        if point.dist is not None and id(point.dist) in owners and point.value not in seen:
            seen.add(point.value)
            yield point


def _read(point: importlib.metadata.EntryPoint) -> tuple[_Sets, str]:
    """What the entry point names, and a sentence on why it cannot be read."""
    try:
        with foreign.printing_aside(), foreign.isolate_plugin_call(point.value):
            found = [(group, list(options)) for group, options in point.load()()]
        if not all(isinstance(option, cfg.Opt) for _, options in found for option in options):
            raise TypeError("it must return pairs of a group's name and a list of options of oslo.config")
    except Exception as error:
        # A stray package must not stop a service; its plugin will be named.
        LOG.debug("The options of %s cannot be read.", point.value, exc_info=True)
        name, version = (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
        return [], (
            f"The options of {name} {version} ({point.value}) cannot be read ({foreign.format_exception(error)}). Repair or "
            f"uninstall {name}; until then what a configuration says of them has no effect."
        )
    return found, ""


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
