# SPDX-License-Identifier: Apache-2.0
"""Everything that a start would refuse of a configuration, looked at without starting anything.

For ``moorage config validate``, and before ``moorage up`` starts its processes or has them reload: either all of them can use
a configuration, or none gets it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from moorage import errors, extensions, plugin_isolation
from moorage.part import InstalledPart, parts

__all__ = ["check", "checks", "deprecated", "doubtful", "problems"]


def checks() -> Iterator[tuple[str, Callable[[Any], object]]]:
    """(what is looked at, a function that raises MoorageError where it cannot be used) of all parts that are installed.

    Nothing is connected or written.
    """
    for part in parts():
        for what, function in part.declared.checks.items():
            yield what, functools.partial(_run, part, function)


def _run(part: InstalledPart, function: str, conf: Any) -> None:
    part.load(function)(conf)


def problems(conf: Any) -> list[str]:
    """What is wrong, a sentence for each; empty when a start would find nothing."""
    return list(dict.fromkeys(error.message for error in _failures(conf)))


def _failures(conf: Any) -> Iterator[errors.MoorageError]:
    for what, look in checks():
        try:
            with plugin_isolation.isolate_plugin_call():
                look(conf)
        except errors.MoorageError as error:
            yield error
        except Exception as error:  # noqa: BLE001  (a plugin's check that fails is what was looked for)
            yield errors.ConfigError(f"The {what} cannot be checked ({plugin_isolation.format_exception(error)}).")


def doubtful(conf: Any) -> list[str]:
    """Returns warnings of settings that a start accepts and that are probably mistakes, a sentence for each."""
    if conf.scheduling.enabled_filters:
        return []
    return [
        "[scheduling] enabled_filters is empty: every node is tried for every request, be it silent, disabled or full."
    ]


def deprecated(conf: Any) -> list[str]:
    """What works now and not for ever of the plugins that are chosen, a sentence for each."""
    with extensions.noting() as noted:
        problems(conf)
    return [f"The {each.sentence()}" for each in noted]


def check(conf: Any) -> None:
    """Refuse what cannot be used.

    :raises ConfigError: says everything that is wrong.
    :raises Unavailable: nothing is wrong, but something was late or away; a later try may succeed.
    """
    found = list(_failures(conf))
    if found:
        may_be_mended_by_time = all(isinstance(error, errors.Unavailable) for error in found)
        refused = errors.Unavailable if may_be_mended_by_time else errors.ConfigError
        raise refused(" ".join(dict.fromkeys(error.message for error in found)))
