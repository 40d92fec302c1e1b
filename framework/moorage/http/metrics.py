# SPDX-License-Identifier: Apache-2.0
"""Counts requests and serves ``/metrics``."""

from __future__ import annotations

import os
from typing import Any

import prometheus_client
from prometheus_client import multiprocess

from moorage.http.routes import Wsgi

__all__ = ["Metrics"]


class Metrics:
    """``/metrics`` in Prometheus' format.

    Where several processes answer at one address, PROMETHEUS_MULTIPROC_DIR names a folder, empty at the start of the server,
    through which each process answers with the sums of all.
    """

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        own = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            own = prometheus_client.CollectorRegistry()
            multiprocess.MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        self._requests = prometheus_client.Histogram(
            "moorage_api_request_seconds",
            "Requests by method, route and status",
            ["method", "route", "status"],
            registry=own,
        )
        #: The series of the histogram by their labels; to look one up there takes as long as to count.
        self._series: dict[tuple[str, str, int], Any] = {}
        self._app: Wsgi = prometheus_client.make_wsgi_app(self.registry)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered."""
        series = self._series.get((method, route, status))
        if series is None:
            series = self._series[method, route, status] = self._requests.labels(method, route, str(status))
        series.observe(seconds)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        """WSGI."""
        return self._app(environ, start_response)
