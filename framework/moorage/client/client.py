# SPDX-License-Identifier: Apache-2.0
"""Defines the client of ``/scheduling/v1``. It uses keystoneauth, so it works with every authentication strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib import parse

from keystoneauth1 import exceptions as ka_exceptions
from keystoneauth1 import http_basic, noauth, session
from keystoneauth1.identity import v3
from requests import adapters

from moorage import errors
from moorage.client.baremetal import Baremetal, refused

__all__ = ["Client", "connect"]

_PREFIX = "/scheduling/v1"
#: Statuses of a server that is ending or has no database, and of a proxy whose server does not answer.
_AWAY = (502, 503, 504)


def connect(
    url: str,
    *,
    auth_type: str = "none",
    username: str = "",
    password: str = "",
    auth_url: str = "",
    project_name: str = "",
    system_scope: str = "",
    user_domain_name: str = "Default",
    project_domain_name: str = "Default",
    timeout: float = 120.0,
) -> Client:
    """Returns a client of the control plane at ``url`` (``http://host:port``).

    :param auth_type: ``none``, ``http_basic`` or ``password`` (Keystone).
    :param system_scope: ``all``: a token with system scope, which administrators need; empty: a token of the project.
    :raises ConfigError: the authentication type is unknown.
    """
    if auth_type == "none":
        auth: Any = noauth.NoAuth(endpoint=url)
    elif auth_type == "http_basic":
        auth = http_basic.HTTPBasicAuth(endpoint=url, username=username, password=password)
    elif auth_type == "password":
        project = {"project_name": project_name, "project_domain_name": project_domain_name}
        scope: dict[str, Any] = {"system_scope": system_scope} if system_scope else project
        auth = v3.Password(
            auth_url=auth_url,
            username=username,
            password=password,
            user_domain_name=user_domain_name,
            **scope,
        )
    else:
        raise errors.ConfigError(
            f"The authentication type {auth_type!r} is not known; use none, http_basic or password."
        )
    return Client(url, session.Session(auth=auth, timeout=timeout))


class Client:
    """Sends requests to the API, with a method for each. Methods return the JSON of the answer as Python data.

    :raises MoorageError: an error answer, as the class that its code names. TransportError: there is no answer.
    """

    def __init__(self, url: str, keystone_session: session.Session) -> None:
        self.url = url.rstrip("/")
        self._session = keystone_session
        # Enough connections for the threads of a replay; requests' own default is ten.
        pool = adapters.HTTPAdapter(pool_connections=4, pool_maxsize=64)
        for scheme in ("http://", "https://"):
            keystone_session.session.mount(scheme, pool)

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        prefix: str = _PREFIX,
    ) -> Any:
        """Sends a request below ``/scheduling/v1``, or a dialect's prefix. Returns the JSON of the answer; None: it has no body."""
        given = [(key, _text(value)) for key, value in (query or {}).items() if value is not None]
        answer = self._send(method, prefix + path, given, headers or {}, body)
        if answer.status_code >= 400:
            raise _error(answer)
        return answer.json() if answer.content else None

    def _send(
        self, method: str, path: str, query: Sequence[tuple[str, Any]], headers: Mapping[str, str], body: Any = None
    ) -> Any:
        extra: dict[str, Any] = {} if body is None else {"json": body}
        try:
            return self._session.request(
                self.url + path,
                method,
                params=query,
                headers={"Accept": "application/json", **headers},
                raise_exc=False,
                endpoint_override=self.url,
                connect_retries=0,
                **extra,
            )
        except ka_exceptions.ConnectFailure as error:
            raise errors.TransportError(
                f"{self.url} does not answer ({_cause(error)}). Is the control plane running, and is the URL right?"
            ) from error
        except ka_exceptions.ConnectTimeout as error:
            raise errors.CallTimeout(
                f"{self.url} has not answered in time; whether it did what was asked is not known. Look, or ask again."
            ) from error
        except ka_exceptions.ConnectionError as error:
            raise errors.TransportError(f"No whole answer came from {self.url}: {error}") from error
        except ka_exceptions.ClientException as error:
            raise errors.Unauthenticated(f"Authentication failed: {error}") from error

    def baremetal(self, mount: str = "/baremetal") -> Baremetal:
        """Returns a client of the control plane's bare metal dialect: nodes by shard, ports, portgroups."""

        def request(method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
            answer = self._send(method, mount.rstrip("/") + path, list(query), dict(headers))
            if answer.status_code >= 400:
                raise refused(answer)
            return answer.json()

        return Baremetal(request)

    def pages(self, path: str, key: str, query: Mapping[str, Any] | None = None, limit: int = 1000) -> Iterator[Any]:
        """Reads all items of a listing, page after page. ``after`` in the query: only the items after that one."""
        query = dict(query or {})
        after: str | None = query.pop("after", None)
        while True:
            page = self.request("GET", path, query={**query, "limit": limit, "after": after})
            yield from page[key]
            after = page.get("next_after")
            if not after:
                return

    def events(self, after: int | str | None = None, *, wait: int | None = None, **query: Any) -> dict[str, Any]:
        """Reads one page of the journal: ``events`` and ``next_after``. The query takes the filters of the API.

        :param after: the cursor: ``next_after`` of the page before; ``latest``: only new events; None: from the oldest.
        :param wait: seconds to wait for the first event; at most 60.
        :raises Gone: events after the cursor were purged.
        """
        return dict(self.request("GET", "/events", query={**query, "after": after, "wait": wait}))

    def webhooks(self) -> Iterator[dict[str, Any]]:
        """Reads all webhooks, by name, each with its cursor in the journal and its last error."""
        return self.pages("/webhooks", "webhooks")

    def webhook(self, name_or_uuid: str) -> dict[str, Any]:
        """Reads a webhook."""
        return dict(self.request("GET", f"/webhooks/{_part(name_or_uuid)}"))

    def create_webhook(self, name: str, url: str, **settings: Any) -> dict[str, Any]:
        """Creates a webhook.

        :param settings: ``secret``, ``kinds``, ``projects``, ``enabled``, ``after``. Without a secret, the answer has a new one.
        """
        return dict(self.request("POST", "/webhooks", body={"name": name, "url": url, **settings}))

    def change_webhook(self, name_or_uuid: str, **changes: Any) -> dict[str, Any]:
        """Changes ``url``, ``secret``, ``kinds``, ``projects`` or ``enabled``, or moves the cursor with ``after``."""
        return dict(self.request("PATCH", f"/webhooks/{_part(name_or_uuid)}", body=changes))

    def delete_webhook(self, name_or_uuid: str) -> None:
        """Deletes a webhook."""
        self.request("DELETE", f"/webhooks/{_part(name_or_uuid)}")

    # -- the fleet ------------------------------------------------------------------------------------------------

    def services(self, **query: Any) -> list[dict[str, Any]]:
        """Reads the services with their states."""
        return list(self.request("GET", "/services", query=query)["services"])

    def service(self, uuid: str) -> dict[str, Any]:
        """Reads a service."""
        return dict(self.request("GET", f"/services/{_part(uuid)}"))

    def set_service(self, uuid: str, **changes: Any) -> dict[str, Any]:
        """Changes ``disabled``, ``disabled_reason`` or ``forced_down`` of a service."""
        return dict(self.request("PATCH", f"/services/{uuid}", body=changes))

    def fence_service(self, uuid: str, reason: str) -> dict[str, Any]:
        """Fences the host of a dead agent: declares that nothing runs on it, so that its instances may be evacuated."""
        return dict(self.request("POST", f"/services/{uuid}/fence", body={"reason": reason}))

    def turn_off_and_fence(self, uuid: str, reason: str) -> dict[str, Any]:
        """Turns the machines of a dead agent's host off, and fences the host if they report that they are off."""
        return dict(self.request("POST", f"/services/{uuid}/fence", body={"reason": reason, "power_off": True}))

    def fence_service_by_itself(self, uuid: str) -> dict[str, Any]:
        """Declares an agent dead whose host fences itself, and fences the host, if the host's lease has expired."""
        return dict(self.request("POST", f"/services/{uuid}/fence", body={"by_itself": True}))

    def nodes(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Reads all nodes, by uuid. The query takes the filters of the API, ``after``, and ``fields`` (names, with commas)."""
        return self.pages("/nodes", "nodes", query)

    def node(self, name_or_uuid: str) -> dict[str, Any]:
        """Reads a node."""
        return dict(self.request("GET", f"/nodes/{_part(name_or_uuid)}"))

    def import_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Enrols or updates nodes; at most 1,000 in a call."""
        return dict(self.request("POST", "/nodes", body={"nodes": list(nodes)}))

    def change_node(
        self, name_or_uuid: str, properties: Mapping[str, Any] | None = None, **states: Any
    ) -> dict[str, Any]:
        """Changes properties of a node (None removes one) and its states.

        :param states: ``disabled``, ``maintenance``, ``draining``, and the reason of each (``disabled_reason``).
        """
        body = {**states, **({"properties": dict(properties)} if properties else {})}
        return dict(self.request("PATCH", f"/nodes/{_part(name_or_uuid)}", body=body))

    def remove_node(self, name_or_uuid: str) -> None:
        """Removes a node.

        :raises InUse: something is on the node; the text says what.
        """
        self.request("DELETE", f"/nodes/{_part(name_or_uuid)}")

    def aggregates(self) -> Iterator[dict[str, Any]]:
        """Reads all aggregates, by name."""
        return self.pages("/aggregates", "aggregates")

    def aggregate(self, name_or_uuid: str) -> dict[str, Any]:
        """Reads an aggregate with its members."""
        return dict(self.request("GET", f"/aggregates/{_part(name_or_uuid)}"))

    def create_aggregate(self, name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Creates an aggregate without members."""
        return dict(self.request("POST", "/aggregates", body={"name": name, "metadata": dict(metadata)}))

    def change_aggregate(self, name_or_uuid: str, **changes: Any) -> dict[str, Any]:
        """Changes ``name`` or ``metadata`` of an aggregate; None in metadata removes a key."""
        return dict(self.request("PATCH", f"/aggregates/{_part(name_or_uuid)}", body=changes))

    def delete_aggregate(self, name_or_uuid: str) -> None:
        """Deletes an aggregate. Its members stay."""
        self.request("DELETE", f"/aggregates/{_part(name_or_uuid)}")

    def change_member(self, method: str, aggregate: str, kind: str, member: str) -> dict[str, Any]:
        """Adds (``PUT``) or removes (``DELETE``) a member of an aggregate; ``kind`` is host or node."""
        return dict(self.request(method, f"/aggregates/{_part(aggregate)}/{kind}s/{_part(member)}"))

    def hosts(self, **query: Any) -> list[dict[str, Any]]:
        """Reads nodes as a scheduler sees them, by uuid. The query takes the filters of the API, ``after`` and ``fields``."""
        return list(self.pages("/hosts", "hosts", query))

    def host(self, name: str) -> dict[str, Any]:
        """Reads a host with its nodes and instances, as a scheduler sees it."""
        found: dict[str, Any] = {"host": name, "nodes": [], "instances": []}
        after: str | None = ""
        while after is not None:
            page = self.request("GET", f"/hosts/{_part(name)}", query={"after": after or None})
            found["nodes"] += page["nodes"]
            found["instances"] += page["instances"]
            after = page["next_after"]
        return found

    def allocations(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Reads all stored allocations."""
        return self.pages("/allocations", "allocations", query)

    def usages(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Reads all providers with their inventories and use."""
        return self.pages("/usages", "usages", query)

    def audit_allocations(self, *, repair: bool = False, release_orphans: bool = False) -> dict[str, Any]:
        """Compares the store's counters with its allocations; with ``repair``, corrects wrong ones."""
        body = {"repair": repair, "release_orphans": release_orphans}
        return dict(self.request("POST", "/allocations/audit", body=body))

    def pools(self) -> list[dict[str, Any]]:
        """Reads all pools with their use."""
        return list(self.request("GET", "/pools")["pools"])

    def set_pool(self, uuid: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Creates or replaces a pool: name, members, inventories."""
        return dict(self.request("PUT", f"/pools/{uuid}", body=body))

    def delete_pool(self, uuid: str) -> None:
        """Deletes a pool."""
        self.request("DELETE", f"/pools/{uuid}")

    def quotas(self, project: str | None = None) -> list[dict[str, Any]]:
        """Reads the limits of a project and their use; None: of all projects that the caller may see."""
        return list(self.request("GET", "/quotas", query={"project": project})["quotas"])

    def set_quota(self, project: str, resource_class: str, limit: int) -> dict[str, Any]:
        """Sets a limit of a project."""
        return dict(self.request("PUT", f"/quotas/{_part(project)}/{_part(resource_class)}", body={"limit": limit}))

    def unset_quota(self, project: str, resource_class: str) -> None:
        """Removes a limit of a project."""
        self.request("DELETE", f"/quotas/{_part(project)}/{_part(resource_class)}")

    def flavors(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Reads all flavors, by flavorid, each with its newest version. ``implicit=True``: also those that only instances have."""
        return self.pages("/flavors", "flavors", query)

    def flavor(self, flavorid: str, version: int | None = None) -> dict[str, Any]:
        """Reads a version of a flavor, with the numbers of all ``versions``; None: the newest version."""
        return dict(self.request("GET", f"/flavors/{_part(flavorid)}", query={"version": version}))

    def create_flavor(
        self,
        flavorid: str,
        resources: Mapping[str, int],
        extra_specs: Mapping[str, str] | None = None,
        *,
        expected_version: int = 0,
    ) -> dict[str, Any]:
        """Creates a flavor, or its next version. Does nothing if the newest version has these contents.

        :param expected_version: the newest version that the caller knows; 0: the flavor is a new one.
        :raises Conflict: the flavor has another newest version, with other contents.
        """
        body = {"flavorid": flavorid, "resources": dict(resources), "extra_specs": dict(extra_specs or {})}
        return dict(self.request("POST", "/flavors", body={**body, "expected_version": expected_version}))

    def deprecate_flavor(
        self, flavorid: str, version: int | None = None, *, deprecated: bool = True, successor: str | None = None
    ) -> list[dict[str, Any]]:
        """Deprecates a version of a flavor: new requests for it are refused. None: all versions. Returns these versions.

        :param deprecated: False: accepts new requests again.
        :param successor: the flavorid that refusals name.
        """
        body = {"deprecated": deprecated, "version": version, "successor": successor}
        given = {name: value for name, value in body.items() if value is not None}
        return list(self.request("PATCH", f"/flavors/{_part(flavorid)}", body=given)["versions"])

    def server_groups(self) -> Iterator[dict[str, Any]]:
        """Reads all server groups with their members, by uuid."""
        return self.pages("/server-groups", "server_groups")

    def server_group(self, name_or_uuid: str) -> dict[str, Any]:
        """Reads a server group with its members."""
        return dict(self.request("GET", f"/server-groups/{_part(name_or_uuid)}"))

    def create_server_group(self, name: str, policy: str, max_server_per_host: int = 1) -> dict[str, Any]:
        """Creates a server group."""
        body = {"name": name, "policy": policy, "max_server_per_host": max_server_per_host}
        return dict(self.request("POST", "/server-groups", body=body))

    def delete_server_group(self, name_or_uuid: str) -> None:
        """Deletes a server group. Its members stay where they are."""
        self.request("DELETE", f"/server-groups/{_part(name_or_uuid)}")

    # -- shards ---------------------------------------------------------------------------------------------------

    def shards(self) -> list[dict[str, Any]]:
        """Reads ``{"name", "count", "agents"}`` of every shard, the largest first. The name None stands for nodes without a shard.

        ``agents`` are the live agents that serve the shard; empty if no agent declares a shard.
        """
        return list(self.request("GET", "/shards")["shards"])

    def check_shards(self) -> dict[str, Any]:
        """Checks the shards of the fleet, and returns what looks wrong."""
        return dict(self.request("GET", "/shards/check"))

    def ports(self, *, shard: str | Sequence[str] | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Reads all ports, by the bare metal dialect at its default prefix."""
        return self.baremetal().ports(shard=shard, **filters)

    def port_groups(self, *, shard: str | Sequence[str] | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Reads all portgroups, by the bare metal dialect at its default prefix."""
        return self.baremetal().port_groups(shard=shard, **filters)

    def assign_shards(
        self, assignments: Sequence[Mapping[str, Any]], *, include_instances: bool = False
    ) -> dict[str, Any]:
        """Changes the shards of many nodes, in calls of 1,000.

        :param assignments: ``{"node", "shard"}``, and ``was`` if the node must be in that shard now.
        :param include_instances: also moves nodes with instances whose agents live.
        :returns: ``moved``, a number, and ``conflicts``, the nodes that were not changed, with reasons.
        """
        total: dict[str, Any] = {"moved": 0, "conflicts": []}
        for first in range(0, len(assignments), 1000):
            body: dict[str, Any] = {"assignments": list(assignments[first : first + 1000])}
            if include_instances:
                body["include_instances"] = True
            answer = self.request("POST", "/shards/assign", body=body)
            total["moved"] += answer["moved"]
            total["conflicts"] += answer["conflicts"]
        return total

    def make_shard_plan(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Makes and stores a plan. Changes no node."""
        return dict(self.request("POST", "/shards/plans", body=dict(wanted)))

    def shard_plans(self) -> list[dict[str, Any]]:
        """Reads the stored plans, the newest first."""
        return list(self.request("GET", "/shards/plans")["plans"])

    def shard_plan(self, uuid: str) -> dict[str, Any]:
        """Reads a plan, in numbers."""
        return dict(self.request("GET", f"/shards/plans/{uuid}"))

    def shard_moves(self, uuid: str, *, status: str | None = None) -> Iterator[dict[str, Any]]:
        """Reads the moves of a plan."""
        return self.pages(f"/shards/plans/{uuid}/moves", "moves", {"status": status})

    def apply_shard_plan(self, uuid: str, *, limit: int = 1000) -> dict[str, Any]:
        """Applies some moves of a plan. Call it until ``remaining`` is 0."""
        return dict(self.request("POST", f"/shards/plans/{uuid}/apply", query={"limit": limit}))

    def rollback_shard_plan(self, uuid: str, *, limit: int = 1000) -> dict[str, Any]:
        """Rolls back some moves of a plan. Call it until ``remaining`` is 0."""
        return dict(self.request("POST", f"/shards/plans/{uuid}/rollback", query={"limit": limit}))

    def verify_shard_plan(self, uuid: str) -> dict[str, Any]:
        """Compares the moves of a plan with the nodes."""
        return dict(self.request("GET", f"/shards/plans/{uuid}/verify"))

    # -- periodic tasks and instances -----------------------------------------------------------------------------

    def rings(self, owner_of: str | None = None) -> list[dict[str, Any]]:
        """Reads the rings of engines; with ``owner_of``, also the owner of that object on each ring."""
        return list(self.request("GET", "/ring", query={"object": owner_of} if owner_of else None)["rings"])

    def periodic_tasks(self) -> list[dict[str, Any]]:
        """Reads the periodic tasks and their last sweeps."""
        return list(self.request("GET", "/periodic-tasks")["periodic_tasks"])

    def periodic_runs(self, task: str, limit: int = 100) -> list[dict[str, Any]]:
        """Reads the last sweeps of a task, newest first."""
        return list(self.request("GET", f"/periodic-tasks/{task}/runs", query={"limit": limit})["runs"])

    def pause_periodic_task(self, task: str, *, reason: str = "") -> dict[str, Any]:
        """Pauses a task: no engine begins a sweep of it."""
        return dict(self.request("PATCH", f"/periodic-tasks/{task}", body={"paused": True, "reason": reason}))

    def resume_periodic_task(self, task: str) -> dict[str, Any]:
        """Resumes a paused task."""
        return dict(self.request("PATCH", f"/periodic-tasks/{task}", body={"paused": False}))

    def run_periodic_task(self, task: str, object_id: str | None = None) -> dict[str, Any]:
        """Runs one sweep of a task now."""
        body = {"object": object_id} if object_id else {}
        return dict(self.request("POST", f"/periodic-tasks/{task}/runs", body=body))

    def select(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns where an instance would be placed. Claims nothing."""
        return dict(self.request("POST", "/select", body=body))

    def create_instance(self, body: Mapping[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """Places and builds an instance. A repetition with the same key gets the first answer."""
        return dict(self.request("POST", "/instances", body=body, headers=_key(idempotency_key)))

    def create_instances(self, body: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Places and builds several equal instances, all or none."""
        return list(self.request("POST", "/instances", body={**body, "count": count})["instances"])

    def decision(self, request_id: str, node: str | None = None) -> dict[str, Any]:
        """Reads the decision on a request, by the id of the request or the uuid of the instance."""
        return dict(self.request("GET", f"/decisions/{request_id}", query={"node": node} if node else None))

    def instances(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Reads all instances, by uuid."""
        return self.pages("/instances", "instances", query)

    def instance(self, uuid: str) -> dict[str, Any]:
        """Reads an instance."""
        return dict(self.request("GET", f"/instances/{uuid}"))

    def act_on_instance(
        self, uuid: str, action: str, body: Mapping[str, Any] | None = None, idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Begins an operation on an instance. A repetition with the same key gets the first answer.

        :param action: stop, start, reboot, rebuild, resize, migrate, live_migrate, shelve_offload, unshelve or evacuate.
            revert_move ends a move that is not committed. confirm_resize and revert_resize end a resize.
        """
        path, asked = f"/instances/{uuid}/action", {action: dict(body or {})}
        return dict(self.request("POST", path, body=asked, headers=_key(idempotency_key)))

    def instance_console(self, uuid: str, lines: int = 100) -> str:
        """Reads the last lines that an instance wrote."""
        return str(self.request("GET", f"/instances/{uuid}/console", query={"lines": lines})["output"])

    def instance_usage(self, uuid: str) -> dict[str, Any]:
        """Reads the use of an instance: ``cpu_seconds`` and ``memory_bytes``."""
        return dict(self.request("GET", f"/instances/{uuid}/usage"))

    def delete_instance(self, uuid: str, *, force: bool = False) -> None:
        """Begins to delete an instance."""
        self.request("DELETE", f"/instances/{uuid}", query={"force": True} if force else None)


def _key(idempotency_key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": idempotency_key} if idempotency_key else {}


def _part(text: str) -> str:
    """Returns a text as one part of a path."""
    return parse.quote(text, safe="")


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


def _cause(error: Exception) -> str:
    return str(error).rpartition(": ")[2] or type(error).__name__


def _error(answer: Any) -> errors.MoorageError:
    request_id = answer.headers.get("X-OpenStack-Request-ID")
    try:
        wire = answer.json()["error"]
        error = errors.from_wire(wire)
        if wire.get("request_id") or request_id:
            error.details.setdefault("request_id", wire.get("request_id") or request_id)
        return error
    except (AttributeError, ValueError, KeyError, TypeError):
        text = answer.text.strip().splitlines()
        first = text[0][:200] if text else ""
        known: dict[str, Any] = {"request_id": request_id} if request_id else {}
        message = f"The server answered {answer.status_code} {answer.reason}. {first}".strip()
        if answer.status_code not in _AWAY:
            return errors.RemoteError(message, **known)
        if answer.headers.get("Retry-After", "").isdigit():
            known["retry_after"] = int(answer.headers["Retry-After"])
        return errors.Unavailable(message, **known)
