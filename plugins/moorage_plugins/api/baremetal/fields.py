# SPDX-License-Identifier: Apache-2.0
"""The fields of nodes, ports and portgroups: name, column, kind, and the microversion they came with.

The versions are Ironic's, as its clients expect them. What is not kept here, since Moorage deploys no images, is shown as
empty.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from moorage.fleet.tables import nodes
from moorage.http.routes import Version
from moorage_plugins.api.baremetal.tables import portgroups, ports

__all__ = ["NODES", "PORTGROUPS", "PORTS", "Field", "Kind", "Resource"]


class Kind(enum.Enum):
    """How a value is written as JSON."""

    UUID = "uuid"
    TEXT = "text"
    FLAG = "flag"
    JSON = "json"
    SECRETS = "json with secrets masked"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    :param column: None: not kept; ``constant`` (JSON text) is shown.
    :param since: the microversion that brought it.
    :param basic: in listings without details.
    """

    name: str
    kind: Kind = Kind.TEXT
    column: Any = None
    since: Version = (1, 1)
    basic: bool = False
    constant: str = "null"

    @property
    def sortable(self) -> bool:
        """Listings can be ordered by it."""
        return self.column is not None and self.kind not in (Kind.JSON, Kind.SECRETS)


@dataclass(frozen=True)
class Resource:
    """A kind of thing that the dialect lists and shows.

    :param name: the collection's name in paths; ``singular`` for messages.
    :param ident: its immutable number, which pages are ordered by.
    :param source: what it is selected from: every row has its node beside it.
    :param since: the microversion that brought it, and ``shard_since`` its filter by shard.
    :param links: collections below it (name, since); shown as links in details.
    """

    name: str
    singular: str
    fields: Sequence[Field]
    ident: Any
    uuid: Any
    source: Any
    since: Version = (1, 1)
    shard_since: Version = (1, 82)
    links: Sequence[tuple[str, Version]] = ()

    @property
    def by_name(self) -> Mapping[str, Field]:
        """The fields by their names."""
        return {field.name: field for field in self.fields}


_V3, _V6, _V7, _V12, _V31 = (1, 3), (1, 6), (1, 7), (1, 12), (1, 31)

#: A node that was given no name is called by its uuid in the store, and has none here.
_NODE_NAME = sa.func.nullif(nodes.c.name, nodes.c.uuid)

NODES = Resource(
    "nodes",
    "Node",
    (
        Field("uuid", Kind.UUID, nodes.c.uuid, basic=True),
        Field("name", Kind.TEXT, _NODE_NAME, (1, 5), basic=True),
        Field("instance_uuid", Kind.TEXT, nodes.c.instance_uuid, basic=True),
        Field("maintenance", Kind.FLAG, nodes.c.maintenance, basic=True),
        Field("power_state", Kind.TEXT, nodes.c.power_state, basic=True),
        Field("provision_state", Kind.TEXT, nodes.c.provision_state, basic=True),
        Field("driver", Kind.TEXT, nodes.c.driver),
        Field("driver_info", Kind.SECRETS, nodes.c.driver_info),
        Field("driver_internal_info", Kind.JSON, since=_V3, constant="{}"),
        Field("properties", Kind.JSON, nodes.c.properties),
        Field("extra", Kind.JSON, nodes.c.extra),
        Field("instance_info", Kind.SECRETS, nodes.c.instance_info),
        Field("chassis_uuid"),
        Field("console_enabled", Kind.FLAG, constant="false"),
        Field("target_power_state", Kind.TEXT, nodes.c.target_power_state),
        Field("target_provision_state", Kind.TEXT, nodes.c.target_provision_state),
        Field("provision_updated_at", Kind.TIME, nodes.c.provision_updated_at),
        Field("last_error", Kind.TEXT, nodes.c.last_error),
        Field("maintenance_reason", Kind.TEXT, nodes.c.maintenance_reason),
        Field("reservation", Kind.TEXT, nodes.c.reservation),
        Field("created_at", Kind.TIME, nodes.c.created_at),
        Field("updated_at", Kind.TIME, nodes.c.updated_at),
        Field("inspection_finished_at", since=_V6),
        Field("inspection_started_at", since=_V6),
        Field("clean_step", Kind.JSON, since=_V7, constant="{}"),
        Field("raid_config", Kind.JSON, since=_V12, constant="{}"),
        Field("target_raid_config", Kind.JSON, since=_V12, constant="{}"),
        Field("network_interface", since=(1, 20)),
        Field("resource_class", Kind.TEXT, nodes.c.resource_class, (1, 21)),
        *(
            Field(f"{name}_interface", since=_V31)
            for name in ("boot", "console", "deploy", "inspect", "management", "power", "raid", "vendor")
        ),
        Field("storage_interface", since=(1, 33)),
        Field("traits", Kind.JSON, since=(1, 37), constant="[]"),
        Field("rescue_interface", since=(1, 38)),
        Field("bios_interface", since=(1, 40)),
        Field("fault", Kind.TEXT, nodes.c.fault, (1, 42)),
        Field("deploy_step", Kind.JSON, since=(1, 44), constant="{}"),
        Field("conductor_group", Kind.TEXT, nodes.c.conductor_group, (1, 46)),
        Field("automated_clean", since=(1, 47)),
        Field("protected", Kind.FLAG, since=(1, 48), constant="false"),
        Field("protected_reason", since=(1, 48)),
        Field("conductor", Kind.TEXT, nodes.c.host, (1, 49)),
        Field("owner", Kind.TEXT, nodes.c.owner, (1, 50)),
        Field("description", Kind.TEXT, nodes.c.description, (1, 51)),
        Field("allocation_uuid", since=(1, 52)),
        Field("retired", Kind.FLAG, since=(1, 61), constant="false"),
        Field("retired_reason", since=(1, 61)),
        Field("lessee", Kind.TEXT, nodes.c.lessee, (1, 65)),
        Field("network_data", Kind.JSON, since=(1, 66), constant="{}"),
        Field("boot_mode", since=(1, 75)),
        Field("secure_boot", since=(1, 75)),
        Field("shard", Kind.TEXT, nodes.c.shard, (1, 82)),
        Field("parent_node", since=(1, 83)),
        Field("firmware_interface", since=(1, 86)),
        Field("service_step", Kind.JSON, since=(1, 87), constant="{}"),
        Field("disable_power_off", Kind.FLAG, since=(1, 95), constant="false"),
    ),
    nodes.c.id,
    nodes.c.uuid,
    nodes,
    links=(("ports", (1, 1)), ("states", (1, 14)), ("portgroups", (1, 24)), ("volume", (1, 32))),
)

PORTS = Resource(
    "ports",
    "Port",
    (
        Field("uuid", Kind.UUID, ports.c.uuid, basic=True),
        Field("address", Kind.TEXT, ports.c.address, basic=True),
        Field("node_uuid", Kind.UUID, nodes.c.uuid),
        Field("extra", Kind.JSON, ports.c.extra),
        Field("created_at", Kind.TIME, ports.c.created_at),
        Field("updated_at", Kind.TIME, ports.c.updated_at),
        Field("internal_info", Kind.JSON, since=(1, 18), constant="{}"),
        Field("pxe_enabled", Kind.FLAG, ports.c.pxe_enabled, (1, 19)),
        Field("local_link_connection", Kind.JSON, ports.c.local_link_connection, (1, 19)),
        Field("portgroup_uuid", Kind.TEXT, ports.c.portgroup_uuid, (1, 24)),
        Field("physical_network", Kind.TEXT, ports.c.physical_network, (1, 34)),
        Field("is_smartnic", Kind.FLAG, ports.c.is_smartnic, (1, 53)),
        Field("name", Kind.TEXT, ports.c.name, (1, 88)),
        Field("description", Kind.TEXT, ports.c.description, (1, 97)),
        Field("vendor", Kind.TEXT, ports.c.vendor, (1, 100)),
        Field("category", Kind.TEXT, ports.c.category, (1, 101)),
    ),
    ports.c.id,
    ports.c.uuid,
    ports.join(nodes, ports.c.node_id == nodes.c.id),
)

PORTGROUPS = Resource(
    "portgroups",
    "Portgroup",
    (
        Field("uuid", Kind.UUID, portgroups.c.uuid, (1, 23), basic=True),
        Field("name", Kind.TEXT, portgroups.c.name, (1, 23), basic=True),
        Field("address", Kind.TEXT, portgroups.c.address, (1, 23), basic=True),
        Field("node_uuid", Kind.UUID, nodes.c.uuid, (1, 23)),
        Field("extra", Kind.JSON, portgroups.c.extra, (1, 23)),
        Field("internal_info", Kind.JSON, since=(1, 23), constant="{}"),
        Field("standalone_ports_supported", Kind.FLAG, portgroups.c.standalone_ports_supported, (1, 23)),
        Field("created_at", Kind.TIME, portgroups.c.created_at, (1, 23)),
        Field("updated_at", Kind.TIME, portgroups.c.updated_at, (1, 23)),
        Field("mode", Kind.TEXT, portgroups.c.mode, (1, 26)),
        Field("properties", Kind.JSON, portgroups.c.properties, (1, 26)),
        Field("physical_network", Kind.TEXT, portgroups.c.physical_network, (1, 102)),
    ),
    portgroups.c.id,
    portgroups.c.uuid,
    portgroups.join(nodes, portgroups.c.node_id == nodes.c.id),
    since=(1, 23),
    shard_since=(1, 106),
    links=(("ports", (1, 24)),),
)
