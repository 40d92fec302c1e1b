# SPDX-License-Identifier: Apache-2.0
"""What Nova's filters and weighers say of one host, written down again as plainly as can be: the oracle of the tests.

Nothing here uses the plugins under test. Two things differ on purpose, because Nova fails the whole request there: a host that says
something that is no number where a number is asked for does not pass, and neither does one whose address is none.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from oslo_utils import versionutils

from moorage.scheduling.interface import HostState, RequestSpec

Host = Any
NUMBERS = {"=", "==", "!=", ">=", "<="}
OPERATORS = NUMBERS | {"s==", "s!=", "s<", "s<=", "s>", "s>=", "<in>", "<all-in>", "<or>"}
#: name -> (host, request, configuration) -> whether it passes.
FILTERS: dict[str, Callable[[Host, RequestSpec, Any], bool]] = {}
#: name -> (minval, raw weight, multiplier), the last two of (host, request, configuration).
WEIGHERS: dict[str, tuple[float | None, Callable[[Host, RequestSpec, Any], float], Callable[[Host, Any], float]]] = {}


def passes(name: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        FILTERS[name] = function
        return function

    return keep


# -- what Nova's helpers say ------------------------------------------------------------------------------------------


def values_of(host: HostState, key: str) -> set[str]:
    return {aggregate.metadata[key] for aggregate in host.aggregates if key in aggregate.metadata}


def metadata_of(host: HostState) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for aggregate in host.aggregates:
        for key, value in aggregate.metadata.items():
            found.setdefault(key, set()).update(part.strip() for part in value.split(","))
    return found


def least(values: set[str], default: Any, kind: Any) -> Any:
    try:
        return min([kind(value) for value in values]) if values else default
    except ValueError:
        return default


def match(value: str, wanted: str) -> bool:
    words = wanted.split()
    if not words:
        return value == wanted
    name, words = words[0], words[1:]
    if name == "<or>":
        return value in [word for number, word in enumerate(words) if number % 2 == 0]
    if name == "<in>":
        return words[0] in value
    if name == "<all-in>":
        return all(word in value for word in words)
    if name not in OPERATORS:
        return value == wanted
    left: Any = value
    right: Any = words[0]
    if name in NUMBERS:
        try:
            left, right = float(left), float(right)
        except ValueError:
            return False
    sign = name.removeprefix("s")
    if sign in ("=", ">="):
        return left == right if name == "s=" else left >= right
    return {"==": left == right, "!=": left != right, "<=": left <= right, "<": left < right, ">": left > right}[sign]


# -- filters ----------------------------------------------------------------------------------------------------------


@passes("all_hosts")
def all_hosts(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return True


@passes("compute")
def compute(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return host.service_enabled and host.service_up and host.can_host


@passes("capacity")
def capacity(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return all(host.free.get(name, 0) >= amount for name, amount in spec.flavor.resources.items())


@passes("type_affinity")
def type_affinity(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return all(instance.flavorid == spec.flavor.flavorid for instance in host.instances.values())


@passes("same_host")
def same_host(host: Host, spec: RequestSpec, conf: Any) -> bool:
    wanted = spec.get_scheduler_hint("same_host")
    wanted = [wanted] if isinstance(wanted, str) else wanted
    return bool(set(host.instances) & set(wanted)) if wanted else True


@passes("different_host")
def different_host(host: Host, spec: RequestSpec, conf: Any) -> bool:
    unwanted = spec.get_scheduler_hint("different_host")
    unwanted = [unwanted] if isinstance(unwanted, str) else unwanted
    return not set(host.instances) & set(unwanted) if unwanted else True


@passes("num_instances")
def num_instances(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return host.num_instances < conf.filter_num_instances.max_instances_per_host


@passes("io_ops")
def io_ops(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return host.num_io_ops < conf.filter_io_ops.max_io_ops_per_host


@passes("aggregate_num_instances")
def aggregate_num_instances(host: Host, spec: RequestSpec, conf: Any) -> bool:
    values = values_of(host, "max_instances_per_host")
    return host.num_instances < least(values, conf.filter_num_instances.max_instances_per_host, int)


@passes("aggregate_io_ops")
def aggregate_io_ops(host: Host, spec: RequestSpec, conf: Any) -> bool:
    return host.num_io_ops < least(values_of(host, "max_io_ops_per_host"), conf.filter_io_ops.max_io_ops_per_host, int)


@passes("availability_zone")
def availability_zone(host: Host, spec: RequestSpec, conf: Any) -> bool:
    if not spec.availability_zone:
        return True
    metadata = metadata_of(host)
    if "availability_zone" in metadata:
        return spec.availability_zone in metadata["availability_zone"]
    return spec.availability_zone == conf.filter_availability_zone.default_zone


@passes("aggregate_instance_extra_specs")
def aggregate_instance_extra_specs(host: Host, spec: RequestSpec, conf: Any) -> bool:
    metadata = metadata_of(host)
    for name, wanted in spec.flavor.extra_specs.items():
        scope = name.split(":", 1)
        if len(scope) > 1 and scope.pop(0) != "aggregate_instance_extra_specs":
            continue
        values = metadata.get(scope[0])
        if not values:
            return False
        if not any(match(value, wanted) for value in values):
            return False
    return True


@passes("aggregate_multitenancy_isolation")
def aggregate_multitenancy_isolation(host: Host, spec: RequestSpec, conf: Any) -> bool:
    tenants: set[str] = set()
    for key, values in metadata_of(host).items():
        if key.startswith("filter_tenant_id"):
            tenants |= values
    return spec.project_id in tenants if tenants else True


@passes("aggregate_type_affinity")
def aggregate_type_affinity(host: Host, spec: RequestSpec, conf: Any) -> bool:
    values = values_of(host, "instance_type")
    for value in values:
        if spec.flavor.flavorid in [part.strip() for part in value.split(",")]:
            return True
    return not values


@passes("aggregate_image_properties_isolation")
def aggregate_image_properties_isolation(host: Host, spec: RequestSpec, conf: Any) -> bool:
    section = conf.filter_aggregate_image_properties_isolation
    for key, options in metadata_of(host).items():
        if section.namespace and not key.startswith(section.namespace + section.separator):
            continue
        value = spec.image.get("properties", {}).get(key)
        if value and str(value) not in options:
            return False
    return True


@passes("isolated_hosts")
def isolated_hosts(host: Host, spec: RequestSpec, conf: Any) -> bool:
    section = conf.filter_isolated_hosts
    restricted = section.restrict_isolated_hosts_to_isolated_images
    host_isolated = host.host in section.isolated_hosts
    if not section.isolated_images:
        return not restricted or not host_isolated
    image_isolated = spec.image.get("id") in section.isolated_images
    return image_isolated == host_isolated if restricted else not image_isolated or host_isolated


@passes("compute_capabilities")
def compute_capabilities(host: Host, spec: RequestSpec, conf: Any) -> bool:
    wanted = dict(spec.flavor.extra_specs)
    bits = wanted.pop("hw:maxphysaddr_bits", None)
    if bits is not None:
        wanted["capabilities:cpu_info:maxphysaddr:bits"] = f">= {bits}"
    for name, condition in wanted.items():
        scope = name.split(":")
        if len(scope) == 1:
            if not hasattr(host, name) and name not in host.stats:
                continue
        elif scope.pop(0) != "capabilities":
            continue
        found = capability(host, scope)
        if found is None or not match(str(found), condition):
            return False
    return True


@passes("required_traits")
def required_traits(host: Host, spec: RequestSpec, conf: Any) -> bool:
    asked = {**spec.flavor.extra_specs, **spec.image.get("properties", {})}
    for key, word in asked.items():
        if key.startswith("trait:in:"):
            passed = any(name in host.traits for name in key.removeprefix("trait:in:").split(","))
        elif key.startswith("trait:"):
            passed = (key.removeprefix("trait:") in host.traits) == (word == "required")
        else:
            continue
        if not passed:
            return False
    return True


def capability(host: Host, path: Sequence[str]) -> Any:
    found: Any = host
    for number, word in enumerate(path):
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except ValueError:
                return None
        if number == 0:
            found = said_of(host, word)
        elif isinstance(found, dict):
            found = found.get(word)
        else:
            return None
        if found is None:
            return None
    return found


def said_of(host: Host, name: str) -> Any:
    """An attribute of the host, else what is in its stats; facts are only what it really said."""
    facts = ("cpu_info", "failed_builds", "host_ip", "hypervisor_type", "metrics", "supported_instances")
    said = None if name in facts else getattr(host, name, None)
    return host.stats.get(name) if said is None else said


@passes("image_properties")
def image_properties(host: Host, spec: RequestSpec, conf: Any) -> bool:
    image = spec.image.get("properties", {})
    architecture = image.get("hw_architecture", conf.filter_image_properties.default_architecture)
    wanted = [
        architecture and {"i386": "i686", "i486": "i686", "i586": "i686", "amd64": "x86_64"}.get(
            architecture.lower(), architecture.lower()
        ),
        image.get("img_hv_type") and image["img_hv_type"].lower().replace("xapi", "xen"),
        image.get("hw_vm_mode") and {"pv": "xen", "hv": "hvm", "baremetal": "hvm"}.get(
            image["hw_vm_mode"].lower(), image["hw_vm_mode"].lower()
        ),
    ]  # fmt: skip
    if not any(wanted):
        return True
    for supported in host.supported_instances or ():
        if any(word and word not in supported for word in wanted):
            continue
        asked = image.get("img_hv_requested_version")
        if asked and host.hypervisor_version:
            version = versionutils.convert_version_to_str(host.hypervisor_version)
            if not versionutils.VersionPredicate(asked).satisfied_by(version):
                continue
        bits = image.get("hw_maxphysaddr_bits")
        known = host.cpu_info.get("maxphysaddr", {}).get("bits")
        if bits and known and known < bits:
            continue
        return True
    return False


@passes("simple_cidr_affinity")
def simple_cidr_affinity(host: Host, spec: RequestSpec, conf: Any) -> bool:
    near = spec.get_scheduler_hint("build_near_host_ip")
    if not near:
        return True
    network = ipaddress.ip_network(near + spec.get_scheduler_hint("cidr", "/24"), strict=False)
    try:
        return ipaddress.ip_address(host.host_ip) in network
    except ValueError:
        return False


@passes("json")
def json_query(host: Host, spec: RequestSpec, conf: Any) -> bool:
    query = spec.get_scheduler_hint("query")
    if not query:
        return True
    answer = evaluate(json.loads(query), host)
    return any(answer) if isinstance(answer, list) else bool(answer)


def evaluate(query: list[Any], host: Host) -> Any:
    if not query:
        return True
    given = [value for argument in query[1:] if (value := meant(argument, host)) is not None]
    name = query[0]
    if name == "not":
        return [not argument for argument in given]
    if name in ("and", "or"):
        return all(given) if name == "and" else any(given)
    if len(given) < 2:
        return False
    if name == "in":
        return given[0] in given[1:]
    try:
        return all(compared(name, given[0], other) for other in given[1:])
    except TypeError:
        return False


def meant(argument: Any, host: Host) -> Any:
    if isinstance(argument, list):
        return evaluate(argument, host)
    if not isinstance(argument, str) or not argument.startswith("$"):
        return None if argument == "" else argument
    path = argument[1:].split(".")
    found = said_of(host, path[0])
    for word in path[1:]:
        found = found.get(word) if hasattr(found, "get") else None
    return found


def compared(name: str, first: Any, other: Any) -> bool:
    if name == "=":
        return bool(first == other)
    if name in ("<", "<="):
        return bool(first < other if name == "<" else first <= other)
    return bool(first > other if name == ">" else first >= other)


@passes("metrics")
def metrics(host: Host, spec: RequestSpec, conf: Any) -> bool:
    wanted = {setting.split("=")[0].strip() for setting in conf.weigher_metrics.settings}
    return wanted <= set(host.metrics)


@passes("server_group_affinity")
def server_group_affinity(host: Host, spec: RequestSpec, conf: Any) -> bool:
    group = spec.server_group
    if group is None or group.policy != "affinity" or not group.nodes:
        return True
    return host.uuid in group.nodes


@passes("server_group_anti_affinity")
def server_group_anti_affinity(host: Host, spec: RequestSpec, conf: Any) -> bool:
    group = spec.server_group
    if group is None or group.policy != "anti-affinity" or spec.instance_uuid in host.instances:
        return True
    return len(set(host.instances) & set(group.members)) < group.max_server_per_host


# -- weighers ---------------------------------------------------------------------------------------------------------


def weighs(name: str, minval: float | None, raw: Callable[[Host, RequestSpec, Any], float], sign: float = 1.0) -> None:
    def multiplier(host: Host, conf: Any) -> float:
        option = conf[f"weigher_{name}"].multiplier
        return sign * float(least(values_of(host, f"{name}_weight_multiplier"), option, float))

    WEIGHERS[name] = (minval, raw, multiplier)


def members_there(policy: str, host: Host, spec: RequestSpec) -> int:
    if spec.server_group is None or spec.server_group.policy != policy:
        return 0
    return len(set(host.instances) & set(spec.server_group.members))


def measured(host: Host, spec: RequestSpec, conf: Any) -> float:
    total = 0.0
    for setting in conf.weigher_metrics.settings:
        name, _, ratio = setting.partition("=")
        if name in host.metrics:
            total += host.metrics[name] * float(ratio)
        elif float(ratio) * WEIGHERS["metrics"][2](host, conf) != 0:
            return conf.weigher_metrics.weight_of_unavailable
    return total


weighs("cpu", 0.0, lambda host, spec, conf: host.vcpus_total * host.cpu_allocation_ratio - host.vcpus_used)
weighs("ram", 0.0, lambda host, spec, conf: host.free_ram_mb)
weighs("disk", 0.0, lambda host, spec, conf: host.free_disk_mb)
weighs("io_ops", 0.0, lambda host, spec, conf: host.num_io_ops)
weighs("num_instances", None, lambda host, spec, conf: host.num_instances)
weighs("build_failure", None, lambda host, spec, conf: host.failed_builds, -1.0)
weighs("hypervisor_version", None, lambda host, spec, conf: host.hypervisor_version or 0)
weighs("soft_affinity", None, lambda host, spec, conf: members_there("soft-affinity", host, spec))
weighs("soft_anti_affinity", None, lambda host, spec, conf: -members_there("soft-anti-affinity", host, spec))
weighs("metrics", None, measured)


# -- the loop ---------------------------------------------------------------------------------------------------------


def survivors(hosts: Sequence[Host], spec: RequestSpec, filters: Sequence[str], conf: Any) -> list[Host]:
    # What Nova's Placement would not have answered.
    hosts = [host for host in hosts if host.can_host or spec.rebuild]
    for name in filters:
        hosts = [host for host in hosts if FILTERS[name](host, spec, conf)]
    return list(hosts)


def ranked(hosts: Sequence[Host], spec: RequestSpec, weighers: Sequence[str], conf: Any) -> list[Host]:
    if len(hosts) <= 1:
        return list(hosts)
    totals = [0.0 for _ in hosts]
    for name in weighers:
        minval, raw, multiplier = WEIGHERS[name]
        weights = [float(raw(host, spec, conf)) for host in hosts]
        if minval is not None:
            weights = [max(weight, minval) for weight in weights]
        low = min(weights) if minval is None else minval
        high = max(weights)
        for number, (host, weight) in enumerate(zip(hosts, weights, strict=True)):
            if low != high:
                totals[number] += multiplier(host, conf) * ((weight - low) / (high - low))
    assert all(math.isfinite(total) for total in totals)
    order = sorted(range(len(hosts)), key=lambda number: totals[number], reverse=True)
    return [hosts[number] for number in order]
