# SPDX-License-Identifier: Apache-2.0
"""The part of the sql store that sets, shows and audits the limits of projects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa
from oslo_log import log as logging
from typing_extensions import override

from moorage import errors
from moorage.allocation.interface import Quota, QuotaDrift, QuotaStore
from moorage_plugins.stores.checks import LARGEST
from moorage_plugins.stores.quota_enforcement import LONGEST_SUBJECT, LimitsChangedError, QuotaTally, subject_of
from moorage_plugins.stores.sql_part import SqlPart

__all__ = ["SqlQuotas"]

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class SqlQuotas(SqlPart, QuotaStore):
    """Limits of projects."""

    @override
    def quotas(self, project: str | None = None) -> list[Quota]:
        with self._database.read() as tx:
            uncounted = self._quotas.uncounted(tx, project)
        for each in uncounted:
            self._database.run(
                lambda tx, each=each: self._quotas.settle(tx, each, QuotaTally(self._quotas))  # type: ignore[misc]
            )
        with self._database.read() as tx:
            return self._quotas.read(tx, project)

    @override
    def set_quota(self, project: str, resource_class: str, limit: int, transaction: Any | None = None) -> Quota:
        if not project or len(project) > 255 or project != project.strip():
            raise errors.InvalidInput(
                f"{project!r:.80} is no project. Name one with 1 to 255 characters.", path="project"
            )
        if isinstance(limit, bool) or not 0 <= limit <= LARGEST:
            raise errors.InvalidInput(f"The limit is {limit}, and must be from 0 to {LARGEST}.", path="limit")
        if len(subject_of(project, resource_class)) > LONGEST_SUBJECT:
            longest = LONGEST_SUBJECT - len(subject_of("", ""))
            raise errors.InvalidInput(
                f"The names of the project and the class have {len(project) + len(resource_class)} characters together, and may "
                f"have {longest}.",
                path="project",
            )
        return self._change_limits(
            project, lambda tx: self._quotas.set(tx, project, resource_class, limit), transaction
        )

    @override
    def unset_quota(self, project: str, resource_class: str, transaction: Any | None = None) -> bool:
        return self._change_limits(project, lambda tx: self._quotas.unset(tx, project, resource_class), transaction)

    def _change_limits(self, project: str, work: Callable[[sa.Connection], T], transaction: Any | None) -> T:
        tries = self._attempts if transaction is None else 1
        for _ in range(tries):
            try:
                return self._database.run(work) if transaction is None else work(transaction)
            except LimitsChangedError:
                LOG.debug("Others change the limits of project %s; beginning again.", project)
        raise errors.StoreBusy(
            f"Others changed the limits of project {project} during each of {tries} tries; try again."
        )

    @override
    def quota_drift(self) -> list[QuotaDrift]:
        with self._database.read() as tx:
            return self._quotas.drift(tx)

    @override
    def recount_quotas(self, project: str) -> bool:
        return self._database.run(lambda tx: self._quotas.recount(tx, project))
