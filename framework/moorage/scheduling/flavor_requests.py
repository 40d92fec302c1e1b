# SPDX-License-Identifier: Apache-2.0
"""What a request's flavor means: a flavorid alone is a version of the catalogue; with resources it is a free-form request.

A request by flavorid costs one read, so its newest version is as new as a plain read finds it. A free-form request costs no
statement: it is compared with a copy of the catalogue in memory. The copy is compared with the store whenever the process watches
heartbeats (``[services] report_interval``), and after each change that this process makes. So for that long, another process may
accept a free-form request that the changed catalogue refuses. The version that it finds is right all the same, because the contents
of a version never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moorage import errors, threads
from moorage.scheduling.flavors import FlavorStore, FlavorVersion
from moorage.scheduling.resource_request import with_held_resources

__all__ = ["FlavorResolver"]


class FlavorResolver:
    """Replaces the flavor of requests by what the catalogue has of it. Safe for use by several threads."""

    def __init__(self, store: FlavorStore) -> None:
        self._store = store
        self._lock = threads.lock()
        self._state: tuple[int, ...] | None = None
        self._known: Mapping[str, Sequence[FlavorVersion]] = {}

    def refresh(self) -> None:
        """Reads the catalogue when it has changed. One statement, and one more after a change."""
        with self._lock:
            # The state is read first: a change in between is found by the next comparison.
            state = self._store.state()
            if state != self._state:
                self._known = self._store.all()
                self._state = state

    def resolved(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the body of a request with the extra specs and the version of its flavor, and with what an instance of it holds.

        To be called once for a body.

        :raises InvalidInput: the catalogue has no such flavor; the flavor is deprecated; or a free-form request has a flavorid of
            the catalogue with other contents; or its extra specs and its image's properties contradict each other.
        """
        flavor = body["flavor"]
        if "resources" not in flavor:
            flavor = self._by_name(flavor["flavorid"])
        elif version := self._version_of(flavor):
            flavor = {**flavor, "version": version}
        return with_held_resources({**body, "flavor": flavor})

    def _by_name(self, flavorid: str) -> Mapping[str, Any]:
        found = self._store.newest(flavorid)
        if found is None:
            raise _refused(
                f"There is no flavor {flavorid} in the catalogue; moorage flavor list shows what there is. A request for a size "
                "of its own gives resources, too."
            )
        if found.deprecated:
            raise _refused(_deprecated(found, found))
        return {
            "flavorid": flavorid,
            "resources": dict(found.resources),
            "extra_specs": dict(found.extra_specs),
            "version": found.version,
        }

    def _version_of(self, flavor: Mapping[str, Any]) -> int:
        """Returns the version with the contents of a free-form flavor; 0: the catalogue does not have the flavor."""
        if self._state is None:
            self.refresh()
        versions = self._known.get(flavor["flavorid"], ())
        if not versions:
            return 0
        same = [each for each in versions if each.means(flavor["resources"], flavor.get("extra_specs") or {})]
        if not same:
            raise _refused(
                f"Flavor {flavor['flavorid']} of the catalogue has other resources or extra specs than the request. Ask for the "
                "flavor without resources and extra specs, or give these resources another flavorid."
            )
        if same[0].deprecated:
            raise _refused(_deprecated(same[0], versions[0]))
        return same[0].version


def _deprecated(found: FlavorVersion, newest: FlavorVersion) -> str:
    said = f"Version {found.version} of flavor {found.flavorid} is deprecated. "
    if found.successor:
        return f"{said}Ask for flavor {found.successor}."
    if not newest.deprecated:
        return f"{said}Ask for flavor {newest.flavorid} without resources: that is version {newest.version}."
    return f"{said}It has no successor; moorage flavor list shows other flavors."


def _refused(why: str) -> errors.InvalidInput:
    return errors.InvalidInput(why, path="body/flavor")
