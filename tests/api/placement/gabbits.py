# SPDX-License-Identifier: Apache-2.0
"""Placement's own gabbi suite, over HTTP, against the dialect.

The YAML files come with the distribution ``openstack-placement``, which only the tests install, and are used where they lie;
no line of Placement runs. Each file gets an empty database, the providers it wants (:mod:`topologies`) and the policy it is
about. ``make gabbi`` runs all files and prints a table; ``python -m tests.api.placement.gabbits --help`` says more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

from gabbi import handlers, suitemaker, utils

from moorage.db import Database, migrations
from moorage_plugins.api.placement.policies import POLICIES
from tests import servers
from tests.api.live import LiveDialect
from tests.api.placement.topologies import TOPOLOGIES, build

__all__ = ["DEVIATIONS", "Databases", "Outcome", "files", "run_file"]

#: (file, request) -> why it cannot pass here. One that passes after all is an error: the list must stay true.
DEVIATIONS: Mapping[tuple[str, str], str] = {
    (
        "basic-http",
        "bad content length not int",
    ): "gabbi's HTTP client refuses to send a Content-Length that is no number",
}

#: Placement as it is today: tokens of the system scope may nothing.
_NO_SYSTEM = "not system_scope:all"
_SECURE = {
    "service_api": f"role:service and {_NO_SYSTEM}",
    "admin_or_service_api": f"(role:admin or role:service) and {_NO_SYSTEM}",
    "project_reader_api": f"role:reader and project_id:%(project_id)s and {_NO_SYSTEM}",
}
#: Placement before its "secure RBAC", which its suite assumes unless a file says otherwise: administrators may reshape too.
_LEGACY = {**_SECURE, "service_api": f"(role:service or role:admin) and {_NO_SYSTEM}"}
_OPEN = {rule.name: "@" for rule in POLICIES if rule.name != "admin_api"}
_CORS = "[cors]\nallowed_origin = http://valid.example.com\nallow_headers = openstack-api-version\n"


def _policies(fixture: str) -> str:
    rules = {"SecureRBACPolicyFixture": _SECURE, "OpenPolicyFixture": _OPEN}.get(fixture, _LEGACY)
    return "".join(f'"{name}": "{check}"\n' for name, check in rules.items())


@dataclass
class Outcome:
    """What came of a file."""

    name: str
    passed: int = 0
    #: Request -> what was wrong with it.
    failed: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    #: Known deviations, which failed as they should.
    deviated: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """All requests of the file."""
        return self.passed + len(self.failed) + self.skipped + self.deviated


def files() -> list[pathlib.Path]:
    """The suite's files, by name."""
    distribution = importlib.metadata.distribution("openstack-placement")
    folder = pathlib.Path(str(distribution.locate_file("placement/tests/functional/gabbits")))
    return sorted(folder.glob("*.yaml"))


class Databases:
    """Empty databases with the tables; on SQLite copies of one file.

    :param server: a name that :mod:`tests.servers` knows; None: SQLite.
    """

    def __init__(self, server: str | None = None) -> None:
        self._server = server
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self._ending: list[threading.Thread] = []
        if server is None:
            database = Database(self._sqlite("template"))
            migrations.upgrade_all(database)
            database.close()

    def _sqlite(self, name: str) -> str:
        return f"sqlite:///{self._folder.name}/{name}.sqlite"

    def fresh(self) -> str:
        """The URL of one."""
        if self._server is not None:
            return servers.fresh_database(servers.shared(self._server))
        self._count += 1
        folder = pathlib.Path(self._folder.name)
        shutil.copyfile(folder / "template.sqlite", folder / f"{self._count}.sqlite")
        return self._sqlite(str(self._count))

    def end(self, live: LiveDialect) -> None:
        """Close it in the background: the server takes half a second for that."""
        thread = threading.Thread(target=live.close)
        thread.start()
        self._ending.append(thread)

    def close(self) -> None:
        """Remove the files."""
        for thread in self._ending:
            thread.join()
        self._folder.cleanup()


class _Result(unittest.TestResult):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome

    def _failed(self, test: Any, problem: Any) -> None:
        name = (
            test.test_data["name"].replace(f"{self._outcome.name}_", "", 1) if hasattr(test, "test_data") else str(test)
        )
        if (self._outcome.name, name) in DEVIATIONS:
            self._outcome.deviated += 1
        else:
            self._outcome.failed[name] = f"{type(problem[1]).__name__}: {problem[1]}"[:2000]

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._failed(test, err)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._failed(test, err)

    def addSuccess(self, test: Any) -> None:
        name = test.test_data["name"]
        if (self._outcome.name, name) in DEVIATIONS:
            self._outcome.failed[name] = "it passes, so it is no deviation any more"
        else:
            self._outcome.passed += 1

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._outcome.skipped += 1


def run_file(path: pathlib.Path, databases: Databases) -> Outcome:
    """Run one file on a database of its own."""
    outcome = Outcome(path.stem)
    began = time.monotonic()
    suite = utils.load_yaml(yaml_file=str(path))
    (fixture,) = suite.pop("fixtures")
    # No request uses TLS, and reading the certificates of the world for each of them takes longer than the request.
    suite.setdefault("defaults", {})["cert_validate"] = False
    live = LiveDialect(
        "placement",
        url=databases.fresh(),
        options=_CORS if fixture == "CORSFixture" else "",
        policies=_policies(fixture),
    )
    try:
        try:
            environ = build(TOPOLOGIES[fixture], live.url)
        except AssertionError as error:
            outcome.failed = {test["name"]: f"before the file: {error}" for test in suite["tests"]}
            return outcome
        address = urlsplit(live.url)
        with mock.patch.dict(os.environ, environ):
            tests = suitemaker.test_suite_from_dict(
                unittest.defaultTestLoader,
                path.stem,
                suite,
                str(path.parent),
                address.hostname,
                address.port,
                None,
                None,
                handlers=[handler() for handler in handlers.RESPONSE_HANDLERS],
            )
            tests.run(_Result(outcome))
    finally:
        databases.end(live)
    outcome.seconds = time.monotonic() - began
    return outcome


def _print(outcomes: Sequence[Outcome], *, verbose: bool) -> None:
    out = sys.stdout.write
    out(f"{'file':<44}{'requests':>9}{'passed':>8}{'failed':>8}{'skipped':>8}{'known':>7}{'seconds':>9}\n")
    for each in outcomes:
        counts = f"{each.total:>9}{each.passed:>8}{len(each.failed):>8}{each.skipped:>8}{each.deviated:>7}"
        out(f"{each.name:<44}{counts}{each.seconds:>9.1f}\n")
    totals = [
        sum(numbers)
        for numbers in zip(*((e.total, e.passed, len(e.failed), e.skipped, e.deviated) for e in outcomes), strict=True)
    ]
    out(f"{len(outcomes)} files{'':<37}{totals[0]:>9}{totals[1]:>8}{totals[2]:>8}{totals[3]:>8}{totals[4]:>7}")
    out(f"{sum(each.seconds for each in outcomes):>9.1f}\n")
    for each in outcomes:
        for name, problem in each.failed.items():
            out(f"FAILED {each.name}: {name}\n")
            if verbose:
                out(f"    {problem}\n")
    for (file, name), reason in DEVIATIONS.items():
        out(f"known deviation: {file}: {name}: {reason}\n")


def main(arguments: Sequence[str]) -> int:
    """Run the suite and print what came of it; 1 when a request failed."""
    parser = argparse.ArgumentParser(description="Placement's gabbi suite against the dialect, over HTTP.")
    parser.add_argument("files", nargs="*", help="names of files without .yaml; none: all")
    parser.add_argument("--database", choices=("sqlite", "postgresql", "mariadb"), default="sqlite")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what was wrong with each request")
    given = parser.parse_args(arguments)
    wanted = [path for path in files() if not given.files or path.stem in given.files]
    databases = Databases(None if given.database == "sqlite" else given.database)
    try:
        outcomes = [run_file(path, databases) for path in wanted]
    finally:
        databases.close()
    _print(outcomes, verbose=given.verbose)
    return int(any(each.failed for each in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
