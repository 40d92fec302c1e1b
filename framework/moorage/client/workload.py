# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads: what arrived when, how large it was and how long it stayed.

Reads three CSV formats, recognized by their header, and JSON lines with the fields of :class:`WorkloadRequest`; also ``.gz``.

* openb: ``arrival_s, lifetime_s, name, cpu_milli, memory_mib, gpus, ...``. CPU is rounded up to whole VCPUs; every GPU, shared or
  not, becomes a whole PGPU.
* SURF: ``arrival_s, lifetime_s, id, vcpus, memory_mb``.
* our own: ``arrival_s, lifetime_s, name``, and one column for each resource class (``VCPU``, ``MEMORY_MB``, ...), all upper case.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from moorage import errors

__all__ = ["WorkloadRequest", "read_requests"]


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request of a workload.

    :param arrival: seconds since the start of the record.
    :param lifetime: seconds until it is released.
    :param resources: resource class -> units.
    """

    arrival: float
    lifetime: float
    name: str
    resources: Mapping[str, int]

    @property
    def flavorid(self) -> str:
        """A name for the size: equal sizes have equal names."""
        return "-".join(f"{name.lower()}{units}" for name, units in sorted(self.resources.items())) or "empty"


def read_requests(path: Path) -> list[WorkloadRequest]:
    """Returns all requests of a file, by arrival.

    :raises InvalidInput: the file cannot be read or a line is wrong; says which line and what.
    """
    try:
        with _open(path) as stream:
            return sorted(_parse(path, stream), key=lambda request: request.arrival)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise errors.InvalidInput(f"{path} cannot be read: {error}.") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return open(path, encoding="utf-8", newline="")


def _parse(path: Path, stream: TextIO) -> Iterator[WorkloadRequest]:
    first = stream.readline()
    if first.lstrip().startswith("{"):
        yield from _lines(path, first, stream)
        return
    header = [name.strip() for name in first.strip().split(",")]
    convert = _format_of(path, header)
    for number, row in enumerate(csv.DictReader(stream, fieldnames=header), start=2):
        try:
            yield convert(row)
        except (ValueError, TypeError, KeyError) as error:
            raise errors.InvalidInput(f"{path}, line {number}: {error or 'a column is missing'}.") from error


def _format_of(path: Path, header: list[str]) -> Callable[[Mapping[str, Any]], WorkloadRequest]:
    known = set(header)
    if {"arrival_s", "lifetime_s", "name", "cpu_milli", "memory_mib", "gpus"} <= known:
        return _openb
    if {"arrival_s", "lifetime_s", "vcpus", "memory_mb"} <= known:
        return _surf
    classes = [name for name in header if name and name.isupper()]
    if {"arrival_s", "lifetime_s"} <= known and classes:
        return lambda row: _own(row, {name: row[name] for name in classes})
    raise errors.InvalidInput(
        f"{path}, line 1: the columns {', '.join(header)} are of no known format. Needed are arrival_s, lifetime_s and either "
        "cpu_milli, memory_mib, gpus, name (openb), or vcpus, memory_mb (SURF), or upper-case resource classes such as VCPU."
    )


def _openb(row: Mapping[str, Any]) -> WorkloadRequest:
    return _request(
        row,
        str(row["name"]),
        {"VCPU": -(-_units(row["cpu_milli"]) // 1000), "MEMORY_MB": row["memory_mib"], "PGPU": row["gpus"]},
    )


def _surf(row: Mapping[str, Any]) -> WorkloadRequest:
    return _request(row, str(row.get("id", "")), {"VCPU": row["vcpus"], "MEMORY_MB": row["memory_mb"]})


def _own(row: Mapping[str, Any], resources: Mapping[str, Any]) -> WorkloadRequest:
    return _request(row, str(row.get("name") or ""), {name: value or 0 for name, value in resources.items()})


def _lines(path: Path, first: str, stream: TextIO) -> Iterator[WorkloadRequest]:
    for number, line in enumerate([first, *stream], start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            yield _request(data, str(data.get("name", "")), data["resources"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise errors.InvalidInput(
                f"{path}, line {number}: {error}. A line is like "
                '{"arrival_s": 0, "lifetime_s": 60, "name": "a", "resources": {"VCPU": 1}}.'
            ) from error


def _request(row: Mapping[str, Any], name: str, resources: Mapping[str, Any]) -> WorkloadRequest:
    arrival, lifetime = float(row["arrival_s"]), float(row["lifetime_s"])
    if not (0 <= arrival < float("inf") and 0 <= lifetime < float("inf")):
        raise ValueError("arrival_s and lifetime_s must be zero or more")
    units = {key: _units(value) for key, value in resources.items()}
    wanted = {key: value for key, value in units.items() if value}
    if not wanted:
        raise ValueError("the request asks for nothing")
    return WorkloadRequest(arrival, lifetime, name, wanted)


def _units(value: Any) -> int:
    number = int(value)
    if number < 0 or number != float(value):
        raise ValueError(f"{value!r} is not a whole number of zero or more")
    return number
