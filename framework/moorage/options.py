# SPDX-License-Identifier: Apache-2.0
"""The options of everything that is installed, and a configuration without files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors, part, plugin_isolation

__all__ = ["defaults", "list_opts", "option_sets", "problems"]

LOG = logging.getLogger(__name__)
_Sets: TypeAlias = list[tuple[str | None, list[cfg.Opt]]]
#: The problems that this process has logged.
_told: set[str] = set()


def option_sets() -> Iterator[tuple[str | None, Sequence[cfg.Opt]]]:
    """(group, options) of all parts that are installed.

    What cannot be read is left out. Each process logs it once, however often the configuration is read.
    """
    for each in part.parts():
        found, problem = _read(each)
        if problem and problem not in _told:
            _told.add(problem)
            LOG.warning("%s", problem)
        yield from found


def list_opts() -> Sequence[tuple[str | None, Sequence[cfg.Opt]]]:
    """Options by group, for the sample configuration; the entry point ``oslo.config.opts`` of Moorage."""
    return list(option_sets())


def problems() -> list[str]:
    """Returns a sentence for each part that cannot be used, or whose options cannot be read; empty when all can."""
    return [*part.problems(), *(problem for each in part.parts() for _, problem in [_read(each)] if problem)]


def _read(brought: part.InstalledPart) -> tuple[_Sets, str]:
    """Returns the options of a part, and a sentence on why they cannot be read."""
    module = brought.declared.options
    if not module:
        return [], ""
    try:
        with plugin_isolation.printing_aside(), plugin_isolation.isolate_plugin_call(module):
            found = [(group, list(options)) for group, options in brought.load(f"{module}:list_opts")()]
        if not all(isinstance(option, cfg.Opt) for _, options in found for option in options):
            raise TypeError("it must return pairs of a group's name and a list of options of oslo.config")
    except Exception as error:
        # A stray package must not stop a service; its plugin will be named.
        LOG.debug("The options of %s cannot be read.", module, exc_info=True)
        name, version = brought.distribution
        return [], (
            f"The options of {name} {version} ({module}) cannot be read ({plugin_isolation.format_exception(error)}). Repair or "
            f"uninstall {name}; until then what a configuration says of them has no effect."
        )
    return found, ""


def defaults(**sections: Mapping[str, Any]) -> cfg.ConfigOpts:
    """Returns a configuration with the defaults of all options, for programs and tests that read no files.

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
