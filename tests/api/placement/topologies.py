# SPDX-License-Identifier: Apache-2.0
"""What there is before a file of Placement's gabbi suite runs, and how it is built over HTTP.

The suite names its fixtures after Python classes that write into Placement's database. Here the same providers are data, and
they are created through the API itself, so that a fixture tests it too. Every step raises a provider's generation as often as
Placement's does: once for each inventory, each setting of traits, and each allocation; aggregates are set the old way (1.18),
which does not.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import requests

__all__ = ["TOPOLOGIES", "Topology", "build", "variables"]

_NEWEST, _OLD_AGGREGATES = "1.39", "1.18"
_SHARING = "MISC_SHARES_VIA_AGGREGATE"
_Inventories = Mapping[str, int | Mapping[str, Any]]


@dataclass(frozen=True)
class Provider:
    """A provider. ``variable`` gets its uuid ("" : none); a name or uuid of ``$X`` is the value of variable X."""

    name: str
    variable: str = ""
    parent: str = ""
    aggregates: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    inventories: _Inventories = field(default_factory=dict)
    uuid: str = ""


@dataclass(frozen=True)
class Holding:
    """Allocations of one consumer, whose uuid ``variable`` gets."""

    provider: str
    resources: Mapping[str, int]
    variable: str = ""
    project: str = "numafx-project"
    user: str = "numafx-user"


@dataclass(frozen=True)
class Topology:
    """Providers in the order of their creation, then what is held of them. ``fresh`` are variables of new uuids."""

    providers: tuple[Provider, ...] = ()
    holdings: tuple[Holding, ...] = ()
    fresh: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


def variables() -> dict[str, str]:
    """The environment that every file may use."""
    uuids = (
        *("RP_UUID", "RP_NAME", "RP_UUID1", "RP_NAME1", "RP_UUID2", "RP_NAME2", "PROJECT_ID", "ADMIN_PROJECT_ID"),
        *("SERVICE_PROJECT_ID", "USER_ID", "PROJECT_ID_ALT", "USER_ID_ALT", "INSTANCE_UUID", "MIGRATION_UUID"),
        *("CONSUMER_UUID", "PARENT_PROVIDER_UUID", "ALT_PARENT_PROVIDER_UUID"),
    )
    return {name: _new() for name in uuids} | {
        "CUSTOM_RES_CLASS": "CUSTOM_IRON_NFV",
        "CUSTOM_RES_CLASS1": "CUSTOM_IRON_NFV1",
        "CUSTOM_RES_CLASS2": "CUSTOM_IRON_NFV2",
    }


def _new() -> str:
    return str(uuid.uuid4())


# -- the topologies -----------------------------------------------------------------------------------------------

_ALLOCATIONS = Topology(
    providers=(
        Provider(
            "$RP_NAME",
            uuid="$RP_UUID",
            inventories={
                "DISK_GB": {"total": 2048, "step_size": 10, "min_unit": 10, "max_unit": 1000},
                "VCPU": {"total": 10, "max_unit": 10},
            },
        ),
    ),
    holdings=(
        Holding("$RP_NAME", {"DISK_GB": 1000}, "CONSUMER_0", "$PROJECT_ID", "$USER_ID"),
        Holding("$RP_NAME", {"VCPU": 6}, "CONSUMER_ID", "$PROJECT_ID", "$USER_ID"),
        Holding("$RP_NAME", {"DISK_GB": 20, "VCPU": 1}, "ALT_CONSUMER_ID", "$PROJECT_ID", "$ALT_USER_ID"),
    ),
    fresh=("ALT_USER_ID", "ALT_RP_UUID", "ALT_RP_NAME"),
)

_DISK = {"DISK_GB": {"total": 2000, "reserved": 100}}


def _shared_storage() -> Topology:
    computes = {
        "VCPU": {"total": 24, "allocation_ratio": 16.0},
        "MEMORY_MB": {"total": 131072, "allocation_ratio": 1.5},
    }
    agg = ("AGG_UUID",)
    pairs = tuple(itertools.product((1, 2), (1, 2)))
    return Topology(
        providers=(
            Provider("cn1", "CN1_UUID", "", agg, ("HW_CPU_X86_SSE", "HW_CPU_X86_SSE2"), computes),
            Provider("cn2", "CN2_UUID", "", agg, (), {**computes, **_DISK}),
            Provider("ss", "SS_UUID", "", agg, (_SHARING,), _DISK),
            Provider("ss2", "SS2_UUID", "", agg, (_SHARING,), _DISK),
            *(Provider(f"numa{a}_{b}", f"NUMA{a}_{b}_UUID", f"cn{a}") for a, b in pairs),
            *(
                Provider(f"pf{a}_{b}", f"PF{a}_{b}_UUID", f"numa{a}_{b}", inventories={"SRIOV_NET_VF": 8})
                for a, b in pairs
            ),
        ),
        fresh=agg,
    )


def _numa_aggregate() -> Topology:
    cpus = {"VCPU": {"total": 24, "allocation_ratio": 16.0}}
    return Topology(
        providers=(
            Provider("cn1", "CN1_UUID", "", ("AGGA_UUID",)),
            Provider("cn2", "CN2_UUID", "", ("AGGA_UUID", "AGGB_UUID")),
            Provider("ss1", "SS1_UUID", "", ("AGGA_UUID",), (_SHARING,), _DISK),
            Provider("ss2", "SS2_UUID", "", ("AGGC_UUID",), (_SHARING,), _DISK),
            Provider("numa1_1", "NUMA1_1_UUID", "cn1", ("AGGC_UUID",), (), cpus),
            Provider("numa1_2", "NUMA1_2_UUID", "cn1", (), (), cpus),
            Provider("numa2_1", "NUMA2_1_UUID", "cn2", (), (), cpus),
            Provider("numa2_2", "NUMA2_2_UUID", "cn2", (), (), cpus),
        ),
        fresh=("AGGA_UUID", "AGGB_UUID", "AGGC_UUID"),
    )


def _numa_network(*, deep: bool = False) -> Topology:
    agg = ("AGGA_UUID",)
    above = (Provider("gp1"), Provider("p1", parent="gp1"), Provider("p2", parent="gp1")) if deep else ()
    memory0 = {"total": 2048, "min_unit": 512, "step_size": 256}
    memory1 = {"total": 2048, "min_unit": 256, "max_unit": 1024}
    cn2: _Inventories = {"VCPU": 8, "MEMORY_MB": {"total": 2048, "min_unit": 1024, "step_size": 128}, "DISK_GB": 1000}
    nics = {1: (2, 4), 2: (4, 2), 3: (1, 8)}
    return Topology(
        providers=(
            *above,
            Provider("ss1", "SS1_UUID", "", agg, (_SHARING,), {"DISK_GB": 2000}),
            Provider("cn1", "CN1_UUID", "p1" if deep else "", agg, ("COMPUTE_VOLUME_MULTI_ATTACH",)),
            Provider("numa0", "NUMA0_UUID", "cn1", (), ("HW_NUMA_ROOT",), {"VCPU": 4, "MEMORY_MB": memory0}),
            Provider(
                "numa1", "NUMA1_UUID", "cn1", (), ("HW_NUMA_ROOT", "CUSTOM_FOO"), {"VCPU": 4, "MEMORY_MB": memory1}
            ),
            Provider("fpga0", "FPGA0_UUID", "numa0", inventories={"FPGA": 1}),
            Provider("pgpu0", "PGPU0_UUID", "numa0", inventories={"VGPU": 8}),
            Provider("fpga1_0", "FPGA1_0_UUID", "numa1", inventories={"FPGA": 1}),
            Provider("fpga1_1", "FPGA1_1_UUID", "numa1", inventories={"FPGA": 1}),
            Provider("sriov_agent", "SRIOV_AGENT_UUID", "cn1", (), ("CUSTOM_VNIC_TYPE_DIRECT",)),
            *(
                Provider(
                    f"esn{i}",
                    f"ESN{i}_UUID",
                    "sriov_agent",
                    (),
                    (f"CUSTOM_PHYSNET{i}",),
                    {"NET_BW_EGR_KILOBIT_PER_SEC": 10000 * i},
                )
                for i in (1, 2)
            ),
            Provider("ovs_agent", "OVS_AGENT_UUID", "cn1", (), ("CUSTOM_VNIC_TYPE_NORMAL",)),
            Provider(
                "br_int", "BR_INT_UUID", "ovs_agent", (), ("CUSTOM_PHYSNET0",), {"NET_BW_EGR_KILOBIT_PER_SEC": 1000}
            ),
            Provider("cn2", "CN2_UUID", "p2" if deep else "", agg, ("CUSTOM_FOO",), cn2),
            *(Provider(f"nic{i}", f"NIC{i}_UUID", "cn2", (), ("CUSTOM_HW_NIC_ROOT",)) for i in nics),
            *(
                Provider(
                    f"pf{nic}_{port}",
                    f"PF{nic}_{port}_UUID",
                    f"nic{nic}",
                    (),
                    (f"CUSTOM_PHYSNET{(port - 1) % 2 + 1}",),
                    {"CUSTOM_VF": functions},
                )
                for nic, (ports, functions) in nics.items()
                for port in range(1, ports + 1)
            ),
        ),
        holdings=(Holding("numa0", {"VCPU": 2}), Holding("cn2", {"VCPU": 3})),
        fresh=agg,
    )


_WHOLE = {"VCPU": 24, "MEMORY_MB": 131072, "DISK_GB": 2000}
_NON_SHARED = Topology(
    providers=tuple(Provider(f"cn{i}", f"CN{i}_UUID", inventories=_WHOLE) for i in (1, 2, 3)),
    fresh=("AGGA_UUID", "AGGB_UUID", "AGGC_UUID"),
)

_SMALL = {"VCPU": 8, "MEMORY_MB": 4096}
_NETWORK = {"SRIOV_NET_VF": 8, "CUSTOM_NET_MBPS": 4000}
_GRANULAR = Topology(
    providers=(
        Provider(
            "cn_left",
            "CN_LEFT",
            "",
            ("AGGA",),
            ("HW_CPU_X86_AVX", "HW_CPU_X86_AVX2", "HW_GPU_API_DXVA", "HW_NIC_DCB_PFC", "CUSTOM_FOO"),
            {**_SMALL, "DISK_GB": 500, "VGPU": 8, **_NETWORK},
        ),
        Provider(
            "cn_middle",
            "CN_MIDDLE",
            "",
            ("AGGA", "AGGB"),
            ("HW_CPU_X86_AVX", "HW_CPU_X86_AVX2", "HW_CPU_X86_SSE", "HW_NIC_ACCEL_TLS"),
            {**_SMALL, **_NETWORK},
        ),
        Provider(
            "cn_right",
            "CN_RIGHT",
            "",
            ("AGGB", "AGGC"),
            ("HW_CPU_X86_MMX", "HW_GPU_API_DXVA", "CUSTOM_DISK_SSD"),
            {**_SMALL, "DISK_GB": 500, "VGPU": {"total": 8, "max_unit": 2}},
        ),
        Provider("shr_disk_1", "SHR_DISK_1", "", ("AGGA",), (_SHARING, "CUSTOM_DISK_SSD"), {"DISK_GB": 1000}),
        Provider("shr_disk_2", "SHR_DISK_2", "", ("AGGA", "AGGB"), (_SHARING,), {"DISK_GB": 1000}),
        Provider("shr_net", "SHR_NET", "", ("AGGC",), (_SHARING,), {"SRIOV_NET_VF": 16, "CUSTOM_NET_MBPS": 40000}),
    ),
    fresh=("AGGA", "AGGB", "AGGC"),
    classes=("CUSTOM_NET_MBPS",),
)

_DIRECT = ("CUSTOM_VNIC_TYPE_DIRECT", "CUSTOM_VNIC_TYPE_DIRECT_PHYSICAL", "CUSTOM_VNIC_TYPE_MACVTAP")


def _ports(
    host: str, bridges: Mapping[str, str], functions: Mapping[str, str], rates: tuple[int, int]
) -> Iterator[Provider]:
    """A compute host of Neutron's multi-segment example: short name of a port -> its physical network."""

    def bandwidth(rate: int) -> _Inventories:
        return {"NET_BW_EGR_KILOBIT_PER_SEC": rate, "NET_BW_IGR_KILOBIT_PER_SEC": rate}

    yield Provider(host, host, inventories={**_SMALL, "DISK_GB": 500})
    agent = f"{host}:Open vSwitch agent"
    normal = "CUSTOM_VNIC_TYPE_NORMAL"
    packets = {"NET_PACKET_RATE_KILOPACKET_PER_SEC": 1000}
    yield Provider(agent, f"{host}:ovs_agent", host, (), (normal,), packets)
    for name, network in bridges.items():
        variable = f"{host}:{name.replace('-', '_')}"
        yield Provider(f"{agent}:{name}", variable, agent, (), (normal, network), bandwidth(rates[0]))
    agent = f"{host}:NIC Switch agent"
    yield Provider(agent, f"{host}:sriov_agent", host, (), _DIRECT)
    for number, (name, network) in enumerate(functions.items()):
        yield Provider(f"{agent}:{name}", f"{host}:pf{number}", agent, (), (*_DIRECT, network), bandwidth(rates[1]))


def _multi_segment() -> Topology:
    networks = ("CUSTOM_PHYSNET_OTHER", "CUSTOM_PHYSNET_MSN_S1", "CUSTOM_PHYSNET_MSN_S2")
    hosts = [
        _ports(f"compute{number}", {"br-ex": network}, {"enp129s0f0": network}, (5000, 10000))
        for number, network in enumerate(networks)
    ]
    both = _ports(
        "compute3",
        {"br-ex": networks[1], "br-ex2": networks[2]},
        {"enp129s0f0": networks[1], "enp129s0f1": networks[2]},
        (1000, 1000),
    )
    return Topology(providers=tuple(itertools.chain(*hosts, both)))


#: By the name that the suite gives it.
TOPOLOGIES: Mapping[str, Topology] = {
    "APIFixture": Topology(),
    "OpenPolicyFixture": Topology(),
    "SecureRBACPolicyFixture": Topology(),
    "LegacyRBACPolicyFixture": Topology(),
    "CORSFixture": Topology(),
    "AllocationFixture": _ALLOCATIONS,
    "SharedStorageFixture": _shared_storage(),
    "NUMAAggregateFixture": _numa_aggregate(),
    "NUMANetworkFixture": _numa_network(),
    "DeepNUMANetworkFixture": _numa_network(deep=True),
    "NonSharedStorageFixture": _NON_SHARED,
    "GranularFixture": _GRANULAR,
    "NeutronQoSMultiSegmentFixture": _multi_segment(),
}


# -- building -----------------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._session = requests.Session()
        self._session.headers["X-Auth-Token"] = token

    def send(self, method: str, path: str, body: Any = None, version: str = _NEWEST) -> Any:
        found = self._session.request(
            method,
            self._url + path,
            json=body,
            headers={"OpenStack-API-Version": f"placement {version}"},
            timeout=60,
        )
        if not found.ok:
            raise AssertionError(f"{method} {path} answered {found.status_code}: {found.text}")
        return found.json() if found.content else None

    def provider(self, each: Provider, uuids: Mapping[str, str], names: Mapping[str, str]) -> str:
        """Create it; its uuid."""
        identity = _value(each.uuid, names) or _new()
        body = {"name": _value(each.name, names), "uuid": identity}
        if each.parent:
            body["parent_provider_uuid"] = uuids[each.parent]
        self.send("POST", "/resource_providers", body)
        path = f"/resource_providers/{identity}"
        if each.aggregates:
            self.send("PUT", f"{path}/aggregates", [names[name] for name in each.aggregates], _OLD_AGGREGATES)
        for of_class, given in each.inventories.items():
            if of_class.startswith("CUSTOM_"):
                self.send("PUT", f"/resource_classes/{of_class}")
            item = dict(given) if isinstance(given, Mapping) else {"total": given}
            item.setdefault("max_unit", item["total"])
            self.send("POST", f"{path}/inventories", {"resource_class": of_class, **item})
        if each.traits:
            for trait in each.traits:
                if trait.startswith("CUSTOM_"):
                    self.send("PUT", f"/traits/{trait}")
            generation = self.send("GET", path)["generation"]
            traits = {"resource_provider_generation": generation, "traits": list(each.traits)}
            self.send("PUT", f"{path}/traits", traits)
        return identity

    def holding(self, each: Holding, uuids: Mapping[str, str], names: Mapping[str, str]) -> str:
        """Claim it, as clients did before consumers had types; the consumer's uuid."""
        consumer = _new()
        body = {
            "allocations": {uuids[each.provider]: {"resources": dict(each.resources)}},
            "project_id": _value(each.project, names),
            "user_id": _value(each.user, names),
        }
        self.send("PUT", f"/allocations/{consumer}", body, "1.12")
        return consumer


def _value(text: str, names: Mapping[str, str]) -> str:
    return names[text[1:]] if text.startswith("$") else text


def build(topology: Topology, url: str, token: str = "admin") -> dict[str, str]:
    """Create it through the API at ``url``; the environment of the file that runs on it."""
    builder = _Builder(url, token)
    names = variables() | {name: _new() for name in topology.fresh}
    uuids: dict[str, str] = {}
    for name in topology.classes:
        builder.send("PUT", f"/resource_classes/{name}")
    for provider in topology.providers:
        uuids[provider.name] = builder.provider(provider, uuids, names)
        if provider.variable:
            names[provider.variable] = uuids[provider.name]
    for holding in topology.holdings:
        consumer = builder.holding(holding, uuids, names)
        if holding.variable:
            names[holding.variable] = consumer
    return names
