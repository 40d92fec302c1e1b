# SPDX-License-Identifier: Apache-2.0
"""Finding filters and weighers by name, or by the path of a class that was written for Nova.

A name without a dot or colon is a plugin's name (an entry point). ``package.module.Class`` and ``package.module:Class`` name a
class; a function in place of the class is called and must answer classes, all of which are used, in its order.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from moorage import errors, plugin_isolation
from moorage.extensions import ExtensionPoint, Loaded
from moorage.scheduling.interface import FILTERS, WEIGHERS
from moorage.scheduling.nova import shim
from moorage.scheduling.nova.adapter import adapted_filter, adapted_weigher, is_filter_class, is_weigher_class
from moorage.scheduling.options import apply_preset

__all__ = ["load_filters", "load_weighers"]


def load_filters(conf: Any) -> list[Loaded[Any]]:
    """What ``[scheduling] enabled_filters`` names, in its order; everything is checked before anything is returned.

    :raises PluginLoadError: one or more cannot be used; the message lists every one of them.
    """
    return _load_all(
        FILTERS, conf.scheduling.enabled_filters, conf.scheduling.nova_shim, is_filter_class, adapted_filter
    )


def load_weighers(conf: Any) -> list[Loaded[Any]]:
    """What ``[scheduling] enabled_weighers`` or the preset names, in the same way."""
    apply_preset(conf)
    return _load_all(
        WEIGHERS, conf.scheduling.enabled_weighers, conf.scheduling.nova_shim, is_weigher_class, adapted_weigher
    )


def _load_all(
    point: ExtensionPoint[Any],
    names: Sequence[str],
    with_shim: bool,
    is_usable: Callable[[Any], bool],
    adapter: Callable[[type], Any],
) -> list[Loaded[Any]]:
    refused: list[str] = []
    found: dict[str, list[Loaded[Any]]] = {}
    plain = [name for name in names if not _is_path(name)]
    try:
        found = {each.name: [each] for each in point.load_all(plain)}
    except errors.PluginLoadError as error:
        refused.append(error.message)
    for name in names:
        if not _is_path(name):
            continue
        if name in found:
            refused.append(f"{point.option} names {name} more than once; name each plugin once.")
            continue
        try:
            found[name] = _of_path(point, name, with_shim, is_usable, adapter)
        except errors.PluginLoadError as error:
            refused.append(error.message)
    if refused:
        raise errors.PluginLoadError(" ".join(refused), group=point.group)
    return [each for name in names for each in found[name]]


def _is_path(name: str) -> bool:
    return "." in name or ":" in name


def _of_path(
    point: ExtensionPoint[Any],
    path: str,
    with_shim: bool,
    is_usable: Callable[[Any], bool],
    adapter: Callable[[type], Any],
) -> list[Loaded[Any]]:
    found = _imported(point, path, with_shim)
    classes = [found]
    if not inspect.isclass(found) and callable(found):
        try:
            with plugin_isolation.printing_aside(), plugin_isolation.isolate_plugin_call(path):
                classes = list(found())
        except Exception as error:
            raise _refused(point, path, f"its call failed ({plugin_isolation.format_exception(error)})") from error
    loaded = []
    for each in classes:
        name = path if each is found else f"{path}[{getattr(each, '__name__', each)}]"
        if inspect.isclass(each) and point.interface is not None and issubclass(each, point.interface):
            loaded.append(Loaded(name, each, each.__module__, "", point.group))
        elif is_usable(each):
            loaded.append(Loaded(name, adapter(each), each.__module__, "", point.group))
        else:
            raise _refused(point, path, f"{each!r} is no class that {point.group} can use")
    return loaded


def _imported(point: ExtensionPoint[Any], path: str, with_shim: bool) -> Any:
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if with_shim:
        shim.install()
    try:
        with plugin_isolation.printing_aside(), plugin_isolation.isolate_plugin_call(path):
            return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "nova":
            hint = " It was written on Nova's base classes: install nova, or set [scheduling] nova_shim = true."
        raise _refused(
            point, path, f"it cannot be imported ({plugin_isolation.format_exception(error)})", hint
        ) from error


def _refused(point: ExtensionPoint[Any], path: str, problem: str, hint: str = "") -> errors.PluginLoadError:
    remedy = hint or f" Write package.module.Class in {point.option}, or the name of an installed plugin."
    return errors.PluginLoadError(
        f"The path '{path}' in {point.option} cannot be used: {problem}.{remedy}", group=point.group, plugin=path
    )
