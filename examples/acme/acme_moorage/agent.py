# SPDX-License-Identifier: Apache-2.0
"""Takes and returns licences: an agent service.

A licence that this host holds is a file in the folder ``licences`` of the state folder. Its name ends with the token of the
operation that made it, so that a repeated or overtaken try never touches the file of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from acme_moorage.tables import licences
from moorage import errors
from moorage.control_plane.interface import AgentTools, LoopService
from moorage.rpc.server import rpc_method
from moorage.work import lease as leases
from moorage.work.job import Job, Work

__all__ = ["LICENCE", "LicenceAgent", "LicenceWork"]

LICENCE = "licence"


class LicenceAgent(LoopService):
    """Does the operations ``taking`` and ``returning`` of the licences of one host."""

    api_version: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, tools: AgentTools) -> None:
        folder = Path(tools.conf.control_plane.state_dir) / "licences"
        work = LicenceWork(tools.database, tools.workers, tools.identity, folder)
        self.loop = tools.work_loop("licences", work, operations=2, batch=20, ahead=20)

    @rpc_method
    def licence_operation(self, uuid: str) -> None:
        """Does what is recorded for a licence."""
        self.loop.ask(LICENCE, uuid)


class LicenceWork(Work[str]):
    """The result of an operation is the status that the licence gets."""

    types = (LICENCE,)

    def __init__(self, database: Any, store: Any, identity: Any, folder: Path) -> None:
        super().__init__(database, store, identity)
        self._folder = folder

    def do(self, job: Job[str]) -> str:
        """Makes this try's file and removes those of earlier tries. Repeated, it changes nothing more."""
        uuid, token = job.key[1], job.lease.token
        self._folder.mkdir(parents=True, exist_ok=True)
        taking = job.lease.operation == "taking"
        if taking:
            (self._folder / f"{uuid}.{token}").touch()
        for path in self._folder.glob(f"{uuid}.*"):
            if int(path.suffix[1:]) < token:
                path.unlink(missing_ok=True)
        return "held" if taking else "available"

    def finish(self, transaction: Any, job: Job[str], result: str) -> None:
        """Writes the licence with the token; a later owner's write is not replaced."""
        write = leases.WRITE.update(licences, licences.c.uuid == job.key[1], {"token": job.lease.token})
        holder = self.identity.host if result == "held" else ""
        if transaction.execute(write.values(status=result, holder=holder)).rowcount != 1:
            raise errors.Fenced(f"Licence {job.key[1]} was written by a later operation, or removed.")

    def overtaken(self, job: Job[str], result: str) -> Sequence[tuple[Job[str], str]]:
        """Removes the file of a try whose lease was lost, unless the try may have been written."""
        if not job.unknown:
            (self._folder / f"{job.key[1]}.{job.lease.token}").unlink(missing_ok=True)
        return ()
