# SPDX-License-Identifier: Apache-2.0
"""The public interface, as data: which modules a plugin, a program of others, and their tests may import.

What stands here stays as it is until the next major release, but for what was announced (:func:`moorage.extensions.deprecated`);
the rest may change without notice. The documentation's page is made from this list, and so are the checks that hold the reference
plugins, the examples and the templates to it.
"""

from __future__ import annotations

import enum
import fnmatch

__all__ = ["PUBLIC", "Audience", "audience_of"]


class Audience(enum.Enum):
    """Who may import a module. Each may import what those before it may."""

    #: Plugins.
    PLUGINS = "plugins"
    #: Programs that use a family as a library, without the control plane.
    PROGRAMS = "programs"
    #: Tests of plugins and programs.
    TESTS = "tests"


#: Patterns of module names, and who may import them.
PUBLIC: dict[str, Audience] = {
    # The kernel.
    "moorage.errors": Audience.PLUGINS,
    "moorage.clock": Audience.PLUGINS,
    "moorage.threads": Audience.PLUGINS,
    "moorage.randomness": Audience.PLUGINS,
    "moorage.read_only": Audience.PLUGINS,
    "moorage.bounded_pool": Audience.PLUGINS,
    "moorage.gathering": Audience.PLUGINS,
    "moorage.context": Audience.PLUGINS,
    "moorage.extensions": Audience.PLUGINS,
    "moorage.drivers.ended_tokens": Audience.PLUGINS,
    "moorage.work.job": Audience.PLUGINS,
    "moorage.work.lease": Audience.PLUGINS,
    "moorage.work.work_loop": Audience.PLUGINS,
    "moorage.options": Audience.PLUGINS,
    "moorage.part": Audience.PLUGINS,
    "moorage.ring": Audience.PLUGINS,
    "moorage.http.routes": Audience.PLUGINS,
    # What each family's plugins implement.
    "moorage.*.interface": Audience.PLUGINS,
    "moorage.allocation.interface.*": Audience.PLUGINS,
    "moorage.scheduling.interface.*": Audience.PLUGINS,
    "moorage.instances.moves": Audience.PLUGINS,
    "moorage.scheduling.instance_fields": Audience.PLUGINS,
    "moorage.scheduling.traits": Audience.PLUGINS,
    # The engines, and what dialects of the API are made with.
    "moorage.db": Audience.PLUGINS,
    "moorage.db.changes": Audience.PLUGINS,
    "moorage.db.migrations": Audience.PLUGINS,
    "moorage.db.ranges": Audience.PLUGINS,
    "moorage.db.schema": Audience.PLUGINS,
    "moorage.db.time": Audience.PLUGINS,
    "moorage.rpc.client": Audience.PLUGINS,
    "moorage.rpc.options": Audience.PLUGINS,
    "moorage.rpc.queues": Audience.PLUGINS,
    "moorage.rpc.server": Audience.PLUGINS,
    "moorage.rpc.wire": Audience.PLUGINS,
    "moorage.http.application": Audience.PLUGINS,
    "moorage.http.dialect": Audience.PLUGINS,
    "moorage.http.error_statuses": Audience.PLUGINS,
    "moorage.http.validation": Audience.PLUGINS,
    "moorage.wsgi": Audience.PLUGINS,
    # What commands are made with.
    "moorage.cli.base": Audience.PLUGINS,
    # Every plugin may read the fleet: tables of plugins join with it.
    "moorage.fleet.tables": Audience.PLUGINS,
    # The families as libraries.
    "moorage.scheduling.fleet_view": Audience.PROGRAMS,
    "moorage.scheduling.plugin_runner": Audience.PROGRAMS,
    "moorage.scheduling.filter_and_weigh": Audience.PROGRAMS,
    "moorage.scheduling.placement": Audience.PROGRAMS,
    "moorage.scheduling.scheduler": Audience.PROGRAMS,
    "moorage.scheduling.scheduling_policy": Audience.PROGRAMS,
    "moorage.sharding.planner": Audience.PROGRAMS,
    "moorage.coordination.facade": Audience.PROGRAMS,
    "moorage.cleanup.cleaner": Audience.PROGRAMS,
    "moorage.cleanup.conditions": Audience.PROGRAMS,
    "moorage.cleanup.orphans": Audience.PROGRAMS,
    "moorage.work.operations": Audience.PROGRAMS,
    "moorage.services.registry": Audience.PROGRAMS,
    # The conformance kits.
    "moorage.testing": Audience.TESTS,
    "moorage.testing.*": Audience.TESTS,
}


def audience_of(module: str) -> Audience | None:
    """Returns which code may import a module of Moorage; None: only Moorage itself."""
    if module in PUBLIC:
        return PUBLIC[module]
    return next((audience for pattern, audience in PUBLIC.items() if fnmatch.fnmatchcase(module, pattern)), None)
