# SPDX-License-Identifier: Apache-2.0
"""A client of the dialect for tests: says what was answered, never raises for a refusal."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

__all__ = ["Wire", "at_once", "claim", "code", "new_uuid"]

NEWEST = "1.39"


def new_uuid() -> str:
    """A random uuid."""
    return str(uuid.uuid4())


def claim(
    resources: Mapping[str, Mapping[str, int]], generation: int | None = None, project: str = "project"
) -> dict[str, Any]:
    """A body of ``PUT /allocations/{consumer}``: provider -> class -> amount."""
    return {
        "allocations": {provider: {"resources": dict(wanted)} for provider, wanted in resources.items()},
        "project_id": project,
        "user_id": "user",
        "consumer_generation": generation,
        "consumer_type": "INSTANCE",
    }


def code(answer: requests.Response) -> str:
    """The code of an error."""
    return str(answer.json()["errors"][0]["code"])


class Wire:
    """One client; every thread has connections of its own."""

    def __init__(self, url: str, token: str = "admin") -> None:
        self._url, self._token = url, token
        self._local = threading.local()

    def send(
        self, method: str, path: str, body: Any = None, version: str = NEWEST, **headers: str
    ) -> requests.Response:
        """Ask; header names with underscores."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        found: requests.Response = self._local.session.request(
            method,
            self._url + path,
            json=body,
            headers={
                "X-Auth-Token": self._token,
                # The administrator of the system, whose token has no project.
                **({"OpenStack-System-Scope": "all"} if self._token == "admin" else {}),
                "OpenStack-API-Version": f"placement {version}",
                **named,
            },
            timeout=120,
        )
        return found

    def get(self, path: str) -> Any:
        """The body of a GET that must succeed."""
        found = self.send("GET", path)
        assert found.status_code == 200, found.text
        return found.json()

    def provider(self, *, parent: str | None = None, name: str = "", **totals: int) -> str:
        """A new provider with inventories; its uuid."""
        identity = new_uuid()
        body: dict[str, Any] = {"uuid": identity, "name": name or identity, "parent_provider_uuid": parent}
        made = self.send("POST", "/resource_providers", body)
        assert made.status_code == 200, made.text
        inventories = {of_class: {"total": total} for of_class, total in totals.items()}
        body = {"resource_provider_generation": 0, "inventories": inventories}
        put = self.send("PUT", f"/resource_providers/{identity}/inventories", body)
        assert put.status_code == 200, put.text
        return identity


def at_once(jobs: Sequence[Callable[[], requests.Response]], threads: int = 8) -> list[requests.Response]:
    """Do the jobs in threads, in no order; the answers in the order of the jobs."""
    ready = threading.Barrier(threads)

    def start() -> None:
        ready.wait(60)

    with ThreadPoolExecutor(threads, initializer=start) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
