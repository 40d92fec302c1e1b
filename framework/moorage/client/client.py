# SPDX-License-Identifier: Apache-2.0
"""A client of ``/scheduling/v1`` over a keystoneauth session, so that it works with every authentication strategy."""

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
#: What a server that ends answers, a dialect whose database is away, and a proxy in front of one that does not answer.
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
    """A client of the control plane at ``url`` (``http://host:port``).

    :param auth_type: ``none``, ``http_basic`` or ``password`` (Keystone).
    :param system_scope: ``all`` asks Keystone for a token of the system, which administrators need; empty: one of the project.
    :raises ConfigError: the type is none of these.
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
    """One method for each thing that the API can do; answers are the API's JSON as Python data.

    :raises MoorageError: of the class that the answer's code names; TransportError when there is no answer.
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
        """One request below ``/scheduling/v1``, or a dialect's prefix; the JSON of the answer, None when it has no body."""
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
        """The bare metal dialect of the same control plane: nodes by shard, ports, portgroups."""

        def request(method: str, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str]) -> Any:
            answer = self._send(method, mount.rstrip("/") + path, list(query), dict(headers))
            if answer.status_code >= 400:
                raise refused(answer)
            return answer.json()

        return Baremetal(request)

    def pages(self, path: str, key: str, query: Mapping[str, Any] | None = None, limit: int = 1000) -> Iterator[Any]:
        """All the items of a listing, page after page; ``after`` in the query: only those after that one."""
        query = dict(query or {})
        after: str | None = query.pop("after", None)
        while True:
            page = self.request("GET", path, query={**query, "limit": limit, "after": after})
            yield from page[key]
            after = page.get("next_after")
            if not after:
                return

    def events(self, after: int | str | None = None, *, wait: int | None = None, **query: Any) -> dict[str, Any]:
        """One page of the journal: ``events`` and ``next_after``. The query takes the filters of the API.

        :param after: the cursor: ``next_after`` of the page before; ``latest``: only new events; None: from the oldest.
        :param wait: seconds to wait for the first event; at most 60.
        :raises Gone: events after the cursor were purged.
        """
        return dict(self.request("GET", "/events", query={**query, "after": after, "wait": wait}))

    def webhooks(self) -> Iterator[dict[str, Any]]:
        """Webhooks by name, each with its place in the journal and its last error."""
        return self.pages("/webhooks", "webhooks")

    def webhook(self, name_or_uuid: str) -> dict[str, Any]:
        """One webhook."""
        return dict(self.request("GET", f"/webhooks/{_part(name_or_uuid)}"))

    def create_webhook(self, name: str, url: str, **settings: Any) -> dict[str, Any]:
        """A new webhook: ``secret``, ``kinds``, ``projects``, ``enabled``, ``after``. Without a secret the answer has a new one."""
        return dict(self.request("POST", "/webhooks", body={"name": name, "url": url, **settings}))

    def change_webhook(self, name_or_uuid: str, **changes: Any) -> dict[str, Any]:
        """Change ``url``, ``secret``, ``kinds``, ``projects`` or ``enabled``, or move the cursor with ``after``."""
        return dict(self.request("PATCH", f"/webhooks/{_part(name_or_uuid)}", body=changes))

    def delete_webhook(self, name_or_uuid: str) -> None:
        """Remove a webhook."""
        self.request("DELETE", f"/webhooks/{_part(name_or_uuid)}")

    # -- what there is --------------------------------------------------------------------------------------------

    def services(self, **query: Any) -> list[dict[str, Any]]:
        """Services with their state."""
        return list(self.request("GET", "/services", query=query)["services"])

    def service(self, uuid: str) -> dict[str, Any]:
        """One service."""
        return dict(self.request("GET", f"/services/{_part(uuid)}"))

    def set_service(self, uuid: str, **changes: Any) -> dict[str, Any]:
        """Change ``disabled``, ``disabled_reason`` or ``forced_down``."""
        return dict(self.request("PATCH", f"/services/{uuid}", body=changes))

    def fence_service(self, uuid: str, reason: str) -> dict[str, Any]:
        """Say that nothing runs on the host of an agent that is declared dead, so that its instances may be evacuated."""
        return dict(self.request("POST", f"/services/{uuid}/fence", body={"reason": reason}))

    def turn_off_and_fence(self, uuid: str, reason: str) -> dict[str, Any]:
        """Turn the machines of a dead agent's host off, and fence the host if they are seen to be off."""
        return dict(self.request("POST", f"/services/{uuid}/fence", body={"reason": reason, "power_off": True}))

    def fence_service_by_itself(self, uuid: str) -> dict[str, Any]:
        """Declare an agent dead whose host fences itself, and the host fenced, if it has had the time to do so."""
        return dict(self.request("POST", f"/services/{uuid}/fence", body={"by_itself": True}))

    def nodes(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Nodes by uuid. The query takes the filters of the API, ``after``, and ``fields`` (names separated by commas)."""
        return self.pages("/nodes", "nodes", query)

    def node(self, name_or_uuid: str) -> dict[str, Any]:
        """One node."""
        return dict(self.request("GET", f"/nodes/{_part(name_or_uuid)}"))

    def import_nodes(self, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Enrol nodes, or bring them up to date; at most 1,000 in a call."""
        return dict(self.request("POST", "/nodes", body={"nodes": list(nodes)}))

    def change_node(
        self, name_or_uuid: str, properties: Mapping[str, Any] | None = None, **states: Any
    ) -> dict[str, Any]:
        """Change properties of a node (None removes one) and its states.

        :param states: ``disabled``, ``maintenance``, ``draining``, and the reason of each (``disabled_reason``).
        """
        body = {**states, **({"properties": dict(properties)} if properties else {})}
        return dict(self.request("PATCH", f"/nodes/{_part(name_or_uuid)}", body=body))

    def remove_node(self, name_or_uuid: str) -> None:
        """Remove a node; InUse, which says what is on it, while anything is."""
        self.request("DELETE", f"/nodes/{_part(name_or_uuid)}")

    def aggregates(self) -> Iterator[dict[str, Any]]:
        """Aggregates by name."""
        return self.pages("/aggregates", "aggregates")

    def aggregate(self, name_or_uuid: str) -> dict[str, Any]:
        """One aggregate with its members."""
        return dict(self.request("GET", f"/aggregates/{_part(name_or_uuid)}"))

    def create_aggregate(self, name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """A new aggregate without members."""
        return dict(self.request("POST", "/aggregates", body={"name": name, "metadata": dict(metadata)}))

    def change_aggregate(self, name_or_uuid: str, **changes: Any) -> dict[str, Any]:
        """Change ``name`` or ``metadata``; a None in metadata takes a key away."""
        return dict(self.request("PATCH", f"/aggregates/{_part(name_or_uuid)}", body=changes))

    def delete_aggregate(self, name_or_uuid: str) -> None:
        """Remove an aggregate; its members stay."""
        self.request("DELETE", f"/aggregates/{_part(name_or_uuid)}")

    def change_member(self, method: str, aggregate: str, kind: str, member: str) -> dict[str, Any]:
        """``PUT`` or ``DELETE`` a member; ``kind`` is host or node."""
        return dict(self.request(method, f"/aggregates/{_part(aggregate)}/{kind}s/{_part(member)}"))

    def hosts(self, **query: Any) -> list[dict[str, Any]]:
        """Nodes as a scheduler sees them, by uuid. The query takes the filters of the API, ``after`` and ``fields``."""
        return list(self.pages("/hosts", "hosts", query))

    def host(self, name: str) -> dict[str, Any]:
        """One host with its nodes and instances, as a scheduler sees it."""
        found: dict[str, Any] = {"host": name, "nodes": [], "instances": []}
        after: str | None = ""
        while after is not None:
            page = self.request("GET", f"/hosts/{_part(name)}", query={"after": after or None})
            found["nodes"] += page["nodes"]
            found["instances"] += page["instances"]
            after = page["next_after"]
        return found

    def allocations(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Stored allocations, all of them."""
        return self.pages("/allocations", "allocations", query)

    def usages(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Providers with inventories and use."""
        return self.pages("/usages", "usages", query)

    def audit_allocations(self, *, repair: bool = False, release_orphans: bool = False) -> dict[str, Any]:
        """Compare the store's counters with its allocations; with ``repair``, set wrong ones right."""
        body = {"repair": repair, "release_orphans": release_orphans}
        return dict(self.request("POST", "/allocations/audit", body=body))

    def pools(self) -> list[dict[str, Any]]:
        """Pools with what is used of them."""
        return list(self.request("GET", "/pools")["pools"])

    def set_pool(self, uuid: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make a pool, or bring it to this state: name, members, inventories."""
        return dict(self.request("PUT", f"/pools/{uuid}", body=body))

    def delete_pool(self, uuid: str) -> None:
        """Remove a pool."""
        self.request("DELETE", f"/pools/{uuid}")

    def quotas(self, project: str | None = None) -> list[dict[str, Any]]:
        """Limits of projects with what is used of them; None: of all projects that the caller may see."""
        return list(self.request("GET", "/quotas", query={"project": project})["quotas"])

    def set_quota(self, project: str, resource_class: str, limit: int) -> dict[str, Any]:
        """Set a limit of a project."""
        return dict(self.request("PUT", f"/quotas/{_part(project)}/{_part(resource_class)}", body={"limit": limit}))

    def unset_quota(self, project: str, resource_class: str) -> None:
        """Remove a limit of a project."""
        self.request("DELETE", f"/quotas/{_part(project)}/{_part(resource_class)}")

    def flavors(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Flavors by flavorid, each with its newest version; ``implicit=True``: also those that only instances have."""
        return self.pages("/flavors", "flavors", query)

    def flavor(self, flavorid: str, version: int | None = None) -> dict[str, Any]:
        """A version of a flavor, with the numbers of all ``versions``; None: the newest version."""
        return dict(self.request("GET", f"/flavors/{_part(flavorid)}", query={"version": version}))

    def create_flavor(
        self,
        flavorid: str,
        resources: Mapping[str, int],
        extra_specs: Mapping[str, str] | None = None,
        *,
        expected_version: int = 0,
    ) -> dict[str, Any]:
        """Add a flavor, or its next version. Does nothing when the newest version has these contents already.

        :param expected_version: the newest version that the caller knows; 0: the flavor is a new one.
        :raises Conflict: the flavor has another newest version, with other contents.
        """
        body = {"flavorid": flavorid, "resources": dict(resources), "extra_specs": dict(extra_specs or {})}
        return dict(self.request("POST", "/flavors", body={**body, "expected_version": expected_version}))

    def deprecate_flavor(
        self, flavorid: str, version: int | None = None, *, deprecated: bool = True, successor: str | None = None
    ) -> list[dict[str, Any]]:
        """Refuse new requests for a version, or accept them again; None: for all versions. Returns these versions.

        :param successor: the flavorid that refusals name.
        """
        body = {"deprecated": deprecated, "version": version, "successor": successor}
        given = {name: value for name, value in body.items() if value is not None}
        return list(self.request("PATCH", f"/flavors/{_part(flavorid)}", body=given)["versions"])

    def server_groups(self) -> Iterator[dict[str, Any]]:
        """Server groups with their members by uuid."""
        return self.pages("/server-groups", "server_groups")

    def server_group(self, name_or_uuid: str) -> dict[str, Any]:
        """One server group with its members."""
        return dict(self.request("GET", f"/server-groups/{_part(name_or_uuid)}"))

    def create_server_group(self, name: str, policy: str, max_server_per_host: int = 1) -> dict[str, Any]:
        """A new server group."""
        body = {"name": name, "policy": policy, "max_server_per_host": max_server_per_host}
        return dict(self.request("POST", "/server-groups", body=body))

    def delete_server_group(self, name_or_uuid: str) -> None:
        """Remove a server group; its members stay where they are."""
        self.request("DELETE", f"/server-groups/{_part(name_or_uuid)}")

    # -- shards ---------------------------------------------------------------------------------------------------

    def shards(self) -> list[dict[str, Any]]:
        """``{"name", "count", "agents"}`` of every shard, the largest first; the name is None for the nodes without one.

        ``agents`` are the working agents that serve the shard; empty where no agent declares a shard.
        """
        return list(self.request("GET", "/shards")["shards"])

    def check_shards(self) -> dict[str, Any]:
        """What looks wrong with the shards of the fleet."""
        return dict(self.request("GET", "/shards/check"))

    def ports(self, *, shard: str | Sequence[str] | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Ports, by the bare metal dialect at its own place."""
        return self.baremetal().ports(shard=shard, **filters)

    def port_groups(self, *, shard: str | Sequence[str] | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Portgroups, by the bare metal dialect at its own place."""
        return self.baremetal().port_groups(shard=shard, **filters)

    def assign_shards(
        self, assignments: Sequence[Mapping[str, Any]], *, include_instances: bool = False
    ) -> dict[str, Any]:
        """Change the shard of many nodes: ``{"node", "shard"}`` and perhaps ``was``, the shard that it must be in.

        :param include_instances: also move nodes with instances from shard to shard while their agents live.

        Sent in calls of 1,000; ``moved`` counts, ``conflicts`` names the nodes that were left alone, and why.
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
        """Make a plan and keep it; nothing moves."""
        return dict(self.request("POST", "/shards/plans", body=dict(wanted)))

    def shard_plans(self) -> list[dict[str, Any]]:
        """Plans that are kept, the newest first."""
        return list(self.request("GET", "/shards/plans")["plans"])

    def shard_plan(self, uuid: str) -> dict[str, Any]:
        """A plan in numbers."""
        return dict(self.request("GET", f"/shards/plans/{uuid}"))

    def shard_moves(self, uuid: str, *, status: str | None = None) -> Iterator[dict[str, Any]]:
        """The journal of a plan."""
        return self.pages(f"/shards/plans/{uuid}/moves", "moves", {"status": status})

    def apply_shard_plan(self, uuid: str, *, limit: int = 1000) -> dict[str, Any]:
        """Carry out some moves; again until ``remaining`` is 0."""
        return dict(self.request("POST", f"/shards/plans/{uuid}/apply", query={"limit": limit}))

    def rollback_shard_plan(self, uuid: str, *, limit: int = 1000) -> dict[str, Any]:
        """Take back some moves; again until ``remaining`` is 0."""
        return dict(self.request("POST", f"/shards/plans/{uuid}/rollback", query={"limit": limit}))

    def verify_shard_plan(self, uuid: str) -> dict[str, Any]:
        """Compare a plan's journal with the nodes."""
        return dict(self.request("GET", f"/shards/plans/{uuid}/verify"))

    # -- placing --------------------------------------------------------------------------------------------------

    def rings(self, owner_of: str | None = None) -> list[dict[str, Any]]:
        """The rings of engines; with ``owner_of`` each also says who owns that object."""
        return list(self.request("GET", "/ring", query={"object": owner_of} if owner_of else None)["rings"])

    def periodic_tasks(self) -> list[dict[str, Any]]:
        """The periodic tasks and their last sweeps."""
        return list(self.request("GET", "/periodic-tasks")["periodic_tasks"])

    def periodic_runs(self, task: str, limit: int = 100) -> list[dict[str, Any]]:
        """The last sweeps of a task, newest first."""
        return list(self.request("GET", f"/periodic-tasks/{task}/runs", query={"limit": limit})["runs"])

    def pause_periodic_task(self, task: str, *, reason: str = "") -> dict[str, Any]:
        """Begin no sweep of it any more."""
        return dict(self.request("PATCH", f"/periodic-tasks/{task}", body={"paused": True, "reason": reason}))

    def resume_periodic_task(self, task: str) -> dict[str, Any]:
        """Let it go on."""
        return dict(self.request("PATCH", f"/periodic-tasks/{task}", body={"paused": False}))

    def run_periodic_task(self, task: str, object_id: str | None = None) -> dict[str, Any]:
        """Have it swept once more now."""
        body = {"object": object_id} if object_id else {}
        return dict(self.request("POST", f"/periodic-tasks/{task}/runs", body=body))

    def select(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask where it would go."""
        return dict(self.request("POST", "/select", body=body))

    def create_instance(self, body: Mapping[str, Any], idempotency_key: str | None = None) -> dict[str, Any]:
        """Place and build an instance; a repetition with the same key gets the first answer."""
        return dict(self.request("POST", "/instances", body=body, headers=_key(idempotency_key)))

    def create_instances(self, body: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Place and build several alike, all or none."""
        return list(self.request("POST", "/instances", body={**body, "count": count})["instances"])

    def decision(self, request_id: str, node: str | None = None) -> dict[str, Any]:
        """What was decided of a request: its id, or the instance's uuid."""
        return dict(self.request("GET", f"/decisions/{request_id}", query={"node": node} if node else None))

    def instances(self, **query: Any) -> Iterator[dict[str, Any]]:
        """Instances by uuid."""
        return self.pages("/instances", "instances", query)

    def instance(self, uuid: str) -> dict[str, Any]:
        """One instance."""
        return dict(self.request("GET", f"/instances/{uuid}"))

    def act_on_instance(
        self, uuid: str, action: str, body: Mapping[str, Any] | None = None, idempotency_key: str | None = None
    ) -> dict[str, Any]:
        """Begin an operation; likewise.

        :param action: stop, start, reboot, rebuild, resize, migrate, live_migrate, shelve_offload, unshelve, evacuate; or
            revert_move, which ends a move that has not been committed; confirm_resize or revert_resize of one that is resized.
        """
        path, asked = f"/instances/{uuid}/action", {action: dict(body or {})}
        return dict(self.request("POST", path, body=asked, headers=_key(idempotency_key)))

    def instance_console(self, uuid: str, lines: int = 100) -> str:
        """The last lines that an instance wrote."""
        return str(self.request("GET", f"/instances/{uuid}/console", query={"lines": lines})["output"])

    def instance_usage(self, uuid: str) -> dict[str, Any]:
        """What an instance uses: ``cpu_seconds`` and ``memory_bytes``."""
        return dict(self.request("GET", f"/instances/{uuid}/usage"))

    def delete_instance(self, uuid: str, *, force: bool = False) -> None:
        """Begin to delete an instance."""
        self.request("DELETE", f"/instances/{uuid}", query={"force": True} if force else None)


def _key(idempotency_key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": idempotency_key} if idempotency_key else {}


def _part(text: str) -> str:
    """A part of a path."""
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
