# SPDX-License-Identifier: Apache-2.0
"""Part: what a family, an engine or a service brings, declared once; and the parts that are installed.

A distribution names its parts in the entry-point group ``moorage.parts``. Whatever walks over all families walks over parts.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from oslo_log import log as logging

from moorage import errors, plugin_isolation
from moorage.extensions import ExtensionPoint, entry_points
from moorage.importing import distribution_of, import_entry_point

__all__ = ["PARTS", "InstalledPart", "Part", "PartPoint", "parts", "problems"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")
#: The distribution whose parts come first, and must not be broken.
_OWN = "moorage"
PARTS: ExtensionPoint[Any] = ExtensionPoint("moorage.parts", None, (1, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a family, an engine or a service brings.

    A part names modules and objects (``package.module:object``) and imports none of them: commands and roles import what they
    use. The names lie in the package of the part.

    :param options: the module of the options. It has ``list_opts()``, which returns pairs of a group's name and its options.
    :param migrations: the chain of migrations of its tables, a :class:`moorage.db.migrations.Migrations`.
    :param checks: what is checked of a configuration -> a function of the configuration. The function raises MoorageError if a
        start would refuse the configuration; it connects to nothing and writes nothing.
    :param interface: the module of the extension points.
    :param api: the modules of routes that the control plane wires. Each has ``POLICIES``, the rules that its routes ask.
    :param routes: the modules of routes that need no wiring. Each has ``POLICIES`` too, and a function
        ``routes(tools)`` that returns routes of the API at ``/scheduling/v1``. The tools are
        :class:`moorage.control_plane.interface.ApiTools`.
    :param collectors: classes of metrics that are counted in the store whenever ``/metrics`` is asked, collectors of
        prometheus_client. Each is built with the database.
    :param upgrade_checks: what ``moorage-status upgrade check`` looks at -> a function of the configuration. The function returns
        a sentence for each thing that an operator should look at, and raises MoorageError if services would not start.
    :param commands: commands of ``moorage`` as they are typed -> the class.
    :param periodic_tasks: the names of periodic tasks -> the class.
    """

    options: str = ""
    migrations: str = ""
    checks: Mapping[str, str] = field(default_factory=dict)
    interface: str = ""
    api: Sequence[str] = ()
    routes: Sequence[str] = ()
    collectors: Sequence[str] = ()
    upgrade_checks: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    periodic_tasks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstalledPart:
    """A part, and the entry point that named it."""

    declared: Part
    point: importlib.metadata.EntryPoint

    @property
    def name(self) -> str:
        """The name of the entry point."""
        return self.point.name

    @property
    def distribution(self) -> tuple[str, str]:
        """Name and version of the distribution that brings the part."""
        return distribution_of(self.point)

    def reference(self, group: str, name: str, value: str) -> importlib.metadata.EntryPoint:
        """One of the part's references as an entry point of the part's distribution."""
        made = importlib.metadata.EntryPoint(name, value, group)
        # As importlib.metadata does it; the class has no other way.
        vars(made)["dist"] = self.point.dist
        return made

    def load(self, value: str) -> Any:
        """Import what a reference names.

        :raises PluginLoadError: it cannot be imported; names the part and its distribution.
        """
        found, failure = import_entry_point(self.reference(PARTS.group, self.name, value))
        if failure is None:
            return found
        owner = " ".join(self.distribution).strip()
        raise errors.PluginLoadError(
            f"{value} of the part '{self.name}' of {owner} cannot be imported ({plugin_isolation.format_exception(failure)}). "
            f"Repair or uninstall {self.distribution[0]}.",
            group=PARTS.group,
            plugin=self.name,
            distribution=self.distribution[0],
        ) from failure


#: The entry points that were read last, and what became of them.
_last: tuple[Sequence[importlib.metadata.EntryPoint], Sequence[InstalledPart], Sequence[str]] = ((), (), ())


def parts() -> Sequence[InstalledPart]:
    """Returns all parts that are installed: Moorage's first, each by name.

    A part of another distribution that cannot be used is left out. The log says so once.

    :raises PluginLoadError: a part of Moorage itself cannot be used.
    """
    return _read()[0]


def problems() -> Sequence[str]:
    """Returns a sentence for each part that cannot be used; empty when all can."""
    return _read()[1]


def _read() -> tuple[Sequence[InstalledPart], Sequence[str]]:
    global _last
    points = entry_points(PARTS.group)
    if points is not _last[0]:
        found: list[InstalledPart] = []
        wrong: list[str] = []
        for name, owners in PARTS.installed().items():
            try:
                declared: object = PARTS.load(name).plugin
                if not isinstance(declared, Part):
                    raise errors.PluginLoadError(f"{owners[0].value} is no moorage.part.Part.")
            except errors.PluginLoadError as error:
                if any(distribution_of(each)[0] == _OWN for each in owners):
                    raise
                LOG.warning("%s", error.message)
                wrong.append(error.message)
            else:
                found.append(InstalledPart(declared, owners[0]))
        found.sort(key=lambda each: (each.distribution[0] != _OWN, each.name))
        _last = points, found, wrong
    return _last[1:]


@dataclass(frozen=True, slots=True)
class PartPoint(ExtensionPoint[T]):
    """An extension point whose plugins come from parts too, beside the entry points of its group.

    :param declared_in: the field of :class:`Part` that names them.
    """

    declared_in: str = ""

    def installed(self) -> dict[str, list[importlib.metadata.EntryPoint]]:
        """As of any extension point. What is typed as several words has ``_`` between them."""
        found = ExtensionPoint.installed(self)
        for part in parts():
            for words, value in getattr(part.declared, self.declared_in).items():
                name = words.replace(" ", "_")
                found.setdefault(name, []).append(part.reference(self.group, name, value))
        return found
