# SPDX-License-Identifier: Apache-2.0
"""What the worker rows of OpenStack Cinder cost, measured beside ``cleanup.py``; for benchmarks only, printed as one JSON object.

``python benchmarks/cinder_peer.py FOLDER DATABASE-URL [--lifecycles 500] [--rows 1000]``

FOLDER gets a virtual environment of its own (made once, with the cinder package), so that nothing of it is ever installed with
Moorage. The database must be empty, and is named with its driver: ``mysql+pymysql://...``, ``postgresql+psycopg2://...``. A
lifecycle is Cinder's own three steps, as its volume object takes them: ``create_worker``, ``set_worker``, ``unset_worker``. Orphans
are cleaned by its own ``CleanableManager.do_cleanup`` with its own handler that does nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PACKAGES = ("cinder==29.0.0", "psycopg2-binary", "PyMySQL")

INSIDE = """
import json, statistics, sys, time, uuid
from cinder import objects
objects.register_all()
from cinder import context, manager, service
from cinder.db import api as db
from oslo_config import cfg

lifecycles, rows = int(sys.argv[2]), int(sys.argv[3])
cfg.CONF([], project="cinder", default_config_files=[sys.argv[1]])
ctxt = context.get_admin_context()
dead, mine = (
    db.service_create(ctxt, {"host": host, "binary": "cinder-volume", "topic": "cinder-volume", "report_count": 0})
    for host in ("dead", "me")
)
kind = db.volume_type_create(ctxt, {"name": str(uuid.uuid4()), "extra_specs": {}})

def volume():
    values = {"id": str(uuid.uuid4()), "status": "creating", "size": 1, "project_id": "p", "user_id": "u", "host": "dead",
              "volume_type_id": kind["id"]}
    db.volume_create(ctxt, values)
    return values["id"]

service.Service.service_id = mine.id
times = {"create": [], "start": [], "end": []}
one = objects.Volume.get_by_id(ctxt, volume())
for _ in range(lifecycles):
    one.id = str(uuid.uuid4())
    marks = [time.perf_counter()]
    one.create_worker(pinned=False); marks.append(time.perf_counter())
    one.set_worker(); marks.append(time.perf_counter())
    one.unset_worker(); marks.append(time.perf_counter())
    for name, begun, ended in zip(times, marks, marks[1:]):
        times[name].append((ended - begun) * 1000)
found = {name + "_ms": round(statistics.median(values), 3) for name, values in times.items()}
found["total_ms"] = round(sum(found.values()), 3)

for _ in range(rows):
    db.worker_create(ctxt, status="creating", resource_type="Volume", resource_id=volume(), service_id=dead.id)

class Cleaner(manager.CleanableManager):
    service_id = mine.id

begun, spent = time.perf_counter(), time.process_time()
Cleaner().do_cleanup(ctxt, objects.CleanupRequest(service_id=dead.id))
seconds, spent = time.perf_counter() - begun, time.process_time() - spent
left = len(db.worker_get_all(ctxt))
print(json.dumps({"lifecycle": found, "cleaning": {
    "rows": rows, "cleaners": 1, "seconds": round(seconds, 3), "rows_per_s": round(rows / seconds),
    "processor_us_per_row": round(1e6 * spent / rows, 1), "left": left}}, indent=1))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the worker rows of OpenStack Cinder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("database", help="URL of an empty database, with its driver")
    parser.add_argument("--lifecycles", type=int, default=500)
    parser.add_argument("--rows", type=int, default=1000)
    arguments = parser.parse_args()
    programs = arguments.folder.resolve() / "venv" / "bin"
    if not programs.exists():
        subprocess.run([sys.executable, "-m", "venv", arguments.folder / "venv"], check=True)
        subprocess.run([programs / "python", "-m", "pip", "install", "-q", *PACKAGES], check=True)
    settings = arguments.folder.resolve() / "cinder.conf"
    settings.write_text(f"[database]\nconnection = {arguments.database}\n")
    migrated = [programs / "cinder-manage", "--config-file", settings, "db", "sync"]
    if subprocess.run(migrated, check=False, stdout=sys.stderr).returncode:
        raise SystemExit(f"The tables of Cinder could not be made in {arguments.database}; its message is above.")
    program = arguments.folder.resolve() / "inside.py"
    program.write_text(INSIDE)
    inside = [programs / "python", "-W", "ignore", program, settings, str(arguments.lifecycles), str(arguments.rows)]
    sys.exit(subprocess.run(inside, check=False).returncode)


if __name__ == "__main__":
    main()
