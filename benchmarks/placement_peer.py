# SPDX-License-Identifier: Apache-2.0
"""Start OpenStack Placement beside Moorage, for benchmarks only: ``python benchmarks/placement_peer.py FOLDER DATABASE-URL``.

FOLDER gets a virtual environment of its own (made once, with the openstack-placement package), so that nothing of it is ever
installed with Moorage. The server listens on a free port of 127.0.0.1, prints its URL, and ends with Ctrl-C. It answers to the
header ``X-Auth-Token: admin``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("openstack-placement==16.0.0", "cheroot", "psycopg2-binary", "PyMySQL")
SERVE = """
import os, sys
from cheroot.wsgi import Server
from placement.wsgi import init_application
application = init_application()
server = Server(("127.0.0.1", 0), application, numthreads=int(sys.argv[1]))
server.prepare()
print(f"http://127.0.0.1:{server.bind_addr[1]}", flush=True)
try:
    server.serve()
except KeyboardInterrupt:
    server.stop()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Start OpenStack Placement for benchmarks.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("database", help="URL of an empty database, with its driver: postgresql+psycopg2://...")
    parser.add_argument("--threads", type=int, default=10, help="of the server")
    arguments = parser.parse_args()
    python = arguments.folder / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", arguments.folder / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    settings = arguments.folder / "placement.conf"
    settings.write_text(
        f"[api]\nauth_strategy = noauth2\n[placement_database]\nconnection = {arguments.database}\nsync_on_startup = true\n"
    )
    os.execve(  # so that a signal to this process reaches the server
        python,
        [str(python), "-c", SERVE, str(arguments.threads)],
        {**os.environ, "OS_PLACEMENT_CONFIG_DIR": str(arguments.folder)},
    )


if __name__ == "__main__":
    main()
