# SPDX-License-Identifier: Apache-2.0
"""Writing a distribution from a family's templates."""

from __future__ import annotations

import importlib.util
import re
import shutil
import string
from collections.abc import Iterator, Mapping
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from moorage import errors, options
from moorage.cli.scaffold.families import FAMILIES, Family
from moorage.control_plane.extension_points import extension_points
from moorage.extensions import ExtensionPoint

__all__ = ["Written", "names_of", "write"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
#: So that the longest name made from it, that of the version table, fits into PostgreSQL's 63 characters.
_LONGEST = 39
#: What the parts of a template's path stand for.
_PATHS = {"PACKAGE": "package"}
#: Templates end with this, so that no tool takes them for code.
_TEMPLATE = ".txt"


class Written:
    """What was written, and what to do next.

    :param folder: the distribution.
    :param files: its files, relative to the folder, sorted.
    """

    def __init__(self, folder: Path, files: list[str], names: Mapping[str, str]) -> None:
        self.folder = folder
        self.files = files
        self.names = names


def names_of(family: Family, name: str) -> Mapping[str, str]:
    """What stands in the templates for a plugin of that name.

    :raises InvalidInput: it cannot be a plugin's name.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise errors.InvalidInput(
            f"{name!r} cannot be a plugin's name: use at most {_LONGEST} small letters and digits, words joined by _, "
            "beginning with a letter (gpu_model).",
            path="name",
        )
    words = name.split("_")
    package = f"moorage_{name}"
    choose = _choose(family, name)
    return {
        "plugin": name,
        "upper": name.upper(),
        "words": " ".join(words),
        "package": package,
        "distribution": package.replace("_", "-"),
        "class_name": "".join(word.capitalize() for word in words) + family.suffix,
        "family": family.name,
        "group": family.group,
        "choose": choose,
        "choose_indented": choose.replace("\n", "\n    "),
        "underline": "=" * len(package),
        "see": string.Template(family.see).substitute(plugin=name, words=" ".join(words)),
        "requirement": f"moorage{_compatible(metadata.version('moorage'))}",
    }


def write(family_name: str, name: str, into: Path) -> Written:
    """Write a distribution with one plugin into a new folder below ``into``.

    :raises InvalidInput: the family or the name cannot be used.
    :raises AlreadyExists: the folder exists, or an installed plugin of the family, package or distribution has the name; nothing is
        written.
    :raises ConfigError: the folder cannot be written.
    """
    family = FAMILIES.get(family_name)
    if family is None:
        raise errors.InvalidInput(
            f"There is no family '{family_name}'; there are: {', '.join(FAMILIES)}.", path="family"
        )
    names = names_of(family, name)
    point: ExtensionPoint[Any] = ExtensionPoint(family.group, None, (1, 0))
    taken = point.installed().get(name)
    if taken:
        raise errors.AlreadyExists(
            f"A {family.name} '{name}' is installed already ({taken[0].value}); two of one name refuse each other. "
            "Choose another name."
        )
    _refuse_to_replace(names)
    folder = into / names["distribution"]
    rendered = dict(_render(family, names))
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise errors.AlreadyExists(f"{folder} exists already; nothing was written.") from error
    except OSError as error:
        raise errors.ConfigError(f"{folder} cannot be made: {error.strerror}.") from error
    try:
        for path, text in rendered.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise errors.ConfigError(f"{folder} cannot be written: {error.strerror}. Nothing was left there.") from error
    return Written(folder, sorted(rendered), names)


def _choose(family: Family, name: str) -> str:
    """Returns the lines of a configuration file with which a deployer uses the plugin; what is on by default stays on."""
    chosen_by = [point.option for point in extension_points() if point.group == family.group]
    if not chosen_by:
        return "# commands need no configuration: all that are installed are offered"
    section, _, option = chosen_by[0].partition(" ")
    default = options.defaults()[section.strip("[]")][option]
    value = string.Template(family.value).substitute(plugin=name)
    return f"{section}\n{option} = {','.join([*default, value]) if isinstance(default, list) else value}"


def _refuse_to_replace(names: Mapping[str, str]) -> None:
    """Two distributions with files of the same names destroy each other; of two with the same name pip removes the first."""
    spec = importlib.util.find_spec(names["package"])
    if spec is not None:
        where = spec.origin or ", ".join(spec.submodule_search_locations or ())
        raise errors.AlreadyExists(
            f"A package {names['package']} is installed already ({where}); installing what would be written would overwrite "
            "it. Choose another name, or uninstall that one."
        )
    installed = next(iter(metadata.distributions(name=names["distribution"])), None)
    if installed is not None:
        raise errors.AlreadyExists(
            f"A distribution {names['distribution']} {installed.version} is installed already; installing what would be "
            "written would uninstall it. Choose another name, or uninstall that one."
        )


def _render(family: Family, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(path, text) of every file: templates that all families share, that some share, and the family's own; the last wins."""
    templates = resources.files("moorage.cli.scaffold") / "templates"
    for folder in ("common", *family.parts, family.name):
        for path, template in _files(templates / folder):
            for part, stands_for in _PATHS.items():
                path = path.replace(part, names[stands_for])
            yield path, string.Template(template.read_text(encoding="utf-8")).substitute(names)


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_TEMPLATE):
            yield prefix + entry.name.removesuffix(_TEMPLATE), entry


def _compatible(version: str) -> str:
    """Returns the Moorages that a distribution asks for that was written with this one, as a version specifier.

    From this one on; from the first development version of the same release where this one is not released, since ``0.0.1.dev142``
    is before ``0.0.1``. And up to the next major release: until then what is public stays (``moorage.public``).
    """
    release, rest = re.findall(r"^(\d+(?:\.\d+)*)(.*)", version)[0]
    lowest = f"{release}.dev0" if re.match(r"\.?(a|b|rc|dev)", rest) else release
    return f">={lowest},<{int(release.split('.')[0]) + 1}"
