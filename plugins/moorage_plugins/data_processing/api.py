# SPDX-License-Identifier: Apache-2.0
"""Clusters, jobs and proxy users over HTTP: the plugin ``data_processing`` of the group moorage.api."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar

from oslo_log import log as logging
from typing_extensions import override

from moorage import errors, randomness
from moorage.control_plane.interface import ApiExtension, ApiTools
from moorage.http.application import Application
from moorage.http.dialect import Dialect
from moorage.http.routes import PolicyRule, Request, Response, Route, Wsgi
from moorage_plugins.data_processing.statuses import RESETTABLE
from moorage_plugins.data_processing.store import Cluster, ClusterJob, DataStore
from moorage_plugins.data_processing.tasks import AGENTS

__all__ = ["POLICIES", "DataProcessingApi"]

LOG = logging.getLogger(__name__)
_DIALECT = Dialect("data-processing", (1, 0), (1, 0))
POLICIES = (
    PolicyRule("data_processing:get", "rule:system_reader", "See clusters, jobs and proxy users.", ("system",)),
    PolicyRule(
        "data_processing:change",
        "rule:system_admin",
        "Create and delete clusters, and run commands in them, which are processes of the agents' user.",
        ("system",),
    ),
)
_SEE, _CHANGE = (rule.name for rule in POLICIES)
_LIMIT = 1000
#: The agent service that works on clusters.
_SERVICE = "data_processing"
_NAME = {"type": "string", "minLength": 1, "maxLength": 255}
_CREATE_CLUSTER = {
    "type": "object",
    "properties": {"name": _NAME, "host": _NAME, "transient": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}
_RESET = {
    "type": "object",
    "properties": {"status": {"enum": list(RESETTABLE)}},
    "required": ["status"],
    "additionalProperties": False,
}
_CREATE_JOB = {
    "type": "object",
    "properties": {
        "cluster": {"type": "string", "minLength": 1, "maxLength": 36},
        "command": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1000,
            "items": {"type": "string", "maxLength": 10000},
        },
    },
    "required": ["cluster", "command"],
    "additionalProperties": False,
}


def _query(*names: str) -> dict[str, Any]:
    text = {"type": "string", "maxLength": 255}
    properties = {
        "limit": {"type": "integer", "minimum": 1, "maximum": _LIMIT},
        "marker": text,
        **dict.fromkeys(names, text),
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


_CLUSTERS, _JOBS, _USERS = _query("status"), _query("status", "cluster"), _query()


class DataProcessingApi(ApiExtension):
    """Records a request in one transaction, then sends a message to the agent. A lost message only delays the operation."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    mount = "/data-processing"
    policies = POLICIES

    @override
    def application(self) -> Wsgi:
        handlers = _Handlers(self.tools)
        routes = [
            Route("POST", "/v1/clusters", handlers.create_cluster, _CHANGE, body=_CREATE_CLUSTER),
            Route("GET", "/v1/clusters", handlers.clusters, _SEE, query=_CLUSTERS),
            Route("GET", "/v1/clusters/{uuid}", handlers.cluster, _SEE),
            Route("DELETE", "/v1/clusters/{uuid}", handlers.delete_cluster, _CHANGE),
            Route("POST", "/v1/clusters/{uuid}/reset-state", handlers.reset_cluster, _CHANGE, body=_RESET),
            Route("POST", "/v1/jobs", handlers.create_job, _CHANGE, body=_CREATE_JOB),
            Route("GET", "/v1/jobs", handlers.jobs, _SEE, query=_JOBS),
            Route("GET", "/v1/jobs/{uuid}", handlers.job, _SEE),
            Route("POST", "/v1/jobs/{uuid}/cancel", handlers.cancel_job, _CHANGE),
            Route("DELETE", "/v1/jobs/{uuid}", handlers.delete_job, _CHANGE),
            Route("GET", "/v1/proxy-users", handlers.proxy_users, _SEE, query=_USERS),
        ]
        return Application(_DIALECT, routes, self.tools)


class _Handlers:
    def __init__(self, tools: ApiTools) -> None:
        self._tools = tools
        self._store = DataStore(tools.database, tools.workers())

    # -- clusters -------------------------------------------------------------------------------------------------

    def create_cluster(self, request: Request) -> Response:
        body = request.body
        host = self._place(body.get("host"))
        uuid = self._store.create_cluster(body["name"], host, transient=body.get("transient", False))
        found = self._must_cluster(uuid)
        self._tell(host, "create_cluster", {"cluster": uuid})
        return Response(202, _cluster(found))

    def clusters(self, request: Request) -> Response:
        found = self._store.clusters(**_page(request), **_filters(request, "status"))
        return Response(200, {"clusters": [_cluster(each) for each in found]})

    def cluster(self, request: Request) -> Response:
        return Response(200, _cluster(self._must_cluster(request.path_params["uuid"])))

    def delete_cluster(self, request: Request) -> Response:
        found = self._store.delete_cluster(request.path_params["uuid"])
        self._tell(found.host, "terminate_cluster", {"cluster": found.uuid, "token": found.fence})
        return Response(202, _cluster(found))

    def reset_cluster(self, request: Request) -> Response:
        return Response(202, _cluster(self._store.reset_cluster(request.path_params["uuid"], request.body["status"])))

    def _must_cluster(self, uuid: str) -> Cluster:
        found = self._store.cluster(uuid)
        if found is None:
            raise errors.NotFound(f"There is no cluster {uuid}.")
        return found

    def _place(self, host: str | None) -> str:
        able = [each.host for each, up in self._tools.services() if up and each.can(_SERVICE) and not each.disabled]
        advice = "See the column offers of moorage service list; [agent] services of an agent says what it runs."
        if host is None:
            if not able:
                raise errors.Unavailable(f"No agent that is up and enabled offers {_SERVICE}. {advice}")
            return randomness.generator().choice(able)
        if host not in able:
            raise errors.InvalidInput(
                f"Host {host} has no agent that is up, enabled and offers {_SERVICE}. {advice}", path="host"
            )
        return host

    # -- jobs -----------------------------------------------------------------------------------------------------

    def create_job(self, request: Request) -> Response:
        cluster = self._must_cluster(request.body["cluster"])
        uuid = self._store.create_job(cluster.uuid, request.body["command"])
        found = self._must_job(uuid)
        self._tell(cluster.host, "start_job", {"job": uuid})
        return Response(202, _job(found))

    def jobs(self, request: Request) -> Response:
        found = self._store.job_page(**_page(request), **_filters(request, "status", "cluster"))
        return Response(200, {"jobs": [_job(each) for each in found]})

    def job(self, request: Request) -> Response:
        return Response(200, _job(self._must_job(request.path_params["uuid"])))

    def cancel_job(self, request: Request) -> Response:
        found = self._store.cancel_job(request.path_params["uuid"])
        cluster = self._store.cluster(found.cluster)
        if cluster is not None:
            self._tell(cluster.host, "cancel_job", {"job": found.uuid})
        return Response(202, _job(found))

    def delete_job(self, request: Request) -> Response:
        self._store.delete_job(request.path_params["uuid"])
        return Response(204)

    def proxy_users(self, request: Request) -> Response:
        found = self._store.proxy_users(**_page(request))
        return Response(200, {"proxy_users": [asdict(each) for each in found]})

    def _must_job(self, uuid: str) -> ClusterJob:
        found = self._store.job(uuid)
        if found is None:
            raise errors.NotFound(f"There is no job {uuid}.")
        return found

    def _tell(self, host: str, method: str, args: Mapping[str, Any]) -> None:
        try:
            self._tools.sender().cast(AGENTS, method, dict(args), server=host)
        except errors.TransportError as error:
            LOG.info("The agent of %s got no message (%s); it finds the operation by itself.", host, error.message)


def _page(request: Request) -> dict[str, Any]:
    return {"limit": request.query.get("limit", _LIMIT), "after": request.query.get("marker", "")}


def _filters(request: Request, *names: str) -> dict[str, Any]:
    return {name: request.query[name] for name in names if name in request.query}


def _cluster(found: Cluster) -> dict[str, Any]:
    names = ("uuid", "name", "host", "status", "transient", "health", "changed_at", "used_at")
    return {**{name: getattr(found, name) for name in names}, "transient": bool(found.transient)}


def _job(found: ClusterJob) -> dict[str, Any]:
    names = ("uuid", "cluster", "command", "status", "exit_code")
    return {name: getattr(found, name) for name in names}
