# SPDX-License-Identifier: Apache-2.0
"""A node and a request as classes written for Nova expect them.

They are made for one request and thrown away: what a class writes on them is seen by that class alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moorage.scheduling.interface import Fleet, HostState, InstanceRecord, RequestSpec, ServerGroup

__all__ = ["NovaHostState", "NovaRequestSpec"]


class _Fields:
    """Attributes that can be asked for by ``in`` and ``get`` too, as Nova's objects can."""

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an attribute, or the default."""
        return getattr(self, name, default)

    def obj_attr_is_set(self, name: str) -> bool:
        """Returns whether there is such an attribute."""
        return hasattr(self, name)


class NovaFlavor(_Fields):
    """A flavor; ``id`` and ``name`` are its flavorid, which is what stays the same."""

    def __init__(self, flavorid: str, resources: Mapping[str, int], extra_specs: Mapping[str, str]) -> None:
        self.id = self.name = self.flavorid = flavorid
        self.extra_specs = dict(extra_specs)
        self.vcpus = resources.get("VCPU", 0)
        self.memory_mb = resources.get("MEMORY_MB", 0)
        self.root_gb = resources.get("DISK_GB", 0)
        self.ephemeral_gb = self.swap = 0


class NovaInstance(_Fields):
    """An instance on a host, with the fields that filters declared in ``instance_fields``."""

    def __init__(self, record: InstanceRecord) -> None:
        self.__dict__.update(record.fields)
        self.uuid = record.uuid
        self.host = record.host
        self.node = record.node
        self.project_id = record.project_id
        self.instance_type_id = record.flavorid
        self.flavor = NovaFlavor(record.flavorid, record.resources, {})


class _Instances(Mapping[str, NovaInstance]):
    """Instances by uuid, made when they are looked at."""

    __slots__ = ("_records",)

    def __init__(self, records: Mapping[str, InstanceRecord]) -> None:
        self._records = records

    def __getitem__(self, uuid: str) -> NovaInstance:
        return NovaInstance(self._records[uuid])

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, uuid: object) -> bool:
        return uuid in self._records


@dataclass(frozen=True, slots=True)
class NovaMetric:
    """A metric of a host."""

    name: str
    value: float
    source: str = "moorage"
    timestamp: Any = None


class NovaHostState:
    """A node. Attributes that are not here are those of :class:`~moorage.scheduling.interface.plugins.HostState`.

    :param row: which row of the fleet it is.
    :param counted: called when a class reads the node's instances or their number.
    """

    #: What Moorage does not have, as Nova's scheduler leaves it before it is filled in.
    cell_uuid = None
    numa_topology = None
    pci_stats = None
    updated = None

    def __init__(self, state: HostState, row: int = -1, counted: Callable[[], None] = lambda: None) -> None:
        self._state = state
        self._counted = counted
        self.row = row

    def __getattr__(self, name: str) -> Any:
        # Only asked for what the object itself does not have.
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _COUNTED:
            self._counted()
        made = _MADE.get(name)
        if made is None:
            return getattr(self._state, name)
        value = self.__dict__[name] = made(self._state)
        return value

    def __repr__(self) -> str:
        return f"({self.host}, {self.nodename})"


def _service(state: HostState) -> dict[str, Any]:
    return {
        "host": state.host,
        "binary": "nova-compute",
        "topic": "compute",
        "disabled": not state.service_enabled,
        "disabled_reason": None,
        "forced_down": not state.service_up,
    }


#: Attributes that follow from the node's instances.
_COUNTED = frozenset({"instances", "num_instances", "num_io_ops"})
#: Attributes that Nova has in another shape, made at the first look.
_MADE: Mapping[str, Any] = {
    "instances": lambda state: _Instances(state.instances),
    "metrics": lambda state: [NovaMetric(name, value) for name, value in state.metrics.items()],
    "service": _service,
    "limits": lambda state: {},
    "allocation_candidates": lambda state: [],
    "aggregates": lambda state: list(state.aggregates),
}


class NovaImageProperties(_Fields):
    """Properties of an image as attributes."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self.__dict__.update(properties)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of them."""
        return dict(self.__dict__)


class NovaImage(_Fields):
    """What is known of an image."""

    def __init__(self, image: Mapping[str, Any]) -> None:
        self.__dict__.update(image)
        self.properties = NovaImageProperties(image.get("properties") or {})


class NovaInstanceGroup(_Fields):
    """A server group."""

    def __init__(self, group: ServerGroup, hosts: Sequence[str]) -> None:
        self.uuid = self.name = group.name
        self.policy = group.policy
        self.policies = [group.policy]
        self.members = list(group.members)
        self.hosts = list(hosts)
        self.rules = {"max_server_per_host": group.max_server_per_host} if group.policy == "anti-affinity" else {}


class NovaRequestSpec(_Fields):
    """A request.

    :param fleet: where the hosts of the server group's members are looked up; without it there are none.
    """

    num_instances = 1
    retry = None
    limits = None
    numa_topology = None
    pci_requests = None
    requested_destination = None
    request_level_params = None

    def __init__(self, spec: RequestSpec, fleet: Fleet | None = None) -> None:
        self.spec = spec
        self.instance_uuid = spec.instance_uuid
        self.project_id = spec.project_id
        self.user_id = spec.user_id
        self.availability_zone = spec.availability_zone
        self.flavor = NovaFlavor(spec.flavor.flavorid, spec.flavor.resources, spec.flavor.extra_specs)
        self.image = NovaImage(spec.image) if spec.image else None
        self.force_hosts = list(spec.force_hosts) or None
        self.force_nodes = list(spec.force_nodes) or None
        self.ignore_hosts = list(spec.ignore_hosts) or None
        self.scheduler_hints = {name: list(values) for name, values in spec.hints.items()}
        if spec.rebuild:
            self.scheduler_hints["_nova_check_type"] = ["rebuild"]
        self.instance_group = None
        if spec.server_group is not None:
            rows = fleet.rows_of_nodes(spec.server_group.nodes) if fleet is not None else ()
            hosts = sorted({fleet.host_state(int(row)).host for row in rows}) if fleet is not None else []
            self.instance_group = NovaInstanceGroup(spec.server_group, hosts)

    @property
    def vcpus(self) -> int:
        """Of the flavor."""
        return self.flavor.vcpus

    @property
    def memory_mb(self) -> int:
        """Of the flavor."""
        return self.flavor.memory_mb

    @property
    def root_gb(self) -> int:
        """Of the flavor."""
        return self.flavor.root_gb

    @property
    def ephemeral_gb(self) -> int:
        """Of the flavor."""
        return self.flavor.ephemeral_gb

    @property
    def swap(self) -> int:
        """Of the flavor."""
        return self.flavor.swap

    def get_scheduler_hint(self, name: str, default: Any = None) -> Any:
        """Returns a hint: the text when it is the only one, the list otherwise, the default when absent."""
        return self.spec.get_scheduler_hint(name, default)
