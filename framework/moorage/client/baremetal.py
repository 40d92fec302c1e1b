# SPDX-License-Identifier: Apache-2.0
"""The bare metal dialect for Python programs: what Ironic's own SDK lacks, and a consumer that keeps to its shard.

Everything here talks through a keystoneauth session or adapter, so it works with every authentication strategy, and against Ironic
itself where Ironic has the feature.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from moorage import errors

__all__ = ["Baremetal", "Requester", "ShardConsumer", "add_shards"]

#: The microversion that has all of shards: that of the filter of portgroups.
VERSION = "1.106"
_HEADERS = {"X-OpenStack-Ironic-API-Version": VERSION, "OpenStack-API-Version": f"baremetal {VERSION}"}


class Requester(Protocol):
    """How a request is made: :meth:`moorage.client.Client.raw` bound to a mount, or what one writes around one's own session."""

    def __call__(self, method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
        """Returns the JSON of the answer; raises :class:`moorage.errors.MoorageError` when there is none."""


class Baremetal:
    """Nodes, ports, portgroups and shards of the dialect.

    Filters are given as in the API (``owner="x"``); a list is joined with commas, ``shard=None`` is no filter, and
    ``shard="none"`` means nodes without a shard.
    """

    def __init__(self, request: Requester) -> None:
        self._request = request

    def shards(self) -> list[dict[str, Any]]:
        """``{"name", "count"}`` of every shard; the name is None for the nodes without one."""
        return list(self._request("GET", "/v1/shards", [], _HEADERS)["shards"])

    def nodes(
        self, *, shard: str | Sequence[str] | None = None, sharded: bool | None = None, **filters: Any
    ) -> Iterator[Any]:
        """Nodes, page after page."""
        return self._pages("nodes", shard=shard, sharded=sharded, **filters)

    def ports(self, *, shard: str | Sequence[str] | None = None, **filters: Any) -> Iterator[Any]:
        """Ports, page after page."""
        return self._pages("ports", shard=shard, **filters)

    def port_groups(self, *, shard: str | Sequence[str] | None = None, **filters: Any) -> Iterator[Any]:
        """Portgroups, page after page."""
        return self._pages("portgroups", shard=shard, **filters)

    def _pages(self, collection: str, **filters: Any) -> Iterator[Any]:
        path = f"/v1/{collection}"
        query = [(name, _text(value)) for name, value in filters.items() if value is not None]
        while True:
            page = self._request("GET", path, query, _HEADERS)
            yield from page[collection]
            following = page.get("next")
            if not following:
                return
            marked = parse_qsl(urlsplit(following).query, keep_blank_values=True)
            # Some servers forget filters in their links; ours are all kept.
            named = {name for name, _ in marked}
            query = [*(pair for pair in query if pair[0] not in named), *marked]


class ShardConsumer:
    """Lists the nodes and ports of one shard, for a service that works on that part of the fleet alone.

    It never falls back to the whole fleet: not for a name that is none, not for a server that does not know shards, and not for one
    that ignores the filter, which is noticed by the first node that is not of the shard.

    :raises InvalidInput: the name cannot be a shard's.
    """

    def __init__(self, baremetal: Baremetal, my_shard: str) -> None:
        from_name = my_shard.strip() if isinstance(my_shard, str) else my_shard
        if not from_name or from_name != my_shard or "," in my_shard or my_shard.lower() in ("none", "null"):
            raise errors.InvalidInput(
                f"my_shard is {my_shard!r}, which names no shard; a consumer without one would work on the whole fleet.",
                path="my_shard",
            )
        self.shard = my_shard
        self._baremetal = baremetal

    def nodes(self, fields: Sequence[str] = ("uuid", "name")) -> Iterator[dict[str, Any]]:
        """Returns the nodes of the shard.

        :raises UnsupportedVersion: the server does not know shards.
        :raises Conflict: the server answered with a node of another shard.
        """
        wanted = list(dict.fromkeys([*fields, "shard"]))
        for node in self._baremetal.nodes(shard=self.shard, fields=wanted):
            if node.get("shard") != self.shard:
                raise errors.Conflict(
                    f"Asked for shard {self.shard}, the server answered with node {node.get('uuid')} of {node.get('shard')}: it "
                    "ignores the filter. Nothing is worked on."
                )
            yield node

    def ports(self, fields: Sequence[str] = ("uuid", "address", "node_uuid")) -> Iterator[dict[str, Any]]:
        """Returns the ports of the shard's nodes.

        :raises Conflict: the server answered with a port of a node of another shard.
        """
        mine = {node["uuid"] for node in self.nodes(("uuid",))}
        strangers: list[str] = []
        for port in self._baremetal.ports(shard=self.shard, fields=list(dict.fromkeys([*fields, "node_uuid"]))):
            if port["node_uuid"] in mine:
                yield port
            else:
                strangers.append(port["node_uuid"])
        # A node may have come into the shard while its ports were read.
        if strangers and not set(strangers) <= {node["uuid"] for node in self.nodes(("uuid",))}:
            raise errors.Conflict(
                f"Asked for shard {self.shard}, the server answered with ports of node {strangers[0]}, which is in another one."
            )


def add_shards(connection: Any) -> Any:
    """Give an openstacksdk connection ``baremetal.shards()``, which it lacks, and filters that it would drop; the connection.

    ``connection.baremetal.sharded_nodes(...)`` and ``.sharded_port_groups(...)`` take the filters of :class:`Baremetal` and answer
    with plain data.
    """
    proxy = connection.baremetal

    def request(method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
        # The SDK's endpoint ends with the major version already.
        answer = proxy.request(
            path.removeprefix("/v1"), method, params=list(query), microversion=VERSION, raise_exc=False
        )
        if answer.status_code >= 400:
            raise refused(answer)
        return answer.json()

    helper = Baremetal(request)
    proxy.shards = helper.shards
    proxy.sharded_nodes = helper.nodes
    proxy.sharded_port_groups = helper.port_groups
    return connection


def refused(answer: Any) -> errors.MoorageError:
    """Returns the error of an answer of the dialect."""
    message = f"The server answered {answer.status_code}."
    try:
        inner = answer.json()["error_message"]
        message = str(errors_of(inner))
    except (ValueError, KeyError, TypeError):
        pass
    known: Mapping[int, type[errors.MoorageError]] = {
        400: errors.InvalidInput, 401: errors.Unauthenticated, 403: errors.Forbidden, 404: errors.NotFound,
        406: errors.UnsupportedVersion, 409: errors.Conflict, 503: errors.Unavailable,
    }  # fmt: skip
    return known.get(answer.status_code, errors.RemoteError)(message)


def errors_of(text: Any) -> str:
    """Returns the message inside of Ironic's two layers of JSON."""
    inner = json.loads(text) if isinstance(text, str) else text
    return str(inner["faultstring"])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return ",".join(str(each) for each in value)
    return str(value)
