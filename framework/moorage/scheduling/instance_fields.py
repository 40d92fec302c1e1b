# SPDX-License-Identifier: Apache-2.0
"""The fields of instances that filters declared (``instance_fields``), which stores read and agents report for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oslo_log import log as logging

from moorage import errors
from moorage.scheduling.interface import FILTERS

__all__ = ["NO_FIELDS", "FieldSet", "declared_fields"]

LOG = logging.getLogger(__name__)
_EVERYTHING = "*"
#: What an instance always has, beside what was asked for in its request.
_OWN = ("name", "status", "user_id", "created_at")


@dataclass(frozen=True, slots=True)
class FieldSet:
    """Names of fields; ``everything``: all that an instance has."""

    names: tuple[str, ...] = ()
    everything: bool = False

    def __bool__(self) -> bool:
        return self.everything or bool(self.names)

    def of(self, instance: Any) -> dict[str, Any]:
        """The fields of an instance: its attributes, else what its ``request`` has under that name; absent ones are left out."""
        ready = getattr(instance, "fields", None)
        if ready is not None:
            return dict(ready)
        request: Mapping[str, Any] = getattr(instance, "request", None) or {}
        names = dict.fromkeys((*_OWN, *request)) if self.everything else self.names
        found = {}
        for name in names:
            value = getattr(instance, name, None) if name not in request else request[name]
            if value is not None:
                found[name] = value
        return found


NO_FIELDS = FieldSet()


def declared_fields(conf: Any) -> FieldSet:
    """What ``[scheduling] instance_fields`` names and the enabled filters declare.

    For a filter that is not installed here (agents need none), a line of the log says that the option must name its fields.
    """
    section = conf.scheduling
    if not section.track_instance_changes:
        return NO_FIELDS
    names = dict.fromkeys(section.instance_fields)
    if _EVERYTHING in names:
        return FieldSet(everything=True)
    # A class that was written for Nova declares nothing.
    ours = [name for name in section.enabled_filters if "." not in name and ":" not in name]
    for name, found in FILTERS.load_each(ours):
        if isinstance(found, errors.PluginLoadError):
            LOG.warning(
                "What the filter %s reads of instances is not known here; name it in [scheduling] instance_fields if it is "
                "anything of its own. %s",
                name,
                found.message,
            )
        else:
            names.update(dict.fromkeys(found.plugin.instance_fields))
    return FieldSet(tuple(names))
