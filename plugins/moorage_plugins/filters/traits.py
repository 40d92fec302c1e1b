# SPDX-License-Identifier: Apache-2.0
"""Only nodes with the traits that a request asks for."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from typing_extensions import override

from moorage.scheduling.interface import SKIP, Fleet, HostFilter, HostState, Mask, RequestSpec, Rows, Skip, Where
from moorage.scheduling.traits import asks_for_traits, traits_of_request

__all__ = ["RequiredTraitsFilter"]


class RequiredTraitsFilter(HostFilter):
    """Passes nodes that have all required traits and no forbidden one.

    A flavor's extra specs and an image's properties ask for traits: ``trait:NAME = required``, ``trait:NAME = forbidden``, and
    ``trait:in:A,B = required`` for at least one of several. The traits are those of the node's own provider.

    On a node with several providers (NUMA cells, GPUs, pools), any of them may have a required trait, and a forbidden one does not
    count: the capacity filter and the claim choose providers without it. A rebuild claims nothing. So there the providers count
    that give the instance what it asks for outside of request groups, or all of the node when they are not known.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    judges_alone = True
    ignores_owner = True
    RUN_ON_REBUILD = True
    run_filter_once_per_request = True
    judges_traits = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        asked = traits_of_request(spec_obj)
        if spec_obj.rebuild:
            return asked.met_by(_judged(host_state, spec_obj))
        if len(host_state.providers) < 2:
            return asked.met_by(host_state.traits)
        return all(any(names & each.traits for each in host_state.providers) for names in asked.required)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return None if asks_for_traits(spec) else SKIP

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        asked, column = traits_of_request(spec), fleet.traits
        answers = np.array([asked.met_by(traits) for traits in column.values], dtype=np.bool_)
        mask: Mask = answers[column.codes[where]]
        if fleet.nested.any():
            nested = fleet.nested[where]
            for names in asked.required:
                nested = nested & fleet.have_trait(names)[where]
            mask = np.where(fleet.nested[where], nested, mask)
            if spec.rebuild:
                self._judge_held(fleet, np.arange(fleet.size)[where], spec, mask)
        return mask

    def _judge_held(self, fleet: Fleet, rows: Rows, spec: RequestSpec, mask: Mask) -> None:
        """Takes out nested nodes whose held providers do not pass. A rebuild has one node, so that one by one is fast."""
        for place in np.flatnonzero(mask & fleet.nested[rows]):
            mask[place] = self.host_passes(fleet.host_state(int(rows[place])), spec)

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return "it has " + " and ".join(traits_of_request(spec).missing_in(_judged(host_state, spec)))


def _judged(host_state: HostState, spec: RequestSpec) -> frozenset[str]:
    """Returns the traits of the node's providers that matter: those of providers that an instance holds, or all."""
    held = [each for each in host_state.providers if each.uuid in spec.held_providers]
    return frozenset().union(*(each.traits for each in held or host_state.providers))
