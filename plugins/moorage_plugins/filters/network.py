# SPDX-License-Identifier: Apache-2.0
"""Near an address."""

from __future__ import annotations

import ipaddress
from typing import Any, ClassVar

from typing_extensions import override

from moorage import errors
from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, RequestSpec, Rows, Skip

__all__ = ["SimpleCidrAffinityFilter"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class SimpleCidrAffinityFilter(HostFilter):
    """Passes nodes whose property ``host_ip`` is in the network of the hints ``build_near_host_ip`` and ``cidr`` (``/24``)."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    run_filter_once_per_request = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        network = _network(spec_obj)
        return network is None or _is_within(host_state.properties.get("host_ip"), network)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return SKIP if _network(spec) is None else None

    @override
    def filter_rows(self, fleet: Fleet, rows: Rows, spec: RequestSpec) -> Rows:
        network = _network(spec)
        if network is None:
            return rows
        return fleet.property_column("host_ip").rows_where(rows, lambda address: _is_within(address, network))

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        address = host_state.properties.get("host_ip")
        return f"its address {address} is not in {_network(spec)}" if address else "its address is not known"


def _network(spec: RequestSpec) -> Network | None:
    near = spec.get_scheduler_hint("build_near_host_ip")
    if not near:
        return None
    prefix = spec.get_scheduler_hint("cidr", "/24")
    try:
        if not isinstance(near, str) or not isinstance(prefix, str) or not prefix.startswith("/"):
            raise ValueError("give one address, and the length of the network as /24")
        return ipaddress.ip_network(near + prefix, strict=False)
    except ValueError as error:
        raise errors.InvalidInput(
            f"The hints build_near_host_ip = {near} and cidr = {prefix} name no network: {error}.",
            path="hints/build_near_host_ip",
        ) from None


def _is_within(address: Any, network: Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False
