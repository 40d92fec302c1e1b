# SPDX-License-Identifier: Apache-2.0
"""Finds and loads plugins.

An :class:`ExtensionPoint` is one entry-point group with the interface its plugins implement. ``survey`` looks at everything that
is installed and never raises; ``load`` takes one plugin by name and refuses, with a remedy, whatever cannot be used.
Entry points are listed afresh from :mod:`importlib.metadata` whenever anything was installed: stevedore's cache can hide a plugin
that was installed seconds ago, and forgets which distribution a plugin came from.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from oslo_log import log as logging

from moorage import errors, plugin_isolation
from moorage.importing import LateImportError, distribution_of, import_entry_point

__all__ = [
    "ExtensionPoint",
    "SurveyResult",
    "Loaded",
    "PluginState",
    "deprecated",
    "deprecated_plugin",
    "entry_points",
    "groups",
    "noting",
    "origin_of",
]

LOG = logging.getLogger(__name__)
T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])
ClassT = TypeVar("ClassT", bound=type)

#: What was installed when entry points were last read; all of them; those that were asked for, by group.
_last: tuple[object, Any, dict[str, Sequence[importlib.metadata.EntryPoint]]] = (None, None, {})


def entry_points(group: str) -> Sequence[importlib.metadata.EntryPoint]:
    """Returns the entry points of a group of all installed distributions.

    They are read again when a file that holds some is another one, or changed. Reading takes about 0.1 ms for each distribution
    that is installed, and a service asks some thirty times while it starts; looking takes a tenth of that.
    """
    _, every, known = _read()
    if group not in known:
        known[group] = tuple(every.select(group=group))
    return known[group]


def groups() -> frozenset[str]:
    """Returns the groups that have entry points."""
    return frozenset(_read()[1].groups)


def _read() -> tuple[object, Any, dict[str, Sequence[importlib.metadata.EntryPoint]]]:
    global _last
    installed = [(path, _files_of(path)) for path in sys.path]
    found = _last
    if found[0] != installed:
        _last = found = (installed, importlib.metadata.entry_points(), {})
    return found


def _files_of(path: str) -> object:
    """What is different when a distribution in a folder of sys.path is another one."""
    try:
        with os.scandir(path or ".") as entries:
            folders = [each.path for each in entries if each.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        # Not there, or an archive.
        return _stamp(path)
    return sorted((folder, _stamp(os.path.join(folder, "entry_points.txt"))) for folder in folders)


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


_MARK = "__moorage_deprecated__"
#: (group, plugin, distribution, version, what) that were warned of in this process.
_warned: set[tuple[str, ...]] = set()
#: Where warnings go instead of into the log, the last one first; see :func:`noting`.
_notes: list[list[SurveyResult]] = []
#: Where the classes that were loaded in this process came from.
_origins: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def origin_of(plugin: object) -> str:
    """Whose an object is, for messages on what it does at run time.

    Of what was loaded as a plugin its name, group and distribution: ``plugin 'it' (moorage.filters, of acme 1.0)``; of anything
    else its class.
    """
    kind = type(plugin)
    return _origins.get(kind, f"{kind.__module__}.{kind.__qualname__}")


def deprecated(since: tuple[int, int], instead: str) -> Callable[[MethodT], MethodT]:
    """Marks a method of an interface that plugins shall not implement any more; it goes with the next major api_version.

    Until then it is called as before. Each process logs a plugin that implements it once, and ``moorage plugin check`` reports it.

    :param since: the api_version with which it became so.
    :param instead: what the author shall do, a clause: ``implement filter_rows``.
    """

    def mark(method: MethodT) -> MethodT:
        setattr(method, _MARK, f"which is deprecated since api_version {_dotted(since)}: {instead}")
        return method

    return mark


def deprecated_plugin(since: str, instead: str) -> Callable[[ClassT], ClassT]:
    """Marks a plugin's class that is going to be removed, by the author of the plugin. Until then it works as before.

    A configuration that chooses it is warned of once in each process, by ``moorage plugin check`` and by ``moorage config
    validate``. The mark is the class's own: a class that is derived from it, or that it is derived from, has none. So a plugin
    gets another name by a subclass under the old one.

    :param since: the release of the author's distribution with which it became so: ``acme 2.0``.
    :param instead: what a deployer shall do, a clause: ``choose gpu_model``.
    """

    def mark(plugin: ClassT) -> ClassT:
        setattr(plugin, _MARK, f"it is deprecated since {since}: {instead}.")
        return plugin

    return mark


@contextlib.contextmanager
def noting() -> Iterator[list[SurveyResult]]:
    """Instead of being logged, what is deprecated of the plugins that are loaded meanwhile comes into the list, each once.

    For commands, which have one thread and tell it their own way.
    """
    noted: list[SurveyResult] = []
    _notes.append(noted)
    try:
        yield noted
    finally:
        _notes.remove(noted)


class PluginState(enum.Enum):
    """What a survey found out about one plugin."""

    READY = "ready"
    BROKEN = "broken"
    LATE = "late"
    DUPLICATE = "duplicate"
    WRONG_API = "wrong-api"
    WRONG_TYPE = "wrong-type"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class SurveyResult:
    """One plugin as a survey sees it; ``problem`` and ``remedy`` are empty when the state is READY.

    :param warning: what will not work for ever, though it works now; empty when there is nothing.
    """

    group: str
    name: str
    state: PluginState
    target: str = ""
    distribution: str = ""
    version: str = ""
    api_version: tuple[int, int] | None = None
    summary: str = ""
    problem: str = ""
    remedy: str = ""
    warning: str = ""

    def sentence(self) -> str:
        """Returns the whole finding as text for a log or an error."""
        owner = f" of {self.distribution} {self.version}".rstrip() if self.distribution else ""
        said = " ".join(filter(None, (self.problem, self.remedy, self.warning)))
        return f"plugin '{self.name}'{owner} in group {self.group}: {said}"


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A usable plugin class and where it came from."""

    name: str
    plugin: type[T]
    distribution: str
    version: str
    group: str

    @property
    def who(self) -> str:
        """For messages: ``plugin 'it' (moorage.filters, of acme 1.0)``."""
        return f"plugin '{self.name}' ({self.group}, of {f'{self.distribution} {self.version}'.strip()})"

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Guards the block that makes an object of the plugin's class: its errors name the plugin.

        :raises PluginLoadError: the plugin's code raised; names the plugin.
        :raises ConfigError: it refused an option, in its own words; they pass as they are.
        :raises Unavailable: what it needs is away; a later try may do.
        """
        try:
            with plugin_isolation.isolate_plugin_call(f"the plugin '{self.name}'"):
                yield
        except (errors.ConfigError, errors.Unavailable):
            raise
        except Exception as error:
            LOG.debug("The plugin %s cannot be built.", self.name, exc_info=True)
            raise errors.PluginLoadError(
                f"The {self.who} cannot be built: "
                f"{plugin_isolation.format_exception(error)}. Repair it, its options, or take it out of the configuration.",
                group=self.group,
                plugin=self.name,
                distribution=self.distribution,
            ) from error

    def build(self, *arguments: Any, **options: Any) -> T:
        """Returns an object of the class, made with what the interface says its constructor is given.

        :raises PluginLoadError: the constructor raised; for what passes as it is see :meth:`building`.
        """
        with self.building():
            return self.plugin(*arguments, **options)


@dataclass(frozen=True, slots=True)
class ExtensionPoint(Generic[T]):
    """A group of entry points whose plugins are classes that implement ``interface``.

    :param group: the entry-point group, for example ``moorage.filters``.
    :param interface: the abstract class; None where any object will do (it is then not checked).
    :param api_version: the (major, minor) of the interface that this Moorage offers.
    :param option: the option that chooses, as a deployer writes it (``[scheduling] enabled_filters``); for the remedies.
    """

    group: str
    interface: type[T] | None
    api_version: tuple[int, int]
    option: str = ""

    def installed(self) -> dict[str, list[importlib.metadata.EntryPoint]]:
        """Entry points of the group by name, more than one where several distributions claim a name."""
        found: dict[str, list[importlib.metadata.EntryPoint]] = {}
        for point in entry_points(self.group):
            owners = found.setdefault(point.name, [])
            if all((other.value, _owner(other)) != (point.value, _owner(point)) for other in owners):
                owners.append(point)
        return found

    def chosen(self, conf: Any) -> list[Loaded[T]]:
        """Returns the plugins that the option names, one or a list.

        :param conf: the configuration (an oslo.config ``ConfigOpts``).
        :raises PluginLoadError: one cannot be used; see :meth:`load`.
        """
        section, _, name = self.option.partition(" ")
        value = conf[section.strip("[]")][name]
        return [self.load(value)] if isinstance(value, str) else self.load_all(value)

    def survey(self, names: Iterable[str] | None = None) -> list[SurveyResult]:
        """Look at all installed plugins of the group (or the named ones); imports them, never raises.

        :returns: findings in the order of ``names``, or sorted by name.
        """
        installed = self.installed()
        wanted = sorted(installed) if names is None else list(names)
        return [self._examine(name, installed.get(name, []))[0] for name in wanted]

    def load(self, name: str) -> Loaded[T]:
        """Returns the plugin class of that name.

        :raises PluginLoadError: it is missing, broken, claimed twice, of the wrong type or of another api_version.
        :raises PluginTimeout: its import did not end in time; a later try may succeed.
        """
        return self._load(name, self.installed().get(name, []))

    def _load(self, name: str, owners: Sequence[importlib.metadata.EntryPoint]) -> Loaded[T]:
        finding, plugin = self._examine(name, owners)
        if plugin is None:
            refused = errors.PluginTimeout if finding.state is PluginState.LATE else errors.PluginLoadError
            raise refused(
                _sentence_case(finding.sentence()),
                group=self.group,
                plugin=name,
                state=finding.state.value,
                distribution=finding.distribution,
            )
        if finding.warning:
            _warn(finding)
        loaded = Loaded(name, plugin, finding.distribution, finding.version, self.group)
        if isinstance(plugin, type):
            _origins[plugin] = loaded.who
        return loaded

    def load_all(self, names: Sequence[str]) -> list[Loaded[T]]:
        """Returns all the named plugins, in that order; everything is checked before anything is returned.

        :raises PluginLoadError: one or more cannot be used; the message lists every one of them.
        :raises PluginTimeout: the import of one did not end in time; a later try may succeed.
        """
        loaded: list[Loaded[T]] = []
        refused: list[errors.PluginLoadError] = []
        twice = sorted({name for name in names if list(names).count(name) > 1})
        if twice:
            where = self.option or self.group
            refused.append(
                errors.PluginLoadError(f"{where} names {', '.join(twice)} more than once; name each plugin once.")
            )
        for _, found in self.load_each(names):
            if isinstance(found, errors.PluginLoadError):
                refused.append(found)
            else:
                loaded.append(found)
        if len(refused) == 1:
            raise refused[0]
        if refused:
            raise errors.PluginLoadError(" ".join(error.message for error in refused), group=self.group)
        return loaded

    def load_each(self, names: Iterable[str]) -> Iterator[tuple[str, Loaded[T] | errors.PluginLoadError]]:
        """Yields each name with its plugin class, or with the reason why it cannot be used.

        What is installed is looked up once, which is most of the cost of :meth:`load`.

        :raises PluginTimeout: the import of one did not end in time; a later try may succeed.
        """
        installed = self.installed()
        for name in names:
            try:
                yield name, self._load(name, installed.get(name, []))
            except errors.PluginLoadError as error:
                yield name, error

    # -- examining one name ---------------------------------------------------------------------------------------

    def _examine(
        self, name: str, owners: Sequence[importlib.metadata.EntryPoint]
    ) -> tuple[SurveyResult, type[T] | None]:
        if not owners:
            return self._missing(name), None
        if len(owners) > 1:
            return self._duplicate(name, owners), None
        point = owners[0]
        plugin, failure = import_entry_point(point)
        if failure is not None:
            return self._broken(point, failure), None
        finding = self._check(point, plugin)
        return finding, (plugin if finding.state is PluginState.READY else None)

    def _missing(self, name: str) -> SurveyResult:
        offered = ", ".join(sorted(self.installed())) or "none"
        chosen = f" (chosen by {self.option})" if self.option else ""
        return SurveyResult(
            self.group,
            name,
            PluginState.MISSING,
            problem=f"no installed distribution offers it{chosen}; offered are: {offered}.",
            remedy="Correct the name, or install the distribution that brings it.",
        )

    def _duplicate(self, name: str, owners: Sequence[importlib.metadata.EntryPoint]) -> SurveyResult:
        owners = sorted(owners, key=_owner)  # a folder lists its files in any order
        listed = " and ".join(f"{owner.value} ({_owner(owner)})" for owner in owners)
        return SurveyResult(
            self.group,
            name,
            PluginState.DUPLICATE,
            target=owners[0].value,
            distribution=", ".join(sorted({distribution_of(owner)[0] for owner in owners})),
            problem=f"two owners claim the name: {listed}.",
            remedy="Uninstall one of them; which one would win is not defined.",
        )

    def _broken(self, point: importlib.metadata.EntryPoint, failure: BaseException) -> SurveyResult:
        distribution, version = distribution_of(point)
        state = PluginState.BROKEN
        if isinstance(failure, LateImportError):
            state = PluginState.LATE
            remedy = (
                f"Try again when the machine is less busy. If it is late again, repair or uninstall {distribution}, or take the "
                f"plugin out of {self.option or 'the configuration'}."
            )
        elif point.extras and isinstance(failure, ImportError):
            extras = ",".join(point.extras)
            remedy = f"Try: pip install '{distribution}[{extras}]'."
        else:
            remedy = (
                f"Repair or uninstall {distribution}, or take the plugin out of {self.option or 'the configuration'}."
            )
            if _only_its_author_can_mend(point, failure):
                remedy = f"This is a mistake in {distribution}, which its author must mend. {remedy}"
        return SurveyResult(
            self.group,
            point.name,
            state,
            point.value,
            distribution,
            version,
            problem=f"it cannot be imported ({plugin_isolation.format_exception(failure)}).",
            remedy=remedy,
        )

    def _check(self, point: importlib.metadata.EntryPoint, plugin: Any) -> SurveyResult:
        distribution, version = distribution_of(point)
        declared = self._declared_version(plugin)
        state, problem, remedy = PluginState.READY, "", ""
        if self.interface is not None and not (isinstance(plugin, type) and issubclass(plugin, self.interface)):
            state = PluginState.WRONG_TYPE
            problem = f"{point.value} is not a subclass of {self.interface.__module__}.{self.interface.__qualname__}."
            remedy = f"This is a mistake in {distribution}: its author must derive the class from the interface."
        elif self.interface is not None and getattr(plugin, "__abstractmethods__", None):
            state = PluginState.WRONG_TYPE
            problem = f"{point.value} lacks the methods {', '.join(sorted(plugin.__abstractmethods__))}."
            remedy = f"This is a mistake in {distribution}: its author must implement them."
        elif self.interface is not None and not self._compatible(declared):
            state = PluginState.WRONG_API
            if declared is None:
                problem, remedy = self._undeclared(plugin, distribution)
            else:
                problem = (
                    f"it declares api_version {_dotted(declared)}, this Moorage offers {_dotted(self.api_version)}."
                )
                remedy = f"Install a release of {distribution} for {self.api_version[0]}.x (up to {_dotted(self.api_version)})."
        return SurveyResult(
            self.group,
            point.name,
            state,
            point.value,
            distribution,
            version,
            declared,
            plugin_isolation.escape_unprintable((getattr(plugin, "__doc__", None) or "").strip().partition("\n")[0]),
            problem,
            remedy,
            self._deprecations(plugin, distribution) if state is PluginState.READY else "",
        )

    def _undeclared(self, plugin: Any, distribution: str) -> tuple[str, str]:
        """(problem, remedy) of a class that says nothing of the interface that it was written for, or nothing that can be read."""
        value = self._written_version(plugin)
        written = (
            "no api_version" if value is None else f"api_version = {plugin_isolation.escape_unprintable(repr(value))}"
        )
        return (
            f"it declares {written}, this Moorage offers {_dotted(self.api_version)}.",
            f"This is a mistake in {distribution}: its author must write the version of the interface that the class is for as two "
            f"whole numbers, api_version = {self.api_version}.",
        )

    def _deprecations(self, plugin: Any, distribution: str) -> str:
        """That it is deprecated itself, and what it implements of what was deprecated."""
        whole: str = getattr(plugin, "__dict__", {}).get(_MARK, "")
        found = [
            f"it implements {name}, {mark}."
            for name in sorted(dir(self.interface) if self.interface is not None else ())
            if (mark := getattr(getattr(self.interface, name), _MARK, ""))
            and getattr(plugin, name) is not getattr(self.interface, name)
        ]
        if not found:
            return whole
        remedy = f"It will not be called any more from api_version {self.api_version[0] + 1}.0 on; ask for a newer {distribution}."
        return " ".join(filter(None, (whole, *found, remedy)))

    def _declared_version(self, plugin: Any) -> tuple[int, int] | None:
        """What the plugin's author declared; a value that is only inherited from the interface is none."""
        value = self._written_version(plugin)
        if isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value):
            return value[0], value[1]
        return None

    def _written_version(self, plugin: Any) -> Any:
        """The nearest ``api_version``, whatever it is; that of a base does not stand in for one that cannot be read."""
        for cls in getattr(plugin, "__mro__", ()):
            if cls is self.interface:
                return None
            if "api_version" in vars(cls):
                return vars(cls)["api_version"]
        return None

    def _compatible(self, declared: tuple[int, int] | None) -> bool:
        return declared is not None and declared[0] == self.api_version[0] and declared[1] <= self.api_version[1]


def _warn(finding: SurveyResult) -> None:
    """Once for each plugin in a process, however often it is loaded."""
    if _notes:
        if finding not in _notes[-1]:
            _notes[-1].append(finding)
        return
    key = (finding.group, finding.name, finding.distribution, finding.version, finding.warning)
    if key not in _warned:
        _warned.add(key)
        LOG.warning("%s", _sentence_case(finding.sentence()))


def _only_its_author_can_mend(point: importlib.metadata.EntryPoint, failure: BaseException) -> bool:
    """Returns whether an import fails wherever it is tried: the code is none, or lacks what it says that it has."""
    if isinstance(failure, ImportError):
        lacking = failure.name or ""
    elif isinstance(failure, AttributeError):
        lacking = getattr(failure.obj, "__name__", "")
    else:
        return isinstance(failure, SyntaxError | NameError)
    return lacking.partition(".")[0] == point.module.partition(".")[0]


def _owner(point: importlib.metadata.EntryPoint) -> str:
    return " ".join(distribution_of(point)).strip()


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]
