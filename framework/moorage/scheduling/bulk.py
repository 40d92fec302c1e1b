# SPDX-License-Identifier: Apache-2.0
"""Places the instances of one bulk request: all of them, or none.

Claims are made in few transactions, and these are not one: when one claim fails, those that were made before are given back. A
client may ask again while an earlier try of its request still runs. So each try finds what others have made, and what a later try
has found is not given back any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from oslo_log import log as logging

from moorage import errors
from moorage.scheduling.interface import Claimer, SetClaimer
from moorage.scheduling.placement import Placement, Reserver, Selection

__all__ = ["BulkPlacer"]

LOG = logging.getLogger(__name__)


class BulkPlacer:
    """Places bulk requests. Safe for use by several threads.

    :param claimer: gives claims back. One that is no set claimer cannot find what another try has made.
    :param place_set: places several requests alike together; returns of each the selection, the error, or None: it has to be placed
        alone.
    :param place_alone: places one of them.
    """

    def __init__(
        self,
        claimer: Claimer,
        reserver: Reserver,
        place_set: Callable[[Sequence[Placement]], Sequence[Selection | Exception | None]],
        place_alone: Callable[[Placement], Selection],
    ) -> None:
        self._claimer = claimer
        self._set_claimer = claimer if isinstance(claimer, SetClaimer) else None
        self._reserver = reserver
        self._place_set = place_set
        self._place_alone = place_alone

    def place(self, works: Sequence[Placement]) -> list[Selection]:
        """Places the instances, each on top of the ones before.

        :raises NoValidHost: there is no room for all; what had been claimed was given back.
        """
        placed: dict[str, Selection | Exception] = {}
        try:
            found = self._place_set(works)
            for work, each in zip(works, found, strict=True):
                if each is not None:
                    placed[work.spec.instance_uuid] = each
            for each in found:
                if isinstance(each, Exception):
                    raise each
            for work in works:
                uuid = work.spec.instance_uuid
                if uuid not in placed:
                    try:
                        placed[uuid] = self._place_alone(work)
                    except Exception as error:
                        placed[uuid] = error
                        raise
            done = [each for work in works if isinstance(each := placed[work.spec.instance_uuid], Selection)]
            self._confirm_repeated(done)
        except BaseException as error:
            self._undo(placed, error)
            raise
        return done

    def _confirm_repeated(self, done: Sequence[Selection]) -> None:
        """Keeps an earlier try of the request, which may still run, from giving back its instances.

        Instances that this try has made are kept, too: the earlier try may not know whether its own claims of them hold. It gives
        such instances back first, and then those that this try has found. An instance that was given back cannot be made again.

        :raises Conflict: the earlier try has given instances back.
        """
        holding = [each.record.uuid for each in done if each.node_uuid]
        if self._set_claimer is None or not holding or not any(each.repeated for each in done):
            return
        try:
            self._set_claimer.confirm(holding)
        except errors.Conflict as error:
            raise errors.Conflict(
                "An earlier try of the request has given its instances back, or they were changed meanwhile; ask again with other "
                "uuids.",
                **error.details,
            ) from error

    def _undo(self, placed: Mapping[str, Selection | Exception], error: BaseException) -> None:
        """Gives back what was placed, and says in the error what came of that.

        :param placed: by instance, what became of each that was tried.
        """
        done = [each for each in placed.values() if isinstance(each, Selection)]
        made = {each.record.uuid: each.record for each in done if not each.repeated}
        uncertain = [
            uuid
            for uuid, each in placed.items()
            if isinstance(each, errors.StoreUnavailable) and each.is_outcome_unknown
        ]
        # If any was placed before, the request is a repetition, which finds them once more.
        is_first = made and len(made) == len(done)
        left, kept = list[str](), list[str]()
        # The uncertain ones first: a later try that makes them finds those that were made here, and so confirms them.
        for uuid in (*(uncertain if is_first else ()), *made):
            try:
                if not self._gave_back(uuid):
                    left.append(uuid)
                elif uuid in made:
                    self._reserver.unreserve(made[uuid])
            except errors.InUse:
                LOG.info("Instance %s stays: a later try of its request has found it.", uuid)
                kept.append(uuid)
        if left and isinstance(error, errors.MoorageError):
            error.details["left_behind"] = left
            error.message += f" Of the instances alike, {', '.join(left)} could not be given back; delete them."
        elif is_first and not kept and isinstance(error, errors.MoorageError):
            # Their uuids cannot be used again, so a repetition of the request needs others.
            error.details["undone"] = True

    def _gave_back(self, uuid: str) -> bool:
        """Undoes a placement. Returns False, and logs a line, if that fails.

        :raises InUse: another try of the request has found it.
        """
        for last in (False, True):
            try:
                self._claimer.release(uuid)
            except errors.InUse:
                raise
            except Exception as error:
                if last:
                    LOG.exception("Instance %s was placed for nothing and could not be given back; delete it.", uuid)
                    return False
                LOG.warning("Instance %s could not be given back (%s); once more.", uuid, error)
        return True
