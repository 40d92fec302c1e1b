# SPDX-License-Identifier: Apache-2.0
"""``make demo``: the whole control plane with its embedded defaults, a recorded workload, a report; ends by itself."""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from pathlib import Path

from moorage import errors, randomness
from moorage.cli import base
from moorage.cli.commands.replay import namespace, replay_files, running
from moorage.cli.report import readable
from moorage.cli.up import LaunchPlan

__all__ = ["main"]

_DATA = Path("..") / "shared" / "data"
_SAMPLE_NODES = 200
_SAMPLE_REQUESTS = 2000


def main() -> int:
    """Run the demonstration; exit status 1 when anything went wrong."""
    with tempfile.TemporaryDirectory(prefix="moorage-demo-") as folder:
        try:
            return _run(Path(folder))
        except errors.MoorageError as error:
            return base.say(sys.stderr, error)


def _run(folder: Path) -> int:
    nodes, requests = _DATA / "nodes_openb.jsonl", _DATA / "requests_openb.csv"
    if nodes.exists() and requests.exists():
        print(f"Replaying the recorded workload of a production GPU cluster ({_DATA}).")
    else:
        print("Replaying a sample fleet and workload, made up here.")
        nodes, requests = _sample(folder)
    print(
        "Starting the API, two schedulers, two agents and an engine; one scheduler is killed in the middle.", flush=True
    )
    state = folder / "state"
    with running(LaunchPlan(state, "127.0.0.1:0")) as plane:
        print(f"Ready at {plane.url}.", flush=True)
        report = replay_files(namespace(state), state, nodes, requests, limit=None, threads=8, release=False, kill=True)
    print(readable(report), end="")
    print(
        "\nWhere to look next: moorage up --state-dir DIR starts such a control plane for you; moorage --help lists what can be "
        "asked of it;\ndoc/source has the tutorial, plugins/moorage_plugins the plugins it runs on."
    )
    return 0 if report.good else 1


def _sample(folder: Path) -> tuple[Path, Path]:
    """Returns a sample fleet and workload, equal at each call."""
    chance = randomness.Random(7)
    nodes, requests = folder / "nodes.jsonl", folder / "requests.csv"
    with open(nodes, "w", encoding="utf-8") as stream:
        for number in range(_SAMPLE_NODES):
            size = chance.choice([16, 32, 64])
            inventories = {"VCPU": size, "MEMORY_MB": size * 4096}
            stream.write(json.dumps({"name": f"node-{number:03}", "inventories": inventories}) + "\n")
    with open(requests, "w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["arrival_s", "lifetime_s", "name", "VCPU", "MEMORY_MB"])
        for number in range(_SAMPLE_REQUESTS):
            size = chance.choice([1, 2, 4, 8])
            writer.writerow(
                [number, chance.randint(60, 6000), f"job-{number}", size, size * chance.choice([1024, 4096])]
            )
    return nodes, requests


if __name__ == "__main__":
    sys.exit(main())
