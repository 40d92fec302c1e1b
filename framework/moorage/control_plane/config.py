# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration into one object, which is passed on and is never global.

Options come from the parts that are installed (:mod:`moorage.part`), so that a plugin that was installed today needs no change
here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from oslo_config import cfg
from oslo_log import log as logging

from moorage import errors
from moorage.control_plane import config_files
from moorage.options import option_sets

__all__ = ["load", "need_restart"]

#: Chatty libraries, and what is worth hearing of them.
_LOG_LEVELS = (
    "alembic=WARN", "sqlalchemy=WARN", "oslo_messaging=WARN", "oslo_service=WARN", "amqp=WARN", "stevedore=ERROR", "uvicorn=ERROR",
)  # fmt: skip


def load(
    *,
    files: Sequence[str] = (),
    state_dir: str | None = None,
    overrides: Mapping[tuple[str, str], Any] | None = None,
    alone: bool = False,
) -> cfg.ConfigOpts:
    """Loads the configuration from files, and derives paths from the state folder.

    :param files: configuration files, later ones win; none: /etc/moorage/moorage.conf where it exists.
    :param state_dir: wins over ``[control_plane] state_dir``.
    :param overrides: (group, option) -> value, from the command line; they win over the files.
    :param alone: read the given files only, and none of moorage.conf.d.
    :raises ConfigError: a file is missing or wrong, or a value is; says which, in which file.
    """
    conf = cfg.ConfigOpts()
    logging.register_options(conf)
    logging.set_defaults(default_log_levels=list(_LOG_LEVELS))
    sets = list(option_sets())
    for group, options in sets:
        conf.register_opts(options, group=group)
    for file in config_files.chosen(files, alone=alone):
        config_files.refuse_unreadable(file)
    try:
        conf(
            [],
            project="moorage",
            default_config_files=list(files) if files or alone else None,
            default_config_dirs=[] if alone else None,
            validate_default_values=True,
        )
        for (group, name), value in (overrides or {}).items():
            _override(conf, group, name, value)
        if state_dir is not None:
            conf.set_override("state_dir", _literal(os.path.abspath(state_dir)), group="control_plane")
        _follow_state_dir(conf)
    except (cfg.Error, ValueError) as error:
        raise errors.ConfigError(f"The configuration cannot be used: {error}") from error
    _check_values(conf, sets)
    return conf


def need_restart(running: cfg.ConfigOpts, new: cfg.ConfigOpts) -> list[str]:
    """``[group] option`` of every option that differs and that a reload does not change (it is not ``mutable``)."""
    found = {
        f"[{group or 'DEFAULT'}] {option.dest}"
        for group, options in option_sets()
        for option in options
        if not option.mutable and _value(running, group, option) != _value(new, group, option)
    }
    return sorted(found)


def _value(conf: cfg.ConfigOpts, group: str | None, option: cfg.Opt) -> Any:
    section = conf if group in (None, "DEFAULT") else conf[group]
    return getattr(section, option.dest, None)


def _follow_state_dir(conf: cfg.ConfigOpts) -> None:
    """Defaults that lie in the state folder."""
    folder = Path(conf.control_plane.state_dir)
    # A name may have characters in it that mean something in a URL.
    url = sa.URL.create("sqlite", database=str(folder / "moorage.sqlite"))
    conf.set_default("connection", _literal(url.render_as_string(hide_password=False)), group="database")
    conf.set_default("run_dir", _literal(str(folder / "run" / "messages")), group="rpc")


def _literal(text: str) -> str:
    """Returns a value in which oslo.config finds no names of other options."""
    return text.replace("$", "$$")


def _override(conf: cfg.ConfigOpts, group: str, name: str, value: Any) -> None:
    try:
        conf.set_override(name, value, group=group)
    except (cfg.Error, ValueError) as error:
        raise errors.ConfigError(f"[{group}] {name} = {value}, of the command line: {error}") from error


def _check_values(conf: cfg.ConfigOpts, sets: Iterable[tuple[str | None, Sequence[cfg.Opt]]]) -> None:
    """Read every option once: oslo.config finds a wrong value only when it is asked for.

    :raises ConfigError: names every option that has one, and its file.
    """
    wrong = []
    for group, options in sets:
        for option in options:
            try:
                value = (conf if group in (None, "DEFAULT") else conf[group])[option.dest]
            except (cfg.Error, ValueError) as error:
                wrong.append(f"{_place(conf, group, option)}: {_reason(error)}.")
                continue
            # Nothing waits for ever, or for no number at all.
            if isinstance(value, float) and not math.isfinite(value):
                wrong.append(f"{_place(conf, group, option)}: {value} is no number that can be reckoned with.")
    if wrong:
        raise errors.ConfigError(" ".join(wrong))


def _place(conf: cfg.ConfigOpts, group: str | None, option: cfg.Opt) -> str:
    """Where an option got its value, as a deployer finds it: ``file: [group] option``."""
    names = {(config_files.section_of(group), option.dest)}
    names |= {
        (each.group or config_files.section_of(group), (each.name or option.dest).replace("-", "_"))
        for each in option.deprecated_opts
    }
    said = [
        f"{file}: [{section}] {name}"
        for file, section, values in config_files.written(config_files.chosen(conf.config_file))
        for name in values
        if (section, name.replace("-", "_")) in names
    ]
    return said[-1] if said else f"[{config_files.section_of(group)}] {option.dest}"


def _reason(error: Exception) -> str:
    """What oslo.config says, without its own words for the place."""
    text = str(error)
    if isinstance(error, cfg.TemplateSubstitutionError | cfg.NoSuchOptError):
        return f"{text.rstrip('.')}; write $$ for a dollar sign"
    return (text.partition(" is not valid: ")[2] or text).rstrip(".")
