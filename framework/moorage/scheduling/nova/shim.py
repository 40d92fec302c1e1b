# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the modules of Nova that filters and weighers derive from, where Nova is not installed.

With ``[scheduling] nova_shim = true`` these can be imported:

==================================  ==================================================================================
``nova.filters``                    ``BaseFilter``
``nova.weights``                    ``BaseWeigher``
``nova.scheduler.filters``          ``BaseHostFilter``
``nova.scheduler.weights``          ``BaseHostWeigher``
``nova.scheduler.filters.utils``    ``aggregate_values_from_key``, ``aggregate_metadata_get_by_host``,
                                    ``validate_num_values``, ``instance_uuids_overlap``
``nova.scheduler.utils``            ``get_weight_multiplier``, ``request_is_rebuild``
``nova.conf``                       ``CONF``, which is oslo.config's own; options of Nova are not in it
``nova.i18n``                       ``_``, which answers the text as it is
==================================  ==================================================================================

A class that imports anything else of Nova needs Nova. Where Nova is installed, nothing is put in its place.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from oslo_config import cfg

from moorage import threads

__all__ = ["BaseFilter", "BaseHostFilter", "BaseHostWeigher", "BaseWeigher", "install"]

_LOCK = threads.lock()


class BaseFilter:
    """A filter over any objects."""

    run_filter_once_per_request: ClassVar[bool] = False

    def _filter_one(self, obj: Any, spec_obj: Any) -> bool:
        return True

    def filter_all(self, filter_obj_list: Iterable[Any], spec_obj: Any) -> Iterator[Any]:
        """Yields the objects that pass."""
        return (each for each in filter_obj_list if self._filter_one(each, spec_obj))

    def run_filter_for_index(self, index: int) -> bool:
        """Returns whether the filter is called for this instance of several equal ones."""
        return index == 0 or not self.run_filter_once_per_request


class BaseHostFilter(BaseFilter):
    """A filter over hosts."""

    RUN_ON_REBUILD: ClassVar[bool] = False

    def _filter_one(self, obj: Any, spec_obj: Any) -> bool:
        return (request_is_rebuild(spec_obj) and not self.RUN_ON_REBUILD) or self.host_passes(obj, spec_obj)

    def host_passes(self, host_state: Any, filter_properties: Any) -> bool:
        """Returns whether the host passes; the author's to write."""
        raise NotImplementedError


class BaseWeigher:
    """A weigher over any objects."""

    minval: ClassVar[float | None] = None
    maxval: ClassVar[float | None] = None

    def weight_multiplier(self, host_state: Any) -> float:
        """How much it counts."""
        return 1.0

    def _weigh_object(self, obj: Any, weight_properties: Any) -> float:
        raise NotImplementedError

    def weigh_objects(self, weighed_obj_list: Iterable[Any], weight_properties: Any) -> list[float]:
        """Weights within the bounds."""
        low = float("-inf") if self.minval is None else self.minval
        high = float("inf") if self.maxval is None else self.maxval
        weights = (self._weigh_object(each.obj, weight_properties) for each in weighed_obj_list)
        return [min(max(weight, low), high) for weight in weights]


class BaseHostWeigher(BaseWeigher):
    """A weigher over hosts."""


def request_is_rebuild(spec_obj: Any) -> bool:
    """Returns whether the instance stays where it is."""
    hints = getattr(spec_obj, "scheduler_hints", None) or {}
    return hints.get("_nova_check_type") == ["rebuild"]


def aggregate_values_from_key(host_state: Any, key_name: str) -> set[str]:
    """What the host's aggregates say under a key."""
    return {each.metadata[key_name] for each in host_state.aggregates if key_name in each.metadata}


def aggregate_metadata_get_by_host(host_state: Any, key: str | None = None) -> dict[str, set[str]]:
    """Returns the metadata of the host's aggregates that have the key, with values split at commas."""
    found: dict[str, set[str]] = {}
    for aggregate in host_state.aggregates:
        if key is None or key in aggregate.metadata:
            for name, value in aggregate.metadata.items():
                found.setdefault(name, set()).update(part.strip() for part in value.split(","))
    return found


def validate_num_values(
    vals: Iterable[str], default: Any = None, cast_to: Callable[[str], Any] = int, based_on: Any = min
) -> Any:
    """Returns ``based_on`` (min) of the values as numbers; the default without values. Raises ValueError for other texts."""
    numbers = [cast_to(value) for value in vals]
    return based_on(numbers) if numbers else default


def instance_uuids_overlap(host_state: Any, uuids: Any) -> bool:
    """Returns whether any of the instances is on the host."""
    return any(uuid in host_state.instances for uuid in ([uuids] if isinstance(uuids, str) else uuids))


def get_weight_multiplier(host_state: Any, multiplier_name: str, multiplier_config: float) -> float:
    """Returns the least that the host's aggregates say, else the configured one."""
    try:
        values = aggregate_values_from_key(host_state, multiplier_name)
        return float(validate_num_values(values, multiplier_config, float))
    except ValueError:
        return multiplier_config


_MODULES: dict[str, dict[str, Any]] = {
    "nova": {},
    "nova.filters": {"BaseFilter": BaseFilter},
    "nova.weights": {"BaseWeigher": BaseWeigher},
    "nova.conf": {"CONF": cfg.CONF},
    "nova.i18n": {"_": str},
    "nova.scheduler": {},
    "nova.scheduler.utils": {"get_weight_multiplier": get_weight_multiplier, "request_is_rebuild": request_is_rebuild},
    "nova.scheduler.filters": {"BaseHostFilter": BaseHostFilter},
    "nova.scheduler.filters.utils": {
        each.__name__: each
        for each in (
            aggregate_values_from_key,
            aggregate_metadata_get_by_host,
            validate_num_values,
            instance_uuids_overlap,
        )
    },
    "nova.scheduler.weights": {"BaseHostWeigher": BaseHostWeigher},
}


def install() -> bool:
    """Put the stand-ins where an import finds them, unless Nova itself can be imported; True when they are there."""
    with _LOCK:
        present = sys.modules.get("nova")
        if present is not None:
            return bool(getattr(present, "moorage_shim", False))
        if importlib.util.find_spec("nova") is not None:
            return False
        made = {name: _module(name, content) for name, content in _MODULES.items()}
        for name, module in made.items():
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(made[parent], child, module)
        sys.modules.update(made)
        return True


def _module(name: str, content: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, "Stands in for the module of Nova; see moorage.scheduling.nova.shim.")
    module.__dict__.update(content, moorage_shim=True, __path__=[])
    return module
