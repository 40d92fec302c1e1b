# SPDX-License-Identifier: Apache-2.0
"""A digest of a host's instances that does not depend on their order."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

__all__ = ["instance_digest"]

_MASK = (1 << 64) - 1


def instance_digest(instances: Iterable[tuple[str, str]]) -> str:
    """Digest of (uuid, flavorid) pairs: the sum of their hashes, so that a lost resize shows; 16 hex digits."""
    total = 0
    for uuid, flavorid in instances:
        total = (total + xxhash.xxh3_64_intdigest(f"{uuid}\0{flavorid}".encode())) & _MASK
    return f"{total:016x}"
