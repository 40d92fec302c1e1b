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
    ``trait:in:A,B = required`` for at least one of several. The traits are those of the node's own provider, not of its pools.
    """

    api_version: ClassVar[tuple[int, int]] = (1, 0)
    RUN_ON_REBUILD = True
    run_filter_once_per_request = True
    judges_traits = True

    @override
    def host_passes(self, host_state: HostState, spec_obj: RequestSpec) -> bool:
        return traits_of_request(spec_obj).met_by(host_state.traits)

    @override
    def prepare(self, spec: RequestSpec, fleet: Fleet) -> Skip | Rows | None:
        return None if asks_for_traits(spec) else SKIP

    @override
    def mask_rows(self, fleet: Fleet, where: Where, spec: RequestSpec) -> Mask:
        asked, column = traits_of_request(spec), fleet.traits
        answers = np.array([asked.met_by(traits) for traits in column.values], dtype=np.bool_)
        mask: Mask = answers[column.codes[where]]
        return mask

    @override
    def explain(self, host_state: HostState, spec: RequestSpec) -> str:
        return "it has " + " and ".join(traits_of_request(spec).missing_in(host_state.traits))
