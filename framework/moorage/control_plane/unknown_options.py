# SPDX-License-Identifier: Apache-2.0
"""Finds unknown sections and options in configuration files, deprecated names, and options that are set twice.

It refuses nothing: ``moorage config validate --strict`` does, and ``moorage-status`` warns.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from oslo_config import cfg
from oslo_log import log as logging

from moorage import plugin_isolation
from moorage.control_plane import config_files
from moorage.extensions import entry_points
from moorage.importing import distribution_of
from moorage.options import option_sets
from moorage.rpc.interface import TRANSPORTS

__all__ = ["deprecated", "repeated", "unknown"]

LOG = logging.getLogger(__name__)
#: Libraries that read our configuration files: logs, messages, Keystone's tokens.
_LIBRARIES = frozenset({"oslo.log", "oslo.messaging", "keystonemiddleware"})


def unknown(files: Sequence[str]) -> list[str]:
    """Sections and options of the files that nothing installed knows, with what may have been meant.

    :raises ConfigError: a file cannot be read.
    """
    known: dict[str, set[str]] = {}
    for group, options in (*option_sets(), *_options_of_libraries()):
        home = config_files.section_of(group)
        for option in options:
            known.setdefault(home, set()).update((option.name, option.dest))
            for each in option.deprecated_opts:
                known.setdefault(each.group or home, set()).add(each.name or option.dest)
    found = []
    for file, section, names in config_files.written(files):
        if section not in known:
            found.append(f"{file}: nothing reads the section [{section}]{_meant(section, known)}.")
            continue
        found += [
            f"{file}: nothing reads [{section}] {name}{_meant(name, known[section])}."
            for name in names
            if name not in known[section] and name.replace("-", "_") not in known[section]
        ]
    return found


def deprecated(files: Sequence[str]) -> list[str]:
    """Options of the files that have another name by now, or that are going to be removed, with what to write instead.

    :raises ConfigError: a file cannot be read.
    """
    old: dict[tuple[str, str], str] = {}
    for group, options in option_sets():
        home = config_files.section_of(group)
        for option in options:
            for each in option.deprecated_opts:
                old[each.group or home, (each.name or option.dest).replace("-", "_")] = f"write [{home}] {option.dest}"
            if option.deprecated_for_removal:
                old[home, option.dest] = option.deprecated_reason or "it is going to be removed"
    return [
        f"{file}: [{section}] {name} is deprecated; {old[section, name.replace('-', '_')]}."
        for file, section, names in config_files.written(files)
        for name in names
        if (section, name.replace("-", "_")) in old
    ]


def repeated(files: Sequence[str]) -> list[str]:
    """Options that a file sets more than once though only the last one counts, a sentence for each.

    :raises ConfigError: a file cannot be read.
    """
    many = {
        (config_files.section_of(group), option.dest)
        for group, options in (*option_sets(), *_options_of_libraries())
        for option in options
        if getattr(option, "multi", False)
    }
    return config_files.repeated(files, many)


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; {near[0]} was meant?" if near else ""


def _options_of_libraries() -> Iterator[tuple[Any, Sequence[cfg.Opt]]]:
    """(group, options) of the libraries that read our files too."""
    # What must be done before a library is imported is done by the transport that drives it.
    TRANSPORTS.survey()
    for point in entry_points("oslo.config.opts"):
        owner = distribution_of(point)[0]
        if owner.replace("_", ".").lower() not in _LIBRARIES:
            continue
        try:
            with plugin_isolation.isolate_plugin_call(owner):
                found = list(point.load()())
            yield from found
        except Exception as error:  # noqa: BLE001  (an optional part of a library that is not installed)
            LOG.debug("The options of %s cannot be read: %s", point.value, error)
