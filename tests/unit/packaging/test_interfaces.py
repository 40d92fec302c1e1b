# SPDX-License-Identifier: Apache-2.0
"""What plugins must implement stays what it was, as long as the major version of their interface does."""

from __future__ import annotations

import inspect
import sys
import unittest
from collections.abc import Iterator
from typing import Any

import moorage
from moorage.control_plane.extension_points import extension_points
from tests.unit.packaging.test_metadata import modules

#: Major version -> class -> what a plugin that derives from it must implement, and is called with. A plugin that lacks a method is
#: refused, and one that takes other arguments fails: so one more needs another major version, whose demands are then written down
#: beside these. A method with a default needs another minor one, and stands nowhere here.
DEMANDS: dict[int, dict[str, set[str]]] = {
    1: {
        "moorage.allocation.interface.candidates.CandidateSource": {
            "candidates(query)",
        },
        "moorage.allocation.interface.catalogue.NameCatalogue": {
            "create_resource_class(name)",
            "create_trait(name)",
            "delete_resource_class(name)",
            "delete_trait(name)",
            "rename_resource_class(name, new_name)",
            "resource_classes()",
            "traits(names, prefix, associated)",
        },
        "moorage.allocation.interface.catalogue.ProviderCatalogue": {
            "add_inventory(uuid, item, expected_generation)",
            "change_inventory(uuid, item, expected_generation)",
            "create_provider(provider)",
            "find_providers(query, after, limit)",
            "inventories(uuid)",
            "provider(uuid)",
            "provider_aggregates(uuid)",
            "provider_traits(uuid)",
            "remove_inventory(uuid, resource_class, expected_generation)",
            "set_aggregates(uuid, aggregates, expected_generation)",
            "set_inventories(uuid, items, expected_generation)",
            "set_traits(uuid, traits, expected_generation)",
            "traits_of(providers)",
            "update_provider(uuid, name, can_host, parent, reparent)",
        },
        "moorage.allocation.interface.claims.AllocationStore": {
            "allocations(consumers, providers, after, limit)",
            "claim(request, companion)",
            "delete_provider(uuid, transaction)",
            "ensure_providers(providers, transaction)",
            "release(consumer, transaction)",
            "usages(after, limit, providers)",
        },
        "moorage.allocation.interface.claims.Auditable": {
            "drift()",
            "recount(provider)",
        },
        "moorage.allocation.interface.claims.BatchCompanion": {
            "__call__(transaction)",
            "together(companions)",
        },
        "moorage.allocation.interface.detectors.OrphanDetector": {
            "missing(consumers)",
        },
        "moorage.allocation.interface.ledger.AllocationLedger": {
            "consumer(uuid)",
            "consumers(after, limit)",
            "expire(limit)",
            "project_usages(project, user, consumer_type)",
            "provider_holding(uuid)",
            "renew(consumer, lifetime)",
            "replace(changes, companion)",
            "reshape(inventories, changes)",
        },
        "moorage.allocation.interface.changes.ChangeSource": {
            "provider_uuids()",
            "recent_providers(since)",
            "sharing()",
        },
        "moorage.allocation.interface.pools.PoolSource": {
            "pools(providers)",
        },
        "moorage.allocation.interface.trees.TreeSource": {
            "nested(roots)",
            "roots_of(providers)",
        },
        "moorage.allocation.interface.quotas.QuotaSource": {
            "limits()",
        },
        "moorage.allocation.interface.quotas.QuotaStore": {
            "quota_drift()",
            "quotas(project)",
            "recount_quotas(project)",
            "set_quota(project, resource_class, limit, transaction)",
            "unset_quota(project, resource_class, transaction)",
        },
        "moorage.cleanup.interface.CleanupHandler": {
            "cleanup(lease, resource)",
            "read(transaction, resource_ids)",
        },
        "moorage.cleanup.interface.SetCleanupHandler": {
            "finish_batch(transaction, leases, resources)",
            "read(transaction, resource_ids)",
        },
        "moorage.control_plane.interface.AgentService": {
            "__init__(tools)",
            "endpoints()",
            "start()",
            "stop()",
            "sweep()",
        },
        "moorage.control_plane.interface.ApiExtension": {
            "application()",
        },
        "moorage.instances.interface.InstanceStore": {
            "all(after, limit)",
            "by_hosts(hosts)",
            "change(transaction, uuid, token, values, expected, fence)",
            "get(uuid)",
            "insert(transaction, instance)",
            "list(after, limit, host, status, project_id)",
            "remove(transaction, uuid, token)",
            "set_status(transaction, uuid, status, token, fault, expected)",
        },
        "moorage.instances.interface.Reassignable": {
            "reassign(transaction, hosts, host)",
        },
        "moorage.coordination.interface.CoordinationBackend": {
            "close()",
            "join(group, member_id)",
            "leave()",
            "members()",
            "renew()",
            "start()",
        },
        "moorage.coordination.interface.PeriodicTask": {
            "handle(object_id, lease)",
            "list_objects()",
        },
        "moorage.drivers.interface.ComputeDriver": {
            "destroy(uuid, up_to_token)",
            "inspect()",
            "spawn(workload, token)",
        },
        "moorage.drivers.interface.FencingDriver": {
            "turn_off(machine)",
        },
        "moorage.observers.interface.Observer": {
            "observe(notice)",
        },
        "moorage.rpc.interface.Subscription": {
            "stop(drain_seconds)",
        },
        "moorage.rpc.interface.Transport": {
            "call(topic, message, server, timeout)",
            "cast(topic, message, server)",
            "close()",
            "fanout(topic, message)",
            "listeners(topic)",
            "serve(topic, server, handler, threads)",
        },
        "moorage.scheduling.interface.plugins.HostFilter": {
            "host_passes(host_state, spec_obj)",
        },
        "moorage.scheduling.interface.plugins.HostWeigher": {
            "weigh_rows(fleet, rows, spec)",
        },
        "moorage.scheduling.interface.requests.InstanceSource": {
            "all(after, limit)",
            "by_hosts(hosts)",
        },
        "moorage.sharding.interface.NodePlacer": {
            "place_one(node, loads, params)",
        },
        "moorage.sharding.interface.ShardStrategy": {
            "assign(nodes, shards, current, locked, params)",
        },
    },
}
# A store that does not count the residents of a node would break the promises of filters in silence.
_STORE = "moorage.allocation.interface.claims.AllocationStore"
DEMANDS[2] = {name: asked for name, asked in DEMANDS[1].items() if name.startswith("moorage.allocation.")}
DEMANDS[2][_STORE] = (DEMANDS[1][_STORE] - {"release(consumer, transaction)"}) | {
    "release(consumer, transaction, residents)",
    "residents(provider, transaction)",
}
#: What Moorage itself implements, and gives to plugins: whatever stands in an interface and is not here is theirs to implement.
GIVEN = {
    f"moorage.{each}"
    for each in (
        *("work.interface.Right", "work.interface.Lease", "work.interface.Renewer", "work.interface.OperationStore"),
    )
}


def abstract_classes() -> Iterator[tuple[str, type[Any], int]]:
    """(name, class, major version) of all that plugins derive from: the extension points' interfaces, and the optional powers."""
    for module in modules(moorage):
        family, found, _ = f"{module.__name__}.".partition(".interface.")
        for name, kind in vars(module).items() if found else ():
            if not inspect.isclass(kind) or kind.__module__ != module.__name__ or not inspect.isabstract(kind):
                continue
            # One that only joins others asks for nothing by itself.
            own = any(getattr(each, "__isabstractmethod__", False) for each in vars(kind).values())
            if own and f"{module.__name__}.{name}" not in GIVEN:
                yield f"{module.__name__}.{name}", kind, sys.modules[f"{family}.interface"].API_VERSION[0]


def demands(kind: type[Any]) -> set[str]:
    """Its abstract methods, each with its parameters."""
    return {
        f"{method}({', '.join([*inspect.signature(getattr(kind, method)).parameters][1:])})"
        for method in kind.__abstractmethods__
    }


class InterfacesTests(unittest.TestCase):
    def test_a_plugin_for_an_earlier_minor_version_has_all_that_it_must_have(self) -> None:
        for name, kind, major in abstract_classes():
            with self.subTest(interface=name):
                known = name in DEMANDS.get(major, {})
                self.assertTrue(known, f"{name}: write down what {major}.0 asks for, or that Moorage gives it")
                more = demands(kind) - DEMANDS[major][name]
                self.assertEqual(set(), more, "give each a default, or raise the major number of API_VERSION")

    def test_the_interface_of_every_extension_point_is_looked_at_in_the_version_that_it_is_loaded_with(self) -> None:
        majors = {kind: major for _, kind, major in abstract_classes()}
        for point in extension_points():
            assert point.interface is not None
            self.assertEqual(point.api_version[0], majors[point.interface], point.group)

    def test_what_is_written_down_is_there(self) -> None:
        there = {(major, name) for name, _, major in abstract_classes()}
        newest = {name: major for major in sorted(DEMANDS) for name in DEMANDS[major]}
        self.assertEqual(set(), {(major, name) for name, major in newest.items()} - there)
