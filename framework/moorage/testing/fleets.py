# SPDX-License-Identifier: Apache-2.0
"""Random fleets and requests for tests of filters and weighers.

They are small and use few words, so that coincidences are common: nodes that share a host, instances that a hint names,
aggregates that say what a flavor asks for, values on the border, values that are no number.
"""

from __future__ import annotations

import json
import random as random_module
from collections.abc import Mapping, Sequence
from typing import Any

from moorage.scheduling.fleet_view import FleetView
from moorage.scheduling.interface import Aggregate, Flavor, InstanceRecord, NodeState, RequestSpec, ServerGroup

__all__ = ["FLAVORS", "IMAGES", "PROJECTS", "random_fleet", "random_node", "random_request"]

FLAVORS: Sequence[str] = ("tiny", "small", "large", "gpu")
TRAITS: Sequence[str] = ("HW_CPU_X86_AVX2", "CUSTOM_FAST", "CUSTOM_OLD")
PROJECTS: Sequence[str] = ("red", "green", "blue")
IMAGES: Sequence[str] = ("img-a", "img-b", "img-c")
_ARCHITECTURES = ("x86_64", "aarch64", "i686")
_ZONES = ("north", "south", "nova")
_KEYS = ("ssd", "gpu_model", "hw_architecture", "os_distro", "rack")
_VALUES = ("true", "false", "1", "2", "10", "x86_64", "a", "b", "a, b", "debian,fedora")
_REQUIREMENTS = (
    "true", "a", "1", "= 2", ">= 2", "<= 2", "== 10", "!= 1", "s== a", "s!= a", "s< b", "s<= a", "s> a", "s>= b", "<in> a",
    "<in> x86", "<all-in> a b", "<or> a <or> b", "<or> a 2 b", "<or> 10", "<or>", ">= many", ">=", "= ", "s==", "<all-in>", "",
)  # fmt: skip
_METADATA: Mapping[str, Sequence[str]] = {
    "availability_zone": _ZONES,
    "filter_tenant_id": ("red", "green", "red, blue"),
    "filter_tenant_id_2": ("blue", "green"),
    "instance_type": ("tiny", "small, large", "gpu"),
    "max_instances_per_host": ("1", "2", "3", "many", "-1"),
    "max_io_ops_per_host": ("1", "2", "0", "few"),
    "ram_weight_multiplier": ("2.0", "-1", "heavy"),
    "cpu_weight_multiplier": ("0", "3"),
    "num_instances_weight_multiplier": ("-2", "1.5"),
    "disk_weight_multiplier": ("0.5", "2"),
    "io_ops_weight_multiplier": ("-2", "1"),
    "build_failure_weight_multiplier": ("1", "1000"),
    "hypervisor_version_weight_multiplier": ("-1", "2"),
    "soft_affinity_weight_multiplier": ("3", "0"),
    "soft_anti_affinity_weight_multiplier": ("2", "some"),
    "metrics_weight_multiplier": ("0", "2.5"),
    **dict.fromkeys(_KEYS, _VALUES),
}


def random_aggregate(random: random_module.Random, number: int) -> Aggregate:
    """Returns an aggregate with a few metadata."""
    keys = random.sample(sorted(_METADATA), random.randrange(8))
    return Aggregate(f"aggregate-{number}", {key: random.choice(_METADATA[key]) for key in keys})


def random_node(random: random_module.Random, number: int, aggregates: Sequence[Aggregate] = ()) -> NodeState:
    """Returns a node; every third host has several."""
    capacity = {"VCPU": float(random.choice((4, 8, 16.5))), "MEMORY_MB": float(random.choice((4096, 8192)))}
    if random.random() < 0.7:
        capacity["DISK_GB"] = float(random.choice((50, 100)))
    if random.random() < 0.3:
        capacity["PGPU"] = 2.0
    used = {name: random.randrange(int(total) + 1) for name, total in capacity.items() if random.random() < 0.3}
    return NodeState(
        uuid=f"00000000-0000-4000-8000-{number:012d}",
        name=f"node-{number}",
        host=f"host-{number - number % 3 if number % 9 < 3 else number}",
        capacity=capacity,
        used=used,
        can_host=random.random() < 0.95,
        up=random.random() < 0.9,
        enabled=random.random() < 0.9,
        properties=_random_properties(random),
        aggregates=tuple(each for each in aggregates if random.random() < 0.3),
        traits=frozenset(each for each in TRAITS if random.random() < 0.4),
    )


def _random_properties(random: random_module.Random) -> dict[str, Any]:
    cpu = {
        "arch": random.choice(_ARCHITECTURES),
        "maxphysaddr": {"mode": "emulate", "bits": random.choice((36, 42, 46))},
        "features": random.sample(("aes", "sse4", "avx"), random.randrange(4)),
    }
    choices: dict[str, Any] = {
        "hypervisor_type": random.choice(("QEMU", "qemu", "ironic")),
        "hypervisor_version": random.choice((2_000_000, 6_002_000, None)),
        "cpu_info": random.choice((cpu, json.dumps(cpu), "no json")),
        "supported_instances": [
            [random.choice(_ARCHITECTURES), random.choice(("qemu", "kvm", "xen")), random.choice(("hvm", "xen"))]
            for _ in range(random.randrange(3))
        ],
        "host_ip": random.choice(("10.0.0.5", "10.0.1.7", "192.168.7.9", "2001:db8::7", "no address")),
        "metrics": {
            name: random.choice((0.5, 2, -1.0, 1000))
            for name in random.sample(("cpu.percent", "power", "heat"), random.randrange(4))
        },
        "failed_builds": random.randrange(3),
        **{key: random.choice(_VALUES) for key in _KEYS},
    }
    return {name: value for name, value in choices.items() if random.random() < 0.6}


def random_fleet(
    random: random_module.Random, size: int, *, nodes: Sequence[NodeState] = (), per_node: int = 4
) -> FleetView:
    """Returns a view of ``size`` nodes (or of the given ones) with up to ``per_node`` instances on each, ``instance-0`` and on."""
    aggregates = [random_aggregate(random, number) for number in range(random.randrange(6))]
    nodes = nodes or [random_node(random, number, aggregates) for number in range(size)]
    view = FleetView()
    view.set_nodes(nodes)
    count = 0
    for node in nodes:
        flavors = random.choice((FLAVORS, FLAVORS[:1], FLAVORS[1:2]))
        for _ in range(random.randrange(per_node + 1)):
            view.put(
                InstanceRecord(
                    f"instance-{count}",
                    node.host,
                    node.name,
                    random.choice(flavors),
                    {"VCPU": random.randrange(1, 3), "MEMORY_MB": 512},
                    random.choice(PROJECTS),
                    busy=random.random() < 0.3,
                )
            )
            count += 1
    return view


def random_request(random: random_module.Random, instances: int = 100) -> RequestSpec:
    """Returns a request that may name any of the first ``instances`` instances, and some that do not exist."""

    def uuids(most: int) -> list[str]:
        return [f"instance-{random.randrange(instances + 5)}" for _ in range(random.randrange(most + 1))]

    resources = {"VCPU": random.randrange(1, 4), "MEMORY_MB": random.choice((128, 1024, 4096))}
    if random.random() < 0.2:
        resources["PGPU"] = 1
    if random.random() < 0.2:
        resources["CUSTOM_UNHEARD_OF"] = 1
    policy = random.choice(("affinity", "anti-affinity", "soft-affinity", "soft-anti-affinity"))
    return RequestSpec(
        instance_uuid=f"instance-{random.randrange(instances)}" if random.random() < 0.1 else "new",
        flavor=Flavor(random.choice(FLAVORS), resources, _random_extra_specs(random)),
        project_id=random.choice(PROJECTS),
        hints=_random_hints(random, uuids),
        image=_random_image(random),
        availability_zone=random.choice((None, None, *_ZONES, "nowhere")),
        server_group=ServerGroup("g", policy, random.randrange(1, 4), tuple(uuids(6)))
        if random.random() < 0.5
        else None,
    )


def _random_extra_specs(random: random_module.Random) -> dict[str, str]:
    names = (
        *_KEYS,
        *(f"aggregate_instance_extra_specs:{key}" for key in _KEYS),
        *(f"capabilities:{key}" for key in _KEYS),
        "capabilities:cpu_info:arch",
        "capabilities:cpu_info:maxphysaddr:bits",
        "capabilities:cpu_info:nothing",
        "capabilities:hypervisor_type",
        "capabilities:num_instances",
        "hw:maxphysaddr_bits",
        "capabilities:free_ram_mb",
        "capabilities:vcpus_used",
        "num_io_ops",
        "total_usable_disk_gb",
        "hypervisor_type",
    )
    found = {
        name: "42" if name.startswith("hw:") else random.choice(_REQUIREMENTS)
        for name in random.sample(names, random.randrange(3))
    }
    if random.random() < 0.3:
        found["trait:" + random.choice((*TRAITS, "CUSTOM_UNHEARD_OF"))] = random.choice(("required", "forbidden"))
    if random.random() < 0.1:
        found["trait:in:" + ",".join(random.sample(TRAITS, 2))] = "required"
    return found


def _random_hints(random: random_module.Random, uuids: Any) -> dict[str, list[str]]:
    hints: dict[str, list[str]] = {}
    for name in ("same_host", "different_host"):
        if random.random() < 0.3:
            hints[name] = uuids(4)
    if random.random() < 0.2:
        hints["build_near_host_ip"] = [random.choice(("10.0.0.1", "192.168.0.0", "2001:db8::1"))]
        if random.random() < 0.5:
            hints["cidr"] = [random.choice(("/24", "/16", "/8", "/31"))]
    if random.random() < 0.3:
        hints["query"] = [json.dumps(_random_query(random, 3))]
    return hints


def _random_query(random: random_module.Random, depth: int) -> list[Any]:
    if depth and random.random() < 0.6:
        parts = [_random_query(random, depth - 1) for _ in range(random.randrange(1, 3))]
        return [random.choice(("and", "or", "not")), *parts]
    compared: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("$num_instances", (0, 1, 3)),
        ("$free_disk_mb", (0, 51200)),
        ("$disk_mb_used", (0, 10240)),
        ("$vcpus_total", (4, 16.5)),
        ("$free_ram_mb", (0, 2048.0, 4096)),
        ("$host", ("host-1", "host-4")),
        ("$hypervisor_type", ("QEMU",)),
        ("$properties.rack", ("a", "b")),
        ("$nothing", (1,)),
        ("$metrics", ("power",)),
    )
    name, values = random.choice(compared)
    operators = ("=", "<", ">", "<=", ">=", "in") if name.startswith(("$num", "$free")) else ("=", "in")
    return [random.choice(operators), name, *(random.choice(values) for _ in range(random.randrange(1, 3)))]


def _random_image(random: random_module.Random) -> dict[str, Any]:
    if random.random() < 0.3:
        return {}
    choices: dict[str, Any] = {
        "hw_architecture": random.choice((*_ARCHITECTURES, "amd64")),
        "img_hv_type": random.choice(("qemu", "kvm", "QEMU")),
        "hw_vm_mode": random.choice(("hvm", "xen")),
        "img_hv_requested_version": random.choice((">=2.0", "<6.0", ">=6.0,<7.0")),
        "hw_maxphysaddr_bits": random.choice((40, 42)),
        "os_distro": random.choice(("debian", "fedora", "a")),
        "ssd": random.choice(("true", True, 1)),
    }
    properties = {name: value for name, value in choices.items() if random.random() < 0.3}
    return (
        {"id": random.choice(IMAGES), "properties": properties} if random.random() < 0.9 else {"properties": properties}
    )
