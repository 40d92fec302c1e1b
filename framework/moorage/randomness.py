# SPDX-License-Identifier: Apache-2.0
"""Makes random numbers, identifiers and secrets for Moorage's own code.

No other module of Moorage calls :mod:`random`, :mod:`secrets` or :func:`uuid.uuid4`; ``make check`` refuses it. So one call of
:func:`use` makes every choice of the whole control plane repeatable in a simulation.
"""

from __future__ import annotations

import collections
import os
import random
import secrets

__all__ = ["Random", "RandomSource", "generator", "new_hex", "new_ordered_uuid", "new_uuid", "secret", "use"]

#: Bytes of a UUID, and how many UUIDs get their bytes from one call of os.urandom. The call releases the interpreter's lock, and a
#: busy thread waits until it has the lock again.
_SIZE, _DRAWN = 16, 256
#: Random bytes for UUIDs that were not made yet. A forked process must not use those of its parent.
_blocks: collections.deque[bytes] = collections.deque()
os.register_at_fork(after_in_child=_blocks.clear)

#: The type of what :func:`generator` returns.
Random = random.Random


class RandomSource:
    """Reads the operating system's randomness. The simulation derives its own from it."""

    def generator(self) -> Random:
        """Returns a generator for choices that are no secret (spreading, jitter)."""
        return Random()

    def new_uuid(self) -> str:
        """Returns a random UUID (version 4), in lower case with hyphens."""
        # As uuid.uuid4() makes it, without its object: three of them take a twentieth of what the API does for an instance.
        digits = _block().hex()
        variant = "89ab"[int(digits[16], 16) & 3]
        return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"

    def secret(self, size: int) -> bytes:
        """Returns cryptographically random bytes."""
        return secrets.token_bytes(size)


def _block() -> bytes:
    """Returns 16 random bytes that no other call returns. Safe for use by several threads."""
    try:
        return _blocks.pop()
    except IndexError:
        drawn = os.urandom(_SIZE * _DRAWN)
        _blocks.extend(drawn[first : first + _SIZE] for first in range(_SIZE, len(drawn), _SIZE))
        return drawn[:_SIZE]


_source = RandomSource()


def use(source: RandomSource) -> RandomSource:
    """Replaces the source of all randomness, and returns the source that was used before."""
    global _source
    before, _source = _source, source
    return before


def generator() -> Random:
    """Returns a generator for choices that are no secret (spreading, jitter). Each process has another seed."""
    return _source.generator()


def new_uuid() -> str:
    """Returns a random UUID (version 4), in lower case with hyphens."""
    return _source.new_uuid()


def new_ordered_uuid(seconds: float) -> str:
    """Returns a UUID of version 7 (RFC 9562), which sorts by time. Rows of one moment are neighbours in an index by such keys.

    :param seconds: since the Unix epoch. The UUID says when it was made, so it is no secret.
    """
    moment = f"{int(seconds * 1000):012x}"
    return f"{moment[:8]}-{moment[8:]}-7{_source.new_uuid()[15:]}"


def new_hex() -> str:
    """Returns a random UUID as 32 hexadecimal digits."""
    return new_uuid().replace("-", "")


def secret(size: int) -> bytes:
    """Returns ``size`` cryptographically random bytes, for passwords and keys."""
    return _source.secret(size)
