# SPDX-License-Identifier: Apache-2.0
"""Classes as people write them for Nova, without any base class; tests name them by their paths."""

from __future__ import annotations


class OddHosts:
    """The shortest filter there is."""

    def host_passes(self, host_state, spec_obj):
        return int(host_state.host.rpartition("-")[2]) % 2 == 1


class EvenHosts:
    """One that has ``_filter_one``."""

    def _filter_one(self, obj, spec_obj):
        return int(obj.host.rpartition("-")[2]) % 2 == 0


class FewestInstances:
    """One that decides over all hosts together."""

    def filter_all(self, filter_obj_list, spec_obj):
        hosts = list(filter_obj_list)
        fewest = min((host.num_instances for host in hosts), default=0)
        return (host for host in hosts if host.num_instances == fewest)


class StopsForGpu:
    """One that says to stop filtering."""

    def filter_all(self, filter_obj_list, spec_obj):
        return None if spec_obj.flavor.name == "gpu" else filter_obj_list


class ReadsEverything:
    """What Nova's own filters read of hosts and requests."""

    RUN_ON_REBUILD = True

    def host_passes(self, host_state, spec_obj):
        metadata = {key: value for each in host_state.aggregates for key, value in each.metadata.items()}
        metrics = {metric.name: metric.value for metric in host_state.metrics}
        group = spec_obj.instance_group
        members = set(group.members) & set(host_state.instances.keys()) if group else set()
        image = spec_obj.image.properties if spec_obj.image else {}
        hint = spec_obj.get_scheduler_hint("different_host") or []
        flavors = {instance.instance_type_id for instance in host_state.instances.values()}
        host_state.limits["vcpu"] = host_state.vcpus_total
        return bool(
            not host_state.service["disabled"]
            and "extra_specs" in spec_obj.flavor
            and host_state.free_ram_mb >= 0
            and metadata.get("rack") != "a"
            and metrics.get("power", 0) < 100
            and (group is None or group.policies != ["anti-affinity"] or not members)
            and image.get("os_distro") != "fedora"
            and not set([hint] if isinstance(hint, str) else hint) & set(host_state.instances)
            and "gpu" not in flavors
            and (host_state.hypervisor_version or 0) < 6_000_000
            and host_state.cpu_info.get("arch") != "i686"
            and not spec_obj.force_hosts
        )


class OnlyTheFirst:
    """One that is asked for the first of several alike only."""

    run_filter_once_per_request = True

    def host_passes(self, host_state, spec_obj):
        return True


class OnlyTheFirstBySaying(OnlyTheFirst):
    run_filter_once_per_request = False

    def run_filter_for_index(self, index):
        return index == 0


class FreeRam:
    """A weigher of Nova's newer kind."""

    minval = 0
    maxval = 6000

    def weight_multiplier(self, host_state):
        return 2.0 if host_state.aggregates else 1.0

    def _weigh_object(self, host_state, weight_properties):
        return host_state.free_ram_mb


class Crowd:
    """A weigher of Nova's older kind, over all hosts, whose multiplier knows no host."""

    def weight_multiplier(self):
        return -1.0

    def weigh_objects(self, weighed_obj_list, weight_properties):
        return [each.obj.num_instances for each in weighed_obj_list]


class NotOne:
    pass


class CannotBeBuilt:
    def __init__(self):
        raise RuntimeError("no licence")

    def host_passes(self, host_state, spec_obj):
        return True


def several():
    return [OddHosts, FewestInstances]


def wrong():
    return [OddHosts, NotOne]
