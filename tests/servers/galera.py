# SPDX-License-Identifier: Apache-2.0
"""A Galera cluster of MariaDB on this machine, every node a writer; for the long tests."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from tests import servers
from tests.servers.base import HOST, free_port, newest
from tests.servers.kinds import Mariadb

__all__ = ["GaleraNode", "cluster", "missing", "recover", "settings"]

GUIDE = Path(__file__).parents[2] / "doc/source/install/distributed.rst"


def settings() -> list[str]:
    """What the guide has written into the configuration of every server, as options."""
    (block,) = re.findall(r"(?m)^ +\[mysqld\]\n((?: +\w+ = .+\n)+)", GUIDE.read_text(encoding="utf-8"))
    return [f"--{name.replace('_', '-')}={value}" for name, value in re.findall(r"(\w+) = (.+)", block)]


class GaleraNode(Mariadb):
    """One node. ``members``: where the nodes that are there already listen to each other; none: it begins the cluster."""

    NAME = "galera"

    def __init__(self, members: Sequence[int], password: str | None = None) -> None:
        super().__init__(durable=True)
        self._members = members
        self.password = password or self.password
        #: Where other nodes find it.
        self.group_port = free_port()
        self._transfer_port, self._state_port = free_port(), free_port()

    @classmethod
    @override
    def programs(cls) -> Mapping[str, str | None]:
        return {
            **Mariadb.programs(),
            "galera": newest("/usr/lib/galera/libgalera_smm.so"),
            "wsrep_sst_rsync": newest("/usr/bin/wsrep_sst_rsync"),
            "rsync": newest("/usr/bin/rsync"),
        }

    @override
    def commands(self) -> Sequence[Sequence[str]]:
        (plain,) = super().commands()
        others = ",".join(f"{HOST}:{port}" for port in self._members)
        provider = (
            f"base_host={HOST};base_port={self.group_port};gmcast.listen_addr=tcp://{HOST}:{self.group_port};"
            f"ist.recv_addr={HOST}:{self._transfer_port}"
        )
        return [
            [
                *plain,
                *settings(),
                *(
                    "--wsrep-on=ON",
                    f"--wsrep-provider={self.programs()['galera']}",
                    f"--wsrep-provider-options={provider}",
                ),
                *("--wsrep-cluster-name=moorage", f"--wsrep-cluster-address=gcomm://{others}"),
                *(f"--wsrep-node-address={HOST}:{self.group_port}", "--wsrep-sst-method=rsync"),
                f"--wsrep-sst-receive-address={HOST}:{self._state_port}",
                *([] if self._members else ["--wsrep-new-cluster"]),
            ]
        ]

    @override
    def answers(self) -> bool:
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SHOW STATUS LIKE 'wsrep_ready'")
            row = cursor.fetchone()
            return row is not None and row[1] == "ON"

    def position(self) -> int:
        """The number of the last transaction that its files hold; for one that does not run."""
        (command,) = self.commands()
        words = [word for word in command if word != "--wsrep-new-cluster"]
        found = subprocess.run(
            [*words, "--wsrep-recover"],
            cwd=self.folder, capture_output=True, text=True, timeout=120, check=False,
            **self._account(),  # type: ignore[call-overload]
        )  # fmt: skip
        said = re.findall(r"Recovered position: \S+:(-?\d+)", found.stdout + found.stderr)
        if not said:
            raise AssertionError(f"no position: {(found.stdout + found.stderr)[-2000:]}")
        return int(said[-1])

    def join(self, members: Sequence[int]) -> None:
        """Start again after a kill; no members: the cluster begins again with what this node has."""
        self._members = list(members)
        state = self.folder / "data" / "grastate.dat"
        if not members:
            state.write_text(re.sub(r"safe_to_bootstrap: *0", "safe_to_bootstrap: 1", state.read_text()))
        self._launch()


def missing() -> str:
    """Why no cluster can be started here, or an empty string."""
    absent = [program for program, path in GaleraNode.programs().items() if path is None]
    return f"galera needs {', '.join(absent)}" if absent else ""


def recover(nodes: Sequence[GaleraNode]) -> None:
    """Start a cluster of which every node was killed, from the one that has the most, as its manual has it."""
    ordered = sorted(nodes, key=lambda node: node.position(), reverse=True)
    for place, node in enumerate(ordered):
        node.join([each.group_port for each in ordered[:place]])


@contextlib.contextmanager
def cluster(size: int) -> Iterator[list[GaleraNode]]:
    """Nodes that have found each other; ended with the block."""
    with contextlib.ExitStack() as stack:
        nodes: list[GaleraNode] = []
        for _ in range(size):
            node = GaleraNode([each.group_port for each in nodes], nodes[0].password if nodes else None)
            nodes.append(stack.enter_context(node))
        servers.wait_until(lambda: all(_size(each) == size for each in nodes), f"{size} nodes in the cluster", 120)
        yield nodes


def _size(node: GaleraNode) -> int:
    with node.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SHOW STATUS LIKE 'wsrep_cluster_size'")
        row = cursor.fetchone()
        return int(row[1]) if row else 0
