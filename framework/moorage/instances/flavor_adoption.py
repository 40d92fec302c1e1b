# SPDX-License-Identifier: Apache-2.0
"""Gives instances that brought their resources along a version of their flavor.

Each distinct flavorid with resources and extra specs becomes a version: one of the catalogue that has these contents, or else a new
implicit one. The adoption goes over all instances by pages, and compares each recorded version with what the instance has. So it
also corrects instances that a process of an earlier release resized, which does not write versions. It may be interrupted and
repeated, and several processes may do it at once. Requests go on meanwhile: an instance is written on the condition that
nothing has changed it since it was read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.db import Database
from moorage.instances.interface import Instance, InstanceStore
from moorage.scheduling.flavors import FlavorStore
from moorage.scheduling.resource_request import HeldResources

__all__ = ["AdoptionReport", "FlavorAdoption"]

#: Instances that one transaction changes at most.
_PAGE = 100
#: A flavorid with contents, as text.
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """What was done.

    :param seen: instances that were read.
    :param written: instances that got a version, or another one.
    :param versions: implicit versions that are new.
    :param changed: instances that something else changed meanwhile; do it again.
    """

    seen: int
    written: int
    versions: int
    changed: int


class FlavorAdoption:
    """Compares the versions of all instances with what they have, and writes those that differ."""

    def __init__(self, database: Database, instances: InstanceStore, flavors: FlavorStore) -> None:
        self._database = database
        self._instances = instances
        self._flavors = flavors
        self._known: dict[_Key, int] = {}
        self._new = 0

    def run(self) -> AdoptionReport:
        """Goes over all instances once, by pages in the order of uuids."""
        seen = written = changed = 0
        after = ""
        while page := self._instances.list(after=after, limit=_PAGE):
            after = page[-1].uuid
            wanted = [(each, version) for each, version in self._versions(page) if version != each.flavor_version]
            done = self._write(wanted) if wanted else 0
            seen, written, changed = seen + len(page), written + done, changed + len(wanted) - done
        return AdoptionReport(seen, written, self._new, changed)

    def _versions(self, page: Sequence[Instance]) -> list[tuple[Instance, int]]:
        """Returns each instance of a page with the version that it has."""
        unknown: dict[str, dict[_Key, tuple[HeldResources, Mapping[str, str]]]] = {}
        for each in page:
            if (key := _key(each)) not in self._known:
                unknown.setdefault(each.flavorid, {})[key] = _contents(each)
        for flavorid, contents in unknown.items():
            found, new = self._flavors.adopt(flavorid, list(contents.values()))
            self._known.update(zip(contents, found, strict=True))
            self._new += new
        return [(each, self._known[_key(each)]) for each in page]

    def _write(self, wanted: Sequence[tuple[Instance, int]]) -> int:
        """Writes versions of instances in one transaction; returns the number of those that nothing else had changed."""

        def work(transaction: Any) -> int:
            return sum(
                self._instances.change(
                    transaction,
                    each.uuid,
                    each.fence,
                    {"flavor_version": version},
                    expected=[each.status],
                    fence=each.fence,
                )
                for each, version in wanted
            )

        return self._database.run(work)


def _contents(each: Instance) -> tuple[HeldResources, Mapping[str, str]]:
    return HeldResources(each.resources), each.request.get("extra_specs") or {}


def _key(each: Instance) -> _Key:
    return each.flavorid, json.dumps(_contents(each), sort_keys=True)
