# SPDX-License-Identifier: Apache-2.0
"""Parses configuration files: which of them can be read, and which names and values they have."""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from oslo_config import cfg

from moorage import errors

__all__ = ["chosen", "refuse_unreadable", "repeated", "section_of", "written"]

#: The first bytes of what Windows' editors write, and what they call it.
_MARKS = ((codecs.BOM_UTF8, "UTF-8"), (codecs.BOM_UTF16_LE, "UTF-16"), (codecs.BOM_UTF16_BE, "UTF-16"))


def chosen(files: Sequence[str], *, alone: bool = False) -> list[str]:
    """Returns the files that are read: the given ones, or those of /etc/moorage and the like; then those of moorage.conf.d.

    :param alone: only the given ones.
    """
    if alone:
        return list(files)
    found = list(files) or cfg.find_config_files(project="moorage")
    for folder in cfg.find_config_dirs(project="moorage"):
        found += map(str, sorted(Path(folder).glob("*.conf")))
    return found


def section_of(group: Any) -> str:
    """Returns the section in which the options of a group stand.

    :param group: its name or an oslo.config group; None for the options without a group.
    """
    return getattr(group, "name", group) or "DEFAULT"


def refuse_unreadable(file: str) -> None:
    """Refuse what oslo.config would wait for, or tell of without its name.

    :raises ConfigError: it is no regular file, cannot be read, or is no text in UTF-8; says what to do.
    """
    where = f"The configuration file {file}"
    try:
        kind = os.stat(file).st_mode
        if not stat.S_ISREG(kind) and not os.path.samefile(file, os.devnull):
            what = "a folder" if stat.S_ISDIR(kind) else "a pipe or a device"
            raise errors.ConfigError(f"{where} is {what}; name a file.")
        data = Path(file).read_bytes()
    except OSError as error:
        raise errors.ConfigError(f"{where} cannot be read: {error.strerror}.") from error
    for mark, name in _MARKS:
        if data.startswith(mark):
            raise errors.ConfigError(
                f"{where} begins with a byte order mark (BOM) of {name}; save it as UTF-8 without BOM."
            )
    try:
        place = data.decode("utf-8").find("\0")
    except UnicodeDecodeError as error:
        raise errors.ConfigError(
            f"{where}, line {_line(data, error.start)}: the byte 0x{data[error.start]:02x} is no UTF-8. Save the file as UTF-8, "
            f"of Latin-1 for example by: iconv -f latin1 -t utf-8 {file}"
        ) from error
    if place >= 0:
        raise errors.ConfigError(f"{where}, line {_line(data, data.index(0))}: there is a NUL character; remove it.")


def written(files: Sequence[str]) -> Iterator[tuple[str, str, dict[str, list[str]]]]:
    """(file, section, values by name) of what the files say.

    :raises ConfigError: a file cannot be read.
    """
    for file in files:
        sections: dict[str, dict[str, Any]] = {}
        refuse_unreadable(file)
        try:
            cfg.ConfigParser(file, sections).parse()
        except (OSError, cfg.ParseError) as error:
            raise errors.ConfigError(f"The configuration file {file} cannot be read: {error}") from error
        for section, values in sections.items():
            yield file, section, values


def repeated(files: Sequence[str], many: Collection[tuple[str, str]]) -> list[str]:
    """Returns a sentence for each option that a file sets more than once: oslo.config uses the last value without a warning.

    :param many: (section, name) of options that are meant to be repeated.
    :raises ConfigError: a file cannot be read.
    """
    return [
        f"{file}: [{section}] {name} is set {len(values)} times; only the last one counts. Write it once."
        for file, section, options in written(files)
        for name, values in options.items()
        if len(values) > 1 and (section, name.replace("-", "_")) not in many
    ]


def _line(data: bytes, place: int) -> int:
    return data.count(b"\n", 0, place) + 1
