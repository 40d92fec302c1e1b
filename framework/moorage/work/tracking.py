# SPDX-License-Identifier: Apache-2.0
"""Marking an operation as cleanable, for services that do it where it is asked for.

::

    with workers.tracked("volume", uuid, "extend", "extending", identity, begin=mark) as lease:
        grow(path, lease.token)
        lease.finish_with(lambda tx: volumes.set_status(tx, uuid, "available", lease.token))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from moorage import errors, plugin_isolation
from moorage.db import Database
from moorage.work.interface import Lease, OperationStore, Renewer

__all__ = ["tracked"]


@contextlib.contextmanager
def tracked(
    workers: OperationStore,
    database: Database,
    renewer: Renewer,
    resource_type: str,
    resource_id: str,
    operation: str,
    status: str,
    identity: Any,
    begin: Callable[[Any, int], None] | None = None,
    project_id: str = "",
) -> Iterator[Lease]:
    """See :meth:`moorage.work.interface.OperationStore.tracked`."""

    def start(tx: Any) -> Lease:
        workers.create(
            tx, resource_type, resource_id, operation, status, target_host=identity.host, project_id=project_id
        )
        lease = workers.start_many(tx, resource_type, [resource_id], identity)[resource_id]
        if begin is not None:
            begin(tx, lease.token)
        return lease

    lease: Lease = database.run(start)
    try:
        with renewer.keeping([lease]):
            yield lease
    except BaseException as error:
        if not isinstance(error, errors.Fenced):
            lease.release(plugin_isolation.format_exception(error))
        raise
    try:
        database.run(lease.end)
    except errors.Fenced:
        # The body may have ended the row with its last write, which is the better way. Otherwise it was overtaken.
        if not lease.ended:
            raise
