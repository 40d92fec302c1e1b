# SPDX-License-Identifier: Apache-2.0
"""Start OpenStack Placement beside Moorage, for benchmarks only: ``python benchmarks/placement_peer.py FOLDER DATABASE-URL``.

FOLDER gets a virtual environment of its own (made once, with the openstack-placement package), so that nothing of it is ever
installed with Moorage. gunicorn serves it with as many processes and threads as are asked for, on a free port of 127.0.0.1; it
prints its URL and ends with Ctrl-C. It answers to the header ``X-Auth-Token: admin``. For a fair comparison give Moorage the same::

    gunicorn --workers 2 --threads 8 --bind 127.0.0.1:8780 moorage.wsgi:application
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

PACKAGES = ("openstack-placement==16.0.0", "gunicorn", "psycopg2-binary", "PyMySQL")


def main() -> None:
    parser = argparse.ArgumentParser(description="Start OpenStack Placement for benchmarks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("database", help="URL of an empty database, with its driver: postgresql+psycopg2://...")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=8, help="of each process")
    arguments = parser.parse_args()
    programs = arguments.folder.resolve() / "venv" / "bin"
    if not programs.exists():
        subprocess.run([sys.executable, "-m", "venv", arguments.folder / "venv"], check=True)
        subprocess.run([programs / "python", "-m", "pip", "install", "-q", *PACKAGES], check=True)
    settings = arguments.folder / "placement.conf"
    log = f"[DEFAULT]\nlog_file = {arguments.folder.resolve()}/placement.log\n"
    settings.write_text(
        f"{log}[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = {arguments.database}\n"
    )
    environment = {**os.environ, "OS_PLACEMENT_CONFIG_DIR": str(arguments.folder.resolve())}
    subprocess.run(
        [programs / "placement-manage", "--config-file", settings, "db", "sync"], check=True, env=environment
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    print(f"http://{address}", flush=True)
    how = ("--workers", str(arguments.workers), "--threads", str(arguments.threads), "--bind", address)
    # So that a signal to this process reaches the server.
    os.execve(programs / "gunicorn", ["gunicorn", *how, "placement.wsgi.api:application"], environment)


if __name__ == "__main__":
    main()
