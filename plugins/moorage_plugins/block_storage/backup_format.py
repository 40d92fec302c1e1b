# SPDX-License-Identifier: Apache-2.0
"""Backups as one file.

It is a magic line, then chunks, each with its length, the length of its packed data and the SHA-256 of what it unpacks to, then
an end mark with the SHA-256 of everything. Integers are unsigned 32 bits, big endian; data are packed by zlib.

A chunk of zeros is kept by its length alone. What is damaged is found before anything that was read from it becomes live. Lengths
are believed only as far as the size of the volume, and what is read is never more in memory than a piece, whatever they say.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moorage import errors
from moorage_plugins.block_storage.backend import Tick

__all__ = ["read_backup", "verify_backup", "write_backup"]

_MAGIC = b"moorage backup 1\n"
_HEAD = struct.Struct(">II32s")
_LEVEL = 1
#: Bytes that are unpacked at a time.
_PIECE = 2**20


def write_backup(source: Path, path: Path, chunk_bytes: int, tick: Tick) -> str:
    """Write a backup of a file; the hexadecimal SHA-256 of its content."""
    whole = hashlib.sha256()
    with open(source, "rb") as reading, open(path, "wb") as stream:
        stream.write(_MAGIC)
        while chunk := reading.read(chunk_bytes):
            whole.update(chunk)
            packed = zlib.compress(chunk, _LEVEL) if chunk.strip(b"\0") else b""
            stream.write(_HEAD.pack(len(chunk), len(packed), hashlib.sha256(chunk).digest()) + packed)
            stream.flush()
            tick()
        stream.write(_HEAD.pack(0, 0, whole.digest()))
    return whole.hexdigest()


def verify_backup(path: Path, size: int, tick: Tick) -> str:
    """Read all of it; the hexadecimal SHA-256 of the content.

    :raises Conflict: it is damaged, or larger than the size; says where.
    """
    whole = hashlib.sha256()
    for chunk in _content(path, size):
        whole.update(chunk)
        tick()
    return whole.hexdigest()


def read_backup(path: Path, target: Path, size: int, tick: Tick) -> str:
    """Write the content into a new file and fill it up with zeros to the size; the hexadecimal SHA-256 of the content.

    :raises Conflict: it is damaged, or larger than the size.
    """
    whole = hashlib.sha256()
    with open(target, "wb") as stream:
        for piece in _content(path, size):
            whole.update(piece)
            stream.write(piece)
            stream.flush()
            tick()
        stream.truncate(size)
    return whole.hexdigest()


def _content(path: Path, size: int) -> Iterator[bytes]:
    """In pieces, which are found to be damaged, if they are, at the latest when the next one is asked for."""
    whole = hashlib.sha256()
    left = size
    with open(path, "rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise errors.Conflict(f"{path.name} is no backup of this format.")
        while True:
            at = stream.tell()
            head = stream.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise errors.Conflict(f"The backup ends in the middle, at byte {at}.")
            length, packed, digest = _HEAD.unpack(head)
            if not length:
                if packed or digest != whole.digest() or stream.read(1):
                    raise errors.Conflict("The backup is damaged: its chunks do not add up to what was written.")
                return
            if length > left:
                raise errors.Conflict(
                    f"The backup is damaged at byte {at}, or has more than the {size} bytes of the volume."
                )
            left -= length
            chunk = hashlib.sha256()
            for piece in _unpacked(stream, length, packed, at) if packed else _zeros(length):
                chunk.update(piece)
                whole.update(piece)
                yield piece
            if chunk.digest() != digest:
                raise errors.Conflict(f"The backup is damaged at byte {at}.")


def _zeros(length: int) -> Iterator[bytes]:
    for start in range(0, length, _PIECE):
        yield bytes(min(_PIECE, length - start))


def _unpacked(stream: BinaryIO, length: int, packed: int, at: int) -> Iterator[bytes]:
    """Exactly as many bytes as were said, from exactly as many."""
    unpacker = zlib.decompressobj()
    damaged = errors.Conflict(f"The backup is damaged at byte {at}.")
    data = b""
    while not unpacker.eof:
        if not data:
            data = stream.read(min(packed, _PIECE))
            packed -= len(data)
        try:
            piece = unpacker.decompress(data, min(length + 1, _PIECE))
        except zlib.error:
            raise damaged from None
        if len(piece) > length or not (data or piece):
            raise damaged
        data = unpacker.unconsumed_tail
        length -= len(piece)
        if piece:
            yield piece
    if length or packed or unpacker.unused_data:
        raise damaged
