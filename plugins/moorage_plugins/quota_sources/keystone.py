# SPDX-License-Identifier: Apache-2.0
"""The quota source ``keystone``: reads Keystone's unified limits.

A registered limit is the default of every project. A limit of a project goes before it. The names of resources are as Nova
registers them: ``class:VCPU``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from keystoneauth1 import exceptions, plugin, session
from keystoneauth1.identity import v3
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import QuotaSource

__all__ = ["KeystoneQuotaSource"]

LOG = logging.getLogger(__name__)
_CLASS = "class:"
#: What Keystone says of a limit that is none.
_UNLIMITED = -1
_FLAT = "flat"
_IDENTITY = {"service_type": "identity", "interface": plugin.AUTH_INTERFACE, "version": (3, 0)}


class KeystoneQuotaSource(QuotaSource):
    """Reads the limits that are registered for one service, and the projects that they apply to."""

    api_version: ClassVar[tuple[int, int]] = (2, 0)

    def __init__(self, *, conf: Any) -> None:
        section = conf.quota_keystone
        missing = [name for name in ("auth_url", "username", "password", "service") if not section[name]]
        if missing:
            raise errors.ConfigError(
                f"[quota] source = keystone needs [quota_keystone] {', '.join(missing)}. The user must have the role reader on the "
                "system."
            )
        self._url, self._service, self._region = section.auth_url, section.service, section.region
        auth = v3.Password(
            section.auth_url,
            username=section.username,
            password=section.password,
            user_domain_id=section.user_domain_id,
            system_scope="all",
        )
        self._session = session.Session(auth, verify=section.cafile or True, timeout=section.timeout)
        self._ignored: frozenset[str] = frozenset()

    @override
    def limits(self) -> Mapping[str, Mapping[str, int]]:
        """Five requests: the model, the service, both kinds of limits, and all projects.

        :raises Unavailable: Keystone does not answer, lists only a part, or enforces limits in a way that Moorage does not know.
        """
        model = self._get("/limits/model", "model")["name"]
        if model != _FLAT:
            raise errors.Unavailable(
                f"Keystone at {self._url} enforces limits by the model {model}, and Moorage knows only the model {_FLAT}. The "
                "store keeps the limits that it has."
            )
        of_service = {"service_id": self._service_id()}
        registered = self._get("/registered_limits", "registered_limits", of_service)
        own = self._get("/limits", "limits", of_service)
        projects = self._get("/projects", "projects")
        try:
            self._tell_ignored({each["resource_name"] for each in registered})
            return self._limits(registered, own, [each["id"] for each in projects])
        except (TypeError, KeyError, ValueError) as error:
            raise errors.Unavailable(
                f"What answers at {self._url} is not Keystone: a limit or a project lacks a field ({error}). Correct "
                "[quota_keystone] auth_url. The store keeps the limits that it has."
            ) from error

    def _limits(
        self, registered: Sequence[Any], own: Sequence[Any], projects: Iterable[str]
    ) -> Mapping[str, Mapping[str, int]]:
        defaults = {each["resource_name"]: int(each["default_limit"]) for each in self._of_region(registered)}
        found = {project: dict(defaults) for project in projects}
        for each in self._of_region(own):
            # A limit of a domain has no project.
            if each["project_id"] in found:
                found[each["project_id"]][each["resource_name"]] = int(each["resource_limit"])
        return {
            project: {
                name.removeprefix(_CLASS): limit
                for name, limit in limits.items()
                if name.startswith(_CLASS) and limit != _UNLIMITED
            }
            for project, limits in found.items()
        }

    def _of_region(self, limits: Sequence[Any]) -> list[Any]:
        """Limits without a region, and then those of the configured one, so that the latter win."""
        ordered = [each for each in limits if each["region_id"] is None]
        return ordered + [each for each in limits if self._region and each["region_id"] == self._region]

    def _service_id(self) -> str:
        found = self._get("/services", "services", {"name": self._service})
        if len(found) != 1:
            raise errors.Unavailable(
                f"Keystone at {self._url} has {len(found)} services named {self._service}, and exactly one is needed. Create the "
                "service, or correct [quota_keystone] service. The store keeps the limits that it has."
            )
        return str(found[0]["id"])

    def _get(self, path: str, key: str, query: Mapping[str, str] | None = None) -> Any:
        try:
            answer = self._session.get(path, endpoint_filter=_IDENTITY, params=query).json()
            if answer.get("truncated"):
                raise errors.Unavailable(
                    f"Keystone at {self._url} lists only a part of {path}. Raise or remove list_limit in its configuration. The "
                    "store keeps the limits that it has."
                )
            return answer[key]
        except exceptions.ClientException as error:
            rights = ""
            if isinstance(error, (exceptions.Unauthorized, exceptions.Forbidden)):
                rights = " Give the user of [quota_keystone] the role reader on the system."
            raise errors.Unavailable(
                f"Keystone at {self._url} does not say what the limits of projects are: GET {path}: {type(error).__name__}: "
                f"{error}.{rights} The store keeps the limits that it has."
            ) from error
        except (ValueError, KeyError, AttributeError) as error:
            raise errors.Unavailable(
                f"What answers at {self._url} is not Keystone: GET {path} has no {key}. Correct [quota_keystone] auth_url. The "
                "store keeps the limits that it has."
            ) from error

    def _tell_ignored(self, names: Iterable[str]) -> None:
        """Warn once of registered limits that are not of a resource class."""
        ignored = frozenset(name for name in names if not name.startswith(_CLASS))
        if ignored - self._ignored:
            LOG.warning(
                "Keystone's registered limits of %s have no effect here: only names such as class:VCPU name resource classes.",
                ", ".join(sorted(ignored)),
            )
        self._ignored = ignored
