# SPDX-License-Identifier: Apache-2.0
"""The interface of orphan detectors, which find consumers that no longer exist (group ``moorage.orphan_detectors``)."""

from __future__ import annotations

import abc
from collections.abc import Sequence, Set
from typing import ClassVar

__all__ = ["OrphanDetector"]


class OrphanDetector(abc.ABC):
    """Tells orphans: consumers that hold something though what they stand for is gone.

    Built by the loader as ``plugin(conf=..., database=..., clock=...)``. Enable one only where everything that claims for its
    types of consumers is known to it: what another service claimed through the API would be taken for an orphan.
    """

    api_version: ClassVar[tuple[int, int]]
    #: The types of consumers that it knows; it is asked about no others.
    consumer_types: ClassVar[frozenset[str]]

    @abc.abstractmethod
    def missing(self, consumers: Sequence[str]) -> Set[str]:
        """Returns the consumers, of at most 1,000, whose object is not stored any more."""
